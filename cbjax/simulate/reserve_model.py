"""What an admission reserve buys, in the smallest model that shows it, and the real scheduler beside it.

The model: a request arrives every few steps and is *lost* unless it is admitted at once; one that runs gains a token a
step and takes a block at each block's end; one that finds the pool empty is evicted and never comes back. Its admission
rule is the scheduler's own, `cbjax.scheduler.may_admit`.

Why the scheduler's figures on the same requests are others:

- A running request that gets no block is not evicted. It stands still, keeping what it has, until somebody ends; only
  when nobody at all can go on are the newest evicted, as many as it takes. With short answers somebody always ends in
  time: no eviction at all, where the model counts 9. With long ones the first comes in step 438 instead of 187 (463
  instead of 212 with a reserve): when all 38 (33) who run want a block at one time.
- Nobody is lost. Who is not admitted waits, and takes the first place that is free, not only one in a step in which a
  request arrives: 100 admitted with the reserve and short answers, where the model has 96.
- Who is evicted comes back, before all others, and is computed again. The model's evictions make room for good, so it
  goes on admitting: 83 with long answers and no reserve, where the scheduler, in which nobody can have ended after 600
  steps, has admitted 38. In the end all 120 have their answers there, some after several evictions.
- A reserve of the whole pool admits one request at a time in both.

In both a reserve delays evictions and makes them fewer, and only capacity cures them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cbjax.scheduler import blocks_for, may_admit
from cbjax.simulate.building import make_trace
from cbjax.simulate.cost import ConstantCost
from cbjax.simulate.result import Result
from cbjax.simulate.run import Simulation
from cbjax.simulate.settings import simulation_config

BLOCK_SIZE, NUM_BLOCKS = 256, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveWorkload:
    """Equal requests at equal distances.

    Attributes:
      prompt, generated: tokens of each.
      every: steps between arrivals, of which the first is in step 0.
      steps: in all.
    """

    prompt: int
    generated: int
    every: int = 5
    steps: int = 600

    @property
    def growth(self) -> int:
        """Blocks that a request still needs once it is admitted, which is what a reserve has to cover."""
        return blocks_for(self.prompt + self.generated, BLOCK_SIZE) - blocks_for(self.prompt, BLOCK_SIZE)


SHORT = ReserveWorkload(prompt=200, generated=200)
LONG = ReserveWorkload(prompt=200, generated=800)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveFigures:
    """What a workload came to.

    Attributes:
      admitted: requests that were given blocks once.
      evictions: times that a request lost its blocks.
      first_eviction: step of the first, from 0; None: never.
    """

    admitted: int
    evictions: int
    first_eviction: int | None


def reserve_model(workload: ReserveWorkload, safety_margin: float) -> ReserveFigures:
    """The model's figures.

    Raises:
      ValueError: the margin is not in [0, 1].
    """
    if not 0.0 <= safety_margin <= 1.0:
        raise ValueError(f"safety_margin must be in [0, 1]; got {safety_margin}")
    free, admitted, evicted_in = NUM_BLOCKS, 0, []
    need = blocks_for(workload.prompt, BLOCK_SIZE)
    running: list[tuple[int, int]] = []  # tokens, blocks
    for step in range(workload.steps):
        stay = []
        for tokens, held in running:
            if blocks_for(tokens + 1, BLOCK_SIZE) > held:
                if not free:
                    evicted_in.append(step)
                    free += held
                    continue
                free -= 1
                held += 1
            elif tokens + 1 >= workload.prompt + workload.generated:
                free += held
                continue
            stay.append((tokens + 1, held))
        running = stay
        is_due = step % workload.every == 0
        if is_due and may_admit(free=free, need=need, num_blocks=NUM_BLOCKS, safety_margin=safety_margin):
            free -= need
            admitted += 1
            running.append((workload.prompt, need))
    first = evicted_in[0] if evicted_in else None
    return ReserveFigures(admitted=admitted, evictions=len(evicted_in), first_eviction=first)


def reserve_in_scheduler(workload: ReserveWorkload, safety_margin: float, *, to_the_end: bool = False) -> Result:
    """The same pool, requests and arrivals through the real scheduler; a step takes a second, so times are in steps.

    Args:
      to_the_end: until the last request has ended, and not only for the workload's steps.
    """
    config = simulation_config(
        num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, safety_margin=safety_margin, shares_blocks=False
    )
    arrival = np.arange(0, workload.steps, workload.every)
    prompt, generated = (np.full(len(arrival), size) for size in (workload.prompt, workload.generated))
    simulation = Simulation(make_trace(arrival, prompt, generated), config, cost=ConstantCost(step=1.0))
    while not simulation.is_done and (to_the_end or simulation.clock < workload.steps):
        simulation.step()
    return simulation.result()


def reserve_table() -> str:
    """Both workloads with and without a reserve: the model, the scheduler after as many steps, and at the end."""
    header = ["workload", "margin", "", "admitted", "evictions", "first", "ended", "stood still", "steps"]
    lines = [header]
    for name, workload in (("short", SHORT), ("long", LONG)):
        for margin in (0.0, 0.15):
            model = reserve_model(workload, margin)
            first = [name, f"{margin:.2f}", "model"]
            lines.append([*first, *_cells(model), "-", "-", str(workload.steps)])
            for label, to_the_end in (("scheduler", False), ("to the end", True)):
                run = reserve_in_scheduler(workload, margin, to_the_end=to_the_end)
                lines.append(["", "", label, *_cells(run), str(run.completed), str(run.starved), str(run.num_steps)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _cells(figures: ReserveFigures | Result) -> list[str]:
    first = figures.first_eviction
    return [str(figures.admitted), str(figures.evictions), "never" if first is None else str(first)]
