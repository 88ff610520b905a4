"""Chat templates, rendered as transformers renders them.

A template comes with a checkpoint and is untrusted: it runs in jinja2's immutable sandbox and sees plain JSON
data only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

type Message = Mapping[str, Any]


def render_chat(
    template: str | None,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The text of a conversation.

    Args:
        template: jinja2 source.
        messages: mappings with "role" and usually "content"; keys whose value is None are left out.
        add_generation_prompt: end with the header of an assistant's turn.
        variables: further names that the template sees, such as bos_token.

    Raises:
        TypeError: messages are not a sequence of mappings of JSON values.
        ValueError: there is no template or no message, or the template does not parse or refuses them.
    """
    if template is None:
        raise ValueError(
            "This tokenizer has no chat template, so chat messages cannot be rendered; "
            "give the prompt as text or token ids, or a tokenizer with a chat template."
        )
    if isinstance(messages, str | Mapping) or not isinstance(messages, Iterable):
        raise TypeError(f"Chat messages must be a sequence of mappings with a 'role'. Got {messages!r}.")
    conversation = [_plain_message(message) for message in messages]
    if not conversation:
        raise ValueError("A chat must have at least one message. Got none.")
    try:
        return _compile(template).render(
            messages=conversation,
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **(variables or {}),
        )
    except (
        Exception
    ) as error:  # a template is a program: it can divide by zero, recurse, loop beyond the sandbox's limit
        reason = str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"The chat template cannot render these messages: {reason}") from error


def _plain_message(message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping) or "role" not in message:
        raise TypeError(f"A chat message must be a mapping with a 'role'. Got {message!r}.")
    return {key: _plain(value) for key, value in message.items() if value is not None}


def _plain(value: Any) -> Any:
    """Plain JSON types only: an object with methods would give the template something to call."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    raise TypeError(f"Chat messages hold JSON values only. Got {value!r} of type {type(value).__name__}.")


@lru_cache(maxsize=32)
def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment.from_string(template)


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training masks; rendering ignores the mark."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it as a set)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML, which models were not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
