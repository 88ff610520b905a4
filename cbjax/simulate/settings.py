"""The scheduler's config with the usual values filled in, for those who have no engine."""

from __future__ import annotations

from cbjax.scheduler import SchedulerConfig, eviction_named, scheduler_named


def simulation_config(
    *,
    num_blocks: int,
    block_size: int = 64,
    policy: str = "fifo",
    safety_margin: float | None = None,
    max_batch_tokens: int = 8192,
    max_requests_per_batch: int = 512,
    host_blocks: int = 0,
    shares_blocks: bool = True,
    eviction: str = "arc",
) -> SchedulerConfig:
    """A pool of `num_blocks` blocks of `block_size` tokens, and what a large accelerator would run it with.

    Args:
      policy, eviction: names, as in `ContinuousBatchingConfig`.
      safety_margin: None: the policy's own.
      max_batch_tokens, max_requests_per_batch: budgets of a step.
      host_blocks: for offloading; 0: who loses its blocks is computed again.

    Raises:
      ValueError: a value outside its range.
    """
    made = scheduler_named(policy)
    return SchedulerConfig(
        policy=made,
        num_blocks=num_blocks,
        block_size=block_size,
        max_batch_tokens=max_batch_tokens,
        max_requests_per_batch=max_requests_per_batch,
        max_blocks_per_request=num_blocks,
        safety_margin=made.default_safety_margin if safety_margin is None else safety_margin,
        host_blocks=host_blocks,
        shares_blocks=shares_blocks,
        eviction=eviction_named(eviction),
    )
