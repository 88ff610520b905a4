"""`HFTokenizer` and where it comes from: a folder, another library's object. B50: one BOS, never two."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny_tokenizers import (
    TEMPLATE,
    byte_fallback_tokenizer,
    byte_level_backend,
    byte_level_tokenizer,
)

from cbjax.text import (
    ByteFallback,
    Detokenizer,
    HFTokenizer,
    Tokenizer,
    as_tokenizer,
    render_chat,
    tokenizer_from_folder,
)

CONVERSATION = [
    {"role": "user", "content": "the cat"},
    {"role": "assistant", "content": "sat"},
    {"role": "user", "content": "on <s> the</s> mat"},
]


@pytest.mark.parametrize("text", ["the cat sat", " 日本 🎉\n\n12", "", "a<|user|>b", "\x00"])
def test_round_trip(text: str) -> None:
    tokenizer = byte_level_tokenizer()
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.backend.token_to_id("<s>")
    assert ids[1:] == tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids[1:], skip_special_tokens=False) == text
    assert all(0 <= id < tokenizer.vocab_size for id in ids)


def test_facts() -> None:
    tokenizer = byte_level_tokenizer()
    assert isinstance(tokenizer, Tokenizer)
    assert tokenizer.eos_token_ids == (1,)
    assert tokenizer.special_token_ids == {0, 1, 2, 3}
    assert tokenizer.byte_token_ids == frozenset()
    assert len(byte_fallback_tokenizer().byte_token_ids) == 256


def test_special_tokens_in_a_text_become_tokens_and_are_skipped_in_decoding() -> None:
    tokenizer = byte_level_tokenizer(adds_bos=False)
    ids = tokenizer.encode("the</s>cat")
    assert 1 in ids
    assert tokenizer.decode(ids) == "thecat"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "the</s>cat"


def test_spaces_before_punctuation_stay() -> None:
    tokenizer = byte_level_tokenizer()
    assert tokenizer.decode(tokenizer.encode("the cat , the dog .")) == "the cat , the dog ."


def test_numpy_ids_decode() -> None:
    tokenizer = byte_level_tokenizer()
    assert tokenizer.decode(list(np.array(tokenizer.encode("the cat"), np.int32))) == "the cat"


@pytest.mark.parametrize("text", [b"x", 3, None, ["x"]])
def test_only_text_is_encoded(text: Any) -> None:
    with pytest.raises(TypeError, match="text must be a str"):
        byte_level_tokenizer().encode(text)


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(ValueError, match="Unicode that UTF-8 can encode"):
        byte_level_tokenizer().encode("a\ud83d")


def test_padding_and_truncation_of_the_file_are_off() -> None:
    backend = byte_level_backend(adds_bos=False)
    expected = HFTokenizer(byte_level_backend(adds_bos=False)).encode("the cat sat")
    backend.enable_padding(length=64)
    backend.enable_truncation(2)
    assert HFTokenizer(backend).encode("the cat sat") == expected


@pytest.mark.parametrize(("given", "expected"), [((), (1,)), ((-1,), (1,)), ((7, 1, 5), (1, 5, 7))])
def test_eos_ids(given: tuple[int, ...], expected: tuple[int, ...]) -> None:
    special = {"eos_token": "</s>"}
    assert HFTokenizer(byte_level_backend(), special_tokens=special, eos_token_ids=given).eos_token_ids == expected


def test_an_eos_token_outside_the_vocabulary_is_none() -> None:
    assert HFTokenizer(byte_level_backend(), special_tokens={"eos_token": "<none>"}).eos_token_ids == ()


def test_b50_chat_has_the_bos_of_its_template_only() -> None:
    tokenizer = byte_level_tokenizer(adds_bos=True)
    ids = tokenizer.chat(CONVERSATION[:1])
    rendered = "<s><|user|>the cat</s>\n<|assistant|>"
    assert render_chat(TEMPLATE, CONVERSATION[:1], variables={"bos_token": "<s>"}) == rendered
    assert ids == tokenizer.encode(rendered, add_special_tokens=False)
    assert ids.count(0) == 1
    assert tokenizer.encode("the cat").count(0) == 1  # a raw prompt keeps one
    assert tokenizer.decode(ids, skip_special_tokens=False) == rendered


def test_b50_a_template_without_bos_gets_none() -> None:
    tokenizer = HFTokenizer(byte_level_backend(), chat_template="{{ messages[0].content }}")
    assert 0 not in tokenizer.chat(CONVERSATION)


def test_special_tokens_in_chat_content_become_tokens() -> None:
    tokenizer = byte_level_tokenizer()
    assert tokenizer.chat(CONVERSATION, add_generation_prompt=False).count(1) == 4


def test_chat_without_a_template() -> None:
    with pytest.raises(ValueError, match="has no chat template"):
        HFTokenizer(byte_level_backend()).chat(CONVERSATION)


def write_tokenizer(folder: Path, *, adds_bos: bool = False, **files: Any) -> Path:
    byte_level_backend(adds_bos=adds_bos).save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def from_folder(folder: Path) -> HFTokenizer:
    tokenizer = tokenizer_from_folder(folder)
    assert tokenizer is not None
    return tokenizer


def test_folder(tmp_path: Path) -> None:
    config = {
        "bos_token": {"content": "<s>", "lstrip": False, "__type": "AddedToken"},
        "eos_token": "</s>",
        "pad_token": None,
        "chat_template": TEMPLATE,
    }
    tokenizer = from_folder(write_tokenizer(tmp_path, adds_bos=True, tokenizer_config=config))
    ours = byte_level_tokenizer()
    assert tokenizer.special_tokens == ours.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.eos_token_ids == (1,)
    assert tokenizer.encode("the 日本 cat") == ours.encode("the 日本 cat")
    assert tokenizer.chat(CONVERSATION) == ours.chat(CONVERSATION)


def test_special_tokens_map_stands_in_for_the_config(tmp_path: Path) -> None:
    tokenizer = from_folder(write_tokenizer(tmp_path, special_tokens_map={"eos_token": "</s>"}))
    assert tokenizer.eos_token_ids == (1,)
    assert tokenizer.chat_template is None


@pytest.mark.parametrize(
    ("template", "jinja", "expected"),
    [
        ("in config", None, "in config"),
        ("in config", "in file", "in file"),
        ([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}], None, "d"),
        ([{"name": "tool_use", "template": "t"}], None, None),
        (None, "in file", "in file"),
    ],
)
def test_where_the_chat_template_is(tmp_path: Path, template: Any, jinja: str | None, expected: str | None) -> None:
    write_tokenizer(tmp_path, tokenizer_config={"chat_template": template})
    if jinja is not None:
        (tmp_path / "chat_template.jinja").write_text(jinja)
    assert from_folder(tmp_path).chat_template == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [({}, [0]), ({"add_bos_token": True}, [0]), ({"add_bos_token": False}, []), ({"add_eos_token": True}, [1])],
)
def test_add_bos_token_replaces_what_the_file_adds(tmp_path: Path, config: dict[str, Any], expected: list[int]) -> None:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = from_folder(write_tokenizer(tmp_path, adds_bos=True, tokenizer_config=special | config))
    assert [id for id in tokenizer.encode("the cat") if id < 4] == expected


def test_a_folder_without_tokenizer_json(tmp_path: Path) -> None:
    assert tokenizer_from_folder(tmp_path) is None


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", '{"version": "1.0"}'),
        ("tokenizer.json", "{"),
        ("tokenizer_config.json", "{"),
        ("special_tokens_map.json", "[]"),
    ],
)
def test_malformed_files_are_named(tmp_path: Path, file: str, content: str) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / file).write_text(content)
    with pytest.raises(ValueError, match=file):
        tokenizer_from_folder(tmp_path)


class FakeAutoTokenizer:
    """The part of a transformers tokenizer that the adapter uses, over the tiny tokenizer."""

    eos_token_id: Any = 1
    all_special_ids = (0, 1)

    def __init__(self) -> None:
        self.inner = byte_level_tokenizer()
        self.added_tokens_decoder = self.inner.backend.get_added_tokens_decoder()
        self.vocab_size = self.inner.vocab_size - 4  # as in transformers: without added tokens

    def __len__(self) -> int:
        return self.inner.vocab_size

    def get_vocab(self) -> dict[str, int]:
        return self.inner.backend.get_vocab()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.inner.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: list[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        assert clean_up_tokenization_spaces is False
        return self.inner.decode(ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(self, messages: Any, tokenize: bool, add_generation_prompt: bool) -> str:
        assert tokenize is False
        return self.inner.render(messages, add_generation_prompt=add_generation_prompt)


def test_a_transformers_tokenizer_serves() -> None:
    theirs = FakeAutoTokenizer()
    tokenizer = as_tokenizer(theirs)
    ours = theirs.inner
    assert isinstance(tokenizer, Tokenizer)
    assert isinstance(tokenizer, ByteFallback)
    assert (tokenizer.vocab_size, tokenizer.eos_token_ids) == (ours.vocab_size, (1,))
    assert tokenizer.special_token_ids == {0, 1, 2, 3}
    assert tokenizer.encode("the cat") == ours.encode("the cat")
    assert tokenizer.encode("the cat", add_special_tokens=False) == ours.encode("the cat")[1:]
    assert tokenizer.chat(CONVERSATION) == ours.chat(CONVERSATION)
    assert tokenizer.decode(ours.chat(CONVERSATION)) == ours.decode(ours.chat(CONVERSATION))
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.add(ours.encode("日本")) + detokenizer.finish() == "日本"


@pytest.mark.parametrize(("eos", "expected"), [(None, ()), (7, (7,)), ([7, 9], (7, 9)), (-1, ())])
def test_eos_of_a_transformers_tokenizer(eos: Any, expected: tuple[int, ...]) -> None:
    theirs = FakeAutoTokenizer()
    theirs.eos_token_id = eos
    assert as_tokenizer(theirs).eos_token_ids == expected


def test_our_own_tokenizers_pass_through() -> None:
    ours = byte_level_tokenizer()
    assert as_tokenizer(ours) is ours
    assert as_tokenizer(byte_level_backend()).encode("the cat") == ours.encode("the cat")


@pytest.mark.parametrize("obj", [None, "demo", 3, SimpleNamespace(encode=len, decode=len)])
def test_other_objects_are_refused(obj: Any) -> None:
    with pytest.raises(TypeError, match="A tokenizer must have encode, decode, chat, vocab_size"):
        as_tokenizer(obj)
