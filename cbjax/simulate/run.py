"""Simulation: the engine's own `schedule` and `update` over a trace, with a clock made of a cost model.

Nothing is computed but the schedule, so a run is exact in everything that does not depend on time: given when requests
come, its plans are those that the engine makes, step by step. A request is handed to the scheduler when the clock has
reached its arrival; with nobody to run, the clock jumps to the next one. Each step's answers are read before the next
is planned, as the engine does. Memory does not grow with the trace: prompts
are made when the scheduler is about to look at them, and dropped with their requests.
"""

from __future__ import annotations

import math

import numpy as np

from cbjax.ladder import Ladder, make_ladder
from cbjax.progress import progress
from cbjax.scheduler import (
    MAX_WINDOW,
    Bucket,
    Request,
    SchedulerConfig,
    StepOutputs,
    StepPlan,
    add,
    blocks_for,
    initial_state,
    schedule,
    update,
)
from cbjax.simulate.cost import CostModel, StepWork
from cbjax.simulate.result import Result
from cbjax.simulate.roofline import roofline
from cbjax.simulate.tally import Tally
from cbjax.simulate.trace import Trace


class Simulation:
    """A run, step by step; `simulate` is all of them.

    Attributes:
      trace, config, cost, ladder, max_window: what was asked for, with the defaults filled in.
      state: the scheduler's.
      clock: simulated seconds.
      tally: what happened so far.
      refused: requests that can never fit the pool, which are left out.
    """

    def __init__(
        self,
        trace: Trace,
        config: SchedulerConfig,
        *,
        cost: CostModel | None = None,
        ladder: Ladder | None = None,
        max_window: int = 1,
    ) -> None:
        """See `simulate`."""
        if not 1 <= max_window <= MAX_WINDOW:
            raise ValueError(f"max_window must be from 1 to {MAX_WINDOW} steps; got {max_window}")
        fits = np.flatnonzero(trace.num_cells <= config.max_request_tokens)
        if not len(fits):
            smallest = int(trace.num_cells.min())
            raise ValueError(
                f"the pool cannot hold one request of the trace: one can have {config.max_request_tokens} KV cells "
                f"(num_blocks={config.num_blocks} of {config.block_size} tokens, max_blocks_per_request="
                f"{config.max_blocks_per_request}) and the smallest of {len(trace)} needs {smallest}, which is "
                f"{blocks_for(smallest, config.block_size)} blocks; raise num_blocks or max_blocks_per_request"
            )
        self.ladder = ladder or make_ladder(
            max_batch_tokens=config.max_batch_tokens, max_rows=config.max_requests_per_batch
        )
        self.cost = cost or roofline(self.ladder, block_size=config.block_size)
        self.trace, self.config, self.max_window = trace, config, max_window
        self.state = initial_state(config)
        self.clock = 0.0
        self.refused = len(trace) - len(fits)
        self.tally = Tally(trace)
        self._uids, self._arrival = fits, trace.arrival[fits]
        self._arrived = self._handed = 0  # of these
        self._words = np.zeros(config.num_words, np.uint32)
        self._logprobs = np.zeros((MAX_WINDOW, config.max_requests_per_batch), np.float32)
        self._finite = np.ones((MAX_WINDOW, config.max_requests_per_batch), bool)

    @property
    def is_done(self) -> bool:
        """Every request that is not refused has ended."""
        return self.tally.ended == len(self._uids)

    def step(self) -> StepPlan:
        """Runs one step; `is_done` must not hold."""
        if self.tally.ended == self._arrived:
            self.clock = max(self.clock, float(self._arrival[self._arrived]))
        self._hand_over()
        plan, state = schedule(self.state, self._max_window())
        assert not plan.is_empty, "requests wait and nothing runs"
        began = self.clock
        self.tally.count_plan(plan, self.state, state, began)
        batch, bucket = plan.batch, self.ladder.select(plan.batch)
        self.clock += self._seconds(plan, bucket)
        self.tally.count_step(plan, bucket, state, self._arrived, began, self.clock)
        tokens = [self.trace.outputs(batch.uid, batch.output_index + i) for i in range(batch.window)]
        outputs = StepOutputs(
            tokens=np.stack(tokens),
            logprobs=self._logprobs[: batch.window, : batch.num_rows],
            finite=self._finite[: batch.window, : batch.num_rows],
        )
        self.state, results = update(state, plan, outputs)
        self.tally.count_ended(results.ended)
        return plan

    def _max_window(self) -> int:
        return 1 if self.max_window == 1 else self.ladder.windows(self.max_window, self.state.num_active)

    def _seconds(self, plan: StepPlan, bucket: Bucket) -> float:
        work = StepWork.of(plan, bucket)
        seconds = self.cost.seconds(work)
        if not 0 < seconds < math.inf:
            raise ValueError(f"a cost model answers with a positive number of seconds; got {seconds} for {work}")
        return seconds

    def result(self) -> Result:
        """What the run came to, so far."""
        return self.tally.result(self.state, refused=self.refused, seconds=self.clock)

    def _hand_over(self) -> None:
        """Gives the scheduler what has arrived, as far as one step can make a difference to it.

        No step admits more requests than it has rows, and nobody is overtaken, so the plans are the same as if all had
        been handed over; those who stay behind need no memory.
        """
        self._arrived = int(np.searchsorted(self._arrival, self.clock, side="right"))
        room = min(self.config.max_requests_per_batch - len(self.state.waiting), self._arrived - self._handed)
        for uid in self._uids[self._handed : self._handed + max(room, 0)].tolist():
            prompt = self.trace.prompt(uid)
            prompt.setflags(write=False)
            request = Request(
                uid=uid,
                prompt=prompt,
                max_new_tokens=int(self.trace.output_tokens[uid]),
                eos_token_ids=(),
                words=self._words,
            )
            self.state = add(self.state, request)
            self._handed += 1


def simulate(
    trace: Trace,
    config: SchedulerConfig,
    *,
    cost: CostModel | None = None,
    ladder: Ladder | None = None,
    max_window: int = 1,
    progress_bar: bool = False,
) -> Result:
    """Runs a whole trace through the scheduler.

    Args:
      config: pool, budgets and policies, as the engine's; `simulation_config` fills in the usual ones.
      cost: seconds of a step; None: an 8B model on an H100, by its data sheet (`roofline`).
      ladder: buckets that steps are padded to; None: those of the config's budgets.
      max_window: decode steps of one dispatch, at most; 1: as if there were no windows.
      progress_bar: shows how many requests have ended.

    Returns:
      Counts, times and a timeline. The same arguments give the same result. Requests that can never fit the pool are
      counted as refused.

    Raises:
      ValueError: no request of the trace fits the pool; the cost of a step is not positive.
    """
    simulation = Simulation(trace, config, cost=cost, ladder=ladder, max_window=max_window)
    tally = simulation.tally
    with progress(show=progress_bar, total=len(trace) - simulation.refused, desc="simulating", unit="request") as bar:
        while not simulation.is_done:
            before = tally.ended
            simulation.step()
            bar.update(tally.ended - before)
    return simulation.result()
