"""Hyperparameters of a decoder: frozen, hashable (usable as a static jit argument), validated on construction."""

from dataclasses import dataclass, field


def _require(holds: bool, name: str, value: object, rule: str) -> None:
    if not holds:
        raise ValueError(f"{name} {rule}. Got {value!r}.")


def _require_positive(config: object, name: str) -> None:
    value = getattr(config, name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int. Got {value!r}.")
    _require(value > 0, name, value, "must be positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Position interpolation: every rotary frequency is divided by `factor`."""

    factor: float

    def __post_init__(self) -> None:
        _require(self.factor > 0, "factor", self.factor, "must be positive")


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
        _require(self.factor > 0, "factor", self.factor, "must be positive")
        _require(self.low_freq_factor > 0, "low_freq_factor", self.low_freq_factor, "must be positive")
        _require(
            self.high_freq_factor > self.low_freq_factor,
            "high_freq_factor",
            self.high_freq_factor,
            f"must be above low_freq_factor={self.low_freq_factor}",
        )
        _require_positive(self, "original_max_positions")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding in the "rotate half" convention.

    Attributes:
        theta: base of the geometric series of frequencies.
        scaling: how the frequencies are changed for longer contexts; None leaves them.
    """

    theta: float = 10_000.0
    scaling: Llama3Scaling | LinearScaling | None = None

    def __post_init__(self) -> None:
        _require(self.theta > 0, "theta", self.theta, "must be positive")
        if not isinstance(self.scaling, None | Llama3Scaling | LinearScaling):
            raise TypeError(f"scaling must be None, Llama3Scaling or LinearScaling. Got {self.scaling!r}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A pre-norm decoder of the Llama family (SiLU gated MLP, RMSNorm, rotary positions, grouped queries).

    Attributes:
        vocab_size: number of token ids.
        hidden_size: width of the residual stream.
        intermediate_size: width of the gated MLP.
        num_layers: number of blocks of attention and MLP.
        num_heads: query heads; a multiple of `num_kv_heads`.
        num_kv_heads: key and value heads.
        head_dim: width of one head, even; need not be `hidden_size / num_heads`.
        rms_norm_eps: added to the mean square before the root.
        rope: rotary embedding.
        max_positions: context length in tokens; a token's position is below it.
        tie_embeddings: logits use the embedding matrix; there is then no `head/weight`.
        qkv_bias: the query, key and value projections have biases.
        out_bias: the attention output projection has a bias.
        mlp_bias: the three MLP projections have biases.
        qk_norm: each head of the queries and of the keys goes through an RMSNorm before the rotation.
        windows: for each layer the tokens that a query sees, itself included, or None for the whole context; None
            if every layer sees the whole context.
        rope_layers: for each layer whether it rotates queries and keys; None if every layer does.
        embedding_multiplier: multiplies the embeddings.
        residual_multiplier: multiplies what attention and MLP add to the residual stream.
        attention_scale: multiplies the attention scores; None is `head_dim ** -0.5`.
        logits_divisor: divides the logits.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = field(default_factory=RopeConfig)
    max_positions: int
    tie_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] | None = None
    rope_layers: tuple[bool, ...] | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_scale: float | None = None
    logits_divisor: float = 1.0

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_positions",
        ):
            _require_positive(self, name)
        multiple = self.num_heads % self.num_kv_heads == 0
        _require(multiple, "num_heads", self.num_heads, f"must be a multiple of {self.num_kv_heads=}")
        _require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "must be even (rotary halves)")
        _require(self.rms_norm_eps >= 0, "rms_norm_eps", self.rms_norm_eps, "must not be negative")
        for name in ("windows", "rope_layers"):
            value = getattr(self, name)
            rule = f"must be None or a tuple with a value for each of {self.num_layers} layers"
            _require(value is None or len(value) == self.num_layers, name, value, rule)
        for window in self.windows or ():
            _require(window is None or window > 0, "windows", self.windows, "must hold positive integers or None")
        _require(self.logits_divisor != 0, "logits_divisor", self.logits_divisor, "must not be 0")

    def window(self, layer: int) -> int | None:
        """Tokens that a query of the layer sees, itself included; None is the whole context."""
        return None if self.windows is None else self.windows[layer]

    def rotates(self, layer: int) -> bool:
        """Whether the layer applies rotary positions."""
        return self.rope_layers is None or self.rope_layers[layer]
