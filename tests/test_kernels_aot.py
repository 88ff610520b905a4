"""The TPU kernels under the real compiler: what it says of bundles, spills, memory and copies, chip by chip."""

import importlib.util
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from whole_steps import MODELS, SMALL, compiled_step

from cbjax.attention.pallas import PallasAttention
from cbjax.descriptor import Bucket
from pallas_kernels.aot import CHIPS, Case, CompileError, compile_for, inspect
from pallas_kernels.aot.__main__ import main
from pallas_kernels.paged_attention import KVLayout, paged_attention

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: .[aot] has it"),
]
CI_CHIPS = ("v5e", "v6e", "tpu7x")
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in CHIPS if name not in CI_CHIPS]
LLAMA = Case()  # 32 query heads over 8 of 128, bfloat16, 64 rows of 8,192 tokens
DEMO = Case(heads=9, kv_heads=3, head_dim=64, block_size=16)
# What the same count makes of RPA v3 on v6e (tpu-inference, jax 0.10.2), by block size.
RPA_V3_BUNDLES = {128: 1880, 16: 2340}


def _report(chip, case):
    chip = CHIPS[chip]
    case = replace(case, vmem_limit_bytes=chip.vmem_bytes * 7 // 8, chunk=256 if chip.name == "v4" else 1024)
    report = inspect(chip, case)
    assert report.vmem_bytes is None or report.vmem_bytes <= case.vmem_limit_bytes
    assert report.inner_spills == 0
    assert report.kv_bytes_per_1024_tokens <= report.bytes_per_1024_tokens <= 1.02 * report.kv_bytes_per_1024_tokens
    return report


@pytest.mark.parametrize("chip", [*CI_CHIPS, *OTHERS])
def test_decode_compiles_without_spills_and_moves_what_it_must(chip):
    report = _report(chip, replace(LLAMA, block_size=64))
    assert report.kv_bytes_per_1024_tokens == 2 * 8 * 128 * 2 * 1024
    if report.compute_us is not None:
        assert report.compute_us < report.memory_us  # the clock is known, and memory is the limit


@pytest.mark.parametrize("block_size", RPA_V3_BUNDLES)
def test_decode_takes_fewer_bundles_than_rpa_v3(block_size):
    report = _report("v6e", replace(LLAMA, block_size=block_size))
    assert report.bundles_per_1024_tokens <= RPA_V3_BUNDLES[block_size]
    assert report.vmem_bytes is not None


def test_narrow_heads_take_no_more_memory_than_their_numbers():
    report = _report("v6e", DEMO)
    assert report.bytes_per_1024_tokens <= 1.05 * 2**20
    assert report.kv_bytes_per_1024_tokens == 0.75 * 2**20


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(
    "case",
    [
        replace(LLAMA, window=1024),
        replace(LLAMA, kv_dtype="float8_e4m3fn"),
        replace(LLAMA, kv_dtype="int8", block_size=16),
        replace(LLAMA, dtype="float32", block_size=256),
        replace(LLAMA, heads=8, kv_heads=4, head_dim=256, soft_cap=50.0),
        replace(LLAMA, kv_heads=32),
    ],
    ids=["window", "fp8", "int8", "float32", "wide", "no groups"],
)
def test_every_form_of_decode_compiles_for_every_chip(chip, case):
    layout = KVLayout(num_kv_heads=case.kv_heads, head_dim=case.head_dim, block_size=case.block_size, num_blocks=1)
    chunk = 256 if CHIPS[chip].vmem_bytes < 2**25 or layout.token_bytes > 2**13 else 512
    report = inspect(CHIPS[chip], replace(case, vmem_limit_bytes=CHIPS[chip].vmem_bytes * 7 // 8, chunk=chunk))
    assert report.bytes_per_1024_tokens <= 1.05 * report.kv_bytes_per_1024_tokens


PREFILL = replace(LLAMA, phase="prefill", rows=4, new_tokens=512, vmem_limit_bytes=48 << 20)
UPDATE = replace(PREFILL, op="kv_update")


def test_prefill_keeps_the_matrix_unit_busy_and_reads_each_tile_once():
    """Of 262,144 flops a bundle that a v6e can do with 256 numbers to add up, 128-wide heads can have half."""
    report = inspect(CHIPS["v6e"], PREFILL)
    assert report.kernel == "paged_attention_varlen"
    assert report.flops_per_bundle > 100_000
    assert report.kv_bytes_per_1024_tokens == pytest.approx(2 * 8 * 128 * 2 * 1024, rel=0.01)
    assert report.bytes_per_1024_tokens <= 1.1 * report.kv_bytes_per_1024_tokens
    assert report.vmem_bytes <= PREFILL.vmem_limit_bytes


def test_an_update_works_in_place_and_reads_only_slabs_that_are_half_new():
    report = inspect(CHIPS["v6e"], replace(UPDATE, new_tokens=500))
    layout = KVLayout(num_kv_heads=8, head_dim=128, block_size=128, num_blocks=4 * 64)
    assert report.alias_bytes == layout.layer_bytes
    assert report.temp_bytes < layout.layer_bytes / 8
    # 8,192 is the end of a slab, and 7,692 lies within one, so 32 are written and one is read; 500 come in float32.
    moved = (32 + 1) * layout.slab * layout.token_bytes + 500 * 4 * 2 * 8 * 128 + 64 * 4
    assert report.bytes_per_1024_tokens == pytest.approx(moved * 1024 / 500)


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(
    "case",
    [
        PREFILL,
        UPDATE,
        replace(PREFILL, window=1024, new_tokens=100),
        replace(PREFILL, kv_dtype="float8_e4m3fn"),
        replace(PREFILL, dtype="float32", block_size=256),
        replace(PREFILL, heads=8, kv_heads=4, head_dim=256, soft_cap=50.0),
        replace(PREFILL, heads=9, kv_heads=3, head_dim=64, block_size=16, rows=7, new_tokens=33),
        replace(UPDATE, kv_dtype="int8", block_size=32),
        replace(UPDATE, heads=9, kv_heads=3, head_dim=64, block_size=16, rows=1),
    ],
    ids=["prefill", "update", "window", "fp8", "float32", "wide", "narrow", "int8 update", "narrow update"],
)
def test_every_form_of_prefill_and_update_compiles_for_every_chip(chip, case):
    limit = CHIPS[chip].vmem_bytes * 7 // 8
    report = inspect(CHIPS[chip], replace(case, vmem_limit_bytes=limit, chunk=256 if limit < 2**25 else 1024))
    assert report.temp_bytes < report.alias_bytes / 8 + 2**20


def _mixed(chip, *, tokens=64, rows=8):
    layout = KVLayout(num_kv_heads=2, head_dim=128, block_size=16, num_blocks=4096)

    def array(*shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype)

    new = array(tokens, 2, 128, dtype=jnp.bfloat16)
    compiled = compile_for(
        CHIPS[chip],
        paged_attention,
        array(tokens, 8, 128, dtype=jnp.bfloat16),
        new,
        new,
        array(*layout.shape, dtype=layout.dtype),
        array(rows + 1, 512),
        array(rows),
        array(rows + 1),
        array(rows),
        array(),
        donate=(3,),
    )
    return compiled.memory_analysis(), layout


@pytest.mark.parametrize("chip", [*CI_CHIPS, *OTHERS])
def test_a_mixed_batch_compiles_and_works_on_the_store_in_place(chip):
    memory, layout = _mixed(chip)
    assert memory.alias_size_in_bytes == layout.layer_bytes
    assert memory.temp_size_in_bytes < layout.layer_bytes / 8


def _memory_of_step(*arguments, **sizes):
    compiled, pool = compiled_step(*arguments, **sizes)
    return compiled.memory_analysis(), pool


@pytest.mark.parametrize("bucket", [Bucket(kind="decode", rows=8, tokens=8), Bucket(kind="mixed", rows=8, tokens=64)])
def test_a_whole_step_has_the_store_in_place_and_temporaries_that_do_not_grow_with_it(bucket):
    small, pool = _memory_of_step(CHIPS["v6e"], SMALL, bucket, PallasAttention(), num_blocks=1024)
    assert small.alias_size_in_bytes >= pool
    large, pool = _memory_of_step(CHIPS["v6e"], SMALL, bucket, PallasAttention(), num_blocks=16 * 1024)
    assert large.alias_size_in_bytes >= pool
    # A mebibyte more or less is the compiler's scheduling; a copy of one layer's array is 512 of them more.
    assert abs(large.temp_size_in_bytes - small.temp_size_in_bytes) < 2**22 < pool / 256


# Blocks of 64 tokens, so that weights and store fit into a chip of 16 GB; 8B weights alone do not.
POOLS = {("v5e", "Llama-3-8B"): 0, ("v5e", "Qwen3-4B"): 512, ("v5e", "Gemma-3-4B"): 512}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("chip", ["v5e", "v5p", "v6e"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "bucket", [Bucket(kind="decode", rows=64, tokens=64), Bucket(kind="mixed", rows=64, tokens=512)]
)
def test_the_steps_of_real_models_compile_with_the_store_in_place(chip, name, bucket):
    num_blocks = POOLS.get((chip, name), 2048)
    if not num_blocks:
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"Ran out of memory|RESOURCE_EXHAUSTED"):
            _memory_of_step(CHIPS[chip], MODELS[name], bucket, PallasAttention(), num_blocks=256)
        return
    memory, pool = _memory_of_step(CHIPS[chip], MODELS[name], bucket, PallasAttention(), num_blocks=num_blocks)
    assert memory.alias_size_in_bytes >= pool
    # Images of the logits are most of it; of a store there is none.
    assert memory.temp_size_in_bytes < 6 * 4 * bucket.rows * MODELS[name].vocab_size + 2**26


def test_the_command_writes_the_figures(tmp_path, capsys):
    file = tmp_path / "figures.json"
    argv = [
        "v6e",
        "--op",
        "paged_attention",
        "--phase",
        "decode",
        "--heads",
        "4",
        "--kv-heads",
        "1",
        "--head-dim",
        "64",
    ]
    assert main([*argv, "--rows", "8", "--context", "1024", "--chunk", "256", "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    keys = {"vmem_bytes", "vector_spills", "bundles_per_1024_tokens", "bytes_per_1024_tokens"}
    assert keys <= figures.keys()
    out = capsys.readouterr().out
    assert f"{figures['bundles_per_1024_tokens']:.0f}" in out
    assert "paged_attention_decode on v6e" in out


def test_a_kernel_that_does_not_fit_is_an_error_that_quotes_the_compiler():
    with pytest.raises(CompileError, match=r"(?s)for v6e does not compile: .*vmem"):
        inspect(CHIPS["v6e"], replace(DEMO, rows=8, context=1024, vmem_limit_bytes=1 << 18))


def test_a_compile_that_takes_too_long_is_given_up():
    with pytest.raises(CompileError, match=r"did not compile within 0 s"):
        inspect(CHIPS["v6e"], replace(DEMO, rows=8, context=1024), timeout=0.01)
