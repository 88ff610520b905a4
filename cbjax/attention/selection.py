"""Which attention implementation serves a model on a device, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from cbjax.attention.contract import LayerSpec
from cbjax.attention.implementation import XLA, Attention, EagerAttention
from cbjax.attention.spec import KVSpec, LayoutName


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionChoice:
    """Attributes:
    attention: the implementation.
    used: its name, for people.
    why: it was chosen.
    is_interpreted: its kernels are; such programs cannot be kept between processes.
    """

    attention: Attention
    used: str
    why: str
    is_interpreted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a model is to run, and how.

    Attributes:
        platform: "cpu", "gpu" or "tpu".
        capability: a GPU's compute capability, "9.0" for Hopper.
        multiprocessors: of a GPU.
        block_size: tokens per block.
        dtype: of the model.
        batch_invariant: a token's bits must not depend on the kernel that computes it.
    """

    platform: str
    capability: str | None = None
    multiprocessors: int | None = None
    block_size: int
    dtype: jax.typing.DTypeLike
    batch_invariant: bool = False


def choose_attention(asked: str | None, layers: Sequence[LayerSpec], place: Place) -> AttentionChoice:
    """The implementation asked for by name, or the fastest one that there is for these layers.

    Raises:
      ValueError, NotImplementedError: what was asked for cannot be.
    """
    assert asked in (None, "pallas", "xla", "eager"), asked
    if asked == "xla":
        return AttentionChoice(attention=XLA, used="xla", why="as asked")
    if asked == "eager":
        return AttentionChoice(attention=EagerAttention(), used="eager", why="as asked: slow, and simple")
    if asked is None and place.platform == "cpu":
        return AttentionChoice(attention=XLA, used="xla", why="portable; the Pallas kernels are for TPUs and GPUs")
    problem = _why_not_pallas(layers, place)
    if problem is not None:
        if asked is None:
            return AttentionChoice(attention=XLA, used="xla", why=f"not the Pallas kernels: {problem}")
        raise NotImplementedError(
            f"attn_implementation={asked!r}: {problem}; or leave it at None for what there is, which is xla"
        )
    if place.platform == "cpu":
        why = "as asked; there is no TPU, so that its kernels are interpreted, which is for tests: very slow"
        return AttentionChoice(
            attention=_for_tpus(interpreted=True), used="pallas, interpreted", why=why, is_interpreted=True
        )
    attention = _for_gpus(place) if place.platform == "gpu" else _for_tpus()
    why = f"kernels for {place.platform.upper()}s" if asked is None else "as asked"
    return AttentionChoice(attention=attention, used="pallas", why=why)


def _for_tpus(*, interpreted: bool = False) -> Attention:
    """Imported here, since most sessions on other devices have no use for Pallas."""
    from jax.experimental.pallas import tpu as pltpu

    from cbjax.attention.pallas import PallasAttention

    return PallasAttention(interpret=pltpu.InterpretParams() if interpreted else False)


def _for_gpus(place: Place) -> Attention:
    from cbjax.attention.pallas_gpu import PallasGpuAttention
    from pallas_kernels.paged_attention.gpu import GpuSizes

    known = {} if place.multiprocessors is None else {"multiprocessors": place.multiprocessors}
    return PallasGpuAttention(sizes=GpuSizes(**known))


def _why_not_pallas(layers: Sequence[LayerSpec], place: Place) -> str | None:
    """What the kernels have no form for; None: they serve these layers."""
    layout: LayoutName = "tpu"
    if place.platform not in ("cpu", "gpu", "tpu"):
        return f"there are kernels for TPUs and GPUs; got {place.platform}"
    if place.platform == "gpu":
        layout = "gpu"
        if (place.capability or "").partition(".")[0] != "9":
            return (
                "the GPU kernels are made of Hopper's instructions (compute capability 9.0), and this GPU has "
                f"{place.capability or 'an unknown one'}"
            )
        if place.batch_invariant:
            return "the GPU kernels add up in another order in prefill than in decode, which batch_invariant rules out"
        if jnp.dtype(place.dtype).itemsize != 2:
            dtype = jnp.dtype(place.dtype)
            return f"the GPU kernels compute in bfloat16 and float16; got {dtype}: load the model with dtype='bfloat16'"
        # Rows of the matrix unit.
        if (group := max(layer.num_heads // layer.num_kv_heads for layer in layers)) > 64:
            return f"the GPU kernels take at most 64 query heads to a kv head; got {group}"
    for shape in dict.fromkeys((layer.num_kv_heads, layer.head_dim) for layer in layers):
        try:
            KVSpec(
                num_kv_heads=shape[0],
                head_dim=shape[1],
                block_size=place.block_size,
                num_blocks=1,
                dtype=place.dtype,
                layout=layout,
            )
        except (ValueError, NotImplementedError) as error:
            return str(error)
    return None
