"""Reads the tokenizer of a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

from cbjax.text.tokenizer import HFTokenizer, surround

_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def tokenizer_from_folder(folder: str | Path) -> HFTokenizer | None:
    """The tokenizer of `tokenizer.json`, or None where that file is absent.

    `tokenizer_config.json` and `special_tokens_map.json` name the special tokens; `add_bos_token` and
    `add_eos_token`, where the former has them, replace what `tokenizer.json` puts around a text, as in
    transformers. The chat template is `chat_template.jinja`, else the one in `tokenizer_config.json` (of
    several, the one named "default").

    Raises:
        ValueError: a file is malformed.
    """
    folder = Path(folder)
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{path} is not a file of the tokenizers library ({error}); download it again.") from error
    config = read_json(folder / "tokenizer_config.json")
    named = {**read_json(folder / "special_tokens_map.json"), **config}
    special_tokens = {role: _content(named[role]) for role in _ROLES if named.get(role)}
    if "add_bos_token" in config or "add_eos_token" in config:
        surround(
            backend,
            bos=special_tokens.get("bos_token") if config.get("add_bos_token") else None,
            eos=special_tokens.get("eos_token") if config.get("add_eos_token") else None,
        )
    return HFTokenizer(backend, special_tokens=special_tokens, chat_template=_chat_template(folder, config))


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, {} where the file is absent. Raises ValueError if it is malformed."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}); download it again.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object. Got {type(content).__name__}.")
    return content


def _content(token: Any) -> str:
    """A special token is written as its text or as a serialised AddedToken."""
    return token["content"] if isinstance(token, dict) else str(token)


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        return next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    return template
