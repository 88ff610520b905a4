"""Other libraries' tokenizers as ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tokenizers

from cbjax.text.chat import Message
from cbjax.text.tokenizer import BYTE_TOKENS, HFTokenizer, Tokenizer


def as_tokenizer(obj: Any) -> Tokenizer:
    """`obj` as a `Tokenizer`: one already, a `tokenizers.Tokenizer`, or a transformers tokenizer.

    Raises:
        TypeError: it is none of these.
    """
    if isinstance(obj, tokenizers.Tokenizer):
        return HFTokenizer(obj)
    if hasattr(obj, "apply_chat_template") and hasattr(obj, "get_vocab"):
        return TransformersTokenizer(obj)
    if isinstance(obj, Tokenizer):
        return obj
    raise TypeError(
        "A tokenizer must have encode, decode, chat, vocab_size and eos_token_ids (cbjax.text.Tokenizer), or "
        f"be a tokenizers.Tokenizer or a transformers tokenizer. Got {type(obj).__name__}."
    )


class TransformersTokenizer:
    """A transformers tokenizer, fast or slow, as `Tokenizer` and `ByteFallback`. Imports no transformers.

    Attributes:
        tokenizer: the tokenizer; changes to it after this object was made may not be seen.
        vocab_size, eos_token_ids, byte_token_ids, special_token_ids: see the protocols.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = len(tokenizer)  # its own `vocab_size` leaves out added tokens
        eos = tokenizer.eos_token_id
        ids = eos if isinstance(eos, list | tuple) else (eos,)
        self.eos_token_ids = tuple(id for id in ids if id is not None and id >= 0)
        vocabulary = tokenizer.get_vocab()
        self.byte_token_ids = frozenset(vocabulary[token] for token in BYTE_TOKENS if token in vocabulary)
        # `all_special_ids` has those with a role only; decoding skips all that are marked special.
        marked = (id for id, token in tokenizer.added_tokens_decoder.items() if token.special)
        self.special_token_ids = frozenset(tokenizer.all_special_ids).union(marked)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
        return self.encode(text, add_special_tokens=False)
