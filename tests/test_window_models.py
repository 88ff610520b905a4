"""Case B09: models with sliding windows on the real device, against the dense masked forward of the same module.

A window of 8 over blocks of 4; prompts that end before, at and behind the window's edge; chunks of 3 and 64 tokens; a
roomy pool, and one so tight that blocks which left a window are handed out again at once.
"""

from contextlib import closing

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cbjax import CausalLM, ContinuousBatchingConfig, GenerationConfig
from cbjax.session import Session

VOCAB, WIDTH, HEADS, KV_HEADS, HEAD_DIM = 61, 32, 4, 2, 8
POSITIONS, WINDOW, NEW = 96, 8, 12
PROMPTS = [np.random.default_rng(length).integers(VOCAB, size=length).tolist() for length in (7, 8, 9, 12)]
GREEDY = GenerationConfig(max_new_tokens=NEW, eos_token_id=-1)


class Layer(nnx.Module):
    def __init__(self, window: int | None, rngs: nnx.Rngs) -> None:
        self.window = window
        self.qkv = nnx.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM, rngs=rngs)
        self.out = nnx.Linear(HEADS * HEAD_DIM, WIDTH, rngs=rngs)

    def __call__(self, layer: int, x, attend):
        heads = self.qkv(x).reshape(x.shape[0], -1, HEAD_DIM)
        q, k, v = jnp.split(heads, (HEADS, HEADS + KV_HEADS), axis=1)
        # Sharp scores: what is attended to decides the token.
        mixed = attend(layer, q, k, v, window=self.window, scale=2.0)
        return x + self.out(mixed.reshape(x.shape[0], -1))


class Model(nnx.Module):
    def __init__(self, windows: tuple[int | None, ...], rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs, embedding_init=nnx.initializers.normal(1.0))
        self.place = nnx.Embed(POSITIONS, WIDTH, rngs=rngs, embedding_init=nnx.initializers.normal(1.0))
        self.layers = nnx.List([Layer(window, rngs) for window in windows])
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def hidden(self, tokens, positions, attend):
        x = self.embed(tokens) + self.place(positions)
        for index, layer in enumerate(self.layers):
            x = layer(index, x, attend)
        return x

    def logits(self, hidden):
        return self.head(hidden)


def make(*windows: int | None) -> CausalLM:
    return CausalLM.from_module(Model(windows, nnx.Rngs(3)), max_positions=POSITIONS)


def dense(lm: CausalLM, prompt: list[int], num_tokens: int) -> list[int]:
    """The oracle: a full causal pass, masked by each layer's window, for each token."""
    tokens = np.zeros(POSITIONS, np.int32)
    tokens[: len(prompt)] = prompt
    for end in range(len(prompt), len(prompt) + num_tokens):
        tokens[end] = int(jnp.argmax(lm(jnp.asarray(tokens))[end - 1]))
    return tokens[len(prompt) : len(prompt) + num_tokens].tolist()


def batching(num_blocks: int, budget: int, columns: int = 8) -> ContinuousBatchingConfig:
    return ContinuousBatchingConfig(
        block_size=4,
        num_blocks=num_blocks,
        max_batch_tokens=budget,
        max_requests_per_batch=min(budget, 8),
        max_blocks_per_request=columns,
        safety_margin=0.0,
        allow_block_sharing=False,  # calls repeat their prompts, over a store that is overwritten between them
        compilation_cache=False,
    )


def generate(lm: CausalLM, prompts: list[list[int]], config: ContinuousBatchingConfig, generation=GREEDY):
    outputs = list(lm.generate_batch(prompts, generation, config).values())
    assert not [output.error for output in outputs if output.error]
    return [output.generated_tokens for output in outputs]


def session_of(lm: CausalLM) -> Session:
    assert lm.session is not None
    return lm.session


def poison_free_blocks(lm: CausalLM) -> None:
    """NaN in every block of the idle store, the reserved two included."""
    cache = session_of(lm).device.cache
    cache.kv = [array.at[:].set(np.nan) for array in cache.kv]


@pytest.fixture(scope="module")
def mixed():
    lm = make(WINDOW, None, WINDOW, None)
    yield lm
    lm.close()


