"""Index tables of one step, computed once and shared by every layer."""

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

# Queries of one prefill tile. A tile belongs to one row.
TILE = 64
# Prefill tiles that are attended together: a CPU has a core for each, and a lone one takes about a tenth longer for
# its empty neighbour.
TILE_GROUP = 2
# Decode rows that are attended together: what they gather at once stays in a core's cache.
GROUP = 16


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class PagedBatch:
    """Where one step's tokens are written and what each of them reads. Made by `prepare_batch`.

    Decode rows (one new token) come first in `decode_*`, longest context first; the rest of those arrays is padding.

    Attributes:
        table: i32[slots + 1, max_blocks], block ids.
        position: i32[tokens], the token's place in its row; 0 for padding.
        write_index: i32[tokens], token index in the flat pool; the write trash for padding.
        decode_token: i32[rows], index of the row's token in the step; 0 for padding.
        decode_slot: i32[rows], row of `table`.
        decode_context: i32[rows], tokens to read; 0 for padding.
        token_decode: i32[tokens], place in `decode_*` of a token that is a decode row, else -1.
        tile_start: i32[tiles], index of the tile's first token in the step.
        tile_count: i32[tiles], number of its tokens, 1 to `TILE`; 0 for padding.
        tile_slot: i32[tiles], row of `table`.
        tile_position: i32[tiles], position of its first token.
        num_tiles: i32, number of real tiles; the rest are padding, up to a multiple of `TILE_GROUP`.
        block_size: tokens per block.
        num_blocks: blocks of the pool, the reserved two not counted.
        single_token_rows: whether there are no tiles at all.
    """

    table: jax.Array
    position: jax.Array
    write_index: jax.Array
    decode_token: jax.Array
    decode_slot: jax.Array
    decode_context: jax.Array
    token_decode: jax.Array
    tile_start: jax.Array
    tile_count: jax.Array
    tile_slot: jax.Array
    tile_position: jax.Array
    num_tiles: jax.Array
    block_size: int = dataclasses.field(metadata={"static": True})
    num_blocks: int = dataclasses.field(metadata={"static": True})
    single_token_rows: bool = dataclasses.field(metadata={"static": True})


def prepare_batch(
    table: jax.Array,
    slot: jax.Array,
    q_start: jax.Array,
    context_len: jax.Array,
    num_rows: jax.Array,
    *,
    num_tokens: int,
    block_size: int,
    num_blocks: int,
    single_token_rows: bool = False,
) -> PagedBatch:
    """Index tables of a step of `num_tokens` flat tokens.

    A row's tokens are the last `count = q_start[r + 1] - q_start[r]` of its `context_len[r]`; a token whose position
    would be negative (a row with context 0) is padding, as is every token of rows from `num_rows` on.

    Args:
        table: i32[slots + 1, max_blocks], block ids; entries beyond a row's context are never followed.
        slot: i32[rows], row of `table` for each batch row.
        q_start: i32[rows + 1], first token of each batch row, non-decreasing.
        context_len: i32[rows], tokens of the row in the store after this step.
        num_rows: i32 scalar, real rows.
        num_tokens: the bucket's tokens.
        block_size: tokens per block.
        num_blocks: blocks of the pool, the reserved two not counted.
        single_token_rows: static promise that row r has the one token r (so `num_tokens` rows); the program then has
            no prefill part.
    """
    rows = slot.shape[0]
    row = jnp.arange(rows, dtype=jnp.int32)
    places = token_places(
        table,
        slot,
        q_start,
        context_len,
        num_rows,
        num_tokens=num_tokens,
        block_size=block_size,
        num_blocks=num_blocks,
        single_token_rows=single_token_rows,
    )
    count = new_tokens(q_start, context_len, num_rows)

    decode_context = jnp.where(count == 1, context_len, 0)
    order = jnp.argsort(-decode_context).astype(jnp.int32)
    place = jnp.zeros_like(order).at[order].set(row)
    token_decode = jnp.where(places.real & (count == 1)[places.row], place[places.row], -1)
    return PagedBatch(
        table=table,
        position=places.position,
        write_index=places.write_index,
        decode_token=jnp.where(decode_context > 0, q_start[:-1], 0)[order],
        decode_slot=slot[order],
        decode_context=decode_context[order],
        token_decode=token_decode,
        **_tiles(slot, q_start, context_len, count, num_tokens),
        block_size=block_size,
        num_blocks=num_blocks,
        single_token_rows=single_token_rows,
    )


