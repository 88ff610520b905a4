"""What can go wrong between us and the Hugging Face Hub, each said with where was looked and what to do."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from cbjax.checkpoints.hub import HubName

_OTHER_FORMATS = (".bin", ".pth", ".pt", ".h5", ".msgpack", ".onnx", ".safetensors")
_MAX_NAMES = 8


@contextmanager
def hub_errors(name: HubName, token: str | bool | None) -> Iterator[None]:
    """Turns errors of `huggingface_hub`, and of the HTTP library beneath it, into ours."""
    try:
        yield
    except Exception as error:  # which classes, the client's HTTP library decides
        raise _explained(error, name, token) from error


def cannot_be_read(name: HubName, files: Collection[str]) -> FileNotFoundError:
    """The error for a repository that lacks what was asked for; `files` are all that it has."""
    ggufs = [file for file in files if file.endswith(".gguf")]
    if name.gguf is not None:
        problem = f"has no file {name.gguf!r}"
    elif not any(file.endswith(".safetensors") for file in files):
        problem = "has no weights as safetensors"
    else:
        problem = "is no model with config.json and model.safetensors"
    if ggufs:
        remedy = f"name one of its GGUF files, for example '{name.repo_id}/{sorted(ggufs)[0]}'; it has {_listed(ggufs)}"
    elif others := [file for file in files if file.endswith(_OTHER_FORMATS)]:
        remedy = (
            f"its weights are {_listed(others)}; convert them with transformers' save_pretrained and load that "
            "folder, or choose another repository or revision"
        )
    else:
        remedy = "choose a repository or revision that has weights"
    return FileNotFoundError(f"The repository of {name} on the hub at {_endpoint()} {problem}: {remedy}.")


def _explained(error: Exception, name: HubName, token: str | bool | None) -> Exception:
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, HFValidationError):
        return FileNotFoundError(f"{name} is neither a file nor a folder here, and no name on the hub: {error}")
    repository = f"the repository {name.repo_id!r} of the hub at {_endpoint()}"
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if isinstance(error, RevisionNotFoundError):
        return FileNotFoundError(
            f"{_upper(repository)} has no revision {name.revision!r}; {_cache_too(name)}. Give one of its branches, "
            "tags or commits."
        )
    if isinstance(error, GatedRepoError):
        return PermissionError(
            f"{_upper(repository)} is gated, and {_whose(token)}; {_cache_too(name)}. Ask for access on its page, "
            "then log in with `hf auth login`, or pass token=."
        )
    # Without a token, the hub answers 401 for what does not exist, too.
    if isinstance(error, RepositoryNotFoundError) or (status == 401 and not _is_token_sent(token)):
        return FileNotFoundError(
            f"{name} is neither a file nor a folder here, and {repository} does not exist or is private, and "
            f"{_whose(token)}; {_cache_too(name)}. Check the name; for a private one log in with `hf auth login`, or "
            "pass token=."
        )
    if status in (401, 403):
        return PermissionError(
            f"{_upper(repository)} refused access with HTTP status {status}{_server_says(error)}, and "
            f"{_whose(token)}; {_cache_too(name)}. Log in with `hf auth login` or pass a token= that may read it."
        )
    return _unreachable(error, name, status)


def _unreachable(error: Exception, name: HubName, status: int | None) -> Exception:
    from huggingface_hub import constants
    from huggingface_hub.errors import OfflineModeIsEnabled

    chain = tuple(_causes(error))
    if any(isinstance(cause, OfflineModeIsEnabled) for cause in chain):
        return ConnectionError(
            f"{name} is neither a file nor a folder here, {_cache_too(name)}, and HF_HUB_OFFLINE forbids asking the "
            f"hub at {_endpoint()}. Unset it to download, or give the path of a local folder."
        )
    if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError | TimeoutError):
        return OSError(
            f"{name} cannot be stored in the cache {constants.HF_HUB_CACHE}: {error}. Make room there or make it "
            "writable, or set HF_HOME to another folder."
        )
    if status is not None:
        failed = f"the hub at {_endpoint()} answered with HTTP status {status}{_server_says(error)}"
        remedy = "Try again later"
    else:
        root = chain[-1]
        failed = f"fetching it from the hub at {_endpoint()} failed with {type(root).__name__}: {root}"
        remedy = "Check the network and proxy settings (HF_ENDPOINT, HTTPS_PROXY) and try again"
    return ConnectionError(
        f"{name} is neither a file nor a folder here, {_cache_too(name)}, and {failed}. {remedy}; what has arrived is "
        "kept. Without a network give the path of a local folder."
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what it was raised from, down to the library that knows the reason."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _endpoint() -> str:
    """The hub's address without user, password and query."""
    from huggingface_hub import constants

    parts = urlsplit(constants.ENDPOINT)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _cache_too(name: HubName) -> str:
    from huggingface_hub import constants

    return f"the cache {constants.HF_HUB_CACHE} does not have {'it' if name.gguf else 'all of it'}"


def _is_token_sent(token: str | bool | None) -> bool:
    from huggingface_hub import get_token

    return isinstance(token, str) or (token is not False and get_token() is not None)


def _whose(token: str | bool | None) -> str:
    return "the token that was sent does not open it" if _is_token_sent(token) else "no token was sent"


def _server_says(error: Exception) -> str:
    message = getattr(error, "server_message", None)
    return f" ({message})" if message else ""


def _upper(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]


def _listed(files: Collection[str]) -> str:
    shown = sorted(files)[:_MAX_NAMES]
    more = f" and {len(files) - len(shown)} more" if len(files) > len(shown) else ""
    return ", ".join(shown) + more
