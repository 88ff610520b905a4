"""The tokenizer that the engine asks for, and the one over the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import tokenizers
from tokenizers import processors

from cbjax.text.chat import Message, render_chat

# A vocabulary that falls back to bytes has a token for each.
BYTE_TOKENS = tuple(f"<0x{byte:02X}>" for byte in range(256))


@runtime_checkable
class Tokenizer(Protocol):
    """Text to ids and back. Anything with these members serves.

    Attributes:
        vocab_size: ids are in [0, vocab_size).
        eos_token_ids: ids that end a text; may be empty.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`, with those that the tokenizer puts around it (BOS) if `add_special_tokens`."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        ...

    def chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        """Ids of a rendered conversation, without special tokens beyond those that the template writes."""
        ...


@runtime_checkable
class ByteFallback(Protocol):
    """What a `Detokenizer` asks of tokenizers whose vocabulary has tokens for single bytes ("<0xE2>").

    Attributes:
        byte_token_ids: ids of such tokens; a run of them is text only as a whole.
        special_token_ids: ids that `decode` leaves out with `skip_special_tokens`.
    """

    @property
    def byte_token_ids(self) -> frozenset[int]: ...

    @property
    def special_token_ids(self) -> frozenset[int]: ...


class HFTokenizer:
    """A `tokenizers.Tokenizer` with its chat template. Implements `Tokenizer` and `ByteFallback`.

    Special tokens written out in a text ("<|im_end|>") become those tokens, in prompts and in the content of
    chat messages alike, as transformers does unless told otherwise. Who serves users that are not trusted has
    to filter their messages.

    `decode` never removes spaces before punctuation (`clean_up_tokenization_spaces`, which transformers too
    ignores for BPE): text could then not be streamed.

    Args:
        backend: padding and truncation are switched off on it.
        special_tokens: role -> token, such as "bos_token" -> "<s>"; the chat template sees them, and the
            token of "eos_token" is among `eos_token_ids`.
        chat_template: jinja2 source, or None.
        eos_token_ids: further ids that end a text; negative ones are dropped.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        backend.no_padding()
        backend.no_truncation()
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        eos = self.special_tokens.get("eos_token")
        named = None if eos is None else backend.token_to_id(eos)
        self.eos_token_ids = tuple(sorted({id for id in (*eos_token_ids, named) if id is not None and id >= 0}))
        bytes_ = (backend.token_to_id(token) for token in BYTE_TOKENS)
        self.byte_token_ids = frozenset(id for id in bytes_ if id is not None)
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(id for id, token in added.items() if token.special)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """See `Tokenizer.encode`. Raises TypeError unless `text` is a str, ValueError for lone surrogates."""
        if not isinstance(text, str):
            raise TypeError(f"text must be a str. Got {text!r} of type {type(text).__name__}.")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"text must be Unicode that UTF-8 can encode: {error}.") from error
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The text that `chat` encodes. Raises as `cbjax.text.chat.render_chat`."""
        return render_chat(
            self.chat_template,
            messages,
            add_generation_prompt=add_generation_prompt,
            variables=self.special_tokens,
        )

    def chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        """Ids of `render(messages)`, as `apply_chat_template(tokenize=True)`: only the template writes BOS."""
        text = self.render(messages, add_generation_prompt=add_generation_prompt)
        return self.encode(text, add_special_tokens=False)


def surround(backend: tokenizers.Tokenizer, *, bos: str | None, eos: str | None) -> None:
    """Makes `backend` put the token `bos` before and `eos` after a text, where they are not None."""
    used = [
        {"id": name, "ids": [backend.token_to_id(token)], "tokens": [token]}
        for name, token in (("BOS", bos), ("EOS", eos))
        if token is not None
    ]
    pieces = [*(["BOS"] if bos is not None else []), "$A", *(["EOS"] if eos is not None else [])]
    backend.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=used)
