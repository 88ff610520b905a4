"""What needs no compiler: jax's dumps of GPU kernels as figures, and programs that are none."""

import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pallas_kernels.aot import GPU_CHIPS, inspect_gpu
from pallas_kernels.aot.__main__ import main
from pallas_kernels.aot.gpu_chips import BLOCK_SHARED_BYTES
from pallas_kernels.aot.gpu_listings import (
    Assembled,
    Launch,
    dumped,
    parse_assembler,
    parse_launch,
    ptx_census,
    sass_census,
)
from pallas_kernels.aot.gpu_report import resident_blocks, write_nvdisasm

ASSEMBLER = """ptxas info    : 0 bytes gmem
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized in function 'k'
ptxas info    : Compiling entry function 'k_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for k_mosaic_gpu_kernel
    24 bytes stack frame, 16 bytes spill stores, 32 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 24 bytes stack, 1 bytes smem
ptxas info    : Compile time = 75.126 ms
"""
PTX = """
.visible .entry k_mosaic_gpu_kernel(.param .u64 k_param_0) .maxntid 128, 1, 1 {
	.reg .pred 	%p<12>;
	// wgmma.mma_async in a comment, and cp.async.bulk.tensor too
$L__BB0_1:
	// begin inline asm
	@%p2 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r7], [%rd3, {%r1, %r2}], [%r9];

	// end inline asm
	cp.async.bulk.commit_group;
	{ .reg .pred p; wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%f1, %f2}, %rd1, %rd2, p, 1, 1, 0, 1; }
	wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%f1,
	%f2}, %rd1, %rd2, p, 1, 1, 0, 1;
	@!%p3 mbarrier.try_wait.parity.shared.b64 p, [%r1], %r2;
	ex2.approx.ftz.f32 %f3, %f4;
	ret;
}
"""
SASS = """
.text.k_mosaic_gpu_kernel:
   -:-:-:Y:01        /*0000*/                   LDC R1, c[0x0][0x28] 
   -:-:1:Y:07        /*0010*/              @!P0 HGMMA.64x64x16.F32 R24, gdesc[UR4], R24 
   -:-:1:Y:07        /*0020*/             @UP1  UTMALDG.2D [UR8], [UR6] 
.L_x_1:
        /*0030*/                   HGMMA.64x64x16.F32 R24, gdesc[UR4], R24 ;
"""
LOG = """// -----// IR Dump Before First //----- //
    %5 = llvm.mlir.constant(9 : i64) : i64 loc(#loc2)
// -----// IR Dump Before Second //----- //
    %5 = llvm.mlir.constant(4 : i64) : i64 loc(#loc2)
    %6 = llvm.mlir.constant(1 : i64) : i64 loc(#loc2)
    %c7 = arith.constant 128 : index
    %8 = llvm.mlir.constant(57368 : i32) : i32 loc(#loc1)
    gpu.launch_func <%0 : !llvm.ptr> @k::@k blocks in (%5, %5, %6) threads in (%c7, %6, %6) : i64 dynamic_shared_memory_size %8 args(%21 : !llvm.ptr)
// -----// IR Dump Before Third //----- //
    %5 = llvm.mlir.constant(2 : i64) : i64 loc(#loc2)
"""  # noqa: E501


def test_what_the_assembler_says_is_read():
    assembled = parse_assembler(ASSEMBLER)
    assert assembled == Assembled(
        name="k_mosaic_gpu_kernel",
        registers=168,
        barriers=16,
        static_shared_bytes=1,
        stack_bytes=24,
        spill_store_bytes=16,
        spill_load_bytes=32,
        remarks=["(C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized in function 'k'"],
    )
    with pytest.raises(ValueError, match="does not say what the kernel takes: 'ptxas fatal"):
        parse_assembler("ptxas fatal   : Unresolved extern function")


def test_instructions_are_counted_where_they_are_instructions():
    assert ptx_census(PTX) == {
        "wgmma.mma_async": 2, "cp.async.bulk.tensor": 1, "mbarrier.try_wait": 1, "ex2": 1,
    }  # fmt: skip
    assert sass_census(SASS) == {"HGMMA": 2, "LDC": 1, "UTMALDG": 1}


def test_the_launch_is_that_of_the_last_stage_that_has_one():
    assert parse_launch(LOG) == Launch(blocks=16, threads=128, shared_bytes=57368)
    for log in ("", LOG.replace("%8 = llvm", "%9 = llvm"), LOG.replace("launch_func", "binary")):
        with pytest.raises(ValueError, match="does not say how the kernel is started"):
            parse_launch(log)


def test_dumps_are_in_the_order_of_their_numbers(tmp_path):
    for number in (10, 2, 0):
        (tmp_path / f"a_b_{number}.ptx").touch()
    (tmp_path / "a_b_0.sass_ctrl").touch()
    assert [path.name for path in dumped(tmp_path)] == ["a_b_0.ptx", "a_b_2.ptx", "a_b_10.ptx"]