@pytest.fixture(scope="module")
def expected(mixed) -> list[list[int]]:
    tokens = [dense(mixed, prompt, NEW) for prompt in PROMPTS]
    # The oracle tells windows from none, and from one that is off by one.
    for other in (make(None, None, None, None), make(WINDOW + 1, None, WINDOW + 1, None)):
        other.params = mixed.params
        assert [dense(other, prompt, NEW) for prompt in PROMPTS] != tokens
    return tokens


@pytest.mark.parametrize("budget", [3, 64])
@pytest.mark.parametrize("num_blocks", [64, 9])
def test_B09_local_and_global_layers_equal_the_dense_masked_forward(mixed, expected, budget, num_blocks) -> None:
    """Also invariant 3: free and reserved blocks hold NaN when the requests come.

    Nine blocks are what the longest request needs at its end, six in the full group and three in the other.
    """
    config = batching(num_blocks, budget)
    generate(mixed, PROMPTS[:1], config)
    poison_free_blocks(mixed)
    assert generate(mixed, PROMPTS, config) == expected
    assert generate(mixed, PROMPTS[::-1], config) == expected[::-1]
    assert session_of(mixed).resolved.scheduler.windows == (None, WINDOW)
    if num_blocks == 9:
        assert session_of(mixed).engine.stats.soft_resets > 0


def test_B09_only_layers_with_a_window_drop_blocks_and_tables_name_the_sentinels_block(mixed, monkeypatch) -> None:
    config = batching(64, 64)
    generate(mixed, PROMPTS[:1], config)
    device, released = session_of(mixed).device, []
    update_table = device.update_table

    def recorded(delta) -> None:
        left = delta.block == 64
        released.extend(zip(delta.group[left].tolist(), delta.column[left].tolist(), strict=True))
        update_table(delta)

    monkeypatch.setattr(device, "update_table", recorded)
    generate(mixed, [PROMPTS[3]], config)
    # 12 prompt tokens and 11 fed back: the last step is at position 22 and reads from 15 on.
    assert released == [(1, 0), (1, 1), (1, 2)]
    table = np.asarray(device.slots.table)
    assert (table[1, 0, :3] == 64).all()
    assert (table[1, 0, 3:6] < 64).all()
    assert (table[0, 0, :6] < 64).all()


def test_B09_a_model_of_windows_alone_generates_far_beyond_its_pool() -> None:
    """Four blocks of 4 serve 12 + 80 tokens, in chunks that fit them."""
    with closing(make(WINDOW, WINDOW)) as lm:
        config = batching(4, 64, columns=24)
        generation = GenerationConfig(max_new_tokens=80, eos_token_id=-1)
        prompt = PROMPTS[3]
        assert generate(lm, [prompt], config, generation) == [dense(lm, prompt, 80)]
        assert session_of(lm).engine.stats.peak_blocks <= 4
        long = (prompt * 7)[:80]
        assert generate(lm, [long], config, GREEDY) == [dense(lm, long, NEW)]


def test_unequal_groups_are_padded_and_the_report_says_so() -> None:
    with closing(make(*[None] * 4, *[WINDOW] * 5)) as lm:
        assert generate(lm, [PROMPTS[2]], batching(64, 64)) == [dense(lm, PROMPTS[2], NEW)]
        report = session_of(lm).resolved.report()
        assert "full: 4, window 8: 5" in report
        assert "1 of 10 places are padding" in report
        assert len(session_of(lm).device.cache.kv) == 5


def test_a_layer_that_asks_for_more_than_was_recorded_is_refused(mixed) -> None:
    generate(mixed, PROMPTS[:1], batching(64, 64))
    device = session_of(mixed).device
    model = mixed.bind(mixed.params)
    model.layers[0].window = WINDOW + 1
    device.bind = lambda params: model
    device.programs.clear()
    try:
        with pytest.raises(ValueError, match=r"layer 0: the KV store keeps the last 8 tokens .* Got window 9"):
            mixed.generate_batch(PROMPTS[:1], GREEDY, batching(64, 64))
    finally:
        mixed.close()
