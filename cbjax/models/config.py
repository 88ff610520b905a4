"""Hyperparameters of a decoder: frozen, hashable (usable as a static jit argument), validated on construction."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from cbjax.models.checks import require, require_positive_int
from cbjax.models.rope_config import RopeConfig

# "gelu_tanh" is the GELU's approximation by a tanh.
type Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts with biases and a clamped SwiGLU, in place of the gated MLP.

    Attributes:
        num_experts: experts of each layer, each as wide as `DecoderConfig.intermediate_size`.
        per_token: experts that a token goes through; their weights are the softmax of these experts' scores.
        alpha: the gate is `gate * sigmoid(alpha * gate)`.
        limit: the gate is clamped from above, the other branch from both sides, before the gate is applied.
    """

    num_experts: int
    per_token: int
    alpha: float
    limit: float

    def __post_init__(self) -> None:
        require_positive_int(self, "num_experts")
        require_positive_int(self, "per_token")
        require(self.per_token <= self.num_experts, "per_token", self.per_token, f"must be at most {self.num_experts=}")
        require(self.limit > 0, "limit", self.limit, "must be positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A pre-norm decoder (gated MLP or experts, RMSNorm, rotary positions, grouped queries).

    The defaults are a Llama's.

    Attributes:
        vocab_size: number of token ids.
        hidden_size: width of the residual stream.
        intermediate_size: width of the gated MLP.
        num_layers: number of blocks of attention and MLP.
        num_heads: query heads; a multiple of `num_kv_heads`.
        num_kv_heads: key and value heads.
        head_dim: width of one head, even; need not be `hidden_size / num_heads`.
        rms_norm_eps: added to the mean square before the root.
        norm_offset: added to the weights of every RMSNorm, in float32; 1 where checkpoints hold what exceeds 1.
        wide_norms: the product with an RMSNorm's weights is in float32 and rounded once, not in the model's dtype.
        post_norms: what attention and MLP add to the residual stream goes through an RMSNorm of its own before.
        rope: rotary embedding.
        local_rope: that of layers with a window; None if it is `rope`.
        max_positions: context length in tokens; a token's position is below it.
        tie_embeddings: logits use the embedding matrix; there is then no `head/weight`.
        qkv_bias: the query, key and value projections have biases.
        out_bias: the attention output projection has a bias.
        mlp_bias: the three MLP projections have biases.
        activation: of the gated MLP.
        experts: a mixture of experts in place of the gated MLP, which has neither `mlp_bias` nor `activation`; None if
            there is none.
        qk_norm: each head of the queries and of the keys goes through an RMSNorm before the rotation.
        windows: for each layer the tokens that a query sees, itself included, or None for the whole context; None
            if every layer sees the whole context.
        rope_layers: for each layer whether it rotates queries and keys; None if every layer does.
        sinks: each layer has a logit per query head that takes part in the softmax and has no value.
        embedding_multiplier: multiplies the embeddings.
        round_embedding_multiplier: that multiplier is rounded to the model's dtype before.
        residual_multiplier: multiplies what attention and MLP add to the residual stream.
        attention_scale: multiplies the attention scores; None is `head_dim ** -0.5`.
        attention_soft_cap: attention scores s become `cap * tanh(s / cap)`; None leaves them.
        logits_divisor: divides the logits.
        logits_soft_cap: the same for logits, after the division.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    norm_offset: float = 0.0
    wide_norms: bool = False
    post_norms: bool = False
    rope: RopeConfig = field(default_factory=RopeConfig)
    local_rope: RopeConfig | None = None
    max_positions: int
    tie_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    activation: Activation = "silu"
    experts: ExpertsConfig | None = None
    qk_norm: bool = False
    windows: tuple[int | None, ...] | None = None
    rope_layers: tuple[bool, ...] | None = None
    sinks: bool = False
    embedding_multiplier: float = 1.0
    round_embedding_multiplier: bool = False
    residual_multiplier: float = 1.0
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    logits_divisor: float = 1.0
    logits_soft_cap: float | None = None

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
            require_positive_int(self, name)
        multiple = self.num_heads % self.num_kv_heads == 0
        require(multiple, "num_heads", self.num_heads, f"must be a multiple of {self.num_kv_heads=}")
        require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "must be even (rotary halves)")
        require(self.rms_norm_eps >= 0, "rms_norm_eps", self.rms_norm_eps, "must not be negative")
        for name in ("windows", "rope_layers"):
            value = getattr(self, name)
            rule = f"must be None or a tuple with a value for each of {self.num_layers} layers"
            require(value is None or len(value) == self.num_layers, name, value, rule)
        for window in self.windows or ():
            require(window is None or window > 0, "windows", self.windows, "must hold positive integers or None")
        require(self.logits_divisor != 0, "logits_divisor", self.logits_divisor, "must not be 0")
        for name in ("attention_soft_cap", "logits_soft_cap"):
            value = getattr(self, name)
            require(value is None or value > 0, name, value, "must be None or positive")
        known = get_args(Activation.__value__)
        require(self.activation in known, "activation", self.activation, f"must be one of {', '.join(known)}")

    def window(self, layer: int) -> int | None:
        """Tokens that a query of the layer sees, itself included; None is the whole context."""
        return None if self.windows is None else self.windows[layer]

    def rotates(self, layer: int) -> bool:
        """Whether the layer applies rotary positions."""
        return self.rope_layers is None or self.rope_layers[layer]

    def layer_rope(self, layer: int) -> RopeConfig:
        """The rotary embedding of the layer, if it `rotates`."""
        return self.rope if self.local_rope is None or self.window(layer) is None else self.local_rope
