"""Sizes of the kernels: from the table where it has them, else by a rule, and never more than VMEM holds."""

import json
from importlib import resources

import pytest

from pallas_kernels.aot import CHIPS, Case
from pallas_kernels.aot import tune as tuning_run
from pallas_kernels.aot.bundles import Loop
from pallas_kernels.aot.report import Compiled, CompileError
from pallas_kernels.paged_attention import KVLayout
from pallas_kernels.paged_attention.tpu.tuning import ANY_TPU, Tpu, current_tpu, default_chunk, sizes_for

TABLE = json.loads(resources.files("pallas_kernels.paged_attention.tpu").joinpath("tuned.json").read_text())


def layout(**sizes):
    given = {"num_kv_heads": 8, "head_dim": 128, "block_size": 64, "num_blocks": 1, "dtype": "bfloat16"} | sizes
    return KVLayout(**given)


@pytest.mark.parametrize("entry", TABLE, ids=lambda entry: f"{entry['chip']} {entry['kv_heads']} {entry['block_size']}")
def test_an_entry_of_the_table_is_used_fits_and_does_not_spill(entry):
    mine = layout(num_kv_heads=entry["kv_heads"], **{n: entry[n] for n in ("head_dim", "block_size", "dtype")})
    chip = CHIPS[entry["chip"]]
    tpu = Tpu(name=chip.name, vmem_bytes=chip.vmem_bytes, cores=1)
    sizes = sizes_for(mine, entry["heads"], tpu)
    assert sizes.chunk == entry["chunk"]
    assert 2 * sizes.chunk * mine.token_bytes < sizes.vmem_limit_bytes < chip.vmem_bytes
    assert entry["inner_spills"] == 0


@pytest.mark.parametrize(
    ("sizes", "vmem_mib", "chunk"),
    [
        ({}, 128, 1024),
        ({}, 16, 512),
        ({"dtype": "float32"}, 16, 256),
        ({"num_kv_heads": 32, "head_dim": 256, "dtype": "float32"}, 16, 256),
        ({"num_kv_heads": 3, "head_dim": 64}, 16, 1024),
    ],
)
def test_other_stores_take_two_chunks_in_a_third_of_vmem(sizes, vmem_mib, chunk):
    assert default_chunk(layout(**sizes), vmem_mib << 20) == chunk


def test_without_a_tpu_the_rule_is_asked_for_no_chip():
    assert current_tpu() is ANY_TPU
    assert sizes_for(layout(), 32).chunk == default_chunk(layout(), ANY_TPU.vmem_bytes)


def _compiles(bundles):
    """A compiler that knows the bundles of a full chunk by its size, and refuses the sizes that are not there."""

    def compile_case(chip, case, *, timeout, asks_vmem):
        if case.chunk not in bundles:
            raise CompileError("no")
        sizes = [size for size in (256, 512, 1024) if size <= case.chunk]
        tails = [Loop(bundles=bundles[case.chunk] * size // case.chunk, loops=[Loop()]) for size in sizes]
        copies = [Loop(), Loop()] if case.chunk >= 512 else [Loop()]
        full = Loop(bundles=bundles[case.chunk], loops=copies)
        row = Loop(loops=[full, *copies, *tails])
        return Compiled(
            facts=dict(vmem_bytes=None, code_bytes=0, temp_bytes=0, alias_bytes=0),
            program=Loop(loops=[Loop(loops=[*copies, row])]),
        )

    return compile_case


@pytest.mark.parametrize(
    ("bundles", "chunk"),
    [
        ({256: 40_000, 512: 60_000, 1024: 200_000}, 512),  # compute is the limit
        ({256: 400, 512: 600, 1024: 900}, 1024),  # memory is, and the fewest bundles win
        ({512: 600}, 512),
        ({}, None),
    ],
)
def test_the_best_size_is_the_fastest_and_then_the_one_that_leaves_most_room(monkeypatch, bundles, chunk):
    monkeypatch.setattr(tuning_run, "compile_case", _compiles(bundles))
    entry = tuning_run.tune(CHIPS["v5e"], Case(block_size=64), (256, 512, 1024))
    assert (entry and entry["chunk"]) == chunk


def test_tuning_writes_a_table_and_keeps_what_it_had(monkeypatch, tmp_path, capsys):
    file = tmp_path / "tuned.json"
    monkeypatch.setattr(tuning_run, "SHAPES", ((32, 8, 128),))
    monkeypatch.setattr(tuning_run, "compile_case", _compiles({256: 400}))
    for chip in ("v6e", "v5e"):
        assert tuning_run.main([chip, "--block-sizes", "64", "--json", str(file)]) == 0
    assert [entry["chip"] for entry in json.loads(file.read_text())] == ["v5e", "v6e"]
    assert "v5e 32/8/128 blocks of 64: chunks of 256" in capsys.readouterr().out
    assert tuning_run.main(["v9", "--json", str(file)]) == 1
    assert "got 'v9'" in capsys.readouterr().err
