"""The accounts of a simulation: a few numbers per step, three times per request, nothing that grows with the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from cbjax.scheduler import Bucket, Ended, SchedulerState, StepPlan
from cbjax.simulate.result import Result
from cbjax.simulate.statistics import Histogram, Sampler
from cbjax.simulate.trace import Trace


class Tally:
    """What happened so far; counts mean what `Result` says.

    Attributes:
      admitted_at, first_at, last_at: f64[n], simulated seconds of each request's first admission, first token, and last
        token so far; NaN before.
      steps: by bucket.
      running, ended: requests.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.admitted_at, self.first_at, self.last_at = np.full((3, len(trace)), np.nan)
        self.steps: Counter[Bucket] = Counter()
        self.running = self.ended = 0
        self.num_steps = self.peak_blocks = self.peak_rows = self.num_starved = 0
        self.computed_tokens = self.generated_tokens = 0
        self.admitted = self.prompt_tokens = self.cached_tokens = self.restored_tokens = self.recomputed_tokens = 0
        self.soft_resets = self.offloads = self.cache_evictions = 0
        self.offloaded_blocks = self.restored_blocks = self.copied_blocks = 0
        self.first_eviction: int | None = None
        self.inter_token = Histogram()
        self.sampler = Sampler()
        self._has_ended = np.zeros(len(trace), bool)
        self._lost: dict[int, int] = {}  # tokens that requests which wait again have lost

    def count_plan(self, plan: StepPlan, before: SchedulerState, after: SchedulerState, now: float) -> None:
        """A step that was planned at `now`, from the state `before` it."""
        self.num_starved += plan.num_starved
        for admission in plan.admitted:
            if admission.incarnation:
                lost = self._lost.pop(admission.uid)
                self.recomputed_tokens += max(0, lost - admission.num_cached)
                self.restored_tokens += admission.num_restored
                continue
            self.admitted += 1
            self.admitted_at[admission.uid] = now
            self.prompt_tokens += int(self.trace.prompt_tokens[admission.uid])
            self.cached_tokens += admission.num_cached
        for reset in plan.soft_resets:
            self._lost[reset.uid] = reset.num_tokens
        for offload in plan.offloads:
            self._lost[offload.uid] = 0
            self.offloaded_blocks += len(offload.blocks)
        self.soft_resets += len(plan.soft_resets)
        self.offloads += len(plan.offloads)
        if self.first_eviction is None and (plan.soft_resets or plan.offloads):
            self.first_eviction = self.num_steps
        self.restored_blocks += sum(len(restore.blocks) for restore in plan.restores)
        self.copied_blocks += len(plan.copies)
        self.running += len(plan.admitted) - len(plan.soft_resets) - len(plan.offloads)
        # Planning registers nothing, so what can be found no more was taken from the cache.
        self.cache_evictions += sum(map(len, before.pool.index.found)) - sum(map(len, after.pool.index.found))

    def count_step(
        self, plan: StepPlan, bucket: Bucket, after: SchedulerState, arrived: int, began: float, now: float
    ) -> None:
        """The same step's work, and its answers, which came at `now`; `arrived` requests had come when it `began`."""
        batch = plan.batch
        self.steps[bucket] += 1
        self.num_steps += 1
        self.computed_tokens += batch.num_computed
        self.peak_rows = max(self.peak_rows, batch.num_rows)
        live = after.config.num_blocks - after.pool.num_free
        self.peak_blocks = max(self.peak_blocks, live)
        self.sampler.add(began, live, after.pool.num_cached, self.running, arrived - self.ended - self.running)
        emits = batch.emits
        uids = batch.uid if emits.all() else batch.uid[emits]
        drawn = int(batch.draws.sum())
        self.generated_tokens += drawn
        gaps = now - self.last_at[uids]  # NaN for a first token
        is_first = np.isnan(gaps)
        if is_first.any():
            self.first_at[uids[is_first]] = now
            gaps = gaps[~is_first]
        self.inter_token.add(gaps)
        if batch.window > 1:  # what a window draws comes together
            self.inter_token.add(np.zeros(drawn - len(uids)))
        self.last_at[uids] = now

    def count_ended(self, ended: Sequence[Ended]) -> None:
        """Requests that have their last token."""
        for request in ended:
            self._has_ended[request.uid] = True
        self.ended += len(ended)
        self.running -= len(ended)

    def result(self, state: SchedulerState, *, refused: int, seconds: float) -> Result:
        """What the run came to, so far."""
        config, arrival = state.config, self.trace.arrival
        return Result(
            trace=self.trace.name,
            policy=config.policy.name,
            eviction=config.eviction.name if config.shares_blocks else None,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            safety_margin=config.safety_margin,
            host_blocks=config.host_blocks,
            requests=len(self.trace),
            refused=refused,
            admitted=self.admitted,
            completed=self.ended,
            seconds=seconds,
            steps=dict(self.steps),
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            computed_tokens=self.computed_tokens,
            generated_tokens=self.generated_tokens,
            recomputed_tokens=self.recomputed_tokens,
            restored_tokens=self.restored_tokens,
            soft_resets=self.soft_resets,
            offloads=self.offloads,
            first_eviction=self.first_eviction,
            offloaded_blocks=self.offloaded_blocks,
            restored_blocks=self.restored_blocks,
            copied_blocks=self.copied_blocks,
            cache_evictions=self.cache_evictions,
            starved=self.num_starved,
            peak_rows=self.peak_rows,
            peak_blocks=self.peak_blocks,
            waiting=self.admitted_at - arrival,
            first_token=self.first_at - arrival,
            latency=np.where(self._has_ended, self.last_at - arrival, np.nan),
            inter_token=self.inter_token,
            timeline=self.sampler.timeline(),
        )
