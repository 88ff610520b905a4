"""A tiny random Llama saved by transformers: the same greedy tokens and logprobs from every form of the folder.

Goldens: `tests/goldens/tiny_llama`, made by `make_tiny_llama.py` one prompt at a time. No margin between the two best
logits in it is below 0.01, so equality is meaningful.
"""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from cbjax import CausalLM, ContinuousBatchingConfig, DecoderConfig, GenerationConfig, RequestStatus
from cbjax.models import Decoder

FOLDER = Path(__file__).parent / "goldens" / "tiny_llama"
GOLDENS = json.loads((FOLDER / "goldens.json").read_text())
SECTIONS = {"single": "plain", "sharded": "plain", "llama3": "llama3"}
# 24 tokens each, EOS ignored.
GREEDY = GenerationConfig(max_new_tokens=24, eos_token_id=-1)


@pytest.fixture(scope="module")
def models():
    loaded = {name: CausalLM.from_pretrained(FOLDER / name) for name in SECTIONS}
    yield loaded
    for lm in loaded.values():
        lm.close()


def batching(**settings):
    defaults = {"block_size": 4, "num_blocks": 160, "max_batch_tokens": 64, "max_requests_per_batch": 8}
    return ContinuousBatchingConfig(**(defaults | {"return_logprobs": True, "compilation_cache": False} | settings))


def assert_equal_goldens(lm, section, config):
    records = GOLDENS[section]
    prompts = [record["prompt_ids"] for record in records]
    # Without warm-up only those programs are compiled that are used.
    outputs = list(lm.generate_batch(prompts, GREEDY, config, warmup=False).values())
    for record, output in zip(records, outputs, strict=True):
        assert (output.status, output.finish_reason) == (RequestStatus.FINISHED, "length"), output.error
        assert output.prompt_ids == record["prompt_ids"]
        assert output.generated_tokens == record["tokens"], f"{len(record['prompt_ids'])} prompt tokens"
        np.testing.assert_allclose(output.logprobs, record["logprobs"], rtol=0, atol=2e-4)
    return outputs


def test_goldens_are_what_the_claim_needs():
    assert GOLDENS["plain"] != GOLDENS["llama3"]
    for section in set(SECTIONS.values()):
        assert len(GOLDENS[section]) == 8
        assert min(min(record["margins"]) for record in GOLDENS[section]) >= 0.01


@pytest.mark.parametrize("folder", SECTIONS)
def test_every_form_of_the_folder_equals_transformers(models, folder):
    assert_equal_goldens(models[folder], SECTIONS[folder], batching())


def test_each_prompt_alone_equals_transformers(models):
    lm, config = models["single"], batching()
    for record in GOLDENS["plain"]:
        (output,) = lm.generate_batch([record["prompt_ids"]], GREEDY, config).values()
        assert output.generated_tokens == record["tokens"]
        np.testing.assert_allclose(output.logprobs, record["logprobs"], rtol=0, atol=2e-4)


@pytest.mark.parametrize("scheduler_type", ["fifo", "prefill_first"])
@pytest.mark.parametrize(("block_size", "budget"), [(4, 16), (16, 16)])
def test_invariant_4_blocks_and_chunks_change_nothing(models, block_size, budget, scheduler_type):
    config = batching(block_size=block_size, max_batch_tokens=budget, scheduler_type=scheduler_type)
    outputs = assert_equal_goldens(models["single"], "plain", config)
    assert sum(output.num_soft_resets for output in outputs) == 0


@pytest.mark.parametrize("scheduler_type", ["fifo", "prefill_first"])
def test_invariant_4_soft_resets_in_a_tight_pool_change_nothing(models, scheduler_type):
    # The longest of the 8 requests needs 63 cells, 16 blocks of 4; all together need 68.
    config = batching(num_blocks=20, scheduler_type=scheduler_type, safety_margin=0.0)
    outputs = assert_equal_goldens(models["single"], "plain", config)
    assert sum(output.num_soft_resets for output in outputs) > 0
    assert models["single"].session.engine.state.pool.num_free == 20


def test_without_decode_programs_every_step_is_a_mixed_one(models):
    assert_equal_goldens(models["single"], "plain", batching(max_blocks_per_request=0))
    assert set(models["single"].summary.steps) == {"mixed"}


def test_eos_ids_are_the_union_of_config_and_generation_config(models):
    assert models["single"].eos_token_ids == (1, 2, 5)
    assert models["sharded"].eos_token_ids == (2,)
    assert models["llama3"].eos_token_ids == ()


@pytest.mark.parametrize("folder", ["single", "sharded"])
def test_b32_generation_stops_at_the_first_eos_of_the_union(models, folder):
    lm, eos = models[folder], set(models[folder].eos_token_ids)
    records = GOLDENS["plain"]
    outputs = lm.generate_batch([r["prompt_ids"] for r in records], GenerationConfig(max_new_tokens=24), batching())
    reasons = []
    for record, output in zip(records, outputs.values(), strict=True):
        end = next((i + 1 for i, token in enumerate(record["tokens"]) if token in eos), 24)
        assert output.generated_tokens == record["tokens"][:end]
        assert output.finish_reason == ("stop" if record["tokens"][end - 1] in eos else "length")
        reasons.append(output.finish_reason)
    assert reasons.count("stop") == (4 if folder == "single" else 0)  # ids 1 and 5 occur in four records, 2 in none


@pytest.mark.parametrize("folder", ["single", "llama3"])
def test_a_config_as_transformers_4_wrote_it_gives_the_same_model(models, tmp_path, folder):
    shutil.copytree(FOLDER / folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype")
    (tmp_path / "config.json").write_text(json.dumps(config))
    lm = CausalLM.from_pretrained(tmp_path)
    assert lm.config == models[folder].config
    assert lm.eos_token_ids == models[folder].eos_token_ids
    jax.tree.map(np.testing.assert_array_equal, lm.params, models[folder].params)


@pytest.mark.parametrize("folder", ["single", "llama3"])
def test_the_dense_forward_is_the_same_model(models, folder):
    """One causal pass over prompt and answer: the argmax at each place is the next token of the answer."""
    for record in GOLDENS[SECTIONS[folder]][:3]:
        prompt, answer = record["prompt_ids"], record["tokens"]
        # One length for all, so that one program serves: what is causal does not see what follows.
        tokens = np.zeros(64, np.int32)
        tokens[: len(prompt) + len(answer)] = prompt + answer
        logits = np.asarray(models[folder](tokens))[len(prompt) - 1 :][: len(answer)]
        assert logits.argmax(axis=1).tolist() == answer
        chosen = np.asarray(jax.nn.log_softmax(logits))[np.arange(len(answer)), answer]
        np.testing.assert_allclose(chosen, record["logprobs"], rtol=0, atol=2e-4)


def test_a_flax_module_of_ones_own_is_served_like_a_checkpoint(models):
    config, params = models["single"].config, models["single"].params
    assert isinstance(config, DecoderConfig)
    module = Decoder(config, rngs=nnx.Rngs(0))
    state = nnx.state(module)
    nnx.replace_by_pure_dict(state, params)
    nnx.update(module, state)
    lm = CausalLM.from_module(module, max_positions=config.max_positions)
    assert_equal_goldens(lm, "plain", batching())
    lm.close()
