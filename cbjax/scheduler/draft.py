"""A step being planned: private copies of the state's arrays, the budgets left, the rows chosen so far.

Only `schedule` and `update` make drafts, and a draft never leaves them. It is the one place where the scheduler's
arrays are written, and it writes none that a state can see.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from cbjax.scheduler.blocks import blocks_for
from cbjax.scheduler.hit import Hit
from cbjax.scheduler.plan import NO_COPIES, NUM_EOS_IDS, Admission, Batch, BlockCopies, Restore, TableDelta
from cbjax.scheduler.pool import PoolDraft
from cbjax.scheduler.state import Field, Record, SchedulerState, TableEntry
from cbjax.scheduler.waiting import Saved, Waiting


class Draft:
    """Mutable scratch over one state.

    Attributes:
      starved: (slot, blocks wanted) of active rows that got no block, in candidate order.
      chosen: slots of the step's rows, in order; `count` their tokens.
      half_done: a prefill of this step leaves known tokens to compute, so nobody is admitted beside it.
      pool: the blocks; written in place.
      host_used: blocks in host memory.
      restores: what comes back from there.
      copied: sources and destinations of block copies, a pair of i32[groups] for each fork.
      admitted: who was admitted.
      swaps: entries changed before this step that the device has not been told.
    """

    def __init__(self, state: SchedulerState) -> None:
        self.state = state
        self.config = state.config
        self.rows = state.rows.copy()
        self.tail, self.words, self.eos = state.tail, state.words, state.eos
        self.records = list(state.records)
        self.pool, self.waiting = PoolDraft(state.pool), state.waiting
        self.num_admissions = state.num_admissions
        self.tokens_left = state.config.max_batch_tokens
        self.rows_left = state.config.max_requests_per_batch
        self.starved: list[tuple[int, int]] = []
        self.chosen: list[np.ndarray] = []
        self.count: list[np.ndarray] = []
        self.half_done = False
        self.host_used = state.host_used
        self.restores: list[Restore] = []
        self.copied: list[tuple[np.ndarray, np.ndarray]] = []
        self.admitted: list[Admission] = []
        self.swaps = list(state.swaps)
        self._grown: list[tuple[int, int, np.ndarray]] = []  # slot, first column, i32[groups, new]
        self._left: list[tuple[int, int, int, int]] = []  # slot, group, first column, end

    @property
    def is_empty(self) -> bool:
        return not self.chosen

    def in_order(self, mask: np.ndarray) -> np.ndarray:
        """The slots where `mask`, oldest admission first."""
        (slots,) = mask.nonzero()
        return slots[self.rows[Field.ORDER][slots].argsort(kind="stable")]

    def decoding(self) -> np.ndarray:
        """Slots that may draw one more token, oldest first."""
        rows = self.rows
        prefilled = rows[Field.COMPUTED] >= rows[Field.PREFILL]
        return self.in_order((rows[Field.ACTIVE] == 1) & prefilled & (rows[Field.DRAWN] < rows[Field.LIMIT]))

    def prefilling(self) -> np.ndarray:
        """Slots with known tokens still to compute, oldest first."""
        rows = self.rows
        return self.in_order((rows[Field.ACTIVE] == 1) & (rows[Field.COMPUTED] < rows[Field.PREFILL]))

    def blocks_wanted(self, slot: int, num_tokens: int) -> int:
        """Blocks, over all groups, that the slot lacks to hold `num_tokens`."""
        lacking = blocks_for(num_tokens, self.config.block_size) - int(self.rows[Field.HELD, slot])
        return max(0, lacking) * self.config.num_groups

    def grow(self, slot: int, ids: np.ndarray) -> None:
        """Appends `ids` (i32[groups * new], already taken from the pool) to the slot's table."""
        record = self.records[slot]
        assert record is not None
        new = ids.reshape(self.config.num_groups, -1)
        column = record.table.shape[1]
        table = np.concatenate([record.table, new], axis=1)
        table.setflags(write=False)
        # `_replace` would take three times as long.
        self.records[slot] = Record(record.request, record.history, record.chain, table, record.prefix)
        self.rows[Field.HELD, slot] = table.shape[1]
        self._grown.append((slot, column, new))

    def leave(self, slot: int, groups: Sequence[int], first: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Takes columns ``[first[i], end[i])`` of `groups[i]` out of the slot's table; returns the ids they held."""
        record = self.records[slot]
        assert record is not None
        table, ids = record.table.copy(), []
        for group, start, stop in zip(groups, first.tolist(), end.tolist(), strict=True):
            if start < stop:
                ids.append(record.table[group, start:stop])
                table[group, start:stop] = self.config.num_blocks
                self._left.append((slot, group, start, stop))
        table.setflags(write=False)
        self.records[slot] = record._replace(table=table)
        self._keep_swaps(lambda entry: entry.slot != slot or table[entry.group, entry.column] == entry.block)
        return np.concatenate(ids)

    def swap(self, slot: int, group: int, column: int, block: int) -> None:
        """Puts another block with the same content into the slot's table."""
        record = self.records[slot]
        assert record is not None
        table = record.table.copy()
        table[group, column] = block
        table.setflags(write=False)
        self.records[slot] = record._replace(table=table)
        self.swaps.append(TableEntry(group, slot, column, block))

    def _keep_swaps(self, still_holds: Callable[[TableEntry], bool]) -> None:
        if self.swaps:
            self.swaps = list(filter(still_holds, self.swaps))

    def take_blocks(self, slot: int, wanted: int) -> bool:
        """Gives the slot `wanted` more blocks, or changes nothing."""
        if wanted:
            ids = self.pool.take(wanted)
            if ids is None:
                return False
            self.grow(slot, ids)
        return True

    def chunk(self, slot: int) -> int:
        """Tokens of the next chunk of a slot's prefill."""
        rows = self.rows
        missing = rows[Field.PREFILL, slot] - rows[Field.COMPUTED, slot]
        return min(int(missing), int(rows[Field.CHUNK, slot]), self.tokens_left)

    def choose_chunk(self, slot: int, count: int) -> None:
        """`choose` for one row of a prefill."""
        self.half_done |= bool(self.rows[Field.COMPUTED, slot] + count < self.rows[Field.PREFILL, slot])
        self.choose(np.array([slot]), np.array([count], np.int32))

    def choose(self, slots: np.ndarray, count: np.ndarray) -> None:
        """Rows of this step; their budgets are spent, their KV and outputs counted as scheduled."""
        self.chosen.append(slots)
        self.count.append(count)
        self.rows_left -= len(slots)
        self.tokens_left -= int(count.sum())

    def admit(self, waiting: Waiting, hit: Hit) -> int:
        """Moves the head of the line into a free slot, which holds the blocks that were found; returns the slot.

        A copy in host memory is to come back (`restore`).
        """
        request, length = waiting.request, waiting.num_tokens
        slot = int(np.argmin(self.rows[Field.ACTIVE]))
        assert not self.rows[Field.ACTIVE, slot]
        history = np.array(waiting.known, np.int32)
        history.setflags(write=False)
        none = np.empty((self.config.num_groups, 0), np.int32)
        self.records[slot] = Record(request, history, None, none, hit.prefix)
        row = [0] * len(Field)
        row[Field.ACTIVE] = 1
        row[Field.UID] = request.uid
        row[Field.INCARNATION] = waiting.incarnation
        row[Field.ORDER] = self.num_admissions
        row[Field.PROMPT] = len(request.prompt)
        row[Field.PREFILL] = row[Field.LENGTH] = length
        row[Field.DRAWN] = len(waiting.outputs)
        row[Field.LIMIT] = request.max_new_tokens
        row[Field.EVICTED] = waiting.evicted
        row[Field.CHUNK] = self.config.chunk_limit(request.num_cells)
        row[Field.COMPUTED] = row[Field.SWEPT] = hit.num_cells
        row[Field.REGISTERED] = hit.num_registered
        row[Field.FAMILY] = request.family
        self.rows[:, slot] = row
        self._write_settings(slot, request.words, request.eos_token_ids)
        self.tail = writable(self.tail, self.state.tail)
        rest = length % self.config.block_size
        self.tail[slot, :rest] = history[length - rest :]
        self.waiting = self.waiting.remove(request.uid)
        self.num_admissions += 1
        if hit.num_columns:
            # A fork or a victim that returns says nothing about others to come.
            reused = not (hit.is_fork or waiting.evicted)
            for block in hit.table[hit.table < self.config.num_blocks].tolist():
                self.pool.pin(block, reused=reused)
            self.grow(slot, hit.table.ravel())
        if len(hit.unfinished):
            ids = self.pool.take(len(hit.unfinished))
            assert ids is not None
            self.grow(slot, ids)
            self.copied.append((hit.unfinished, ids))
        restored = 0 if waiting.saved is None else self._restore(slot, waiting.saved)
        self.admitted.append(
            Admission(
                uid=request.uid,
                slot=slot,
                incarnation=waiting.incarnation,
                num_cached=hit.num_cells,
                num_forked=hit.num_cells if hit.is_fork else 0,
                num_restored=restored,
            )
        )
        return slot

    def _restore(self, slot: int, saved: Saved) -> int:
        """Brings back what was saved beyond what was found, into new blocks; returns the tokens that came back."""
        rows, config = self.rows, self.config
        found, cells = int(rows[Field.HELD, slot]), saved.num_cells
        index = saved.restored(found, config.windows, config.block_size)
        wanted = index >= 0
        blocks = self.pool.take(int(wanted.sum()))
        assert blocks is not None
        restored = max(0, cells - found * config.block_size)
        if restored:
            new = np.full(index.shape, config.num_blocks, np.int32)
            new[wanted] = blocks
            self.grow(slot, new.ravel())
            rows[Field.COMPUTED, slot] = rows[Field.SWEPT, slot] = cells
        self.restores.append(Restore(uid=int(rows[Field.UID, slot]), index=index[wanted], blocks=blocks))
        self.host_used -= saved.num_blocks
        return restored

    def _write_settings(self, slot: int, words: np.ndarray, eos: tuple[int, ...]) -> None:
        self.words = writable(self.words, self.state.words)
        self.words[:, slot] = words
        more = len(eos) - len(self.eos)
        if more > 0:
            self.eos = np.pad(self.eos, ((0, more), (0, 0)), constant_values=-1)
        self.eos = writable(self.eos, self.state.eos)
        self.eos[:, slot] = -1
        self.eos[: len(eos), slot] = eos

    def release(self, slot: int) -> np.ndarray:
        """Empties a slot; returns the block ids it held. Those that nobody else holds are free."""
        record = self.records[slot]
        assert record is not None
        ids = record.table[record.table < self.config.num_blocks]
        self.pool.drop(ids)
        self.records[slot] = None
        self.rows[:, slot] = 0
        # The slot's next owner may write the same entries in this very plan, and no entry may be written twice.
        self._left = [left for left in self._left if left[0] != slot]
        self._keep_swaps(lambda entry: entry.slot != slot)
        return ids

    def freeze(self, *, in_flight: tuple[int, ...], swaps: Sequence[TableEntry] = ()) -> SchedulerState:
        """The state this draft has come to; `swaps` are left for the next plan to tell."""
        for array in (self.rows, self.tail, self.words, self.eos):
            array.setflags(write=False)
        # `replace` would take four times as long.
        return SchedulerState(
            config=self.config,
            pool=self.pool.freeze(),
            waiting=self.waiting,
            rows=self.rows,
            tail=self.tail,
            words=self.words,
            eos=self.eos,
            records=tuple(self.records),
            num_admissions=self.num_admissions,
            in_flight=in_flight,
            host_used=self.host_used,
            swaps=tuple(swaps),
            weights_version=self.state.weights_version,
        )

    def batch(self, window: int = 1) -> Batch:
        """The chosen rows as a batch of this many steps; counts them as scheduled."""
        # Indices of another dtype than NumPy's own would be converted at every use.
        slots = np.concatenate(self.chosen) if self.chosen else np.empty(0, np.intp)
        count = np.concatenate(self.count) if self.count else np.empty(0, np.int32)
        rows = self.rows
        start = rows[Field.COMPUTED][slots]
        prefill = rows[Field.PREFILL][slots]
        carried = start >= prefill
        emits = start + count >= prefill
        output_index = rows[Field.DRAWN][slots]
        draws = emits.astype(np.int32) if window == 1 else np.minimum(rows[Field.LIMIT][slots] - output_index, window)
        tokens = np.zeros(int(count.sum()), np.int32)
        if not carried.all():
            ends = np.cumsum(count)
            for i in np.flatnonzero(~carried):
                record = self.records[slots[i]]
                assert record is not None
                tokens[ends[i] - count[i] : ends[i]] = record.history[start[i] : start[i] + count[i]]
        rows[Field.COMPUTED][slots] = start + (count if window == 1 else draws)
        rows[Field.DRAWN][slots] = output_index + draws
        return Batch(
            uid=rows[Field.UID][slots],
            incarnation=rows[Field.INCARNATION][slots],
            slot=slots.astype(np.int32),
            start=start,
            count=count,
            carried=carried,
            emits=emits,
            output_index=output_index,
            draws=draws,
            eos=self.eos[:NUM_EOS_IDS].take(slots, axis=1),
            words=self.words.take(slots, axis=1),
            tokens=tokens,
            window=window,
        )

    def copies(self) -> BlockCopies:
        """Every block copy of this draft."""
        if not self.copied:
            return NO_COPIES
        sources, destinations = (np.concatenate(blocks) for blocks in zip(*self.copied, strict=True))
        return BlockCopies(sources=sources, destinations=destinations)

    def table_delta(self) -> TableDelta:
        """Every block-table entry this draft has changed, once."""
        if not (self._grown or self._left or self.swaps):
            return TableDelta.empty()
        # A Python loop: most steps change a few entries, and few change more than some hundred.
        entries = [tuple(swap) for swap in self.swaps]
        for slot, first, ids in self._grown:
            for group, blocks in enumerate(ids.tolist()):
                entries += [(group, slot, column, block) for column, block in enumerate(blocks, first)]
        for slot, group, first, end in self._left:
            entries += [(group, slot, column, self.config.num_blocks) for column in range(first, end)]
        group, slot, column, block = np.array(entries, np.int32).T
        return TableDelta(group=group, slot=slot, column=column, block=block)


def writable(array: np.ndarray, original: np.ndarray) -> np.ndarray:
    """`array` itself if this draft already made it, else a copy."""
    return array.copy() if array is original else array
