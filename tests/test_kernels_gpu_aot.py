"""Mosaic GPU kernels under the real compilers: what they say of registers, spills, memory and instructions."""

import importlib.util
import json

import pytest
from whole_steps import SMALL, compiled_step

from cbjax.attention import XLA
from cbjax.attention.pallas_gpu import PallasGpuAttention
from cbjax.descriptor import Bucket
from pallas_kernels.aot import GPU_CHIPS, CompileError, inspect_gpu
from pallas_kernels.aot.__main__ import GPU_CASES, main
from pallas_kernels.paged_attention.gpu import GpuLayout

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(
        importlib.util.find_spec("jax_cuda13_plugin") is None,
        reason="jax's CUDA plugin is not installed: .[aot] has it",
    ),
]


@pytest.mark.parametrize("chip", ["h100", "h200"])
def test_a_kernel_of_copies_and_products_is_seen_through(chip):
    report = inspect_gpu(GPU_CHIPS[chip], "gpu_programs:multiply")
    (kernel,) = report.kernels
    # 64 x 64 x 64 in steps of 16; a, b and out are copied; two buffers of 8 KiB, one more, a barrier.
    assert (report.wgmma, kernel.sass["HGMMA"]) == (4, 4)
    assert (report.tma, kernel.sass["UTMALDG"], kernel.sass["UTMASTG"]) == (3, 2, 1)
    assert 3 * 8192 + 8 <= report.shared_bytes <= 3 * 8192 + 64
    assert (kernel.blocks, kernel.threads) == (2, 128)
    assert 32 < report.registers < 128
    assert report.spills == 0
    assert not kernel.remarks
    assert {"LDL", "STL"}.isdisjoint(kernel.sass)


def test_a_kernel_of_too_many_registers_is_seen_to_spill():
    report = inspect_gpu(GPU_CHIPS["h200"], "gpu_programs:multiply", {"width": 256, "live": 2})
    (kernel,) = report.kernels
    assert report.registers == 255
    assert report.spills > 0
    assert kernel.sass["LDL"] > 0
    assert any("spilled" in remark for remark in kernel.remarks)
    assert any("serialized" in remark for remark in kernel.remarks)


def test_each_kernel_is_told_of_once_and_what_is_in_place_is_too():
    report = inspect_gpu(GPU_CHIPS["h200"], "gpu_programs:multiply_twice")
    assert sorted(kernel.blocks for kernel in report.kernels) == [2, 3]
    assert len({kernel.name for kernel in report.kernels}) == 1
    assert report.alias_bytes == 4 << 20
    assert 0 < report.temp_bytes < 1 << 20
    assert report.wgmma == 8


def test_a_newer_gpu_takes_the_kernels_that_it_can_run():
    report = inspect_gpu(GPU_CHIPS["b200"], "gpu_programs:multiply", {"live": 0})
    assert (report.wgmma, report.tma) == (0, 3)
    with pytest.raises(CompileError, match=r"for b200 does not compile: .*wgmma"):
        inspect_gpu(GPU_CHIPS["b200"], "gpu_programs:multiply")


def test_the_command_writes_the_figures(tmp_path, capsys):
    file = tmp_path / "figures.json"
    argv = ["h200", "--program", "gpu_programs:multiply", "--sizes", '{"blocks": 5}', "--json", str(file)]
    assert main(argv) == 0
    figures = json.loads(file.read_text())
    assert {"registers", "spills", "shared_bytes", "wgmma", "tma", "temp_bytes", "alias_bytes"} <= figures.keys()
    assert figures["sizes"] == {"blocks": 5}
    assert figures["kernels"][0]["blocks"] == 5
    out = capsys.readouterr().out
    assert "kernel_mosaic_gpu_kernel on h200" in out
    assert "wgmma, tma     4, 3" in out


def _store_bytes(sizes):
    layout = GpuLayout(
        num_kv_heads=sizes.get("kv_heads", 8), head_dim=sizes.get("head_dim", 128),
        block_size=sizes.get("block_size", 128), num_blocks=64 * 8192 // sizes.get("block_size", 128),
        dtype=sizes.get("kv_dtype", "bfloat16"),
    )  # fmt: skip
    return layout.layer_bytes


CASES = {
    "blocks of 16": {"block_size": 16},
    "blocks of 64": {"block_size": 64},
    "blocks of 256": {"block_size": 256},
    "narrow": {"heads": 9, "kv_heads": 3, "head_dim": 64, "block_size": 16},
    "wide": {"heads": 8, "kv_heads": 4, "head_dim": 256, "soft_cap": 50.0},
    "window": {"window": 1024},
    "wide, window": {"heads": 8, "kv_heads": 4, "head_dim": 256, "window": 1024},
    "fp8": {"kv_dtype": "float8_e4m3fn"},
    "wide, fp8": {"heads": 8, "kv_heads": 4, "head_dim": 256, "kv_dtype": "float8_e4m3fn"},
}


