"""The hub's list of the files in a model's repository: names, sizes and hashes of one commit.

The hub may be another one than huggingface.co (HF_ENDPOINT). Its answers are not trusted: they are
read up to a limit and parsed with types, and names are checked.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import msgspec

from asyncllm.errors import ModelLoadError, one_line
from asyncllm.hub.cache import COMMIT, MAIN, Repo

MAX_LIST_BYTES = 16 << 20  # about 80,000 files
MAX_RETRIES = 3  # after 1, 2 and 4 seconds, if the hub is busy (429, 5xx)
_HASHES = {"sha256": re.compile("[0-9a-f]{64}"), "sha1": re.compile("[0-9a-f]{40}")}


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """digest: the hash of the contents, or of git's blob; None if the hub sends none."""

    name: str
    size: int | None  # bytes
    algorithm: str | None  # "sha256", or "sha1" with git's header
    digest: str | None


@dataclass(frozen=True, slots=True)
class Listing:
    commit: str
    files: dict[str, RemoteFile]


class _Lfs(msgspec.Struct):
    sha256: str | None = None
    size: int | None = None


class _Sibling(msgspec.Struct):
    rfilename: str
    size: int | None = None
    blobId: str | None = None
    lfs: _Lfs | None = None


class _Answer(msgspec.Struct):
    sha: str
    siblings: list[_Sibling] = []


def read_listing(repo: Repo) -> Listing:
    """Ask the hub for a repository's list. Raises `ModelLoadError`."""
    from huggingface_hub import constants

    source = f"{repo} at {constants.ENDPOINT}"
    path = f"{repo.name}/revision/{quote(repo.revision, safe='')}"
    try:
        raw = _get(f"{constants.ENDPOINT}/api/models/{path}?blobs=true")
    except Exception as error:  # httpx's, the library's and OSError have no common base
        raise hub_error(repo, error) from error
    if len(raw) > MAX_LIST_BYTES:
        raise ModelLoadError(f"{source}: its list of files has over {MAX_LIST_BYTES >> 20} MiB")
    try:
        answer = msgspec.json.decode(raw, type=_Answer)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{source}: no list of files: {one_line(error)}") from error
    if not COMMIT.fullmatch(answer.sha):
        raise ModelLoadError(f"{source}: {answer.sha[:80]!r} is no commit")
    for file in answer.siblings:
        _check_name(file.rfilename, source)
    return Listing(answer.sha, {file.rfilename: _remote(file) for file in answer.siblings})


def hub_error(repo: Repo, error: Exception) -> ModelLoadError:
    """An error that says what can be done about a library's error."""
    from huggingface_hub import constants, get_token

    where = constants.ENDPOINT
    for each in (error, error.__cause__):  # the library's error about its cache hides the hub's
        status: int | None = getattr(getattr(each, "response", None), "status_code", None)
        if status is not None:
            break
    if status in (401, 403):
        token = "its token may not read it" if get_token() else "set HF_TOKEN to a token for it"
        terms = f"accept its terms at {where}/{repo.name} where it has some"
        said = f"private, gated or not there (HTTP {status}): {token}; {terms}"
    elif status == 404:
        revision = "" if repo.revision == MAIN else f" or no revision {repo.revision} of it"
        said = f"there is no such model{revision} (HTTP 404), nor such a folder here"
    elif status is not None:
        said = f"HTTP {status}"
    else:
        said = one_line(error)
    return ModelLoadError(f"{repo} at {where}: {said}")


def _get(url: str) -> bytearray:
    """The body of an answer, cut above the limit. Raises the library's errors."""
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

    body = bytearray()
    how: dict[str, Any] = {
        "headers": build_hf_headers(library_name="asyncllm"),
        "timeout": constants.HF_HUB_DOWNLOAD_TIMEOUT,
        "max_retries": MAX_RETRIES,
        "retry_on_exceptions": (),  # without a network, fail at once
    }
    with http_stream_backoff("GET", url, **how) as response:
        hf_raise_for_status(response)
        for piece in response.iter_bytes():
            body += piece
            if len(body) > MAX_LIST_BYTES:
                break
    return body


def _check_name(name: str, source: str) -> None:
    parts = name.split("/")
    if not name.isprintable() or "\\" in name or {"", ".", ".."} & {*parts}:
        raise ModelLoadError(f"{source}: {name[:80]!r} is no file name")


def _remote(file: _Sibling) -> RemoteFile:
    size = file.size if file.lfs is None or file.lfs.size is None else file.lfs.size
    given = {"sha256": file.lfs and file.lfs.sha256, "sha1": file.blobId if not file.lfs else None}
    for algorithm, digest in given.items():
        if digest and _HASHES[algorithm].fullmatch(digest):
            return RemoteFile(file.rfilename, size, algorithm, digest)
    return RemoteFile(file.rfilename, size, None, None)
