"""A device made of NumPy whose "model" is a hash of everything it was shown.

A KV cell holds a token, its position, and a hash of the history up to and with it, which is made from the hash of the
cell before. In every layer group, attention reads through the device's block table all cells that the group's window
reaches, checks their positions and that each hash follows from the one before it, and that what has left the window is
named by the sentinel's block. The next token is a hash of the history, the sampler words and the output index. So any
block, slot, chunk, copy, release or reset of the scheduler or the engine that is wrong is caught or changes an output.
It takes the same descriptors and table entries as the jitted step and runs them in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cbjax.descriptor import BatchDescriptor, Bucket
from cbjax.scheduler import NUM_RESERVED_BLOCKS, Offload, Restore, StepOutputs, TableDelta, Window, first_column

_MULTIPLIER = 6364136223846793005
_INCREMENT = 1442695040888963407


def next_token(tokens: np.ndarray, words: np.ndarray, output_index: int, vocab_size: int) -> int:
    """The token that follows `tokens` (i32[n]) for these sampler words, in ``[0, vocab_size)``."""
    return _draw(_hashes(_INCREMENT, tokens)[-1], words, output_index, vocab_size)


def _hashes(before: int, values: np.ndarray) -> list[int]:
    """The hash `before`, and after each of `values`."""
    hashes = [before]
    for value in values.tolist():
        hashes.append(((hashes[-1] ^ (value + 1)) * _MULTIPLIER + _INCREMENT) % 2**64)
    return hashes


def _draw(history: int, words: np.ndarray, output_index: int, vocab_size: int) -> int:
    last = _hashes(history, np.append(words.astype(np.int64), output_index))[-1]
    return (last >> 33) % vocab_size


class HistoryHashDevice:
    """See the module's docstring.

    Attributes:
      windows: of each layer group; at least 2 tokens, since nothing flows through a window of one.
      cells: i32[2, (num_blocks + 2) * block_size], token and position of each KV cell; -1 where nothing was written.
      history: u64[(num_blocks + 2) * block_size], hash of the tokens up to and with each cell's.
      table, last_token, goes_on: as `cbjax.step.SlotState`.
      copies: of offloaded blocks by uid, their cells i32[2, blocks, block_size] and history u64[blocks, block_size].
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        max_blocks: int,
        vocab_size: int = 997,
        windows: Sequence[Window] = (None,),
    ) -> None:
        self.block_size, self.num_blocks, self.num_slots = block_size, num_blocks, num_slots
        self.vocab_size, self.windows = vocab_size, tuple(windows)
        assert all(window is None or window >= 2 for window in self.windows)
        num_cells = (num_blocks + NUM_RESERVED_BLOCKS) * block_size
        self.cells = np.full((2, num_cells), -1, np.int32)
        self.history = np.zeros(num_cells, np.uint64)
        self.table = np.full((len(self.windows), num_slots + 1, max_blocks), num_blocks, np.int32)
        self.last_token = np.zeros(num_slots + 1, np.int32)
        self.goes_on = np.ones(num_slots + 1, bool)
        self.copies: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def update_table(self, delta: TableDelta) -> None:
        """Writes block-table entries."""
        entries = set(zip(delta.group.tolist(), delta.slot.tolist(), delta.column.tolist(), strict=True))
        assert len(entries) == len(delta), "a table entry is written twice, in no particular order"
        self.table[delta.group, delta.slot, delta.column] = delta.block

    def forward(self, batch: BatchDescriptor, bucket: Bucket) -> StepOutputs:
        """Writes each step's cells, reads every context, answers for all rows of the bucket."""
        num_rows, window, rows = int(batch.num_rows), int(batch.window), len(batch.slot)
        assert window == 1 or (bucket.kind == "decode" and batch.carried[:num_rows].all()), "a window of prefills"
        count = np.diff(batch.q_start)
        tokens = batch.tokens.copy()
        tokens[batch.q_start[:-1][batch.carried]] = self.last_token[batch.slot[batch.carried]]
        answers = np.zeros((window, rows), np.int32)
        goes_on = ~batch.carried | self.goes_on[batch.slot]
        for step in range(window):
            runs = [r for r in range(num_rows) if goes_on[r] and step < max(1, batch.draws[r])]
            # As on a real device, every group has written when the first row reads.
            for r in runs:
                positions = np.arange(batch.context_len[r] - count[r], batch.context_len[r]) + step
                for group in range(len(self.windows)):
                    self._write(group, int(batch.slot[r]), positions, tokens[batch.q_start[r] : batch.q_start[r + 1]])
            for r in runs:
                answers[step, r] = token = self._answer(batch, r, int(count[r]), step)
                if batch.emits[r]:
                    self.last_token[batch.slot[r]] = token
                    self.goes_on[batch.slot[r]] = goes_on[r] = token not in batch.eos[:, r]
                if step + 1 < window:
                    tokens[r] = token
        return StepOutputs(
            tokens=answers, logprobs=np.zeros((window, rows), np.float32), finite=np.ones((window, rows), bool)
        )

    def offload(self, offload: Offload) -> None:
        """Copies blocks; a request has at most one copy."""
        assert offload.uid not in self.copies, f"uid {offload.uid} is offloaded and has a copy already"
        assert self._are_distinct(offload.blocks), f"uid {offload.uid} offloads blocks that nobody can hold, or twice"
        where = self._cells_of(offload.blocks)
        self.copies[offload.uid] = (self.cells[:, where], self.history[where])

    def restore(self, restore: Restore) -> None:
        """Writes blocks of a copy back, and drops it."""
        assert restore.uid in self.copies, f"uid {restore.uid} is restored and has no copy"
        assert self._are_distinct(restore.blocks), (
            f"uid {restore.uid} restores to blocks that nobody can hold, or twice"
        )
        cells, history = self.copies.pop(restore.uid)
        in_copy = (restore.index >= 0) & (restore.index < len(history))
        assert len(restore.index) == len(restore.blocks), f"uid {restore.uid} restores other blocks than it names"
        assert in_copy.all(), f"uid {restore.uid} restores blocks that its copy lacks"
        where = self._cells_of(restore.blocks)
        self.cells[:, where], self.history[where] = cells[:, restore.index], history[restore.index]

    def copy_blocks(self, sources: np.ndarray, destinations: np.ndarray) -> None:
        """Copies blocks; all sources are read before any destination is written."""
        assert self._are_distinct(destinations), "blocks are copied to where nobody can be, or twice"
        source, destination = self._cells_of(sources), self._cells_of(destinations)
        self.cells[:, destination], self.history[destination] = self.cells[:, source], self.history[source]

    def discard(self, uid: int) -> None:
        """Drops a copy, if there is one."""
        self.copies.pop(uid, None)

    def recover(self) -> None:
        """Nothing is ever lost here; copies are nobody's any more."""
        self.copies.clear()

    def close(self) -> None:
        """Drops the copies, as a real device does."""
        self.copies.clear()

    def _are_distinct(self, blocks: np.ndarray) -> bool:
        """Whether these are blocks that can be handed out, none of them twice."""
        return len(np.unique(blocks)) == len(blocks) and bool(((blocks >= 0) & (blocks < self.num_blocks)).all())

    def _cells_of(self, blocks: np.ndarray) -> np.ndarray:
        """Indices of the cells of each block, [blocks, block_size]."""
        return blocks[:, None] * self.block_size + np.arange(self.block_size)

    def _where(self, group: int, slot: int, positions: np.ndarray) -> np.ndarray:
        block = self.table[group, slot, positions // self.block_size]
        return block * self.block_size + positions % self.block_size

    def _write(self, group: int, slot: int, positions: np.ndarray, tokens: np.ndarray) -> None:
        where = self._where(group, slot, positions)
        assert (where < self.num_blocks * self.block_size).all(), "a token is written to a block that nobody can hold"
        before = int(self.history[self._where(group, slot, positions[:1] - 1)[0]]) if positions[0] else _INCREMENT
        self.cells[0, where], self.cells[1, where] = tokens, positions
        self.history[where] = np.array(_hashes(before, tokens)[1:], np.uint64)

    def _answer(self, batch: BatchDescriptor, r: int, count: int, step: int) -> int:
        context = int(batch.context_len[r]) + step
        histories = [self._read(group, batch, r, context - count, context, step) for group in range(len(self.windows))]
        assert len(set(histories)) == 1, f"the layer groups of uid {batch.uid[r]} do not hold the same tokens"
        return _draw(histories[0], batch.words[:, r], int(batch.output_index[r]) + step, self.vocab_size)

    def _read(self, group: int, batch: BatchDescriptor, r: int, first: int, context: int, step: int) -> int:
        """Checks all that new tokens from position `first` on see; returns the hash of the row's history."""
        window, slot = self.windows[group], int(batch.slot[r])
        left = first_column(first - step, window, self.block_size)  # nothing leaves it within a window of steps
        assert (self.table[group, slot, :left] == self.num_blocks).all(), "a block has left the window and is named"
        low = 0 if window is None else max(0, first - window + 1)
        where = self._where(group, slot, np.arange(low, context))
        tokens, positions = self.cells[:, where]
        who = f"group {group}, row {r} of uid {batch.uid[r]}"
        assert np.array_equal(positions, np.arange(low, context)), f"{who} reads cells that are not its own"
        history = self.history[where]
        if low == 0:
            history = np.append(np.uint64(_INCREMENT), history)
        new = tokens[len(tokens) - len(history) + 1 :].astype(np.uint64) + np.uint64(1)
        chained = (history[:-1] ^ new) * np.uint64(_MULTIPLIER) + np.uint64(_INCREMENT)
        assert np.array_equal(chained, history[1:]), f"{who} reads cells of another history"
        return int(history[-1])


def solo_run(
    prompt: np.ndarray, words: np.ndarray, max_new_tokens: int, eos: tuple[int, ...] = (), vocab_size: int = 997
) -> list[int]:
    """What a request must generate, computed with no engine: the oracle of every history-hash test."""
    tokens = list(prompt)
    for index in range(max_new_tokens):
        token = next_token(np.array(tokens), words, index, vocab_size)
        tokens.append(token)
        if token in eos:
            break
    return tokens[len(prompt) :]
