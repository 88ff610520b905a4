"""`CausalLM`: a model with its weights and tokenizer, and everything the engine can do with it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
from flax import nnx

from cbjax.attention import Attend, DenseAttend, LayerSpec, record_layers
from cbjax.config import GenerationConfig
from cbjax.mixin import ContinuousMixin
from cbjax.step import Bind, Model
from cbjax.strict import check_int

if TYPE_CHECKING:
    from cbjax.models import DecoderConfig
    from cbjax.text import Tokenizer


class CausalLM(ContinuousMixin):
    """A servable model.

    Made by `from_pretrained`, `from_config` (random weights) or `from_module` (a Flax module of one's own).

    Attributes:
      bind: from parameters to the model that holds them; called inside traces.
      params: nested dict of arrays, an argument of every step. Assigning one of the same shapes takes effect at the
        next call and compiles nothing; for a running manager at the next request, and it is refused (RuntimeError)
        while the manager has requests that have not ended.
      layers: what each layer's `attend` call asks of the KV store.
      vocab_size, max_positions: in ids and tokens.
      dtype: of keys and values.
      config: the decoder's, None for a module of one's own.
      description: all that decides how `bind`'s model is traced, if that is cbjax's code alone; else empty.
    """

    def __init__(
        self,
        bind: Bind,
        params: dict[Any, Any],
        *,
        max_positions: int,
        dtype: jax.typing.DTypeLike = jnp.float32,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: tuple[int, ...] = (),
        generation_config: GenerationConfig | None = None,
        config: DecoderConfig | None = None,
        source: str = "",
        description: str = "",
    ) -> None:
        super().__init__()
        self.bind, self._params = bind, params
        self.max_positions, self.dtype = max_positions, jnp.dtype(dtype)
        self.tokenizer = tokenizer
        self.generation_config = generation_config or GenerationConfig()
        self.config, self.source, self.description = config, source, description
        self.layers, self.vocab_size = _shapes_of(bind(params))
        # A checkpoint may name ids that its vocabulary lacks; they could never be drawn.
        self.eos_token_ids = tuple(id for id in eos_token_ids if 0 <= id < self.vocab_size)

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        *,
        dtype: str = "float32",
        revision: str | None = None,
        token: str | bool | None = None,
        progress_bar: bool = False,
    ) -> CausalLM:
        """Loads a checkpoint: "demo", a Hugging Face folder, a .gguf file, or a repository of the hub.

        Args:
          source: of the hub, "org/name", or "org/name/file.gguf" for a GGUF file in it.
          dtype: "float32" or "bfloat16", of weights, activations and KV store.
          revision: of the hub: a branch, tag or commit; None: "main".
          token: of the hub: for private and gated repositories; None: the saved one, if any; False: none.
          progress_bar: show progress of downloading and loading.

        Raises:
          FileNotFoundError, ValueError, PermissionError, ConnectionError, RuntimeError: as `cbjax.checkpoints.load`.
        """
        from cbjax.checkpoints import load
        from cbjax.models import build

        checkpoint = load(source, dtype=dtype, revision=revision, token=token, progress=progress_bar)
        graphdef = build(checkpoint.config, dtype)
        defaults = checkpoint.generation
        return cls(
            lambda params: nnx.merge(graphdef, params),
            checkpoint.params,
            max_positions=checkpoint.config.max_positions,
            dtype=dtype,
            tokenizer=checkpoint.tokenizer,
            eos_token_ids=checkpoint.eos_token_ids,
            generation_config=_generation_config(defaults),
            config=checkpoint.config,
            source=checkpoint.source,
            description=_description(checkpoint.config, dtype),
        )

    @classmethod
    def from_config(
        cls, config: DecoderConfig, *, dtype: str = "float32", seed: int = 0, tokenizer: Tokenizer | None = None
    ) -> CausalLM:
        """A decoder with random weights: for tests, benchmarks, and training from scratch."""
        from cbjax.models import build, init_params

        graphdef = build(config, dtype)
        return cls(
            lambda params: nnx.merge(graphdef, params),
            init_params(config, dtype, seed),
            max_positions=config.max_positions,
            dtype=dtype,
            tokenizer=tokenizer,
            eos_token_ids=tokenizer.eos_token_ids if tokenizer else (),
            config=config,
            description=_description(config, dtype),
        )

    @classmethod
    def from_module(
        cls,
        module: nnx.Module,
        *,
        max_positions: int,
        dtype: jax.typing.DTypeLike = jnp.float32,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: tuple[int, ...] = (),
    ) -> CausalLM:
        """Serves a Flax module that has `hidden` and `logits` as `cbjax.step.Model` says.

        The module is split, not kept: change `params` (its `nnx.Param`s) to serve new weights. docs/your_own_model.md
        has a whole example.

        Raises:
          TypeError: the module is no such module.
          ValueError: `max_positions` is not positive, or a layer does not call `attend` as its contract says.
        """
        wanting = [name for name in ("hidden", "logits") if not callable(getattr(module, name, None))]
        if not isinstance(module, nnx.Module) or wanting:
            lacks = f" without {' and '.join(wanting)}" if wanting else ""
            raise TypeError(
                "module must be a flax.nnx.Module with the methods hidden(tokens, positions, attend) and "
                f"logits(hidden); got a {type(module).__name__}{lacks}"
            )
        check_int("max_positions", max_positions, minimum=1)
        graphdef, params, rest = nnx.split(module, nnx.Param, ...)
        return cls(
            lambda params: cast(Model, nnx.merge(graphdef, params, rest)),
            nnx.to_pure_dict(params),
            max_positions=max_positions,
            dtype=dtype,
            tokenizer=tokenizer,
            eos_token_ids=eos_token_ids,
        )

    @property
    def params(self) -> dict[Any, Any]:
        return self._params

    @params.setter
    def params(self, params: dict[Any, Any]) -> None:
        from cbjax.models import check_same_params

        params = nnx.to_pure_dict(params) if isinstance(params, nnx.State) else params
        check_same_params(self._params, params)
        with self._changing_weights():
            self._params = params

    def forward(self, params: dict[Any, Any], tokens: jax.Array) -> jax.Array:
        """Dense causal logits of one sequence, i32[tokens] -> f32[tokens, vocab]; pure, for training or as oracle."""
        positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        model = self.bind(params)
        return model.logits(model.hidden(tokens, positions, DenseAttend(positions)))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """`forward` with the model's own weights."""
        return jax.jit(self.forward)(self.params, jnp.asarray(tokens, jnp.int32))


def _description(config: DecoderConfig, dtype: str) -> str:
    return f"{config!r} in {dtype}"


def _shapes_of(model: Model) -> tuple[tuple[LayerSpec, ...], int]:
    """Layers and vocabulary size, from one trace."""
    widths = []

    def logits(tokens: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
        result = model.logits(model.hidden(tokens, positions, attend))
        widths.append(result.shape[-1])
        return result

    return record_layers(logits), widths[0]


def _generation_config(defaults) -> GenerationConfig:
    """A checkpoint's own defaults; where it says nothing, ours."""
    sampled = defaults.do_sample is True
    return GenerationConfig(
        max_new_tokens=defaults.max_new_tokens or GenerationConfig().max_new_tokens,
        do_sample=sampled,
        temperature=defaults.temperature if sampled else None,
        top_k=defaults.top_k if sampled else None,
        top_p=defaults.top_p if sampled else None,
    )
