"""Small fakes that ship with the product: a hashing device, tiny random models, a byte tokenizer."""

import importlib
from typing import TYPE_CHECKING

from cbjax.testing.byte_tokenizer import ByteTokenizer as ByteTokenizer
from cbjax.testing.history_hash import HistoryHashDevice as HistoryHashDevice
from cbjax.testing.history_hash import next_token as next_token
from cbjax.testing.history_hash import solo_run as solo_run

if TYPE_CHECKING:
    from cbjax.testing.tiny import tiny_llama as tiny_llama

__all__ = ["ByteTokenizer", "HistoryHashDevice", "next_token", "solo_run", "tiny_llama"]


def __getattr__(name: str):
    """`tiny_llama` when it is first used: the fakes do without the models and flax."""
    if name != "tiny_llama":
        raise AttributeError(f"module 'cbjax.testing' has no attribute {name!r}")
    return importlib.import_module("cbjax.testing.tiny").tiny_llama
