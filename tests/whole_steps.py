"""Whole steps of models, compiled for chips that are not there."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx

from cbjax.attention import LayerSpec, layer_groups, store_spec
from cbjax.descriptor import packed_shape
from cbjax.models import DecoderConfig, abstract_params, build
from cbjax.sampling.params import NUM_WORDS
from cbjax.step import initial_slots, make_step
from pallas_kernels.aot import compile_for

SMALL = DecoderConfig(
    vocab_size=2048, hidden_size=512, intermediate_size=512, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=128,
    max_positions=8192,
)  # fmt: skip


MODELS = {
    "SmolLM2-135M": DecoderConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9, num_kv_heads=3,
        head_dim=64, max_positions=8192, tie_embeddings=True,
    ),
    "Llama-3-8B": DecoderConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32, num_kv_heads=8,
        head_dim=128, max_positions=8192,
    ),
    "Qwen3-4B": DecoderConfig(
        vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_layers=36, num_heads=32, num_kv_heads=8,
        head_dim=128, max_positions=40960, tie_embeddings=True, qk_norm=True,
    ),
    "Gemma-3-4B": DecoderConfig(
        vocab_size=262208, hidden_size=2560, intermediate_size=10240, num_layers=34, num_heads=8, num_kv_heads=4,
        head_dim=256, max_positions=131072, tie_embeddings=True, qk_norm=True, post_norms=True, norm_offset=1.0,
        activation="gelu_tanh", windows=tuple(None if layer % 6 == 5 else 1024 for layer in range(34)),
    ),
}  # fmt: skip


def compiled_step(chip, config, bucket, attention, *, num_blocks, block_size=64):
    """A model's step for a chip, compiled, and the bytes of its store."""
    layer = LayerSpec(num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim)
    windows = config.windows or (None,) * config.num_layers
    groups = layer_groups([replace(layer, window=window) for window in windows])
    store = store_spec(groups, num_blocks=num_blocks, block_size=block_size, dtype=jnp.bfloat16, attention=attention)
    graphdef = build(config)
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), abstract_params(config))
    slots = jax.eval_shape(
        lambda: initial_slots(
            num_slots=bucket.rows, num_groups=len(groups.windows), max_blocks=128, num_blocks=num_blocks
        )
    )
    step = make_step(lambda params: nnx.merge(graphdef, params), bucket, store, NUM_WORDS)
    arrays = [spec.abstract() for spec in store.arrays]
    compiled = compile_for(chip, step, params, arrays, slots, packed_shape(bucket, NUM_WORDS), donate=(1, 2))
    return compiled, sum(spec.layer_bytes for spec in store.arrays)
