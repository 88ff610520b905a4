"""Paged attention, one query at a time, in NumPy and float64: the definition that kernels are tested against."""

import numpy as np


def paged_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    kv: np.ndarray,
    table: np.ndarray,
    slot: np.ndarray,
    q_start: np.ndarray,
    context_len: np.ndarray,
    num_rows: int,
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Writes the rows' new keys and values into the store, then attends over it.

    Args:
        q: [tokens, heads, head_dim]; query head h reads kv head `h // (heads / kv_heads)`.
        k: [tokens, kv_heads, head_dim], rounded to the store's dtype.
        v: [tokens, kv_heads, head_dim], rounded to the store's dtype.
        kv: [2, kv_heads, num_blocks + 2, block_size, head_dim], keys then values; not changed.
        table: i32[slots + 1, max_blocks], block ids.
        slot: i32[rows], row of `table` for each batch row.
        q_start: i32[rows + 1]; row r's new tokens are `q_start[r]` to `q_start[r + 1]`.
        context_len: i32[rows], tokens of the row in the store after the call; the new tokens are the last of them.
        num_rows: real rows; the rest are padding, as is a row whose context is 0.
        scale: multiplies the scores; None is `head_dim ** -0.5`.
        window: a token sees itself and the `window - 1` tokens before it; None is the whole context.
        soft_cap: scores become `soft_cap * tanh(scores / soft_cap)`; None leaves them.
        sinks: [heads], a logit per head that takes part in the softmax's denominator and has no value.

    Returns:
        out [tokens, heads, head_dim] in q's dtype, zeros for padding, and the new store.
    """
    scale = q.shape[2] ** -0.5 if scale is None else scale
    group = q.shape[1] // k.shape[1]
    kv = write_kv(k, v, kv, table, slot, q_start, context_len, num_rows)
    out = np.zeros(q.shape, q.dtype)
    for row, token, position in _tokens(q_start, context_len, num_rows):
        first = 0 if window is None else max(0, position - window + 1)
        cells = [_cell(kv, table[slot[row]], seen) for seen in range(first, position + 1)]
        for head in range(q.shape[1]):
            keys = np.stack([cell[0, head // group] for cell in cells]).astype(np.float64)
            values = np.stack([cell[1, head // group] for cell in cells]).astype(np.float64)
            scores = keys @ q[token, head].astype(np.float64) * scale
            if soft_cap is not None:
                scores = soft_cap * np.tanh(scores / soft_cap)
            if sinks is not None:
                scores = np.append(scores, np.float64(sinks[head]))
            weights = np.exp(scores - scores.max())
            weights = weights / weights.sum()
            out[token, head] = (weights[: len(cells)] @ values).astype(q.dtype)
    return out, kv


def write_kv(
    k: np.ndarray,
    v: np.ndarray,
    kv: np.ndarray,
    table: np.ndarray,
    slot: np.ndarray,
    q_start: np.ndarray,
    context_len: np.ndarray,
    num_rows: int,
) -> np.ndarray:
    """A copy of the store that holds the rows' new keys and values; padding is not written."""
    kv = kv.copy()
    for row, token, position in _tokens(q_start, context_len, num_rows):
        cell = _cell(kv, table[slot[row]], position)
        cell[0], cell[1] = k[token].astype(kv.dtype), v[token].astype(kv.dtype)
    return kv


def _tokens(q_start: np.ndarray, context_len: np.ndarray, num_rows: int) -> list[tuple[int, int, int]]:
    """(row, token, position) of every real token."""
    found = []
    for row in range(int(num_rows)):
        start, stop = int(q_start[row]), int(q_start[row + 1])
        before = int(context_len[row]) - (stop - start)
        if context_len[row] > 0:
            found += [(row, token, before + token - start) for token in range(start, stop)]
    return found


def _cell(kv: np.ndarray, blocks: np.ndarray, position: int) -> np.ndarray:
    """The view [2, kv_heads, head_dim] of one token's key and value."""
    block, offset = divmod(position, kv.shape[3])
    return kv[:, :, blocks[block], offset]
