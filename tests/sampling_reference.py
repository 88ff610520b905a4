"""The sampler once more, in float64 NumPy, with a sort: the oracle of the sampling tests."""

from dataclasses import dataclass

import jax
import numpy as np

from cbjax.sampling import SamplingParams
from cbjax.sampling.lanes import LANES


@dataclass(frozen=True)
class Expected:
    """One row's distribution, and how far its top_p boundary is from a tie that rounding could tip.

    Attributes:
      probabilities: f64[vocab], after temperature, top_k and top_p.
      margin: relative distance of the nearest cumulative mass from what top_p asks for.
    """

    probabilities: np.ndarray
    margin: float

    @property
    def kept(self) -> np.ndarray:
        return self.probabilities > 0


def distribution(logits: np.ndarray, params: SamplingParams) -> Expected:
    """`params` applied to one row of finite or -inf logits, whichever `do_sample` is."""
    temperature = 1.0 if params.temperature is None else params.temperature
    logits = logits.astype(np.float64)
    scaled = (logits - logits.max()) / temperature
    order = np.argsort(-logits, kind="stable")
    kept = np.ones(len(logits), bool)
    if params.top_k not in (None, 0, -1) and params.top_k < len(logits):
        kept = logits >= logits[order[params.top_k - 1]]
    weights = np.where(kept, np.exp(scaled), 0.0)
    margin = 1.0
    if params.top_p not in (None, 1.0):
        values, first = np.unique(-logits[order], return_index=True)
        likelier = np.concatenate([[0.0], np.cumsum(weights[order])])[first]
        mass = likelier / weights.sum()
        top_p = float(np.float32(params.top_p))
        margin = np.abs(mass - top_p).min()
        weights = np.where(np.isin(-logits, values[mass < top_p]), weights, 0.0)
    return Expected(weights / weights.sum(), margin)


def draw(probabilities: np.ndarray, seed: int, output_index: int) -> tuple[int, float]:
    """The token of a seed and an index, and the distance from the next boundary that rounding could cross.

    Block first, then lane, by inverting cumulative sums at the two halves of jax's own threefry bits.
    """
    key = jax.random.wrap_key_data(np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32), impl="threefry2x32")
    halves = np.asarray(jax.random.key_data(jax.random.fold_in(key, output_index)))
    high, low = (halves >> 8).astype(np.float64) / 2**24
    blocks = np.pad(probabilities, (0, -len(probabilities) % LANES)).reshape(-1, LANES)
    block, block_margin = _invert(blocks.sum(1), high)
    lane, lane_margin = _invert(blocks[block] / blocks[block].sum(), low)
    return block * LANES + lane, min(block_margin, lane_margin)


def _invert(probabilities: np.ndarray, uniform: float) -> tuple[int, float]:
    cumulative = np.cumsum(probabilities)
    place = min(int(np.searchsorted(cumulative, uniform, side="right")), np.flatnonzero(probabilities)[-1])
    return place, np.abs(cumulative[probabilities > 0][:-1] - uniform).min(initial=1.0)