# A prefill's program has all kernels.
IN_EVERY_RUN = {("prefill", name) for name in ("blocks of 16", "blocks of 64", "narrow", "fp8")}


@pytest.mark.parametrize(
    ("phase", "sizes"),
    [
        pytest.param(
            phase, sizes, id=f"{phase}, {name}", marks=() if (phase, name) in IN_EVERY_RUN else pytest.mark.slow
        )
        for phase in ("decode", "prefill")
        for name, sizes in CASES.items()
    ],
)
def test_paged_attention_compiles_without_spills_and_with_the_store_in_place(phase, sizes):
    report = inspect_gpu(GPU_CHIPS["h200"], GPU_CASES, {"phase": phase, "new_tokens": 8, **sizes})
    assert report.spills == 0
    assert report.alias_bytes == _store_bytes(sizes)
    assert report.temp_bytes < report.alias_bytes / 8
    kernels = {kernel.name.removesuffix("_mosaic_gpu_kernel"): kernel for kernel in report.kernels}
    attends = {"paged_attention_decode"} | ({"paged_attention_varlen"} if phase == "prefill" else set())
    assert kernels.keys() == attends | {"paged_attention_kv_update", "paged_attention_merge"}
    for name in attends:
        assert min(kernels[name].wgmma, kernels[name].tma, kernels[name].sass["HGMMA"]) > 0
        assert not kernels[name].remarks


@pytest.mark.slow
def test_prefill_of_the_widest_heads_spills_two_words_over_8_bits_with_a_window():
    """At the edge of what a warpgroup's registers hold; what is told in the documents is no more than that."""
    wide = {"heads": 8, "kv_heads": 4, "head_dim": 256, "phase": "prefill", "new_tokens": 8, "window": 1024}
    report = inspect_gpu(GPU_CHIPS["h200"], GPU_CASES, wide | {"kv_dtype": "float8_e4m3fn"})
    assert report.spills <= 8
    assert {kernel.name for kernel in report.kernels if kernel.spills} <= {"paged_attention_varlen_mosaic_gpu_kernel"}


STEPS = [Bucket(kind="decode", rows=8, tokens=8), Bucket(kind="mixed", rows=8, tokens=64)]


@pytest.mark.parametrize("bucket", [pytest.param(STEPS[0], marks=pytest.mark.slow), STEPS[1]], ids=["decode", "mixed"])
@pytest.mark.parametrize(("chip", "attention"), [("h200", PallasGpuAttention()), ("a100", XLA)], ids=["h200", "a100"])
def test_a_whole_step_has_the_store_in_place_and_temporaries_that_do_not_grow_with_it(chip, attention, bucket):
    """The kernels on Hopper; on an older card the portable implementation, which gathers what it reads and no more."""
    compiled, pool = compiled_step(GPU_CHIPS[chip], SMALL, bucket, attention, num_blocks=16 * 1024)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= pool
    assert memory.temp_size_in_bytes < 2**24 < pool / 100


@pytest.mark.parametrize(
    ("program", "sizes", "error", "message"),
    [
        (
            "gpu_programs:nope",
            {},
            ValueError,
            r"a program is MODULE:FUNCTION .*'gpu_programs:nope'.*no attribute 'nope'",
        ),
        ("no_such_module:nope", {}, ValueError, r"No module named 'no_such_module'"),
        ("gpu_programs", {}, ValueError, r"a program is MODULE:FUNCTION"),
        ("gpu_programs:multiply", {"wide": 1}, ValueError, r"unexpected keyword argument 'wide'"),
        ("gpu_programs:nothing", {}, ValueError, r"must give a GpuProgram; got NoneType"),
        ("gpu_programs:add", {}, CompileError, r"gpu_programs:add for h200 has no Mosaic GPU kernel"),
        ("gpu_programs:multiply", {"width": 1024}, CompileError, r"(?s)for h200 does not compile: .*shared memory"),
    ],
)
def test_what_does_not_compile_is_an_error_that_says_why(program, sizes, error, message):
    with pytest.raises(error, match=message):
        inspect_gpu(GPU_CHIPS["h200"], program, sizes)


def test_a_compile_that_takes_too_long_is_given_up():
    with pytest.raises(CompileError, match=r"did not compile within 0 s"):
        inspect_gpu(GPU_CHIPS["h200"], "gpu_programs:multiply", timeout=0.01)
