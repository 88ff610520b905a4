"""Chat templates: transformers' settings, the sandbox, and what is refused."""

import re
from typing import Any

import pytest

from cbjax.text import render_chat

HI = [{"role": "user", "content": "Hi"}]


def test_blocks_are_trimmed_as_transformers_trims_them() -> None:
    template = "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\nend\n"
    assert render_chat(template, HI) == "Hi\nend"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "<é>"}'),
        ("{{ messages[0].content | tojson(ensure_ascii=true) }}", '"<\\u00e9>"'),
        ("{{ {'b': 1, 'a': [2]} | tojson(indent=1, sort_keys=true) }}", '{\n "a": [\n  2\n ],\n "b": 1\n}'),
        ("{{ [1, 2] | tojson(separators=(',', ':')) }}", "[1,2]"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% for i in range(3) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "02"),
        ("a{% generation %}{{ messages[0].content }}{% endgeneration %}b", "a<é>b"),
        ("{{ bos_token }}{{ unknown_name }}|{{ tools is none }}{{ documents is none }}", "<s>|TrueTrue"),
        ("{% set ns = namespace(n=0) %}{% set ns.n = 3 %}{{ ns.n }}", "3"),
        ("{{ add_generation_prompt }}", "False"),
    ],
)
def test_what_templates_may_use(template: str, expected: str) -> None:
    messages = [{"role": "user", "content": "<é>"}]
    rendered = render_chat(template, messages, add_generation_prompt=False, variables={"bos_token": "<s>"})
    assert rendered == expected


def test_the_date() -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", render_chat("{{ strftime_now('%Y-%m-%d') }}", HI))


def test_keys_without_a_value_are_left_out() -> None:
    messages = [{"role": "assistant", "content": None, "tool_calls": [{"id": None, "name": "f"}]}]
    assert render_chat("{{ messages[0].keys() | list }}", messages) == "['role', 'tool_calls']"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
    ],
)
def test_templates_stay_in_the_sandbox(template: str) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    with pytest.raises(ValueError, match=r"cannot render these messages: .*(unsafe|sandbox|not safe)"):
        render_chat(template, messages)
    assert messages == HI


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "cannot render these messages: roles must alternate"),
        ("{% if %}", "cannot render these messages"),
        ("{{ messages[0]['text'] + 'x' }}", "cannot render these messages"),
        ("{{ messages[0].content + 1 }}", "cannot render these messages"),
    ],
)
def test_templates_that_fail(template: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        render_chat(template, HI)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("Hi", "must be a sequence of mappings"),
        ({"role": "user"}, "must be a sequence of mappings"),
        (3, "must be a sequence of mappings"),
        (["Hi"], "must be a mapping with a 'role'"),
        ([{"content": "Hi"}], "must be a mapping with a 'role'"),
        ([{"role": "user", "content": object()}], "JSON values only"),
        ([{"role": "user", "content": [b"x"]}], "JSON values only"),
    ],
)
def test_messages_that_are_none(messages: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        render_chat("{{ messages }}", messages)


def test_an_empty_chat() -> None:
    with pytest.raises(ValueError, match="at least one message"):
        render_chat("x", [])
