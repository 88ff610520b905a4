"""The table of families, and how a checkpoint's is found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cbjax.models.families.family import Family, GGUFForm
from cbjax.models.families.gemma import GEMMA2, GEMMA3
from cbjax.models.families.gpt_oss import GPT_OSS
from cbjax.models.families.granite import GRANITE
from cbjax.models.families.llama import LLAMA, MISTRAL
from cbjax.models.families.qwen import QWEN2, QWEN3
from cbjax.models.families.reading import unsupported
from cbjax.models.families.smollm3 import SMOLLM3

FAMILIES: tuple[Family, ...] = (LLAMA, MISTRAL, QWEN2, QWEN3, GRANITE, SMOLLM3, GEMMA2, GEMMA3, GPT_OSS)


def family_of_hf(config: Mapping[str, Any]) -> Family:
    """The family of a config.json. Raises ValueError for an architecture that is not in the table."""
    architectures = config.get("architectures") or []
    for family in FAMILIES:
        if family.hf_architecture in architectures:
            return family
        if not architectures and config.get("model_type") == family.hf_model_type:
            return family
    got = architectures or config.get("model_type")
    raise unsupported("architecture", got, [family.hf_architecture for family in FAMILIES])


def form_of_gguf(metadata: Mapping[str, Any]) -> GGUFForm:
    """How the model of a GGUF file is stored. Raises ValueError for an architecture that is not in the table."""
    forms = {family.gguf.architecture: family.gguf for family in FAMILIES if family.gguf}
    architecture = metadata.get("general.architecture")
    if architecture not in forms:
        raise unsupported("GGUF general.architecture", architecture, list(forms))
    return forms[architecture]
