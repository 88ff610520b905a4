"""A device made of NumPy whose "model" is a hash of everything it was shown.

A KV cell holds the token and position it belongs to; attention reads every cell of the context through the device's
block table and checks its position; the next token is a hash of all ids seen, the sampler words and the output index.
A request's output therefore changes if any block, slot, chunk, copy or reset of the scheduler or the engine is wrong.
It takes the same descriptors and table entries as the jitted step and runs them in the same order.
"""

from __future__ import annotations

import numpy as np

from cbjax.descriptor import BatchDescriptor, Bucket
from cbjax.scheduler import NUM_RESERVED_BLOCKS, StepOutputs, TableDelta

_MULTIPLIER = 6364136223846793005
_INCREMENT = 1442695040888963407


def next_token(tokens: np.ndarray, words: np.ndarray, output_index: int, vocab_size: int) -> int:
    """The token that follows `tokens` (i32[n]) for these sampler words, in ``[0, vocab_size)``."""
    value = (output_index * _MULTIPLIER + _INCREMENT) % 2**64
    for word in (*words.tolist(), *tokens.tolist()):
        value = ((value ^ (word + 1)) * _MULTIPLIER + _INCREMENT) % 2**64
    return (value >> 33) % vocab_size


class HistoryHashDevice:
    """See the module's docstring.

    Attributes:
      cells: i32[2, (num_blocks + 2) * block_size], token and position of each KV cell; -1 where nothing was written.
      table: i32[slots + 1, max_blocks], as on a real device.
    """

    def __init__(
        self, *, num_blocks: int, block_size: int, num_slots: int, max_blocks: int, vocab_size: int = 997
    ) -> None:
        self.block_size, self.num_slots, self.vocab_size = block_size, num_slots, vocab_size
        self.write_trash = (num_blocks + 1) * block_size
        self.cells = np.full((2, (num_blocks + NUM_RESERVED_BLOCKS) * block_size), -1, np.int32)
        self.table = np.full((num_slots + 1, max_blocks), num_blocks, np.int32)
        self.last_token = np.zeros(num_slots + 1, np.int32)

    def update_table(self, delta: TableDelta) -> None:
        """Writes block-table entries."""
        assert not delta.group.any(), "the history-hash device has one layer group"
        self.table[delta.slot, delta.column] = delta.block

    def forward(self, batch: BatchDescriptor, bucket: Bucket) -> StepOutputs:
        """Writes the step's cells, reads every context, answers for all rows of the bucket."""
        rows = int(batch.num_rows)
        count = np.diff(batch.q_start)
        tokens = batch.tokens.copy()
        tokens[batch.q_start[:-1][batch.carried]] = self.last_token[batch.slot[batch.carried]]
        for r in range(rows):
            positions = np.arange(batch.context_len[r] - count[r], batch.context_len[r])
            where = self._where(int(batch.slot[r]), positions)
            self.cells[0, where] = tokens[batch.q_start[r] : batch.q_start[r + 1]]
            self.cells[1, where] = positions
        answers = np.zeros(len(batch.slot), np.int32)
        for r in range(rows):
            answers[r] = self._answer(batch, r)
        self.last_token[np.where(batch.emits, batch.slot, self.num_slots)] = answers
        rows_of_bucket = len(batch.slot)
        return StepOutputs(
            tokens=answers, logprobs=np.zeros(rows_of_bucket, np.float32), finite=np.ones(rows_of_bucket, bool)
        )

    def recover(self) -> None:
        """Nothing is ever lost here."""

    def _where(self, slot: int, positions: np.ndarray) -> np.ndarray:
        return self.table[slot, positions // self.block_size] * self.block_size + positions % self.block_size

    def _answer(self, batch: BatchDescriptor, r: int) -> int:
        positions = np.arange(batch.context_len[r])
        seen, where = self.cells[:, self._where(int(batch.slot[r]), positions)]
        assert np.array_equal(where, positions), f"row {r} of uid {batch.uid[r]} reads cells that are not its own"
        return next_token(seen, batch.words[:, r], int(batch.output_index[r]), self.vocab_size)


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
