"""The manager over a real model: the same tokens as calls, one store for both, memory, and new weights."""

from __future__ import annotations

import jax
import pytest
from manager_fakes import SECONDS, result
from test_generate_batch import GREEDY, PROMPTS, batching, dense_greedy

from cbjax import GenerationConfig, WorkloadHints
from cbjax import session as session_module
from cbjax.descriptor import pack
from cbjax.machine import MachineFacts
from cbjax.programs import ModelDevice
from cbjax.testing import ByteTokenizer, tiny_llama

MIXED = ["hello", [72, 101, 108], [{"role": "user", "content": "hi"}], [], "bye"]
SAMPLED = GenerationConfig(max_new_tokens=6, eos_token_id=-1, temperature=1.0)


@pytest.fixture(scope="module")
def lm():
    model = tiny_llama(tokenizer=ByteTokenizer())
    yield model
    model.close()


def test_invariant_4_tokens_logprobs_and_texts_are_those_of_generate_batch(lm):
    config = batching(seed=11, return_logprobs=True)
    expected = list(lm.generate_batch(MIXED, SAMPLED, config).values())
    session = lm.session
    with lm.continuous_batching_context_manager(SAMPLED, config) as manager:
        assert lm.session is session
        names = [*manager.add_requests(MIXED[:3]), *manager.add_requests(MIXED[3:])]
        outputs = [result(manager, name) for name in names]
    for output, other in zip(outputs, expected, strict=True):
        assert output.generated_tokens == other.generated_tokens
        assert (output.text, output.prompt_ids) == (other.text, other.prompt_ids)
        assert (output.status, output.finish_reason, output.error) == (other.status, other.finish_reason, other.error)
        assert output.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    compiled = len(lm.session.device.programs)
    again = list(lm.generate_batch(MIXED, SAMPLED, config).values())
    assert [output.generated_tokens for output in again] == [output.generated_tokens for output in expected]
    assert (lm.session, lm.summary.compiled, len(session.device.programs)) == (session, 0, compiled)


def test_invariant_7_no_step_compiles_after_the_warm_up(lm):
    manager = lm.init_continuous_batching(GREEDY, batching())
    manager.warmup()
    lm.session.device.strict = True
    manager.start()
    names = manager.add_requests(PROMPTS * 3)
    outputs = [result(manager, name) for name in names]
    manager.stop()
    lm.session.device.strict = False
    assert [output.generated_tokens for output in outputs] == [dense_greedy(lm, p, 6) for p in PROMPTS] * 3


def test_times_count_from_the_submission(lm):
    with lm.continuous_batching_context_manager(GREEDY, batching(), warmup=False) as manager:
        output = result(manager, manager.add_request(PROMPTS[0]))
    assert 0 < output.lifespan[0] < output.timestamps[0] <= output.timestamps[-1] <= output.lifespan[1]


def test_hints_size_the_store_and_the_warm_up(lm):
    config = batching(num_blocks=None, max_blocks_per_request=None, block_size=16)
    hints = WorkloadHints(max_prompt_length=20, max_generated_length=12, num_requests=1)
    manager = lm.init_continuous_batching(GREEDY, config, hints)
    manager.warmup()
    assert lm.session.resolved.scheduler.num_blocks == 2
    assert len(lm.session.device.programs) == 3  # one row is all that can come
    manager.start()
    with pytest.raises(ValueError, match="must fit the KV pool"):
        manager.add_request([1] * 40)
    assert result(manager, manager.add_request([1] * 20)).generated_tokens == dense_greedy(lm, [1] * 20, 6)
    manager.stop()


