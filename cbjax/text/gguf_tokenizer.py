"""Rebuilds a tokenizer from a GGUF file's metadata.

A GGUF file names its pre-tokenizer (`tokenizer.ggml.pre`) instead of describing it; the table here says what
each name means, after llama.cpp's `llama-vocab.cpp` and the `tokenizer.json` files that the names stand for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from cbjax.text.tokenizer import HFTokenizer, surround

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # of tokenizer.ggml.token_type
_SPACE = "\u2581"  # SentencePiece's visible space

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _PreTokenizer:
    """What a name of `tokenizer.ggml.pre` means.

    Attributes:
        names: the names.
        splits: regular expressions that cut the text one after another; each match is a piece, and so is the
            text between two matches.
        nfc: the text is normalised first.
        whole_words: a piece that is a token is not merged from its parts.
        adds_bos: default of `tokenizer.ggml.add_bos_token`.
    """

    names: tuple[str, ...]
    splits: tuple[str, ...]
    nfc: bool = False
    whole_words: bool = False
    adds_bos: bool = False


_PRE_TOKENIZERS = (
    _PreTokenizer(names=("gpt-2", "mpt", "olmo"), splits=(_GPT2,)),
    _PreTokenizer(names=("smollm", "starcoder", "refact", "command-r", "codeshell"), splits=(r"\p{N}", _GPT2)),
    _PreTokenizer(names=("llama-bpe", "llama-v3", "llama3"), splits=(_LLAMA3,), whole_words=True, adds_bos=True),
    _PreTokenizer(names=("qwen2",), splits=(_QWEN2,), nfc=True),
    # llama.cpp's choice for files that name none.
    _PreTokenizer(names=("default",), splits=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
)
_BY_NAME = {name: pre for pre in _PRE_TOKENIZERS for name in pre.names}


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> HFTokenizer | None:
    """The tokenizer that the `tokenizer.*` keys describe, or None where there are none.

    Control tokens are cut out of a text before anything else and skipped in decoding; user-defined tokens are
    cut out and kept.

    Raises:
        ValueError: keys are missing or contradict each other, or the model or pre-tokenizer is not supported.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model is None:
        return None
    builders = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}
    if model not in builders:
        raise ValueError(f"Unsupported tokenizer.ggml.model: {model!r}. Supported: {', '.join(builders)}.")
    tokens: list[str] = _required(metadata, "tokens")
    types: list[int] = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    _require_one_each("token types", types, tokens)
    backend, adds_bos = builders[model](metadata, tokens, types)
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        chosen = [token for token, of_kind in zip(tokens, types, strict=True) if of_kind == kind]
        backend.add_tokens([AddedToken(token, special=special, normalized=False) for token in chosen])
    special_tokens = _special_tokens(metadata, tokens)
    surround(
        backend,
        bos=special_tokens.get("bos_token") if _flag(metadata, "add_bos_token", adds_bos) else None,
        eos=special_tokens.get("eos_token") if _flag(metadata, "add_eos_token", False) else None,
    )
    return HFTokenizer(
        backend,
        special_tokens=special_tokens,
        chat_template=metadata.get("tokenizer.chat_template"),
        eos_token_ids=[metadata.get(f"tokenizer.ggml.{key}_token_id", -1) for key in ("eos", "eot", "eom")],
    )


def _byte_level_bpe(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> tuple[Tokenizer, bool]:
    """Returns (tokenizer, whether it adds BOS unless the file says otherwise)."""
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in _BY_NAME:
        raise ValueError(f"Unsupported tokenizer.ggml.pre: {name!r}. Supported: {', '.join(_BY_NAME)}.")
    pre = _BY_NAME[name]
    merges = [tuple(merge.split(" ")) for merge in _required(metadata, "merges")]
    if any(len(merge) != 2 for merge in merges):
        raise ValueError("Each of tokenizer.ggml.merges must be two tokens with a space between.")
    try:
        bpe = models.BPE(vocab=_vocabulary(tokens), merges=merges, ignore_merges=pre.whole_words)
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"tokenizer.ggml.merges do not fit tokenizer.ggml.tokens: {error}.") from error
    backend = Tokenizer(bpe)
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=_flag(metadata, "add_space_prefix", False), use_regex=False)
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.splits]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend, pre.adds_bos


def _sentencepiece_bpe(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> tuple[Tokenizer, bool]:
    """SentencePiece merges the neighbours whose union has the best score: scores become the merges' order.

    As in llama.cpp, `add_space_prefix` puts a space before a text and after each special token in it.

    Returns (tokenizer, whether it adds BOS unless the file says otherwise).
    """
    scores: list[float] = _required(metadata, "scores")
    _require_one_each("scores", scores, tokens)
    vocabulary = _vocabulary(tokens)
    pieces = {token for token, kind in zip(tokens, types, strict=True) if kind in (_NORMAL, _USER_DEFINED)}
    merges = [
        (token[:cut], token[cut:])
        for token in pieces
        for cut in range(1, len(token))
        if token[:cut] in pieces and token[cut:] in pieces
    ]
    merges.sort(key=lambda pair: (-scores[vocabulary["".join(pair)]], *(vocabulary[part] for part in pair)))
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    backend = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix_space = _flag(metadata, "add_space_prefix", True)
    backend.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend(_SPACE)] if prefix_space else []), normalizers.Replace(" ", _SPACE)]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if prefix_space else []),
        ]
    )
    return backend, True


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    return {token: id for id, token in enumerate(tokens)}


def _special_tokens(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, str]:
    special = {}
    for key, role in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        id = metadata.get(f"tokenizer.ggml.{key}_token_id", -1)
        if 0 <= id < len(tokens):
            special[f"{role}_token"] = tokens[id]
    return special


def _flag(metadata: Mapping[str, Any], key: str, default: bool) -> bool:
    return bool(metadata.get(f"tokenizer.ggml.{key}", default))


def _require_one_each(what: str, values: Sequence[object], tokens: list[str]) -> None:
    if len(values) != len(tokens):
        raise ValueError(f"The GGUF file has {len(tokens)} tokens but {len(values)} {what}; it is damaged.")


def _required(metadata: Mapping[str, Any], key: str) -> list[Any]:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if not value:
        raise ValueError(f"The GGUF file has no tokenizer.ggml.{key}, so its tokenizer cannot be rebuilt.")
    return value
