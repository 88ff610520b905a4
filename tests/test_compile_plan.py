"""The compile plan before and after warm-up, and executables that a second start finds on disk without tracing."""

import _thread
import dataclasses
import itertools
import shutil
import threading
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from cbjax import ContinuousBatchingConfig, GenerationConfig, WorkloadHints, programs
from cbjax.compile_plan import CompilePlan
from cbjax.program_store import cache_hits
from cbjax.programs import ModelDevice, StrictModeError
from cbjax.session import Session
from cbjax.testing import tiny_llama

GREEDY = GenerationConfig(max_new_tokens=4, eos_token_id=-1)
PROMPTS = [[1, 2, 3], [4, 5]]
CONFIG = ContinuousBatchingConfig(
    block_size=4,
    num_blocks=64,
    max_blocks_per_request=16,
    max_batch_tokens=16,
    max_requests_per_batch=2,
    cpu_offload_space=0.01,
    compilation_cache=False,
)
NAMES = [
    "block-table entries",
    "copies of blocks",
    "blocks to the host",
    "blocks from the host",
    "decode(2)",
    "mixed(64 tokens, 2 rows)",
]


@pytest.fixture
def lm():
    model = tiny_llama(num_layers=1)
    yield model
    model.close()


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """A compilation cache of cbjax's own, as a user without settings has it."""
    monkeypatch.setenv("CBJAX_CACHE", str(tmp_path))
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()  # jax keeps the first folder that it used
    yield tmp_path
    compilation_cache.reset_cache()
    for name, value in before.items():
        jax.config.update(name, value)


def refuse(*_):
    raise AssertionError("nothing may be traced or compiled")


