"""A Hugging Face Hub on loopback: the endpoints that `huggingface_hub` uses to look at and download a repository."""

import hashlib
import json
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit


@dataclass(kw_only=True)
class Repository:
    """Attributes:
    branches: files by path, by branch.
    token: what a request must bring to be answered; None: nothing.
    gated: files, unlike the listing, are refused without the token.
    """

    branches: dict[str, dict[str, bytes]]
    token: str | None = None
    gated: bool = False

    def commit(self, branch: str) -> str:
        digest = hashlib.sha1(branch.encode())
        for path, content in sorted(self.branches[branch].items()):
            digest.update(path.encode() + content)
        return digest.hexdigest()

    def find(self, revision: str) -> str | None:
        """The branch that a branch's name or a commit means."""
        return next((name for name in self.branches if revision in (name, self.commit(name))), None)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@dataclass(kw_only=True)
class FakeHub:
    """Attributes:
    repositories: by "org/name".
    trouble: by file, what goes wrong with its next GETs: an HTTP status, or "cut" after half of the body.
    requests: (method, path, headers) as they came; the path without the query.
    """

    repositories: dict[str, Repository] = field(default_factory=dict)
    trouble: dict[str, deque[int | str]] = field(default_factory=dict)
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    endpoint: str = ""

    def add(self, repo_id: str, files: dict[str, bytes], **settings: object) -> Repository:
        repository = Repository(branches={"main": files}, **settings)
        self.repositories[repo_id] = repository
        return repository

    def downloaded(self) -> list[str]:
        """Files whose bodies were asked for, in alphabetical order, since the last call."""
        paths = [path for method, path, _ in self.requests if method == "GET" and "/resolve/" in path]
        self.requests.clear()
        return sorted(path.split("/", 5)[5] for path in paths)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Answers on loopback until the block ends."""
        handler = type("Handler", (Handler,), {"hub": self})
        with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            server.daemon_threads = True
            thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
            thread.start()
            self.endpoint = f"http://127.0.0.1:{server.server_port}"
            try:
                yield
            finally:
                server.shutdown()
                thread.join()


class Handler(BaseHTTPRequestHandler):
    hub: FakeHub

    def log_message(self, format: str, *args: object) -> None:
        """Standard error is the tests'."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, dict(self.headers)))
        parts = path.strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        repo_id, rest = "/".join(parts[2:4] if is_api else parts[:2]), parts[4:] if is_api else parts[2:]
        repository = self.hub.repositories.get(repo_id)
        authorized = repository is not None and self._opens(repository)
        if repository is None or not (authorized or repository.gated):
            return self._refuse(401, "RepoNotFound" if self.headers.get("Authorization") else None, "Invalid username")
        verb, revision = (rest[0], rest[1]) if rest else ("revision", "main")
        branch = repository.find(revision)
        if branch is None:
            return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        files, commit = repository.branches[branch], repository.commit(branch)
        if verb == "revision":
            siblings = [{"rfilename": file} for file in files]
            return self._send_json({"id": repo_id, "sha": commit, "siblings": siblings})
        if verb == "tree":
            entries = [
                {"type": "file", "path": file, "size": len(body), "oid": _etag(body)} for file, body in files.items()
            ]
            return self._send_json(entries)
        assert verb == "resolve", path
        if not authorized:
            return self._refuse(403, "GatedRepo", "Access to this model is restricted")
        file = "/".join(rest[2:])
        if file not in files:
            return self._refuse(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": commit})
        return self._send_file(file, files[file], commit)

    def _opens(self, repository: Repository) -> bool:
        return repository.token is None or self.headers.get("Authorization") == f"Bearer {repository.token}"

    def _send_file(self, file: str, body: bytes, commit: str) -> None:
        troubles = self.hub.trouble.get(file)
        trouble = troubles.popleft() if troubles and self.command == "GET" else None
        if isinstance(trouble, int):
            return self._refuse(trouble, None, "the store is tired")
        first = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        headers = {"ETag": f'"{_etag(body)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if first:
            headers["Content-Range"] = f"bytes {first}-{len(body) - 1}/{len(body)}"
        self._send(206 if first else 200, headers, body[first:], cut=trouble == "cut")

    def _send_json(self, content: object) -> None:
        self._send(200, {"Content-Type": "application/json"}, json.dumps(content).encode())

    def _refuse(self, status: int, code: str | None, message: str, headers: dict[str, str] | None = None) -> None:
        named = {"X-Error-Code": code} if code else {}
        self._send(status, {"X-Error-Message": message, **named, **(headers or {})}, b"")

    def _send(self, status: int, headers: dict[str, str], body: bytes, *, cut: bool = False) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[: len(body) // 2] if cut else body)


def _etag(body: bytes) -> str:
    return hashlib.sha1(body).hexdigest()
