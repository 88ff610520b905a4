"""A tokenizer without a vocabulary file: one token per byte of UTF-8, and two special ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cbjax.text.chat import Message

BOS, EOS = 256, 257


class ByteTokenizer:
    """Implements `cbjax.text.Tokenizer`: ids 0 to 255 are bytes, then come BOS and EOS.

    A text may be cut anywhere, also within a character: what is not UTF-8 decodes to U+FFFD. Special tokens have no
    text form in prompts, so no text can forge them.

    Attributes:
      vocab_size: 258. A model with more ids can be served, too: those further up have no text.
      bos_token_id, eos_token_id: 256 and 257.
      eos_token_ids: (257,).
    """

    vocab_size = 258
    bos_token_id, eos_token_id = BOS, EOS
    eos_token_ids = (EOS,)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """BOS, unless switched off, and the bytes of `text`."""
        return [BOS] * add_special_tokens + list(text.encode())

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of the bytes among `ids`; special tokens are left out, or written as <bos> and <eos>."""
        special = {} if skip_special_tokens else {BOS: b"<bos>", EOS: b"<eos>"}
        pieces = [bytes([id]) if id < BOS else special.get(id, b"") for id in ids]
        return b"".join(pieces).decode(errors="replace")

    def chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        """BOS, a line "role: content" for each message, and the beginning of the assistant's.

        Raises:
          TypeError: a message is not a mapping with both.
        """
        for message in messages:
            if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
                raise TypeError(f"a chat message is a mapping with 'role' and 'content'; got {message!r}")
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return self.encode("".join(lines) + "assistant:" * add_generation_prompt)
