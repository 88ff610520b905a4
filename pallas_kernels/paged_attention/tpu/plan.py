"""Which kernel serves which row of a step: index arrays, made once and shared by every layer."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.tpu.decode import ROW_TILE

# Cores that any device has.
MOST_CORES = 2


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A step's rows, dealt to the kernels. Made by `make_plan`.

    Rows with one new token are decoded, those with more are updated and attended as varlen.

    Attributes:
      table: i32[slots + 1, max_blocks], block ids.
      decode_token: i32[padded rows], the row's token in the flat batch; of the others any.
      decode_slot, decode_context: i32[padded rows], row of `table`, and tokens to read; 0 for rows not decoded.
      next_row: i32[padded rows + 1], the first row from here on that is decoded; `padded rows` if there is none.
      token_row: i32[tokens], the row of a token that is decoded, else -1.
      update_slot, update_first, update_stop, update_offset: i32[rows], of the rows with several tokens: row of `table`,
        first and last token plus one, and what a token's index lacks to its position.
      tile_items: i32[tiles + 1], the first varlen item of each tile of tokens.
      item_slot, item_first, item_stop, item_offset: i32[items], as those of the rows, within one tile.
      tile: tokens of a tile.
      single_token_rows: there are no other rows.
    """

    table: jax.Array
    decode_token: jax.Array
    decode_slot: jax.Array
    decode_context: jax.Array
    next_row: jax.Array
    token_row: jax.Array
    update_slot: jax.Array
    update_first: jax.Array
    update_stop: jax.Array
    update_offset: jax.Array
    tile_items: jax.Array
    item_slot: jax.Array
    item_first: jax.Array
    item_stop: jax.Array
    item_offset: jax.Array
    tile: int = dataclasses.field(metadata={"static": True})
    single_token_rows: bool = dataclasses.field(metadata={"static": True})


def make_plan(
    table: jax.Array,
    slot: jax.Array,
    q_start: jax.Array,
    context_len: jax.Array,
    num_rows: jax.Array,
    *,
    num_tokens: int,
    tile: int,
    single_token_rows: bool = False,
) -> Plan:
    """The plan of a step of `num_tokens` flat tokens; the other arguments are those of `paged_attention`."""
    rows = slot.shape[0]
    row = jnp.arange(rows, dtype=jnp.int32)
    count = jnp.where((row < num_rows) & (context_len > 0), q_start[1:] - q_start[:-1], 0)
    is_one, is_many = count == 1, count > 1

    padding = (0, -rows % (ROW_TILE * MOST_CORES) if rows > ROW_TILE else 0)
    padded = rows + padding[1]
    context = jnp.pad(jnp.where(is_one, context_len, 0), padding)
    served = jnp.where(context > 0, jnp.arange(padded, dtype=jnp.int32), padded)
    next_row = jax.lax.cummin(jnp.append(served, jnp.int32(padded)), reverse=True)

    token = jnp.where(is_one, q_start[:-1], num_tokens)
    token_row = jnp.full(num_tokens, -1, jnp.int32).at[token].set(row, mode="drop")
    offset = context_len - q_start[1:]
    first, stop = (jnp.where(is_many, edge, 0) for edge in (q_start[:-1], q_start[1:]))
    return Plan(
        table=table,
        decode_token=jnp.pad(jnp.where(is_one, q_start[:-1], 0), padding),
        decode_slot=jnp.pad(slot, padding),
        decode_context=context,
        next_row=next_row,
        token_row=token_row,
        update_slot=slot,
        update_first=first,
        update_stop=stop,
        update_offset=offset,
        **_items(slot, first, stop, offset, num_tokens, tile),
        tile=tile,
        single_token_rows=single_token_rows,
    )


def _items(
    slot: jax.Array, first: jax.Array, stop: jax.Array, offset: jax.Array, num_tokens: int, tile: int
) -> dict[str, jax.Array]:
    """Cuts the rows with several tokens at the tiles' edges."""
    rows, tiles = slot.shape[0], -(-num_tokens // tile)
    # An item more than there are tiles for each row that begins within one; such a row has two tokens at least.
    max_items = tiles + min(rows, num_tokens // 2)
    first_tile = first // tile
    items_of_row = jnp.where(stop > first, (stop - 1) // tile - first_tile + 1, 0)
    ends = jnp.cumsum(items_of_row)
    item = jnp.arange(max_items, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(ends, item, side="right"), rows - 1).astype(jnp.int32)
    item_tile = jnp.where(item < ends[-1], first_tile[row] + item - (ends - items_of_row)[row], tiles)
    edges = jnp.arange(tiles + 1, dtype=jnp.int32)
    return {
        "tile_items": jnp.searchsorted(item_tile, edges).astype(jnp.int32),
        "item_slot": slot[row],
        "item_first": jnp.maximum(first[row], item_tile * tile),
        "item_stop": jnp.minimum(stop[row], (item_tile + 1) * tile),
        "item_offset": offset[row],
    }
