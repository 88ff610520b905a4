"""What a model family is: how it is known, how its configuration is read, where its tensors are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cbjax.models.config import DecoderConfig

type Transform = Callable[[np.ndarray, DecoderConfig], np.ndarray]
type Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRule:
    """The tensor `name` ("{i}" is the layer) holds a parameter, after `transform`.

    All shapes are checked before any tensor is read, so a transform that changes the shape has `stored_shape`.

    Attributes:
        name: of the tensor.
        transform: makes the parameter of the tensor; None: they are the same.
        stored_shape: the tensor's shape, from the parameter's; None: they are the same.
    """

    name: str
    transform: Transform | None = None
    stored_shape: Callable[[tuple[int, ...]], tuple[int, ...]] | None = None

    def expected_shape(self, parameter: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that the tensor of a parameter of that shape must have."""
        return parameter if self.stored_shape is None else self.stored_shape(parameter)


@dataclass(frozen=True, slots=True, kw_only=True)
class IgnoredTensor:
    """A tensor that checkpoints carry and the model does not need.

    Attributes:
        name: as in `TensorRule`.
        reason: why it may be left out.
        tied_only: it is ignored in models with tied embeddings only.
    """

    name: str
    reason: str
    tied_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NameTable:
    """Parameter path ("layers/{i}/attn/q/weight") -> rule, and the tensors to leave out.

    A rule is used only if the model has its parameter, so one table serves families with and without biases.
    """

    rules: Mapping[str, TensorRule]
    ignored: tuple[IgnoredTensor, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFForm:
    """How llama.cpp stores a family.

    Attributes:
        architecture: `general.architecture` of the file.
        read: (metadata, {tensor name: shape}, values of rope_freqs.weight or None) -> DecoderConfig.
        names: the name table.
    """

    architecture: str
    read: Callable[[Mapping[str, Any], Shapes, np.ndarray | None], DecoderConfig]
    names: NameTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model family.

    Attributes:
        hf_architecture: the entry of `architectures` in config.json.
        hf_model_type: `model_type` in config.json, used where `architectures` is absent.
        from_hf: config.json -> DecoderConfig.
        hf_names: the name table of Hugging Face checkpoints.
        gguf: its form in GGUF files; None if those have another family's.
    """

    hf_architecture: str
    hf_model_type: str
    from_hf: Callable[[Mapping[str, Any]], DecoderConfig]
    hf_names: NameTable
    gguf: GGUFForm | None
