"""Tokenizers rebuilt from GGUF metadata: against transformers' and sentencepiece's recorded ids."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizers import byte_level_backend

from cbjax.checkpoints.gguf import GGUFFile
from cbjax.text import Detokenizer, HFTokenizer, tokenizer_from_gguf

GOLDENS = Path(__file__).parent / "goldens"
SMOLLM2 = json.loads((GOLDENS / "smollm2_tokenizer.json").read_text(encoding="utf-8"))
SENTENCEPIECE = json.loads((GOLDENS / "sentencepiece.json").read_text(encoding="utf-8"))


def rebuild(metadata: dict[str, Any]) -> HFTokenizer:
    tokenizer = tokenizer_from_gguf(metadata)
    assert tokenizer is not None
    return tokenizer


@pytest.mark.demo
def test_smollm2_equals_transformers(demo_gguf: Path) -> None:
    tokenizer = rebuild(GGUFFile(demo_gguf).metadata)
    assert tokenizer.vocab_size == SMOLLM2["vocab_size"]
    assert tokenizer.eos_token_ids == (SMOLLM2["eos_token_id"],)
    for case in SMOLLM2["texts"]:
        assert tokenizer.encode(case["text"]) == case["ids"], case["text"]
        assert tokenizer.decode(case["ids"], skip_special_tokens=False) == case["text"]
    for case in SMOLLM2["chats"]:
        options = {"add_generation_prompt": case["add_generation_prompt"]}
        assert tokenizer.render(case["messages"], **options) == case["rendered"]
        assert tokenizer.chat(case["messages"], **options) == case["ids"]


@pytest.mark.demo
def test_smollm2_streams_every_golden_text(demo_gguf: Path) -> None:
    tokenizer = rebuild(GGUFFile(demo_gguf).metadata)
    for case in SMOLLM2["texts"] + SMOLLM2["chats"]:
        detokenizer = Detokenizer(tokenizer)
        text = "".join(detokenizer.add([id]) for id in case["ids"]) + detokenizer.finish()
        assert text == tokenizer.decode(case["ids"])


@pytest.mark.parametrize("record", SENTENCEPIECE["vocabularies"], ids=["space_first", "as_is"])
def test_sentencepiece_vocabularies_equal_sentencepiece(record: dict[str, Any]) -> None:
    tokenizer = rebuild(record["metadata"])
    assert tokenizer.eos_token_ids == (2,)
    assert len(tokenizer.byte_token_ids) == 256
    for case in record["cases"]:
        assert tokenizer.encode(case["text"], add_special_tokens=False) == case["ids"], case["text"]
        assert tokenizer.encode(case["text"]) == [1, *case["ids"]]
        assert tokenizer.decode(case["ids"]) == case["decoded"]


def test_a_space_follows_each_special_token_as_in_llama_cpp() -> None:
    tokenizer = rebuild(SENTENCEPIECE["vocabularies"][0]["metadata"])
    the = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.encode("the<s>the") == [1, *the, 1, *the]


def metadata(pre: str | None = "gpt-2", **changes: Any) -> dict[str, Any]:
    """The tiny byte-level tokenizer as GGUF metadata; `None` takes a key out."""
    model = json.loads(byte_level_backend().to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    keys = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "merges": [" ".join(pair) for pair in model["merges"]],
        "token_type": [3 if id < 4 else 1 for id in range(len(tokens))],
        "bos_token_id": 0,
        "eos_token_id": 1,
    } | changes
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}


def test_gpt2_equals_the_tokenizer_it_was_made_from() -> None:
    original = byte_level_backend(adds_bos=False)
    rebuilt = rebuild(metadata())
    for text in ["the cat's mat", "  two\n\n lines ", "日本 🎉 12345", "<s>the</s>", "don't I'll"]:
        assert rebuilt.encode(text) == original.encode(text).ids


def words(tokenizer: HFTokenizer, text: str) -> list[str]:
    """The pieces between which nothing is merged, as text."""
    normalizer, pre_tokenizer = tokenizer.backend.normalizer, tokenizer.backend.pre_tokenizer
    assert pre_tokenizer is not None
    text = text if normalizer is None else normalizer.normalize_str(text)
    return [text[begin:end] for _, (begin, end) in pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["We", "'ll", " pay", " 1234", "!?", "\n\n ", " x"]),
        ("smollm", ["We", "'ll", " pay", " ", "1", "2", "3", "4", "!?", "\n\n ", " x"]),
        ("llama-bpe", ["We", "'ll", " pay", " ", "123", "4", "!?\n\n", " ", " x"]),
        ("qwen2", ["We", "'ll", " pay", " ", "1", "2", "3", "4", "!?\n\n", " ", " x"]),
        ("default", ["We", "'", "ll", " pay", " ", "123", "4", "!?", "\n\n ", " x"]),
    ],
)
def test_where_pre_tokenizers_cut(pre: str, expected: list[str]) -> None:
    assert words(rebuild(metadata(pre)), "We'll pay 1234!?\n\n  x") == expected


def test_qwen2_normalises() -> None:
    tokenizer = rebuild(metadata("qwen2"))
    assert tokenizer.decode(tokenizer.encode("e\u0301")) == "\u00e9"


def test_llama3_takes_whole_words_and_adds_bos() -> None:
    changes = {
        "tokens": ["<s>", "</s>", "a", "b", "c", "abc", "ab"],
        "token_type": [3, 3, 1, 1, 1, 1, 1],
        "merges": ["a b"],
    }
    assert rebuild(metadata("llama-bpe", **changes)).encode("abc") == [0, 5]
    assert rebuild(metadata("gpt-2", **changes)).encode("abc", add_special_tokens=False) == [6, 4]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"add_bos_token": True}, [0]),
        ({"add_bos_token": True, "bos_token_id": None}, []),
        ({"add_bos_token": True, "add_eos_token": True}, [0, 1]),
    ],
)
def test_what_is_put_around_a_text(changes: dict[str, Any], expected: list[int]) -> None:
    assert [id for id in rebuild(metadata(**changes)).encode("the cat") if id < 4] == expected


def test_all_end_tokens_are_eos() -> None:
    assert rebuild(metadata(eot_token_id=3, eom_token_id=2)).eos_token_ids == (1, 2, 3)
    assert rebuild(metadata(eos_token_id=None)).eos_token_ids == ()


def test_user_defined_tokens_are_cut_out_and_kept_in_decoding() -> None:
    tokenizer = rebuild(metadata(token_type=[3, 3, 4, 4] + [1] * (len(metadata()["tokenizer.ggml.tokens"]) - 4)))
    ids = tokenizer.encode("the<|user|>cat</s>")
    assert 2 in ids
    assert tokenizer.decode(ids) == "the<|user|>cat"
    assert tokenizer.special_token_ids == {0, 1}


def test_metadata_without_a_tokenizer() -> None:
    assert tokenizer_from_gguf({"general.architecture": "llama"}) is None


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (metadata(model="t5"), "Unsupported tokenizer.ggml.model: 't5'. Supported: gpt2, llama"),
        (metadata("hunyuan"), "Unsupported tokenizer.ggml.pre: 'hunyuan'. Supported: gpt-2"),
        (metadata(tokens=None), "has no tokenizer.ggml.tokens"),
        (metadata(merges=[]), "has no tokenizer.ggml.merges"),
        (metadata(merges=["a b c"]), "must be two tokens with a space between"),
        (metadata(merges=["a nonesuch"]), "merges"),
        (metadata(token_type=[1]), "tokens but 1 token types"),
        (metadata(model="llama"), "has no tokenizer.ggml.scores"),
        (metadata(model="llama", scores=[0.0]), "tokens but 1 scores"),
    ],
)
def test_metadata_that_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tokenizer_from_gguf(keys)
