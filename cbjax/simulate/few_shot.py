"""Many questions about few tasks, each after the same worked examples: how models are evaluated."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cbjax.simulate.building import trace_of_arrays
from cbjax.simulate.quantiles import Quantiles
from cbjax.simulate.trace import Trace, arrivals


@dataclass(frozen=True, slots=True, kw_only=True)
class FewShot:
    """Requests that begin with their task's examples.

    Attributes:
      name: of the model.
      num_tasks: in turn asked about in random order.
      num_shots: examples of a task; each is a question and its answer.
      question, answer: tokens.
    """

    name: str
    num_tasks: int
    num_shots: int
    question: Quantiles
    answer: Quantiles

    def sample(self, num_requests: int, *, rate: float | None = None, seed: int = 0) -> Trace:
        """See `cbjax.simulate.workloads.Workload.sample`."""
        rng = np.random.default_rng(seed)
        arrival = arrivals(rng, num_requests, rate)
        examples = self.question.tokens(rng.random((self.num_tasks, self.num_shots)))
        header = (examples + self.answer.tokens(rng.random(examples.shape))).sum(axis=1)
        task = rng.integers(0, self.num_tasks, num_requests)
        question = self.question.tokens(rng.random(num_requests))
        own = np.stack([task, self.num_tasks + np.arange(num_requests)], axis=1)
        tokens = np.stack([header[task], question], axis=1)
        return trace_of_arrays(
            self.name,
            arrival=arrival,
            prompt_tokens=tokens.sum(axis=1),
            output_tokens=self.answer.tokens(rng.random(num_requests)),
            offsets=2 * np.arange(num_requests + 1),
            segment_ids=own.ravel(),
            segment_tokens=tokens.ravel(),
            output_ids=-1 - np.arange(num_requests),
        )


# ServeGen, m-small (Apache-2.0): quantiles of its clients, weighted by their rates; short questions with answers of a
# few tokens. Tasks and shots are those of MMLU (Hendrycks et al., ICLR 2021).
FEW_SHOT = FewShot(
    name="few_shot",
    num_tasks=57,
    num_shots=5,
    question=Quantiles(
        (
            *((0, 18), (0.1, 19), (0.2, 19), (0.3, 21), (0.4, 28), (0.5, 40), (0.6, 49), (0.7, 52), (0.8, 70)),
            *((0.9, 322), (0.95, 573), (0.99, 1478), (1, 1500)),
        )
    ),
    answer=Quantiles(
        (
            *((0, 1), (0.2, 1), (0.3, 2), (0.4, 3), (0.5, 3), (0.6, 4), (0.7, 7), (0.8, 14), (0.9, 44)),
            *((0.95, 71), (0.99, 142), (1, 150)),
        )
    ),
)
