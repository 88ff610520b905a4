"""Sessions: conversations of agents or people whose history is sent again with every turn."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cbjax.simulate.building import trace_of_arrays
from cbjax.simulate.quantiles import Quantiles
from cbjax.simulate.trace import Trace, arrivals

_SYSTEM = 0  # the segment that all prompts begin with


@dataclass(frozen=True, slots=True, kw_only=True)
class Sessions:
    """Turns that begin with all of what was said before, and sessions that begin with one system prompt.

    A turn's prompt is the system prompt with its tools, the opening, and for each turn before it the answer and the
    next message.

    Attributes:
      name: of the model.
      system_tokens: of the system prompt.
      opening, message, output: tokens of what comes first, what comes before each later turn, and of the answers.
      pause: seconds between the arrivals of two turns.
      continues: probability that another turn follows.
    """

    name: str
    system_tokens: int
    opening: Quantiles
    message: Quantiles
    output: Quantiles
    pause: Quantiles
    continues: float

    def sample(self, num_requests: int, *, rate: float | None = None, seed: int = 0) -> Trace:
        """See `cbjax.simulate.workloads.Workload.sample`; the rate is that of turns, once sessions overlap.

        Sessions begin as a Poisson process; without a rate all begin at once.
        """
        rng = np.random.default_rng(seed)
        # As many sessions as requests are always enough, and no later one could come before the last request.
        began = arrivals(rng, num_requests, None if rate is None else rate * (1 - self.continues))
        turns = rng.geometric(1 - self.continues, num_requests)
        ends = np.cumsum(turns)
        session = np.repeat(np.arange(num_requests), turns)
        turn = np.arange(ends[-1]) - np.repeat(ends - turns, turns)  # from 0
        said = np.where(turn == 0, self.opening.tokens(rng.random(ends[-1])), self.message.tokens(rng.random(ends[-1])))
        output = self.output.tokens(rng.random(ends[-1]))
        paused = _since_first(np.where(turn == 0, 0.0, self.pause.at(rng.random(ends[-1]))), turn)
        arrival = began[session] + paused
        order = np.argsort(arrival, kind="stable")[:num_requests]
        return self._trace(arrival, turn, said, output, order)

    def _trace(
        self, arrival: np.ndarray, turn: np.ndarray, said: np.ndarray, output: np.ndarray, order: np.ndarray
    ) -> Trace:
        """The requests `order` of all turns, which are given session by session."""
        # Of all turns: segment 1 + 2q is what turn q was asked, 2 + 2q is what it answered.
        both = np.stack([said, output], axis=1).ravel()
        # A prompt's segments lie together, from its session's opening up to its own message; before them the system's.
        sizes = 2 * turn[order] + 2
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        place = np.arange(offsets[-1]) - np.repeat(offsets[:-1], sizes)
        ids = np.where(place == 0, _SYSTEM, np.repeat(2 * (order - turn[order]), sizes) + place)
        tokens = np.where(place == 0, self.system_tokens, both[np.maximum(ids - 1, 0)])
        return trace_of_arrays(
            self.name,
            arrival=arrival[order],
            prompt_tokens=np.add.reduceat(tokens, offsets[:-1]),
            output_tokens=output[order],
            offsets=offsets,
            segment_ids=ids,
            segment_tokens=tokens,
            output_ids=2 * order + 2,
        )


def _since_first(steps: np.ndarray, turn: np.ndarray) -> np.ndarray:
    """f64[turns], the sum of a session's steps up to each turn."""
    total = np.cumsum(steps)
    first = np.arange(len(turn)) - turn
    return total - total[first]


# Mooncake, conversation (Qin et al., FAST 2025; Apache-2.0). Outputs are the trace's; sessions are as its first 2,000
# requests show them by the identity of their blocks, and all begin with the same 880 or so tokens. Openings and the
# probability to go on are such that prompt lengths and what can be found again are the whole trace's.
AGENTS = Sessions(
    name="agents",
    system_tokens=880,
    opening=Quantiles(
        (
            *((0, 11), (0.1, 39), (0.2, 430), (0.3, 1730), (0.4, 3600), (0.5, 5000), (0.6, 7200), (0.7, 10_300)),
            *((0.8, 14_600), (0.9, 23_200), (0.99, 81_000), (1, 122_009)),
        )
    ),
    message=Quantiles(
        (
            *((0, 1), (0.2, 6), (0.3, 9), (0.4, 13), (0.5, 20), (0.6, 34), (0.7, 117), (0.8, 730), (0.9, 4278)),
            *((0.95, 8234), (0.99, 21_723), (1, 41_611)),
        )
    ),
    output=Quantiles(
        ((0, 1), (0.1, 24), (0.2, 107), (0.3, 225), (0.4, 310), (0.5, 350), (0.9, 597), (0.99, 1118), (1, 2000))
    ),
    pause=Quantiles(
        ((0, 3), (0.01, 15), (0.05, 27), (0.1, 38), (0.2, 54), (0.3, 66), (0.5, 99), (0.7, 161), (0.9, 298), (1, 594))
    ),
    continues=0.39,
)