def test_the_plan_names_every_program_before_any_is_compiled_and_tells_what_was_measured_after(lm, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(ModelDevice, "_lower", refuse)
        plan = lm.compile_plan(CONFIG)
        assert [program.name for program in plan.programs] == NAMES
        assert {program.status for program in plan.programs} == {"to compile"}
        assert {(program.seconds, program.temp_bytes) for program in plan.programs} == {(None, None)}
        assert all(program.purpose and program.sizes for program in plan.programs)
        assert lm.session.device.programs == {}
        assert lm.compile_plan() == plan
    assert "6 programs: 6 to compile; 0.0 s in all, side by side or not; cache: off, as asked" in str(plan)
    lm.session.warmup()
    after = lm.compile_plan()
    assert [program.name for program in after.programs] == NAMES
    compiled = {program.name: program for program in lm.session.device.programs.values()}
    for program in after.programs:
        assert program.status == "compiled"
        assert program.seconds == compiled[program.name].seconds > 0
        assert program.temp_bytes == compiled[program.name].temp_bytes
    lines = str(after).splitlines()
    assert len(lines) == 8
    assert lines[0].split() == ["program", "for", "sizes", "status", "seconds", "temporaries"]


def test_a_smaller_warm_up_leaves_the_rest_to_compile(lm):
    lm.generate_batch([[1, 2]], GREEDY, CONFIG)
    plan = lm.compile_plan()
    assert (plan.count("compiled"), plan.count("to compile"), len(plan)) == (5, 1, 6)
    assert [p.name for p in plan.programs if p.status == "to compile"] == ["copies of blocks"]


@pytest.mark.parametrize(("level", "most"), [(0, 24), (3, 24)])
def test_the_demo_has_at_most_24_programs_with_forks_and_offload(level, most):
    # The demo's budgets on a CPU; its layers and widths change no number.
    demo = tiny_llama(num_layers=1, max_positions=8192)
    session = Session(
        demo,
        ContinuousBatchingConfig(cpu_offload_space=0.25, compilation_cache=False, default_compile_level=level),
        WorkloadHints(max_prompt_length=4096, max_generated_length=1024, num_requests=64),
    )
    scheduler = session.resolved.scheduler
    assert (scheduler.max_batch_tokens, scheduler.max_requests_per_batch, session.resolved.host_blocks > 0) == (
        512,
        64,
        True,
    )
    assert len(session.compile_plan()) <= most
    session.close()


def test_strict_mode_names_the_bucket_and_what_there_is(lm):
    lm.generate_batch([[1, 2]], GenerationConfig(max_new_tokens=1), dataclasses.replace(CONFIG, cpu_offload_space=0.0))
    lm.session.device.strict = True
    with pytest.raises(StrictModeError, match=r"needed now: decode\(2\); compiled are: .*mixed\(64 tokens, 2 rows\)"):
        lm.generate_batch([[1, 2]], GREEDY, dataclasses.replace(CONFIG, cpu_offload_space=0.0))


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_while_the_compiler_runs_stops_and_the_next_call_works(lm, monkeypatch):
    threads = threading.enumerate()
    real = programs._compile

    def interrupted(key, *rest):
        if isinstance(key, programs.Bucket):
            _thread.interrupt_main()  # as the signal would, while the main thread waits for this one
        return real(key, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(programs, "_compile", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lm.generate_batch(PROMPTS, GREEDY, CONFIG)
    assert threading.enumerate() == threads
    outputs = lm.generate_batch(PROMPTS, GREEDY, CONFIG).values()
    assert [len(output.generated_tokens) for output in outputs] == [4, 4]


# A second start.


def start(own_cache, **overrides) -> tuple[Any, Any, list[list[int]]]:
    """A new model as a new process would make it, its session, and what it generates."""
    model = tiny_llama(num_layers=1, **overrides)
    config = dataclasses.replace(CONFIG, compilation_cache=True)
    plan = model.compile_plan(config)
    outputs = model.generate_batch(PROMPTS, GREEDY, config)
    return model, plan, [output.generated_tokens for output in outputs.values()]


def test_a_second_start_finds_every_program_and_traces_none(own_cache, monkeypatch):
    lm, plan, tokens = start(own_cache)
    lm.session.warmup()
    measured = {program.name: program.temp_bytes for program in lm.session.device.programs.values()}
    assert plan.count("to compile") == 6
    assert f"cache: {own_cache / 'xla'}" in str(plan)
    lm.close()
    assert len(list((own_cache / "programs").iterdir())) == 6
    monkeypatch.setattr(ModelDevice, "_lower", refuse)
    again, plan, same = start(own_cache)
    assert same == tokens
    assert plan.count("on disk") == 6
    assert {program.name: program.temp_bytes for program in plan.programs} == measured
    assert all(program.seconds > 0 for program in plan.programs)
    again.session.warmup()
    assert again.compile_plan().count("read") == 6
    kv = again.session.device.cache.kv
    for name, program in {p.name: p for p in again.session.device.programs.values()}.items():
        assert program.temp_bytes == measured[name]
    again.generate_batch(PROMPTS, GREEDY, dataclasses.replace(CONFIG, compilation_cache=True))
    assert all(array.is_deleted() for array in kv), "the store is still donated"
    again.close()


def test_what_jax_read_from_its_own_cache_is_not_written_again(own_cache, monkeypatch):
    monkeypatch.setattr(programs, "cache_hits", itertools.count().__next__)
    lm, _, _ = start(own_cache)
    lm.close()
    assert not (own_cache / "programs").exists()


def test_nor_is_it_by_a_second_session_that_jax_gives_the_same_program_again(own_cache, monkeypatch):
    """Such a program lacks functions when it runs, so a third process could not go on."""
    monkeypatch.setattr("cbjax.compilation_cache.SHORTEST_COMPILE", 0.0)
    lm, _, tokens = start(own_cache)
    lm.close()
    shutil.rmtree(own_cache / "programs")  # as if cbjax were another version
    jax.clear_caches()  # as if the process were
    for _ in range(2):
        lm, _, again = start(own_cache)
        lm.close()
        assert again == tokens
        assert not (own_cache / "programs").exists()


def test_hits_of_the_cache_of_jax_are_counted(own_cache):
    jax.config.update("jax_compilation_cache_dir", str(own_cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    argument = jax.ShapeDtypeStruct((4,), np.float32)
    before = cache_hits()
    for hits in (0, 1, 2):
        jax.jit(lambda x: x * np.float32(3.25)).lower(argument).compile()
        assert cache_hits() == before + hits


def test_another_model_or_setting_finds_nothing_and_new_weights_find_all(own_cache):
    lm, _, _ = start(own_cache)
    lm.close()
    assert planned(seed=1).count("on disk") == 5
    for change in ({"hidden_size": 16}, {"rms_norm_eps": 1e-3}, {"dtype": "bfloat16"}, {"vocab_size": 300}):
        assert planned(**change).count("to compile") == 6, change
    with jax.default_matmul_precision("highest"):
        assert planned().count("to compile") == 6
    assert planned().count("on disk") == 5


def planned(**overrides) -> CompilePlan:
    model = tiny_llama(num_layers=1, **overrides)
    plan = model.compile_plan(dataclasses.replace(CONFIG, compilation_cache=True))
    model.close()
    return plan


def test_a_damaged_entry_is_compiled_anew_and_replaced(own_cache, caplog):
    lm, _, tokens = start(own_cache)
    lm.close()
    entries = list((own_cache / "programs").iterdir())
    damages = [b"", b"no header\n", b'{"seconds": 1.0, "temp_bytes": 5}\nno executable']
    for entry, damage in zip(entries, itertools.cycle(damages), strict=False):
        entry.write_bytes(damage)
    shutil.rmtree(own_cache / "xla")  # what jax would read from its own cache would not be written again
    compilation_cache.reset_cache()
    again, _, same = start(own_cache)
    again.close()
    assert same == tokens
    assert caplog.text.count("cannot be read and is compiled anew") == len(entries) == 5
    assert all(entry.stat().st_size > 1000 for entry in entries)


def test_a_module_of_ones_own_is_always_traced(own_cache):
    lm: Any = tiny_llama(num_layers=1)
    own: Any = type(lm)(lm.bind, lm.params, max_positions=256)
    own.generate_batch(PROMPTS, GREEDY, dataclasses.replace(CONFIG, compilation_cache=True))
    assert own.session.device.store is None
    assert not (own_cache / "programs").exists()
    own.close()


def test_without_a_cache_nothing_is_kept(lm, own_cache):
    lm.generate_batch(PROMPTS, GREEDY, CONFIG)
    assert lm.session.device.store is None
    assert list(own_cache.iterdir()) == []


def test_old_entries_go_when_there_are_too_many(own_cache, monkeypatch):
    monkeypatch.setattr("cbjax.program_store._MAX_ENTRIES", 4)
    lm, _, _ = start(own_cache)
    lm.close()
    assert len(list((own_cache / "programs").iterdir())) == 4
