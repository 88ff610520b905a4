"""Incremental detokenisation. B34: pieces joined equal the whole decoded at once, and nothing is shown too early."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import byte_fallback_tokenizer, byte_id, byte_level_tokenizer

from cbjax.text import Detokenizer, HFTokenizer

BYTE_LEVEL = byte_level_tokenizer()
BYTE_FALLBACK = byte_fallback_tokenizer()
both = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte_level", "byte_fallback"])


def pieces(tokenizer: HFTokenizer, chunks: Sequence[Sequence[int]], **kwargs: bool) -> list[str]:
    """What `add` returns for each chunk, and last what `finish` returns."""
    detokenizer = Detokenizer(tokenizer, **kwargs)
    return [*(detokenizer.add(chunk) for chunk in chunks), detokenizer.finish()]


def ids_of(tokenizer: HFTokenizer, raw: bytes) -> list[list[int]]:
    return [[byte_id(tokenizer, byte)] for byte in raw]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"\xc4\x8f", ["", "ď", ""]),
        (b"\xf0\x9f\x98\x80", ["", "", "", "😀", ""]),
        (b"\xff", ["", "\ufffd"]),
        (b"\xe2", ["", "\ufffd"]),  # cut after one byte of three
        (b"\xe2\x82a", ["", "", "\ufffda", ""]),  # what cannot become a character any more is shown
        (b"a\xffb", ["a", "", "\ufffdb", ""]),
        (b"\x82\xacb", ["", "", "\ufffd\ufffdb", ""]),  # continues no character of this text
        (b"\xef\xbf\xbd!", ["", "", "", "\ufffd!", ""]),  # U+FFFD itself
    ],
)
def test_b34_byte_level(raw: bytes, expected: list[str]) -> None:
    assert pieces(BYTE_LEVEL, ids_of(BYTE_LEVEL, raw)) == expected


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"\xc4\x8f", ["", "", "ď"]),
        (b"\xf0\x9f\x98\x80", ["", "", "", "", "😀"]),
        (b"\xff", ["", "\ufffd"]),
        # One invalid byte spoils the whole run for the decoder, so no part of a run is shown before its end.
        (b"\xc4\x8f\xff", ["", "", "", "\ufffd\ufffd\ufffd"]),
    ],
)
def test_b34_byte_fallback(raw: bytes, expected: list[str]) -> None:
    assert pieces(BYTE_FALLBACK, ids_of(BYTE_FALLBACK, raw)) == expected


def test_b34_a_space_while_bytes_pend() -> None:
    space = BYTE_LEVEL.encode(" the", add_special_tokens=False)
    chunks = [*ids_of(BYTE_LEVEL, b"\xf0\x9f"), space]
    assert pieces(BYTE_LEVEL, chunks) == ["", "", "\ufffd the", ""]
    space = [BYTE_FALLBACK.backend.token_to_id("▁he")]
    chunks = [*ids_of(BYTE_FALLBACK, b"\xf0\x9f"), space]
    assert pieces(BYTE_FALLBACK, chunks) == ["", "", "\ufffd\ufffd he", ""]


@both
def test_b34_a_prompt_that_ends_within_a_character_is_never_shown(tokenizer: HFTokenizer) -> None:
    prompt, generated = ids_of(tokenizer, b"\xe2\x82"), ids_of(tokenizer, b"\xaca")
    assert tokenizer.decode([id for chunk in prompt + generated for id in chunk]) in ("€a", "€", "€ a")
    text = "".join(pieces(tokenizer, generated))
    assert text == tokenizer.decode([id for chunk in generated for id in chunk])
    assert "€" not in text


@both
def test_a_space_at_the_start_is_dropped_once_only(tokenizer: HFTokenizer) -> None:
    written = " ".join(["a", "", "b", "he"] * 12)
    ids = tokenizer.encode(written, add_special_tokens=False)
    text = pieces(tokenizer, [[id] for id in ids])
    assert "".join(text) == tokenizer.decode(ids) == written
    assert text[-1] == ""


@both
@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens(tokenizer: HFTokenizer, skip: bool) -> None:
    special = tokenizer.backend.token_to_id("<|user|>")
    ids = [special, *tokenizer.encode(" he", add_special_tokens=False), special, special]
    ids += [byte_id(tokenizer, 0xC4), special, byte_id(tokenizer, 0x8F)]
    text = "".join(pieces(tokenizer, [[id] for id in ids], skip_special_tokens=skip))
    assert text == tokenizer.decode(ids, skip_special_tokens=skip)
    assert ("<|user|>" in text) != skip
    assert ("ď" in text) == skip


def chunked(ids: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    chunks, start = [], 0
    for size in sizes:
        chunks.append(list(ids[start : start + size]))
        start += size
    return [*chunks, list(ids[start:])]


some_text = st.text(alphabet="a he\n日é🎉\ufffd12.", max_size=30).map(str.encode) | st.binary(max_size=8)


def as_ids(tokenizer: HFTokenizer, parts: Sequence[bytes | int]) -> list[int]:
    """Text that is UTF-8 through the tokenizer, other bytes one by one, ints as ids."""
    ids: list[int] = []
    for part in parts:
        if isinstance(part, int):
            ids.append(part % tokenizer.vocab_size)
            continue
        try:
            ids += tokenizer.encode(part.decode(), add_special_tokens=False)
        except UnicodeDecodeError:
            ids += [byte_id(tokenizer, byte) for byte in part]
    return ids


@both
@settings(deadline=None)
@given(
    parts=st.lists(some_text | st.integers(0, 10_000), max_size=12),
    sizes=st.lists(st.integers(0, 4), max_size=60),
    skip=st.booleans(),
)
def test_b34_any_ids_in_any_chunks(
    tokenizer: HFTokenizer, parts: list[bytes | int], sizes: list[int], skip: bool
) -> None:
    ids = as_ids(tokenizer, parts)
    text = pieces(tokenizer, chunked(ids, sizes), skip_special_tokens=skip)
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(text) == whole
    shown = "".join(text[:-1])
    assert whole.startswith(shown)
    assert not shown.endswith("\ufffd")


def test_a_long_text_costs_a_window_per_token() -> None:
    decoded: list[int] = []

    class Counting:
        vocab_size, eos_token_ids = BYTE_LEVEL.vocab_size, ()
        encode: Callable[..., list[int]] = BYTE_LEVEL.encode
        chat: Callable[..., list[int]] = BYTE_LEVEL.chat

        def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
            decoded.append(len(ids))
            return BYTE_LEVEL.decode(ids, skip_special_tokens=skip_special_tokens)

    text = "the cat sat on the 日本 mat 🎉 " * 100
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False)
    detokenizer = Detokenizer(Counting())
    assert "".join(detokenizer.add([id]) for id in ids) + detokenizer.finish() == text
    assert max(decoded) < 40 < len(ids)
