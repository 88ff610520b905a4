"""Workload models: lengths, arrivals and common beginnings of real traffic, as a few numbers in the code.

Each is a small value; `sample` draws any number of requests from it, the same for the same seed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from cbjax.simulate.building import trace_of_arrays
from cbjax.simulate.few_shot import FEW_SHOT
from cbjax.simulate.quantiles import Quantiles, correlated
from cbjax.simulate.sessions import AGENTS
from cbjax.simulate.trace import Trace, arrivals


class Workload(Protocol):
    """Anything that requests can be drawn from."""

    @property
    def name(self) -> str: ...

    def sample(self, num_requests: int, *, rate: float | None = None, seed: int = 0) -> Trace:
        """Draws `num_requests` requests.

        Args:
          rate: requests per second on average; None: all come at once.

        Raises:
          ValueError: `num_requests` or `rate` is not positive.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Independent:
    """Requests that have nothing in common.

    Attributes:
      name: of the model.
      prompt, output: tokens.
      gap: between arrivals, in any unit, since they are scaled to the rate asked for; None: a Poisson process.
      coupling: of a request's two lengths, the theta of `correlated`.
    """

    name: str
    prompt: Quantiles
    output: Quantiles
    gap: Quantiles | None = None
    coupling: float = 0.0

    def sample(self, num_requests: int, *, rate: float | None = None, seed: int = 0) -> Trace:
        """See `Workload.sample`."""
        rng = np.random.default_rng(seed)
        arrival = arrivals(rng, num_requests, rate, self.gap)
        prompt, output = correlated(rng, num_requests, self.coupling)
        tokens = self.prompt.tokens(prompt)
        return trace_of_arrays(
            self.name,
            arrival=arrival,
            prompt_tokens=tokens,
            output_tokens=self.output.tokens(output),
            offsets=np.arange(num_requests + 1),
            segment_ids=np.arange(num_requests),
            segment_tokens=tokens,
            output_ids=-1 - np.arange(num_requests),
        )


# Azure LLM inference trace 2023, conversation (Patel et al., Splitwise, ISCA 2024; CC-BY-4.0). Minimum, 10%, 50%, 90%,
# 99% and maximum of the whole trace; between them its first 2,000 requests, or for outputs one point that makes the
# mean right.
CHAT = Independent(
    name="chat",
    prompt=Quantiles(
        (
            *((0, 2), (0.1, 207), (0.2, 388), (0.3, 420), (0.4, 998), (0.5, 1020), (0.6, 1068), (0.7, 1126)),
            *((0.8, 1201), (0.9, 2734.5), (0.99, 4142), (1, 14_050)),
        )
    ),
    output=Quantiles(((0, 7), (0.1, 54), (0.5, 129), (0.75, 395), (0.9, 424), (0.99, 601), (1, 1000))),
    coupling=1.15,
)

# The same source, code. Gaps come in bursts: their quantiles are those of its first 2,000 requests, in seconds.
CODE = Independent(
    name="code",
    prompt=Quantiles(
        (
            *((0, 3), (0.1, 147), (0.2, 349), (0.3, 729), (0.4, 1033), (0.5, 1469), (0.6, 1893), (0.7, 2436)),
            *((0.8, 3287), (0.9, 5187.6), (0.99, 7436), (1, 7437)),
        )
    ),
    output=Quantiles(
        (
            *((0, 6), (0.1, 7), (0.2, 8), (0.3, 9), (0.4, 11), (0.5, 13), (0.6, 16), (0.7, 19), (0.8, 27), (0.9, 55)),
            *((0.95, 91), (0.99, 251), (0.999, 400), (1, 1899)),
        )
    ),
    gap=Quantiles(
        (
            *((0, 1e-5), (0.05, 1e-4), (0.1, 3e-4), (0.2, 0.0018), (0.3, 0.0047), (0.4, 0.0263), (0.5, 0.0605)),
            *((0.6, 0.0932), (0.7, 0.1001), (0.8, 0.1555), (0.9, 0.2533), (0.95, 0.3975), (0.99, 2.3986)),
            *((0.995, 10.39), (0.999, 87.4), (1, 173.5)),
        )
    ),
)

# ServeGen, deepseek-r1 (Apache-2.0): quantiles of its clients, weighted by their rates.
REASONING = Independent(
    name="reasoning",
    prompt=Quantiles(
        (
            *((0, 8), (0.01, 9), (0.05, 13), (0.1, 18), (0.2, 29), (0.3, 57), (0.4, 113), (0.5, 208), (0.6, 266)),
            *((0.7, 406), (0.8, 748), (0.9, 2092), (0.95, 6714), (0.99, 23_423), (1, 57_284)),
        )
    ),
    output=Quantiles(
        (
            *((0, 100), (0.01, 141), (0.05, 225), (0.1, 287), (0.2, 387), (0.3, 470), (0.4, 582), (0.5, 792)),
            *((0.6, 1104), (0.7, 1367), (0.8, 1680), (0.9, 3432), (0.95, 5701), (0.99, 12_607), (1, 32_768)),
        )
    ),
)

_ALL: tuple[Workload, ...] = (CHAT, CODE, REASONING, AGENTS, FEW_SHOT)
WORKLOADS: Mapping[str, Workload] = {workload.name: workload for workload in _ALL}


def workload_named(name: str) -> Workload:
    """The workload model of that name.

    Raises:
      ValueError: no such model.
    """
    if name not in WORKLOADS:
        raise ValueError(f"a workload is one of {sorted(WORKLOADS)}; got {name!r}")
    return WORKLOADS[name]
