"""Token ids to text, piece by piece.

The invariant: the pieces joined equal `tokenizer.decode(all ids)`, whatever the cut, and a replacement
character U+FFFD appears only where the bytes are invalid for good. A detokenizer sees generated ids only, so
nothing of a prompt can appear, and a prompt that ends within a character changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from cbjax.text.tokenizer import ByteFallback, Tokenizer

_REPLACEMENT = "\ufffd"
# Tokens that are decoded again at each call; more only cost time.
_MAX_WINDOW = 16


class Detokenizer:
    """Incremental `decode`.

    A window of recent ids is decoded again at each call and what is new in its text is returned. Text that
    could still change is held back: replacement characters at the end, which the next ids may complete, and a
    run of byte-fallback tokens, which decoders resolve as a whole. The window is cut only between characters,
    and always keeps tokens with text before the new ones, since some decoders treat the first token's leading
    space differently.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._held_ids: frozenset[int] = frozenset()
        if isinstance(tokenizer, ByteFallback) and tokenizer.byte_token_ids:
            skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
            self._held_ids = tokenizer.byte_token_ids | skipped
        self._window: list[int] = []
        self._cut = 0  # tokens of the window whose text had been returned at the last call but one
        self._returned = 0  # characters of the window's text that were returned

    def add(self, ids: Iterable[int]) -> str:
        """The text that `ids` make certain; "" while a character is incomplete."""
        self._window.extend(ids)
        end = len(self._window)
        while end and self._window[end - 1] in self._held_ids:
            end -= 1
        text = self._decode(self._window[:end])
        certain = text.rstrip(_REPLACEMENT)
        new = certain[self._returned :]
        self._returned = max(self._returned, len(certain))
        if new and certain == text and end == len(self._window):
            self._slide()
        return new

    def finish(self) -> str:
        """What was held back; an incomplete character is now U+FFFD. Call it once, at the end."""
        new = self._decode(self._window)[self._returned :]
        self._returned += len(new)
        return new

    def _slide(self) -> None:
        if len(self._window) > _MAX_WINDOW:
            self._window = self._window[self._cut :]
            self._returned = len(self._decode(self._window))
        self._cut = len(self._window)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)
