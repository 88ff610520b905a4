"""Hyperparameters of rotary position embedding: frozen, hashable, validated on construction."""

from dataclasses import dataclass

from cbjax.models.checks import require, require_positive_int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Position interpolation: every rotary frequency is divided by `factor`."""

    factor: float

    def __post_init__(self) -> None:
        require(self.factor > 0, "factor", self.factor, "must be positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's scaling: long wavelengths are stretched by `factor`, short ones kept, the middle blended.

    Attributes:
        factor: divisor of the lowest frequencies.
        low_freq_factor: wavelengths above `original_max_positions / low_freq_factor` are stretched in full.
        high_freq_factor: wavelengths below `original_max_positions / high_freq_factor` are left alone.
        original_max_positions: context length of the unscaled model, in tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def __post_init__(self) -> None:
        require(self.factor > 0, "factor", self.factor, "must be positive")
        require(self.low_freq_factor > 0, "low_freq_factor", self.low_freq_factor, "must be positive")
        require(
            self.high_freq_factor > self.low_freq_factor,
            "high_freq_factor",
            self.high_freq_factor,
            f"must be above low_freq_factor={self.low_freq_factor}",
        )
        require_positive_int(self, "original_max_positions")


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): pairs that turn seldom are stretched by `factor`, pairs that turn often are kept, and
    between the two the blend is linear in the pair's number; cosines and sines are multiplied by `attention_factor`.

    Attributes:
        factor: divisor of the lowest frequencies.
        original_max_positions: context length of the unscaled model, in tokens.
        beta_fast: pairs with more turns than that in the original context are left alone.
        beta_slow: pairs with fewer turns than that are stretched in full.
        attention_factor: multiplies cosines and sines.
        truncate: the ends of the blend are rounded outwards to whole pairs.
    """

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        for name in ("factor", "beta_slow", "attention_factor"):
            require(getattr(self, name) > 0, name, getattr(self, name), "must be positive")
        require(self.beta_fast >= self.beta_slow, "beta_fast", self.beta_fast, f"must be at least {self.beta_slow=}")
        require_positive_int(self, "original_max_positions")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding in the "rotate half" convention.

    Attributes:
        theta: base of the geometric series of frequencies.
        scaling: how the frequencies are changed for longer contexts; None leaves them.
    """

    theta: float = 10_000.0
    scaling: Llama3Scaling | LinearScaling | YarnScaling | None = None

    def __post_init__(self) -> None:
        require(self.theta > 0, "theta", self.theta, "must be positive")
        if not isinstance(self.scaling, None | Llama3Scaling | LinearScaling | YarnScaling):
            raise TypeError(
                f"scaling must be None, Llama3Scaling or LinearScaling, or YarnScaling. Got {self.scaling!r}."
            )
        if isinstance(self.scaling, YarnScaling):
            require(self.theta > 1, "theta", self.theta, "must be above 1 for YarnScaling")
