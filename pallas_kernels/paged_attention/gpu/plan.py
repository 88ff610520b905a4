"""Which kernel does which part of a step: index arrays, made once on the device and shared by the layers.

A row's context is cut into items, which programs of the decode kernel take one after the other, and whose results are
merged. How long they are is decided when the step is there, so that long rows and few rows fill the GPU too.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp

# Tokens of keys and values that are fetched and computed with at a time. Items begin at multiples of it.
TILE = 64
# Items are at least as many tiles long: below it, their results are too much beside what they read.
MIN_TILES = 4


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeItems:
    """Parts of the contexts of rows with one new token, for layers of one window, sorted by row.

    Attributes:
      count: i32[1], how many there are; the arrays below are longer.
      row: i32[items], in the batch.
      slot: i32[items], row of `table`.
      first: i32[items], where the item begins, a multiple of `TILE`.
      low, stop: i32[items], first position that is seen, and the one behind the last.
      row_items: i32[rows + 1], the first item of each row.
    """

    count: jax.Array
    row: jax.Array
    slot: jax.Array
    first: jax.Array
    low: jax.Array
    stop: jax.Array
    row_items: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class VarlenItems:
    """Parts of the rows with several new tokens, at most `tile` tokens each.

    Attributes:
      count: i32[1], how many there are; the arrays below are longer.
      slot: i32[items], row of `table`.
      first: i32[items], first token in the flat batch.
      tokens: i32[items], how many.
      position: i32[items], that of the first token.
      token_item, token_place: i32[tokens], where a token is computed; item -1 if it is not.
      tile: the most tokens of an item.
    """

    count: jax.Array
    slot: jax.Array
    first: jax.Array
    tokens: jax.Array
    position: jax.Array
    token_item: jax.Array
    token_place: jax.Array
    tile: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPlan:
    """A step's rows, dealt to the kernels. Made by `make_plan`.

    Attributes:
      table: i32[slots + 1, max_blocks], block ids.
      token_block, token_offset: i32[tokens], the cell of each new token; block -1 for padding.
      decodes: items of the rows with one new token, for each of `windows`.
      decode_token: i32[rows], the row's token in the flat batch; of the others any.
      token_row: i32[tokens], the row of a token that is decoded, else -1.
      varlen: items of the other rows; None where the step has none.
      windows: of the layers.
      block_size: of their stores.
    """

    table: jax.Array
    token_block: jax.Array
    token_offset: jax.Array
    decodes: tuple[DecodeItems, ...]
    decode_token: jax.Array
    token_row: jax.Array
    varlen: VarlenItems | None
    windows: tuple[int | None, ...] = dataclasses.field(metadata={"static": True})
    block_size: int = dataclasses.field(metadata={"static": True})


def make_plan(
    table: jax.Array,
    slot: jax.Array,
    q_start: jax.Array,
    context_len: jax.Array,
    num_rows: jax.Array,
    *,
    num_tokens: int,
    block_size: int,
    target_items: int,
    varlen_tile: int,
    windows: tuple[int | None, ...] = (None,),
    span: int | None = None,
    single_token_rows: bool = False,
) -> GpuPlan:
    """The plan of a step of `num_tokens` flat tokens; the first arguments are those of `paged_attention`.

    Args:
      block_size: of the store.
      target_items: about how many decode items there are for enough tokens, `rows` more at most.
      varlen_tile: tokens of a varlen item.
      windows: of all layers that share the plan.
      span: tokens of a decode item, a multiple of `TILE`, so that a row's bits do not depend on the others; None lets
        the step decide.
      single_token_rows: static promise that row r has the one token r.
    """
    rows = slot.shape[0]
    row = jnp.arange(rows, dtype=jnp.int32)
    count = jnp.where((row < num_rows) & (context_len > 0), q_start[1:] - q_start[:-1], 0)
    is_one, is_many = count == 1, count > 1
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    owner = row if single_token_rows else _owner(q_start[1:], token)
    is_owned, owner = owner < rows, jnp.minimum(owner, rows - 1)
    # Tokens before the first row's are padding, too.
    is_real = is_owned & (count[owner] > 0) & (token >= q_start[owner])
    offset = context_len - q_start[1:]
    position = jnp.where(is_real, token + offset[owner], 0)
    block = table[slot[owner], position // block_size]
    longest = table.shape[1] * block_size
    return GpuPlan(
        table=table,
        token_block=jnp.where(is_real, block, -1),
        token_offset=position % block_size,
        decodes=tuple(
            _decode_items(slot, jnp.where(is_one, context_len, 0), window, longest, target_items, span)
            for window in windows
        ),
        decode_token=jnp.where(is_one, q_start[:-1], 0),
        token_row=jnp.where(is_real & is_one[owner], owner, -1),
        varlen=None
        if single_token_rows
        else _varlen_items(slot, jnp.where(is_many, count, 0), q_start, offset, num_tokens, varlen_tile),
        windows=windows,
        block_size=block_size,
    )


def _decode_items(
    slot: jax.Array, context: jax.Array, window: int | None, longest: int, target: int, span: int | None
) -> DecodeItems:
    """Cuts what the rows see, `window` of `context` tokens, at multiples of `TILE`; a row of context 0 has no item."""
    rows = slot.shape[0]
    low = jnp.zeros_like(context) if window is None else jnp.maximum(context - window, 0)
    first_tile = low // TILE
    tiles = jnp.where(context > 0, -(-context // TILE) - first_tile, 0)
    if span is None:
        most = jnp.maximum(-(-jnp.sum(tiles) // target), MIN_TILES)
        number = -(-tiles // most)
        # Of a row's items none is much shorter than the others.
        length = -(-tiles // jnp.maximum(number, 1))
        max_items = rows + target
    else:
        most_tiles = -(-longest // TILE) if window is None else min(-(-longest // TILE), (window - 2) // TILE + 2)
        number = -(-tiles // (span // TILE))
        length = jnp.full(rows, span // TILE, jnp.int32)
        max_items = rows * -(-most_tiles // (span // TILE))
    ends = jnp.cumsum(number)
    item = jnp.arange(max_items, dtype=jnp.int32)
    row = jnp.minimum(_owner(ends, item), rows - 1)
    tile = first_tile[row] + (item - (ends - number)[row]) * length[row]
    return DecodeItems(
        count=ends[-1:].astype(jnp.int32),
        row=row,
        slot=slot[row],
        first=tile * TILE,
        low=low[row],
        stop=jnp.minimum((tile + length[row]) * TILE, context[row]),
        row_items=jnp.concatenate([jnp.zeros(1, jnp.int32), ends.astype(jnp.int32)]),
    )


def _varlen_items(
    slot: jax.Array, count: jax.Array, q_start: jax.Array, offset: jax.Array, num_tokens: int, tile: int
) -> VarlenItems:
    """Cuts rows with `count` new tokens each, those with 0 left out, into items of `tile` tokens, from their first."""
    rows = slot.shape[0]
    # Each row has at most one item that is not full; such a row has two tokens at least.
    max_items = num_tokens // tile + min(rows, num_tokens // 2) + 1
    number = -(-count // tile)
    ends = jnp.cumsum(number)
    begins = ends - number
    item = jnp.arange(max_items, dtype=jnp.int32)
    row = jnp.minimum(_owner(ends, item), rows - 1)
    done = (item - begins[row]) * tile
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    owner = jnp.minimum(_owner(q_start[1:], token), rows - 1)
    inside = token - q_start[owner]
    is_served = (inside >= 0) & (inside < count[owner])
    return VarlenItems(
        count=ends[-1:].astype(jnp.int32),
        slot=slot[row],
        first=q_start[row] + done,
        tokens=jnp.minimum(count[row] - done, tile),
        position=q_start[row] + done + offset[row],
        token_item=jnp.where(is_served, begins[owner] + inside // tile, -1).astype(jnp.int32),
        token_place=(inside % tile).astype(jnp.int32),
        tile=tile,
    )


def _owner(ends: jax.Array, number: jax.Array) -> jax.Array:
    """i32 like number: the first row whose things end behind this one; as many as there are rows, if none does.

    All are compared with all: a search in steps would be a loop of kernels, each of which the host starts.
    """
    return jnp.searchsorted(ends, number, side="right", method="compare_all").astype(jnp.int32)
