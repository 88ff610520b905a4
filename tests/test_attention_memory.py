"""Paged attention in place: no copy of the pool, and one flat pool for a scan over layers."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged_rows import kernel, make_inputs, make_spec, mixed_step

from cbjax.attention import KVSpec, paged_attention


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("single_token_rows", [False, True], ids=["mixed", "decode"])
def test_a_compiled_step_never_copies_the_pool(dtype, single_token_rows):
    spec = KVSpec(num_kv_heads=2, head_dim=64, block_size=16, num_blocks=65_536, dtype=dtype)
    rows, tokens = (16, 16) if single_token_rows else (8, 128)
    token = partial(jax.ShapeDtypeStruct, dtype=dtype)
    index = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    compiled = (
        jax.jit(paged_attention, static_argnames="single_token_rows", donate_argnames="kv")
        .lower(
            token((tokens, 4, 64)),
            token((tokens, 2, 64)),
            token((tokens, 2, 64)),
            spec.abstract(),
            index((rows + 1, 16)),
            index((rows,)),
            index((rows + 1,)),
            index((rows,)),
            index(()),
            single_token_rows=single_token_rows,
        )
        .compile()
    )
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == spec.layer_bytes
    assert memory.temp_size_in_bytes < spec.layer_bytes / 50


def test_scan_over_layers_with_one_flat_pool_equals_separate_arrays():
    layers = 3
    spec = make_spec(16)
    step = mixed_step(spec)
    inputs = [make_inputs(spec, 160, seed=layer) for layer in range(layers)]
    separate = [kernel(*layer_inputs, *step.args)[0] for layer_inputs in inputs]
    flat = np.concatenate([kv[:, :, : spec.num_blocks] for *_, kv in inputs] + [inputs[0][3][:, :, -2:]], axis=2)

    @jax.jit
    def scanned(q, k, v, kv, step_args):
        table, *rest = step_args

        def body(kv, layer_inputs):
            layer, *qkv = layer_inputs
            out, kv = paged_attention(*qkv, kv, table + layer * spec.num_blocks, *rest)
            return kv, out

        return jax.lax.scan(body, kv, (jnp.arange(layers, dtype=jnp.int32), q, k, v))[1]

    stacked = [np.stack([layer_inputs[index] for layer_inputs in inputs]) for index in range(3)]
    together = scanned(*stacked, flat, step.args)
    real = slice(0, int(step.q_start[-1]))
    for layer in range(layers):
        np.testing.assert_allclose(together[layer][real], separate[layer][real], atol=1e-6)


def test_single_token_rows_needs_one_row_per_token():
    spec = make_spec(16)
    q, k, v, kv = make_inputs(spec, 10)
    with pytest.raises(ValueError, match=r"as many rows as tokens \(10\). Got 9 rows"):
        paged_attention(q, k, v, kv, *mixed_step(spec).args, single_token_rows=True)
