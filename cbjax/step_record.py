"""What one step was, for those who want to look: values that stay valid, since plans and states are never written."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from cbjax.scheduler import Bucket, SchedulerState, StepPlan

# The host phases of a step, in order. Between `dispatch` (block copies, the block table, the step itself) and `read`
# (waits for the answers) the device works, and with steps in flight the phases of later steps lie there.
PHASES = ("schedule", "build", "dispatch", "account", "read", "update")


class RequestIds(Mapping[int, str]):
    """Names by uid over a persistent map, which costs nothing to keep and fails on NumPy's integers as keys."""

    __slots__ = ("_names",)

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names

    def __getitem__(self, uid: int) -> str:
        return self._names[operator.index(uid)]

    def __iter__(self) -> Iterator[int]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"RequestIds({dict(self._names)})"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class StepRecord:
    """A step as it was dispatched.

    Attributes:
      plan: who computed what, who lost its blocks for it.
      bucket: the program that ran it.
      state: the scheduler's, with the plan's blocks taken.
      request_ids: by uid, of every request alive.
      dispatched: seconds, on the clock of `time.perf_counter`.
    """

    plan: StepPlan
    bucket: Bucket
    state: SchedulerState
    request_ids: Mapping[int, str]
    dispatched: float

    def __repr__(self) -> str:
        plan = self.plan
        evicted = len(plan.soft_resets) + len(plan.offloads)
        return (
            f"StepRecord({self.bucket}: {self.prefill_tokens} prefill and {self.decode_tokens} decode tokens in "
            f"{plan.batch.num_rows} rows, {len(plan.admitted)} admitted, {evicted} evicted)"
        )

    @property
    def prefill_tokens(self) -> int:
        """Tokens computed that were known before: prompts, and what a soft reset made to be computed again."""
        batch = self.plan.batch
        return batch.num_tokens - np.count_nonzero(batch.carried)

    @property
    def decode_tokens(self) -> int:
        """Rows that computed the one token they drew last."""
        return self.plan.batch.num_tokens - self.prefill_tokens

    @property
    def rectangle(self) -> int:
        """Token slots of a padded batch of these rows: as many rows, each as long as the longest."""
        return self.plan.batch.num_rows * int(self.plan.batch.count.max(initial=0))

    def block_tables(self) -> dict[str, np.ndarray]:
        """i32[blocks] for each running request, in order of its positions; of all layer groups, one after another."""
        tables = {}
        for record in filter(None, self.state.records):
            blocks = record.table.ravel()
            # Beyond the pool lies the id that stands for a block which a sliding window has left.
            tables[self.request_ids[record.request.uid]] = blocks[blocks < self.state.config.num_blocks]
        return tables


type Observer = Callable[[StepRecord], object]
