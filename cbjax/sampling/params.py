"""What one request asks of the sampler, checked once on the host and packed into words for the device.

NumPy only: the pure scheduler and the configuration import this module, so it never imports jax.
"""

import hashlib
import math
from dataclasses import dataclass
from numbers import Integral, Real

import numpy as np

EPSILON = 1e-6
"""Temperatures below this mean greedy: dividing by less would only rank what the maximum already ranks."""

NUM_WORDS = 6
WORD_FLAGS, WORD_TEMPERATURE, WORD_TOP_K, WORD_TOP_P, WORD_SEED_LOW, WORD_SEED_HIGH = range(NUM_WORDS)
FLAG_SAMPLED = 1
FLAG_LOGPROBS = 2

_MAX_TOP_K = 2**31 - 1
_FLOAT32 = np.finfo(np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling settings of one request; values are normalised to plain Python types when built.

    A sampled token is drawn after, in this order, temperature, top_k and top_p. Greedy requests ignore
    all three and the seed.

    Attributes:
      do_sample: False takes the most likely token (the lowest id among equals).
      temperature: divides the logits; None is 1.0, anything below `EPSILON` (so 0, too) is greedy.
      top_k: keeps the k largest logits and whatever ties with the last of them; None, 0, -1 or at least
        the vocabulary's size keeps all.
      top_p: keeps the fewest most likely tokens whose probability reaches this, in (0, 1], and whatever
        ties with the last of them; never none. None or 1.0 keeps all.
      seed: 64 bits, in [0, 2**64). Draws depend on the seed and the output index only.
      logprobs: whether the chosen token's logprob is wanted.

    Raises:
      TypeError: a value of the wrong type (bools and strings are not numbers).
      ValueError: a number outside the range above.
    """

    do_sample: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    logprobs: bool = False

    def __post_init__(self) -> None:
        checked = {
            "do_sample": _flag("do_sample", self.do_sample),
            "temperature": _temperature(self.temperature),
            "top_k": _top_k(self.top_k),
            "top_p": _top_p(self.top_p),
            "seed": _integer("seed", self.seed, 0, 2**64 - 1, "reduce it modulo 2**64"),
            "logprobs": _flag("logprobs", self.logprobs),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        """Whether the token is the most likely one, so that temperature, filters and seed are moot."""
        return not self.do_sample or (self.temperature is not None and self.temperature < EPSILON)

    def pack(self) -> np.ndarray:
        """The sampler words u32[NUM_WORDS]; `cbjax.sampling.settings.unpack` reads them on the device.

        What has no effect is written as "off" (1.0 or 0), so equal behaviour has equal words, but for the seed.
        """
        temperature, top_k, top_p = (1.0, 0, 1.0) if self.greedy else self._effective()
        words = np.zeros(NUM_WORDS, np.uint32)
        words[WORD_FLAGS] = FLAG_SAMPLED * (not self.greedy) + FLAG_LOGPROBS * self.logprobs
        words[WORD_TEMPERATURE] = _float_bits(temperature)
        words[WORD_TOP_K] = top_k
        words[WORD_TOP_P] = _float_bits(top_p)
        words[WORD_SEED_LOW] = self.seed & 0xFFFFFFFF
        words[WORD_SEED_HIGH] = self.seed >> 32
        return words

    def _effective(self) -> tuple[float, int, float]:
        temperature = 1.0 if self.temperature is None else self.temperature
        top_k = min(max(self.top_k or 0, 0), _MAX_TOP_K)
        # The smallest normal float stands for anything smaller, which the device would flush to zero.
        top_p = 1.0 if self.top_p is None else max(self.top_p, float(_FLOAT32.tiny))
        return temperature, top_k, top_p


def derive_seed(config_seed: int, submission_index: int) -> int:
    """The 64-bit seed of a request that was given none.

    BLAKE2b (RFC 7693, 8-byte digest) of both numbers in decimal, read as a little-endian integer: the same
    on every host and Python, and neighbouring inputs share nothing.

    Args:
      config_seed: the run's seed; any integer.
      submission_index: how many requests were submitted before this one; not negative.

    Raises:
      TypeError: an argument that is not an integer.
      ValueError: a negative submission index.
    """
    config_seed = _integer("config_seed", config_seed, None, None, "")
    submission_index = _integer("submission_index", submission_index, 0, None, "count submissions from 0")
    text = f"{config_seed}:{submission_index}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, person=b"cbjax-seed").digest(), "little")


def _temperature(value: object) -> float | None:
    if value is None:
        return None
    number = _real("temperature", value)
    if not 0.0 <= number <= float(_FLOAT32.max):
        raise ValueError(
            f"temperature must be a finite float32 of at least 0; got {value!r}. "
            "Use 0 for greedy, or leave it None for 1.0."
        )
    return number


def _top_k(value: object) -> int | None:
    if value is None:
        return None
    return _integer("top_k", value, -1, None, "use None, 0 or -1 to keep every token")


def _top_p(value: object) -> float | None:
    if value is None:
        return None
    number = _real("top_p", value)
    if not 0.0 < number <= 1.0:
        raise ValueError(
            f"top_p must lie in (0, 1]; got {value!r}. Use None or 1.0 to keep every token, do_sample=False for greedy."
        )
    return number


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be a bool; got {value!r} of type {type(value).__name__}. Pass True or False.")
    return bool(value)


def _real(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(
            f"{name} must be a real number or None; got {value!r} of type {type(value).__name__}. Convert it to float."
        )
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _integer(name: str, value: object, low: int | None, high: int | None, remedy: str) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer; got {value!r} of type {type(value).__name__}. Convert it to int.")
    number = int(value)
    if (low is not None and number < low) or (high is not None and number > high):
        bounds = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise ValueError(f"{name} must be {bounds}; got {number}: {remedy}.")
    return number


def _float_bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))
