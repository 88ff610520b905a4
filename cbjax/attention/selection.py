"""Which attention implementation serves a model on a device, and why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import jax

from cbjax.attention.contract import LayerSpec
from cbjax.attention.implementation import XLA, Attention, EagerAttention
from cbjax.attention.spec import KVSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionChoice:
    """Attributes:
    attention: the implementation.
    used: its name, for people.
    why: it was chosen.
    """

    attention: Attention
    used: str
    why: str


def choose_attention(
    asked: str | None, *, platform: str, layers: Iterable[LayerSpec], block_size: int, dtype: jax.typing.DTypeLike
) -> AttentionChoice:
    """The implementation asked for by name, or the fastest one that there is for these layers.

    Raises:
      ValueError, NotImplementedError: what was asked for cannot be.
    """
    assert asked in (None, "pallas", "xla", "eager"), asked
    if asked == "xla":
        return AttentionChoice(attention=XLA, used="xla", why="as asked")
    if asked == "eager":
        return AttentionChoice(attention=EagerAttention(), used="eager", why="as asked: slow, and simple")
    if asked is None and platform != "tpu":
        return AttentionChoice(attention=XLA, used="xla", why="portable; the Pallas kernels are for TPUs")
    problem = _why_not_pallas(layers, block_size, dtype)
    if asked is None:
        if problem is not None:
            why = f"not the Pallas kernels: {problem}"
            return AttentionChoice(attention=XLA, used="xla", why=why)
        return AttentionChoice(attention=_pallas(), used="pallas", why="kernels for TPUs")
    if problem is not None:
        raise NotImplementedError(f"attn_implementation={asked!r}: {problem}; leave it at None for what there is")
    if platform == "tpu":
        return AttentionChoice(attention=_pallas(), used="pallas", why="as asked")
    if platform == "cpu":
        why = "as asked; there is no TPU, so that the kernels are interpreted, which is for tests: very slow"
        return AttentionChoice(attention=_pallas(interpreted=True), used="pallas, interpreted", why=why)
    raise NotImplementedError(
        f"attn_implementation={asked!r}: the Pallas kernels are for TPUs, and this is a {platform}; leave it at None, "
        "which takes xla there"
    )


def _pallas(*, interpreted: bool = False) -> Attention:
    """Imported here, since most sessions on other devices have no use for Pallas."""
    from jax.experimental.pallas import tpu as pltpu

    from cbjax.attention.pallas import PallasAttention

    return PallasAttention(interpret=pltpu.InterpretParams() if interpreted else False)


def _why_not_pallas(layers: Iterable[LayerSpec], block_size: int, dtype: jax.typing.DTypeLike) -> str | None:
    """What the kernels have no form for; None: they serve these layers."""
    for shape in dict.fromkeys((layer.num_kv_heads, layer.head_dim) for layer in layers):
        try:
            KVSpec(
                num_kv_heads=shape[0],
                head_dim=shape[1],
                block_size=block_size,
                num_blocks=1,
                dtype=dtype,
                layout="block_major",
            )
        except (ValueError, NotImplementedError) as error:
            return str(error)
    return None
