"""What an engine counts: over its life, and in the requests that a step touches."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from cbjax.requests import RequestState, RequestStatus
from cbjax.scheduler import Admission, Bucket, SchedulerState, StepPlan


@dataclass(slots=True)
class EngineStats:
    """Counts since the engine was made.

    Attributes:
      steps: dispatches, by bucket.
      windows: those of more than one step, by their number of steps.
      prompt_tokens, cached_tokens: of requests when they were first admitted; those of them found in the prefix cache.
      prefill_tokens, recomputed_tokens: tokens computed that were known; those computed again after a soft reset.
      soft_resets, offloads: requests that lost their blocks and their KV; those whose KV went to host memory.
      offloaded_blocks, restored_blocks: copied to host memory, and back.
      peak_blocks: most blocks held at one time.
    """

    steps: Counter[Bucket] = field(default_factory=Counter)
    windows: Counter[int] = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefill_tokens: int = 0
    recomputed_tokens: int = 0
    soft_resets: int = 0
    offloads: int = 0
    offloaded_blocks: int = 0
    restored_blocks: int = 0
    peak_blocks: int = 0


def count_step(
    stats: EngineStats, plan: StepPlan, bucket: Bucket, state: SchedulerState, alive: Mapping[int, RequestState]
) -> None:
    """A step that was dispatched; `state` is the scheduler's once it was planned, `alive` every request by uid."""
    batch, now = plan.batch, time.perf_counter()
    stats.steps[bucket] += 1
    if batch.window > 1:
        stats.windows[batch.window] += 1
    stats.prefill_tokens += int(batch.count[~batch.carried].sum())
    stats.peak_blocks = max(stats.peak_blocks, state.config.num_blocks - state.pool.num_free)
    for reset in plan.soft_resets:
        request = alive[reset.uid]
        request.status = RequestStatus.PENDING
        request.num_soft_resets += 1
        request.num_lost_tokens = reset.num_tokens
        stats.soft_resets += 1
    for offload in plan.offloads:
        request = alive[offload.uid]
        request.status = RequestStatus.PENDING
        request.num_offloads += 1
        request.num_lost_tokens = 0
        stats.offloads += 1
        stats.offloaded_blocks += len(offload.blocks)
    stats.restored_blocks += sum(len(restore.blocks) for restore in plan.restores)
    for admission in plan.admitted:
        _count_admission(stats, alive[admission.uid], admission)
    for uid in batch.uid[~batch.carried].tolist():
        request = alive[uid]
        request.status = RequestStatus.PREFILLING
        request.started = request.started or now


def _count_admission(stats: EngineStats, request: RequestState, admission: Admission) -> None:
    if admission.incarnation:
        stats.recomputed_tokens += max(0, request.num_lost_tokens - admission.num_cached)
        return
    request.num_cached_tokens = admission.num_cached
    if not admission.num_forked:  # a prompt with several continuations counts once
        stats.prompt_tokens += len(request.prompt)
        stats.cached_tokens += admission.num_cached