class TokenPlaces(NamedTuple):
    """Of each flat token: its row, its place in that row, whether it is real, and where it is written.

    row: i32[tokens]; position: i32[tokens], 0 for padding; real: bool[tokens]; write_index: i32[tokens], token index in
    the flat pool, the write trash for padding.
    """

    row: jax.Array
    position: jax.Array
    real: jax.Array
    write_index: jax.Array


def new_tokens(q_start: jax.Array, context_len: jax.Array, num_rows: jax.Array) -> jax.Array:
    """i32[rows], the new tokens of each row; 0 for padding."""
    row = jnp.arange(context_len.shape[0], dtype=jnp.int32)
    return jnp.where((row < num_rows) & (context_len > 0), q_start[1:] - q_start[:-1], 0)


def token_places(
    table: jax.Array,
    slot: jax.Array,
    q_start: jax.Array,
    context_len: jax.Array,
    num_rows: jax.Array,
    *,
    num_tokens: int,
    block_size: int,
    num_blocks: int,
    single_token_rows: bool,
) -> TokenPlaces:
    """Arguments are those of `prepare_batch`."""
    rows = slot.shape[0]
    if single_token_rows and rows != num_tokens:
        raise ValueError(f"single_token_rows needs as many rows as tokens ({num_tokens}). Got {rows} rows.")
    count = new_tokens(q_start, context_len, num_rows)
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    if single_token_rows:
        token_row = token
    else:
        token_row = jnp.searchsorted(q_start[1:], token, side="right").astype(jnp.int32)
    row = jnp.minimum(token_row, rows - 1)
    offset = token - q_start[:-1][row]
    # Tokens before the first row's are padding, too.
    real = (token_row < num_rows) & (offset >= 0) & (offset < count[row])
    position = jnp.where(real, (context_len - count)[row] + offset, 0)
    block = table[slot[row], position // block_size]
    write_trash = (num_blocks + 1) * block_size
    write_index = jnp.where(real, block * block_size + position % block_size, write_trash)
    return TokenPlaces(row=row, position=position, real=real, write_index=write_index)


def _tiles(
    slot: jax.Array, q_start: jax.Array, context_len: jax.Array, count: jax.Array, num_tokens: int
) -> dict[str, jax.Array]:
    """Cuts the rows with more than one new token into tiles, row by row."""
    rows = slot.shape[0]
    # A row of c > 1 tokens has at most c // TILE + 1 tiles and uses at least 2 tokens.
    max_tiles = num_tokens // TILE + max(1, min(rows, num_tokens // 2))
    max_tiles += -max_tiles % TILE_GROUP
    tiles_of_row = jnp.where(count > 1, (count + TILE - 1) // TILE, 0)
    ends = jnp.cumsum(tiles_of_row)
    tile = jnp.arange(max_tiles, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(ends, tile, side="right"), rows - 1).astype(jnp.int32)
    offset = (tile - (ends - tiles_of_row)[row]) * TILE
    return {
        "tile_start": q_start[:-1][row] + offset,
        "tile_count": jnp.where(tile < ends[-1], jnp.minimum(count[row] - offset, TILE), 0),
        "tile_slot": slot[row],
        "tile_position": (context_len - count)[row] + offset,
        "num_tiles": ends[-1],
    }