@pytest.mark.skipif(sys.platform == "win32", reason="jax makes no machine code listings there")
@pytest.mark.parametrize(("program", "status"), [("cat", 0), ("false", 1)])
def test_nvdisasm_leaves_nothing_of_jax_behind(tmp_path, program, status):
    tool = write_nvdisasm(tmp_path, Path(shutil.which(program)))
    folder = Path(tempfile.mkdtemp(prefix="mosaic-gpu-", dir="/tmp"))  # as jax does
    (folder / "kernel.bin").write_text("code")
    (tmp_path / "kernel.bin").write_text("of another")
    done = subprocess.run([tool, folder / "kernel.bin", tmp_path / "kernel.bin"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (status, "")
    assert done.stdout == ("" if status else "codeof another")
    assert not folder.exists()
    assert (tmp_path / "kernel.bin").exists()


@pytest.mark.parametrize(
    ("registers", "threads", "shared", "expected"),
    [(32, 128, 1 << 10, 16), (168, 384, 0, 1), (126, 256, 0, 2), (32, 128, BLOCK_SHARED_BYTES, 1), (16, 32, 0, 32)],
)
def test_blocks_are_as_many_as_registers_shared_memory_and_threads_are_there_for(registers, threads, shared, expected):
    assembled = Assembled(
        name="k", registers=registers, barriers=0, static_shared_bytes=0, stack_bytes=0, spill_store_bytes=0,
        spill_load_bytes=0, remarks=[],
    )  # fmt: skip
    assert resident_blocks(assembled, Launch(blocks=1, threads=threads, shared_bytes=shared)) == expected


@pytest.mark.parametrize("chip", GPU_CHIPS.values(), ids=GPU_CHIPS)
def test_a_chip_is_told_to_xla_as_it_is(chip):
    assert f"core_count: {chip.multiprocessors} " in chip.target_config
    assert f'name: "{chip.kind}"' in chip.target_config
    assert f"memory_bandwidth: {int(chip.hbm_bytes_per_second)} " in chip.target_config
    assert ("ACCELERATED_FEATURES" in chip.target_config) == (chip.capability >= (9, 0))
    assert chip.arch == {"a100": "sm_80", "h100": "sm_90a", "h200": "sm_90a", "b200": "sm_100a"}[chip.name]


@pytest.mark.parametrize("missing", ["jax_cuda13_plugin", "nvidia"])
def test_what_is_not_installed_is_said_with_what_to_install(monkeypatch, capsys, missing):
    def find_spec(name):
        """As if the one were there and the other not."""
        if name.startswith("jax_cuda"):
            return None if missing.startswith("jax_cuda") else object()
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.setattr("shutil.which", lambda *args, **kwargs: None)
    with pytest.raises(ModuleNotFoundError, match=r"is not installed: pip install 'cbjax\[aot\]'"):
        inspect_gpu(GPU_CHIPS["h200"], "gpu_programs:multiply")
    assert main(["h200", "--program", "gpu_programs:multiply"]) == 1
    assert "is not installed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["h200", "--op", "conv"], "GPU kernels are paged_attention in the phases decode, prefill; got conv in decode"),
        (["h200", "--heads", "9", "--kv-heads", "4"], "kv heads must divide query heads; got 4 and 9"),
        (["h200", "--phase", "prefill", "--context", "4"], "a row has 1 to context (4) new tokens; got 512"),
        (["h200", "--block-size", "48"], "block_size must be one of"),
        (["h200", "--dtype", "float32"], "got float32"),
        (["h200", "--chunk", "256"], "--chunk: of TPUs only; got h200"),
        (["h200", "--program", "gpu_programs:multiply", "--sizes", "{"], "--sizes must be a JSON object; got '{'"),
        (["h200", "--program", "gpu_programs:multiply", "--sizes", "[1]"], "--sizes must be a JSON object; got '[1]'"),
    ],
)
def test_what_cannot_be_compiled_is_said(monkeypatch, capsys, argv, message):
    monkeypatch.setattr("pallas_kernels.aot.gpu_report.check_cuda_plugin", lambda: None)
    monkeypatch.setattr("pallas_kernels.aot.gpu_report._nvdisasm", lambda: None)
    assert main(argv) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["h200", "--chunk", "512", "--cores", "2"], "--chunk, --cores: of TPUs only; got h200"),
        (["a100"], r"compute capability 9.0 \(h100, h200\); got a100, which has 8.0"),
        (["b200"], "got b200, which has 10.0"),
    ],
)
def test_what_the_gpu_kernels_are_not_made_for_is_refused_before_it_is_compiled(capsys, argv, message):
    assert main(argv) == 1
    assert re.search(message, capsys.readouterr().err)
