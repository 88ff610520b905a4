"""A real model recorded: calls, streams and managers, over sessions, new weights and interrupts."""

import jax
import pytest

import cbjax
from cbjax import ContinuousBatchingConfig, GenerationConfig, read_recording, replay
from cbjax.recording import Cancel, Renew, Reset, Start
from cbjax.recording.compare import differences
from cbjax.testing import ByteTokenizer, tiny_llama

PROMPTS = [[72, 101, 108, 108, 111, 1, 2], [5], [72, 101, 108, 108, 9, 9, 31, 7, 64, 12, 80, 3]]
GREEDY = GenerationConfig(max_new_tokens=10, eos_token_id=-1)
TIGHT = ContinuousBatchingConfig(
    block_size=4,
    num_blocks=8,
    max_blocks_per_request=0,  # one program to compile
    max_batch_tokens=8,
    max_requests_per_batch=3,
    seed=1,
    compilation_cache=False,
)


@pytest.fixture(scope="module")
def lm():
    model = tiny_llama(tokenizer=ByteTokenizer())
    yield model
    model.close()


@pytest.fixture(scope="module")
def right(lm):
    """What a call that nobody records gives."""
    return tokens_of(lm.generate_batch(PROMPTS, GREEDY, TIGHT))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.cbjax"


def tokens_of(outputs):
    return [output.generated_tokens for output in outputs.values()]


def assert_replays(path, steps):
    """The recording makes the plans that the engine told its observers."""
    replayed = list(replay(path))
    assert len(replayed) == len(steps) > 0
    for step, original in zip(replayed, steps, strict=True):
        assert list(differences(original.plan, step.plan, "plan")) == []


def count(path, kind):
    return sum(isinstance(given, kind) for given in read_recording(path).inputs)


def test_a_call_a_stream_and_a_manager_are_one_recording(lm, right, path):
    with lm.record_to(path), lm.recording() as steps:
        assert tokens_of(lm.generate_batch(PROMPTS, GREEDY, TIGHT)) == right
        *_, streamed = lm.stream(PROMPTS[0], GREEDY, TIGHT)
        with lm.continuous_batching_context_manager(GREEDY, TIGHT, warmup=False) as manager:
            names = manager.add_requests(PROMPTS)
            long = manager.add_request(PROMPTS[1], max_new_tokens=20, streaming=True)
            next(manager.request_id_iter(long))
            manager.cancel_request(long)
            outputs = [manager.get_result(name) for name in names]
    assert streamed.generated_tokens == right[0]
    assert [output.generated_tokens for output in outputs] == right
    recording = read_recording(path)
    assert (recording.is_complete, recording.notes) == (True, ())
    assert (count(path, Start), count(path, Cancel), count(path, Reset)) == (1, 1, 0)
    assert any(step.plan.soft_resets for step in steps)
    assert_replays(path, steps)


def test_what_runs_before_and_after_is_not_in_it(lm, right, path):
    lm.generate_batch(PROMPTS, GREEDY, TIGHT)
    with lm.record_to(path), lm.recording() as steps:
        lm.generate_batch(PROMPTS[:1], GREEDY, TIGHT)
    content = path.read_bytes()
    assert tokens_of(lm.generate_batch(PROMPTS, GREEDY, TIGHT)) == right
    assert path.read_bytes() == content
    assert_replays(path, steps)
    assert lm.session.engine.scheduler.journal is None
    # The prompts before are no part of the recording, so none of their blocks can be found in it.
    assert sum(admission.num_cached for step in steps for admission in step.plan.admitted) == 0


def test_new_weights_are_in_it(lm, path):
    params = lm.params
    with lm.record_to(path), lm.recording() as steps:
        lm.generate_batch(PROMPTS[:2], GREEDY, TIGHT)
        lm.params = jax.tree.map(lambda leaf: leaf * 1.5, params)
        lm.generate_batch(PROMPTS[:2], GREEDY, TIGHT)
        lm.params = params
        lm.generate_batch(PROMPTS[:1], GREEDY, TIGHT)
    assert count(path, Renew) == 2
    assert_replays(path, steps)


def test_an_interrupted_call_leaves_a_recording_and_the_next_one_goes_on_in_it(lm, right, path):
    def interrupt(step):
        raise KeyboardInterrupt

    with lm.record_to(path), lm.recording() as steps:
        lm.generate_batch(PROMPTS[:1], GREEDY, TIGHT)
        lm.observers.append(interrupt)
        with pytest.raises(KeyboardInterrupt):
            lm.generate_batch(PROMPTS, GREEDY, TIGHT)
        lm.observers.remove(interrupt)
        assert_replays(path, steps)  # the file is not closed, and all there
        assert not read_recording(path).is_complete
        assert tokens_of(lm.generate_batch(PROMPTS, GREEDY, TIGHT)) == right
    assert read_recording(path).is_complete
    assert count(path, Reset) == 1
    assert_replays(path, steps)


def test_an_error_in_the_block_closes_the_file(lm, path):
    with pytest.raises(ZeroDivisionError), lm.record_to(path):
        raise ZeroDivisionError
    assert read_recording(path).is_complete
    assert read_recording(path).inputs == ()


def test_a_manager_that_outlives_the_block_goes_on_unrecorded(lm, right, path):
    manager = lm.init_continuous_batching(GREEDY, TIGHT)
    with lm.record_to(path):
        manager.start()
        manager.get_result(manager.add_request(PROMPTS[0]))
    content = path.read_bytes()
    assert manager.get_result(manager.add_request(PROMPTS[2])).generated_tokens == right[2]
    manager.stop()
    assert path.read_bytes() == content
    assert len(list(replay(path))) == 10


def test_what_cannot_be_recorded_is_refused(lm, right, path, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"), lm.record_to(tmp_path / "nowhere" / "run.cbjax"):
        pass
    with lm.record_to(path), pytest.raises(RuntimeError, match="to one file at a time"), lm.record_to(path):
        pass
    manager, running = lm.continuous_batching_context_manager(GREEDY, TIGHT, warmup=False), "manager of this model is"
    with manager, pytest.raises(RuntimeError, match=running), lm.record_to(path):
        pass
    stream = lm.stream(PROMPTS[0], GREEDY, TIGHT)
    next(stream)
    with pytest.raises(RuntimeError, match="this model is generating"), lm.record_to(path):
        pass
    stream.close()
    assert tokens_of(lm.generate_batch(PROMPTS, GREEDY, TIGHT)) == right


def test_the_public_names_are_those_of_the_package():
    from cbjax import recording

    assert (cbjax.replay, cbjax.read_recording) == (recording.replay, recording.read_recording)
