"""A recorded step as a row of numbers, and the ring of the last ones."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from cbjax.step_record import PHASES, StepRecord

# Seconds on the timeline's clock; NaN where it has not come to that.
TIMES = (
    *(f"{phase}_{edge}" for phase in PHASES for edge in ("begin", "end")),
    "device_begin",
    "device_end",
    "device_sure",
)
COUNTS = (
    "bucket",
    "rows",
    "prefill_tokens",
    "decode_tokens",
    "new_tokens",
    "blocks",
    "running",
    "waiting",
    "admitted",
    "soft_resets",
    "offloads",
    "offloaded_blocks",
    "restores",
    "restored_blocks",
    "copies",
    "starved",
    "ended",
    "compiled",
)
STEP = np.dtype([("index", np.int64), *((name, np.float64) for name in TIMES), *((name, np.int32) for name in COUNTS)])
_PACKED = struct.Struct(f"=q{len(TIMES)}d{len(COUNTS)}i")
assert _PACKED.size == STEP.itemsize


def counts_of(record: StepRecord, *, bucket: int, compiled: int) -> list[int]:
    """The values of `COUNTS` as far as they are known when a step is dispatched; 0 for the others."""
    plan, state = record.plan, record.state
    return [
        bucket,
        plan.batch.num_rows,
        record.prefill_tokens,
        record.decode_tokens,
        0,
        state.config.num_blocks - state.pool.num_free,
        state.num_active,
        len(state.waiting),
        len(plan.admitted),
        len(plan.soft_resets),
        len(plan.offloads),
        sum(len(offload.blocks) for offload in plan.offloads) if plan.offloads else 0,
        len(plan.restores),
        sum(len(restore.blocks) for restore in plan.restores) if plan.restores else 0,
        len(plan.copies),
        plan.num_starved,
        0,
        compiled,
    ]


class StepRing:
    """The last steps, `STEP.itemsize` bytes each; its memory becomes resident as it is filled.

    Attributes:
      capacity: steps it can hold.
      num_steps: how many were ever put into it.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.num_steps = capacity, 0
        self._bytes = bytearray(capacity * STEP.itemsize)

    def append(self, index: int, times: Sequence[float], counts: Sequence[int]) -> None:
        """Puts a step in, in place of the oldest one if the ring is full."""
        place = self.num_steps % self.capacity * STEP.itemsize
        _PACKED.pack_into(self._bytes, place, index, *times, *counts)
        self.num_steps += 1

    def rows(self) -> np.ndarray:
        """STEP[steps], a copy, in the order in which they came."""
        used = min(self.num_steps, self.capacity)
        rows = np.frombuffer(bytes(memoryview(self._bytes)[: used * STEP.itemsize]), STEP)
        return np.roll(rows, -(self.num_steps % self.capacity)) if self.num_steps > self.capacity else rows.copy()
