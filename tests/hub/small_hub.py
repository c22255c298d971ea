"""A hub of our own on 127.0.0.1, with one model and a second host for its large files.

It answers as huggingface.co does: a list with sizes and hashes, `/resolve/` with ETag and commit,
large files by a redirect to another host, ranges. Its attributes make it misbehave.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from asyncllm.model_config import BUILTIN_MODELS
from tests.waiting import PATIENCE_SECONDS

NAME = "our-org/tiny"
COMMIT = "c" * 40
OTHER_COMMIT = "d" * 40
TINY = {file.name: file.read_bytes() for file in BUILTIN_MODELS["tiny-draft"].iterdir()}
DECOYS = {
    "README.md": b"# tiny",
    "modeling_tiny.py": b"raise SystemExit('code of a model was run')",
    "pytorch_model.bin": b"a pickle",
    "pytorch_model.bin.index.json": b"{}",
    "consolidated.safetensors": b"the same weights again",
    "original/params.json": b"{}",
    "onnx/model.onnx": b"again",
}


class SmallHub:
    def __init__(self) -> None:
        self.files = TINY | DECOYS
        self.revisions = {"main": COMMIT, "v1": COMMIT, COMMIT: COMMIT}
        self.requests: list[tuple[str, str, str | None]] = []  # method and path, host, token
        self.status: int | None = None  # of every answer
        self.error_code: str | None = None
        self.token: str | None = None  # needed
        self.listed_names: list[str] = []  # beside those that there are
        self.list_body: bytes | None = None
        self.num_cuts = 0  # answers with the body of a large file that end in the middle
        self.corrupt: set[str] = set()  # files that come with other contents of the same size
        self.headers: dict[str, str] = {}  # in place of those of /resolve/
        self.tells_hashes = True
        self.go = threading.Event()  # large files end only once it is set
        self.go.set()

    @property
    def paths(self) -> list[str]:
        return [path for path, _, _ in self.requests]

    def listing(self, commit: str) -> bytes:
        if self.list_body is not None:
            return self.list_body
        siblings: list[dict[str, Any]] = [{"rfilename": name} for name in self.listed_names]
        for name, content in self.files.items():
            entry: dict[str, Any] = {"rfilename": name}
            if self.tells_hashes:
                entry |= {"size": len(content), "blobId": git_hash(content)}
                if is_large(name):
                    entry["lfs"] = {"sha256": sha256(content), "size": len(content)}
            siblings.append(entry)
        return json.dumps({"id": NAME, "sha": commit, "siblings": siblings}).encode()


def is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".bin", ".gguf"))


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def small_hub() -> Iterator[tuple[SmallHub, str]]:
    """The hub and its URL. The large files' host is `localhost`, on a port of its own."""
    hub = SmallHub()
    with _server(hub, None) as store, _server(hub, f"http://localhost:{store}") as port:
        yield hub, f"http://127.0.0.1:{port}"


@contextmanager
def _server(hub: SmallHub, store: str | None) -> Iterator[int]:
    class Bound(_Handler):
        pass

    Bound.hub, Bound.store = hub, store
    server = ThreadingHTTPServer(("127.0.0.1", 0), Bound)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: SmallHub
    store: str | None  # the URL of the other host; None: this is it

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        hub = self.hub
        token = self.headers.get("Authorization")
        host = "store" if self.store is None else "hub"
        hub.requests.append((f"{self.command} {self.path.partition('?')[0]}", host, token))
        if self.store is None:
            self._body(hub.files[self.path[1:]], self.path[1:])
        elif hub.status is not None:
            self._answer(
                hub.status, {} if hub.error_code is None else {"X-Error-Code": hub.error_code}
            )
        elif hub.token is not None and token != f"Bearer {hub.token}":
            self._answer(401, {"X-Error-Code": "RepoNotFound"})
        elif listed := re.match(rf"/api/models/{NAME}/revision/([^?/]+)", self.path):
            self._list(listed[1])
        elif asked := re.match(rf"/{NAME}/resolve/({COMMIT})/([^?]+)", self.path):
            self._file(asked[2])
        else:
            self._answer(404, {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def _list(self, revision: str) -> None:
        commit = self.hub.revisions.get(revision.replace("%2F", "/"))
        if commit is None:
            self._answer(404, {"X-Error-Code": "RevisionNotFound"})
        else:
            self._answer(200, {"Content-Type": "application/json"}, self.hub.listing(commit))

    def _file(self, name: str) -> None:
        content = self.hub.files[name]
        digest = sha256(content) if is_large(name) else git_hash(content)
        headers = {"ETag": f'"{digest}"', "X-Repo-Commit": COMMIT, **self.hub.headers}
        if not is_large(name):
            self._body(content, name, headers)
            return
        linked = {"X-Linked-ETag": headers.pop("ETag"), "X-Linked-Size": str(len(content))}
        self._answer(302, {"Location": f"{self.store}/{name}", **headers, **linked})

    def _body(self, content: bytes, name: str, headers: dict[str, str] | None = None) -> None:
        if name in self.hub.corrupt:
            content = bytes(len(content))
        start = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        first = int(start[1]) if start else 0
        sent = dict(headers or {})
        if start:
            sent["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        cuts = self.store is None and self.command == "GET" and self.hub.num_cuts > 0
        if cuts:
            self.hub.num_cuts -= 1
        self._answer(206 if start else 200, sent, content[first:], cuts)

    def _answer(
        self, status: int, headers: dict[str, str], body: bytes = b"", cuts: bool = False
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            try:
                half, content = len(body) // 2, memoryview(body)  # a test counts what is copied
                self.wfile.write(content[:half])
                if self.store is None:
                    self.hub.go.wait(PATIENCE_SECONDS)
                if not cuts:
                    self.wfile.write(content[half:])
            except OSError:  # a client that has read enough
                self.close_connection = True
        self.close_connection = self.close_connection or cuts
