"""The hub, against a fake one on loopback: what is asked for, what is kept, and what is said when it goes wrong."""

import json
import logging
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from checkpoint_files import hf_tensors, write_folder, write_gguf
from fake_hub import FakeHub, Handler, files_of
from huggingface_hub import constants
from tiny_tokenizers import TEMPLATE, byte_level_backend

from cbjax import CausalLM, ContinuousBatchingConfig, GenerationConfig
from cbjax.checkpoints import hub, load

GOLDENS = Path(__file__).parent / "goldens" / "tiny_llama"
SHARDS = [f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)]
TOKENIZER = ["chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
# What repositories carry beside what is read.
OTHERS = {
    "README.md": b"# model",
    "consolidated.safetensors": b"the same weights under other names",
    "onnx/config.json": b"{}",
    "onnx/model.onnx": b"onnx",
    "optimizer.pth": b"state",
    "pytorch_model.bin": b"pickle",
    "q4.gguf": b"GGUF",
    "tokenizer.model": b"sentencepiece",
    "training_args.json": b"{}",
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of `huggingface_hub`, without a saved token, proxy or pause before a retry."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    return tmp_path / "cache"


@pytest.fixture
def fake(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub that answers, and that `huggingface_hub` asks."""
    fake = FakeHub()
    with fake.serving():
        point_at(fake.endpoint, monkeypatch)
        yield fake
        huggingface_hub.close_session()


@pytest.fixture
def silent_endpoint(monkeypatch: pytest.MonkeyPatch) -> str:
    """An address at which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{free.getsockname()[1]}"
    point_at(endpoint, monkeypatch)
    return endpoint


def point_at(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What HF_ENDPOINT does where it is set before `huggingface_hub` is imported."""
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    template = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def sharded() -> dict[str, bytes]:
    """The sharded golden folder with a tokenizer."""
    template = {"tokenizer_config.json": json.dumps({"eos_token": "</s>"}), "chat_template.jinja": TEMPLATE}
    extra = {"tokenizer.json": byte_level_backend().to_str(), "generation_config.json": "{}", **template}
    return files_of(GOLDENS / "sharded") | {name: text.encode() for name, text in extra.items()}


def assert_generates_the_goldens(lm: CausalLM) -> None:
    records = json.loads((GOLDENS / "goldens.json").read_text())["plain"][:2]
    config = ContinuousBatchingConfig(block_size=4, num_blocks=160, max_batch_tokens=64, max_requests_per_batch=8)
    greedy = GenerationConfig(max_new_tokens=24, eos_token_id=-1)
    outputs = lm.generate_batch([record["prompt_ids"] for record in records], greedy, config, warmup=False)
    assert [output.generated_tokens for output in outputs.values()] == [record["tokens"] for record in records]
    lm.close()


def test_a_repository_generates_what_transformers_does_and_then_needs_no_network(
    fake: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.add("org/model", sharded() | OTHERS)
    lm = CausalLM.from_pretrained("org/model")
    assert lm.tokenizer is not None
    assert lm.tokenizer.chat([{"role": "user", "content": "cat"}])
    assert_generates_the_goldens(lm)
    assert fake.downloaded() == sorted(["config.json", *SHARDS, "model.safetensors.index.json", *TOKENIZER])

    again = CausalLM.from_pretrained("org/model")
    assert fake.requests == []
    for path, leaf in _leaves(again):
        np.testing.assert_array_equal(leaf, _leaf(lm, path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert load("org/model").config == lm.config


def _leaves(lm: CausalLM) -> list[tuple[str, np.ndarray]]:
    import jax

    return [(jax.tree_util.keystr(p), np.asarray(leaf)) for p, leaf in jax.tree_util.tree_leaves_with_path(lm.params)]


def _leaf(lm: CausalLM, path: str) -> np.ndarray:
    return dict(_leaves(lm))[path]


def test_of_one_file_of_weights_and_shards_the_one_file_is_taken(fake: FakeHub, tmp_path: Path) -> None:
    fake.add("org/model", sharded() | OTHERS | files_of(write_folder(tmp_path / "one", hf_tensors())))
    assert load("org/model").config.vocab_size == 48
    assert fake.downloaded() == sorted(["config.json", "model.safetensors", *TOKENIZER])


def test_a_gguf_file_is_named_in_its_repository(fake: FakeHub, tmp_path: Path) -> None:
    gguf = write_gguf(tmp_path / "m.gguf", hf_tensors()).read_bytes()
    fake.add("org/model-GGUF", {"sub/m[1].gguf": gguf, **OTHERS})
    for _ in range(2):
        checkpoint = load("org/model-GGUF/sub/m[1].gguf")
        assert checkpoint.config.num_layers == 2
    assert checkpoint.source == "org/model-GGUF/sub/m[1].gguf"
    assert fake.downloaded() == ["sub/m[1].gguf"]


def test_a_revision_is_a_branch_or_a_commit(fake: FakeHub, tmp_path: Path) -> None:
    folders = {name: write_folder(tmp_path / name, hf_tensors(seed=i)) for i, name in enumerate(("main", "v2"))}
    repository = fake.add("org/model", files_of(folders["main"]))
    repository.branches["v2"] = files_of(folders["v2"])
    expected = hf_tensors(seed=1)["model.norm.weight"]
    for revision in ("v2", repository.commit("v2")):
        np.testing.assert_array_equal(load("org/model", revision=revision).params["norm"]["weight"], expected)
    norm = np.asarray(load("org/model").params["norm"]["weight"])
    np.testing.assert_array_equal(norm, hf_tensors(seed=0)["model.norm.weight"])


def test_a_cut_download_is_resumed(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    fake.add("org/model", sharded())
    fake.trouble[SHARDS[1]] = deque(["cut"])
    load("org/model")
    gets = [(path, headers) for method, path, headers in fake.requests if method == "GET"]
    ranges = [headers.get("Range") for path, headers in gets if path.endswith(SHARDS[1])]
    half = len(sharded()[SHARDS[1]]) // 2
    assert ranges == [None, f"bytes={half // 1000 * 1000}-"]


def test_after_a_failed_download_only_what_is_missing_is_asked_for(fake: FakeHub, cache: Path) -> None:
    fake.add("org/model", sharded())
    fake.trouble[SHARDS[2]] = deque([503])
    with pytest.raises(ConnectionError) as error:
        load("org/model")
    message = str(error.value)
    assert message.startswith(f"'org/model' is neither a file nor a folder here, the cache {cache} does not have all")
    assert f"the hub at {fake.endpoint} answered with HTTP status 503 (the store is tired). Try again later" in message
    assert SHARDS[2] in fake.downloaded()
    load("org/model")
    assert fake.downloaded() == [SHARDS[2]]


def test_without_a_tokenizer_in_the_cache_the_hub_is_asked_but_not_needed(
    fake: FakeHub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake.add("org/model", sharded())
    fake.add("org/bare", files_of(GOLDENS / "sharded"))
    huggingface_hub.snapshot_download("org/model", allow_patterns=["config.json", "model*"])
    assert load("org/model").tokenizer is not None
    assert load("org/bare").tokenizer is None
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with caplog.at_level(logging.WARNING, "cbjax"):
        assert load("org/model").tokenizer is not None
        assert caplog.messages == []
        assert load("org/bare").tokenizer is None
    assert "'org/bare' has no tokenizer in the cache, and none could be looked for" in caplog.text


def test_progress_is_shown_if_asked_for(fake: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    fake.add("org/a", sharded())
    fake.add("org/b", sharded())
    load("org/a")
    assert capsys.readouterr() == ("", "")
    load("org/b", progress=True)
    shown = capsys.readouterr()
    assert (shown.out, "Fetching 10 files" in shown.err, "Loading weights" in shown.err) == ("", True, True)


NO_SAFETENSORS = "has no weights as safetensors"
NAME_A = r"name one of its GGUF files, for example 'org/m/a\.gguf'; it has a\.gguf"


@pytest.mark.parametrize(
    ("files", "name", "message"),
    [
        (["a.gguf", "b.gguf"], "org/m", rf"{NO_SAFETENSORS}: {NAME_A}, b\.gguf"),
        (["a.gguf", "config.json"], "org/m", rf"{NO_SAFETENSORS}: {NAME_A}"),
        (["a.gguf", "config.json"], "org/m/b.gguf", rf"has no file 'b\.gguf': {NAME_A}"),
        (
            ["config.json", "pytorch_model.bin"],
            "org/m",
            rf"{NO_SAFETENSORS}: its weights are pytorch_model\.bin; conv",
        ),
        (
            ["adapter_model.safetensors"],
            "org/m",
            r"is no model with config\.json and model\.safetensors: its",
        ),
        (["README.md"], "org/m", f"{NO_SAFETENSORS}: choose a repository or revision that has weights"),
        (["README.md"], "org/m/b.gguf", r"has no file 'b\.gguf': choose a repository or revision that has weights"),
    ],
)
def test_repositories_that_cannot_be_read(fake: FakeHub, files: list[str], name: str, message: str) -> None:
    fake.add("org/m", dict.fromkeys(files, b"{}"))
    with pytest.raises(FileNotFoundError, match=rf"^The repository of '{name}' on the hub at .*{message}"):
        load(name)
    assert fake.downloaded() == []


def test_shards_that_the_repository_lacks_are_named_before_the_others_are_downloaded(fake: FakeHub) -> None:
    files = sharded()
    del files[SHARDS[0]], files[SHARDS[3]]
    fake.add("org/model", files)
    with pytest.raises(FileNotFoundError, match=rf"'org/model' of the hub lacks {SHARDS[0]}, {SHARDS[3]}, which its"):
        load("org/model")
    assert not set(fake.downloaded()) & set(SHARDS)


def test_an_unknown_or_private_repository_and_an_unknown_revision(fake: FakeHub, cache: Path) -> None:
    fake.add("org/private", sharded(), token="hf_secret")
    where = rf"the repository 'org/\w+' of the hub at {fake.endpoint} does not exist or is private"
    for name in ("org/unknown", "org/private"):
        with pytest.raises(FileNotFoundError, match=where + ", and no token was sent") as error:
            load(name)
        assert f"the cache {cache} does not have all of it" in str(error.value)
        assert "Check the name; for a private one log in with `hf auth login`, or pass token=." in str(error.value)
    with pytest.raises(FileNotFoundError, match=where + ", and the token that was sent does not open it") as error:
        load("org/private", token="hf_wrong")
    assert "hf_wrong" not in str(error.value)
    assert load("org/private", token="hf_secret").config.num_layers == 2
    fake.add("org/public", sharded())
    with pytest.raises(FileNotFoundError, match=r"The repository 'org/public' .* has no revision 'v9'; the cache"):
        load("org/public", revision="v9")


def test_a_gated_repository(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.add("org/gated", sharded(), token="hf_secret", gated=True)
    with pytest.raises(PermissionError, match=r"'org/gated' .* is gated, and no token was sent; .*Ask for access"):
        load("org/gated")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with pytest.raises(PermissionError, match="no token was sent"):
        load("org/gated", token=False)
    assert load("org/gated").config.num_layers == 2


def test_no_network(cache: Path, silent_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    point_at(silent_endpoint.replace("http://", "http://me:password@"), monkeypatch)
    with pytest.raises(ConnectionError) as error:
        load("org/model")
    message = str(error.value)
    assert f"'org/model' is neither a file nor a folder here, the cache {cache} does not have all of it, and" in message
    assert f"fetching it from the hub at {silent_endpoint} failed with ConnectError: " in message
    assert "Check the network and proxy settings" in message
    assert "password" not in message


def test_an_endpoint_that_is_no_hub(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handler, "do_GET", lambda self: self._send(200, {}, b"<html>Log in to the wifi</html>"))
    with pytest.raises(ConnectionError, match="failed with JSONDecodeError"):
        load("org/model")


def test_a_cache_that_cannot_be_written(fake: FakeHub, cache: Path) -> None:
    fake.add("org/model", sharded())
    cache.write_text("a file where a folder should be")
    with pytest.raises(OSError, match=rf"'org/model' cannot be stored in the cache {cache}: .*set HF_HOME") as error:
        load("org/model")
    assert not isinstance(error.value, ConnectionError)


def test_offline_mode_at_the_command_line(tmp_path: Path, silent_endpoint: str) -> None:
    settings = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path), "HF_ENDPOINT": silent_endpoint}
    command = [sys.executable, "-m", "cbjax", "generate", "--model", "org/model", "hello"]
    run = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=100, check=False)
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr == (
        f"cbjax: 'org/model' is neither a file nor a folder here, the cache {tmp_path} does not have all of it, and "
        f"HF_HUB_OFFLINE forbids asking the hub at {silent_endpoint}. Unset it to download, or give the path of a "
        "local folder.\n"
    )


def test_a_local_folder_goes_before_the_hub_and_has_no_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent_endpoint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_folder(Path("org/model"), hf_tensors())
    assert load("org/model").config.vocab_size == 48
    for source in ("org/model", "demo"):
        with pytest.raises(ValueError, match=rf"'{source}' is not one; got 'v2': leave it out"):
            load(source, revision="v2")


@pytest.mark.parametrize(
    ("source", "repo_id", "gguf"),
    [
        ("org/m", "org/m", None),
        ("org-1/m.2_3", "org-1/m.2_3", None),
        ("org/m/q4.gguf", "org/m", "q4.gguf"),
        ("org/m/sub/q4.gguf", "org/m", "sub/q4.gguf"),
    ],
)
def test_names_that_are_on_the_hub(source: str, repo_id: str, gguf: str | None) -> None:
    assert hub.parse(source, "v1") == hub.HubName(repo_id=repo_id, gguf=gguf, revision="v1")


@pytest.mark.parametrize(
    "name", ["demo", "a/b/c", "./a", "/a/b", "a/", "o/m.gguf", "a b/c", "-a/b", "", "a--b/c", "a/b..c"]
)
@pytest.mark.parametrize("suffix", ["", "/c/../d.gguf"])
def test_names_that_are_not_on_the_hub(name: str, suffix: str) -> None:
    assert hub.parse(name + suffix) is None


def test_a_name_that_the_hub_would_not_take(fake: FakeHub) -> None:
    with pytest.raises(FileNotFoundError, match=r"'org/m-' is neither .* here, and no name on the hub"):
        load("org/m-")
    assert fake.requests == []