def test_without_hints_a_store_that_was_sized_for_one_call_is_not_taken(lm):
    config = batching(num_blocks=None, max_blocks_per_request=None, max_requests_per_batch=2)
    lm.generate_batch([[1]], GREEDY, config, warmup=False)
    small = lm.session.resolved.scheduler.num_blocks
    manager = lm.init_continuous_batching(GREEDY, config)
    manager.start()
    assert lm.session.resolved.scheduler.num_blocks > 8 * small
    manager.stop()
    session = lm.session
    manager.start()
    manager.stop()
    lm.generate_batch([[1]], GREEDY, config, warmup=False)
    assert lm.session is session


def test_a_store_that_does_not_fit_is_refused_at_start_and_the_model_stays_usable(lm, monkeypatch):
    machine = MachineFacts(platform="cpu", device="cpu", free_bytes=1 << 20, source="a test")
    manager = lm.init_continuous_batching(GREEDY, batching(block_size=8, num_blocks=9000))
    with monkeypatch.context() as patched:
        patched.setattr(session_module, "machine_facts", lambda: machine)
        with pytest.raises(ValueError, match="must fit into memory"):
            manager.start()
    assert not manager.is_running()
    assert lm.manager is None
    (output,) = lm.generate_batch([PROMPTS[0]], GREEDY, batching()).values()
    assert output.generated_tokens == dense_greedy(lm, PROMPTS[0], 6)


def test_destroy_gives_the_memory_back(lm):
    manager = lm.init_continuous_batching(GREEDY, batching())
    manager.start()
    arrays = [*lm.session.device.cache.kv, lm.session.device.slots.table]
    manager.destroy()
    assert lm.session is None
    assert all(array.is_deleted() for array in arrays)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(lm.params))


def test_destroy_leaves_a_store_that_another_manager_uses(lm):
    first, second = (lm.init_continuous_batching(GREEDY, batching()) for _ in range(2))
    first.start()
    first.stop()
    second.start()
    first.destroy()
    assert result(second, second.add_request(PROMPTS[0])).generated_tokens == dense_greedy(lm, PROMPTS[0], 6)
    second.stop()


def test_new_weights_are_refused_while_requests_run_and_taken_by_the_next_one(lm, monkeypatch):
    """A request never mixes keys and values of two sets of weights."""
    old, new = lm.params, jax.tree.map(lambda leaf: leaf[::-1], lm.params)
    expected = dense_greedy(lm, PROMPTS[0], 6)
    with lm.continuous_batching_context_manager(GREEDY, batching()) as manager:
        session = lm.session
        manager.add_request(PROMPTS[0], "long", 200)
        with pytest.raises(RuntimeError, match=r"1 requests .* wait for them, cancel them, or stop"):
            lm.params = new
        assert lm.params is old
        manager.cancel_request("long")
        lm.params = new
        assert result(manager, manager.add_request(PROMPTS[0])).generated_tokens == dense_greedy(lm, PROMPTS[0], 6)
        lm.params = old
        assert result(manager, manager.add_request(PROMPTS[0])).generated_tokens == expected
        assert lm.session is session
    assert dense_greedy(lm, PROMPTS[0], 6) == expected


def test_B40_the_store_is_sound_after_an_error_that_lost_the_donated_arrays(lm, monkeypatch):
    manager = lm.init_continuous_batching(GREEDY, batching())
    manager.warmup()
    manager.start()
    real, session = ModelDevice.forward, lm.session

    def forward(self, batch, bucket):
        real_call = self._program(bucket)
        real_call(self.weights, self.cache.kv, self.slots, pack(batch))
        raise RuntimeError("device lost")

    with monkeypatch.context() as patched:
        patched.setattr(ModelDevice, "forward", forward)
        output = result(manager, manager.add_request(PROMPTS[0]))
    assert "device lost" in output.error
    assert ModelDevice.forward is real
    manager.start()
    names = manager.add_requests(PROMPTS)
    outputs = [manager.get_result(name, timeout=SECONDS) for name in names]
    manager.stop()
    assert [output.generated_tokens for output in outputs] == [dense_greedy(lm, p, 6) for p in PROMPTS]
    assert lm.session is session
