"""Models of the hub: what is downloaded, what is found again, and a hub that misbehaves."""

from __future__ import annotations

import io
import json
import shutil
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from asyncllm.errors import ModelLoadError
from asyncllm.hub.cache import Repo, find_snapshot, unverified_mark
from asyncllm.hub.download import download, find_or_download
from asyncllm.hub.listing import MAX_LIST_BYTES
from tests.hub.small_hub import COMMIT, NAME, OTHER_COMMIT, TINY, SmallHub

REPO = Repo(NAME)
ALL: Any = ("config", "tokenizer", "weights")


def held(folder: Path) -> dict[str, bytes]:
    files = [file for file in folder.rglob("*") if file.is_file()]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def refusal(cache: Path, repo: Repo = REPO) -> str:
    with pytest.raises(ModelLoadError) as error:
        find_or_download(repo, cache, ALL)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_model_is_downloaded_and_nothing_else(hub: SmallHub, cache: Path) -> None:
    folder = find_or_download(REPO, cache, ALL)
    assert held(folder) == TINY
    assert folder == cache / "models--our-org--tiny" / "snapshots" / COMMIT


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_of_all_bytes_on_a_terminal_and_none_elsewhere(
    hub: SmallHub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for shown in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", shown)
        find_or_download(REPO, cache, ALL)
        shutil.rmtree(cache)
        last = shown.getvalue().split("\r")[-1]
        if not shown.isatty():
            assert last == ""
            continue
        size = len(TINY["model.safetensors"]) / 1e6
        assert last.startswith(f"{NAME}: 100%") and f"{size:.2f}M/{size:.2f}M" in last


def test_what_is_in_the_cache_is_not_asked_for(hub: SmallHub, cache: Path) -> None:
    folder = find_or_download(REPO, cache, ALL)
    hub.requests.clear()
    assert find_or_download(REPO, cache, ALL) == folder
    assert find_or_download(Repo(NAME, COMMIT), cache, ALL) == folder
    assert hub.requests == []


def test_pulled_again_it_is_verified_and_what_is_new_is_fetched(hub: SmallHub, cache: Path) -> None:
    folder = download(REPO, cache)
    (folder / "model.safetensors").resolve().write_bytes(bytes(len(TINY["model.safetensors"])))
    hub.files["chat_template.jinja"] = b"{{ messages }}"
    with pytest.raises(ModelLoadError, match=r"model\.safetensors has the sha256"):
        download(REPO, cache)
    assert find_snapshot(cache, REPO) is None
    assert held(download(REPO, cache)) == TINY | {"chat_template.jinja": b"{{ messages }}"}


def test_small_files_alone_and_the_weights_later(hub: SmallHub, cache: Path) -> None:
    folder = find_or_download(REPO, cache, ["config", "tokenizer"])
    assert "model.safetensors" not in held(folder) and "tokenizer.json" in held(folder)
    hub.requests.clear()
    assert held(find_or_download(REPO, cache, ALL)) == TINY
    assert [path for path in hub.paths if "json" in path] == []


def test_shards_are_those_of_the_index(hub: SmallHub, cache: Path) -> None:
    weights = hub.files.pop("model.safetensors")
    index = {"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}
    hub.files |= {"part-1.safetensors": weights, "part-2.safetensors": weights[:99]}
    hub.files["model.safetensors.index.json"] = json.dumps(index).encode()
    folder = find_or_download(REPO, cache, ALL)
    assert held(folder).keys() >= {*index["weight_map"].values()}
    (folder / "part-2.safetensors").resolve().unlink()
    hub.requests.clear()
    find_or_download(REPO, cache, ALL)  # another program's cache may hold some alone
    assert "GET /part-2.safetensors" in hub.paths and "GET /part-1.safetensors" not in hub.paths


@pytest.mark.parametrize("revision", ["v1", COMMIT])
def test_revisions(hub: SmallHub, cache: Path, revision: str) -> None:
    assert held(find_or_download(Repo(NAME, revision), cache, ALL)) == TINY
    assert find_snapshot(cache, Repo(NAME)) is None
    assert find_snapshot(cache, Repo(NAME, revision)) is not None


def test_offline_it_is_the_cache_or_nothing(
    hub: SmallHub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert refusal(cache) == f"{NAME} is not in {cache}, and HF_HUB_OFFLINE forbids to ask"
    assert hub.requests == []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    find_or_download(REPO, cache, ["config"])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "is only without its weights in" in refusal(cache)


# --- refused by the hub ---------------------------------------------------------------------------


def test_a_token_goes_to_the_hub_and_to_no_other_host(
    hub: SmallHub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.token = "secret"
    assert "(HTTP 401): set HF_TOKEN to a token for it" in refusal(cache)
    monkeypatch.setenv("HF_TOKEN", "wrong")
    assert "(HTTP 401): its token may not read it; accept its terms at http://" in refusal(cache)
    monkeypatch.setenv("HF_TOKEN", "secret")
    hub.requests.clear()
    assert held(find_or_download(REPO, cache, ALL)) == TINY
    tokens = {
        host: {token for _, at, token in hub.requests if at == host} for host in ("hub", "store")
    }
    assert tokens == {"hub": {"Bearer secret"}, "store": {None}}


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (403, "GatedRepo", "private, gated or not there (HTTP 403)"),
        (404, "RepoNotFound", "there is no such model (HTTP 404), nor such a folder here"),
        (410, None, "HTTP 410"),
    ],
)
def test_refused(hub: SmallHub, cache: Path, status: int, code: str | None, said: str) -> None:
    hub.status, hub.error_code = status, code
    assert f"{NAME} at http://127.0.0.1:" in refusal(cache) and said in refusal(cache)


def test_an_unknown_revision(hub: SmallHub, cache: Path) -> None:
    said = refusal(cache, Repo(NAME, "v2"))
    assert "there is no such model or no revision v2 of it (HTTP 404)" in said


def test_nobody_there(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    start = time.monotonic()
    assert "at http://127.0.0.1:1: " in refusal(cache)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"config.json": None}, "holds no config.json"),
        (
            {"config.json": None, "pytorch_model.bin": None, "a.gguf": b"GGUF"},
            "holds no config.json, only GGUF files (a.gguf): download one and give its path",
        ),
        (
            {"model.safetensors": None},
            "holds no model.safetensors, only pickled weights (pytorch_model.bin), which are never",
        ),
        (
            {"model.safetensors": None, "pytorch_model.bin": None, "a.gguf": b"GGUF"},
            "holds no model.safetensors, only GGUF files (a.gguf): download one and give its path",
        ),
        (
            {
                "model.safetensors": None,
                "model.safetensors.index.json": b'{"weight_map": {"a": "b.safetensors"}}',
            },
            "lacks b.safetensors, which its model.safetensors.index.json names",
        ),
        (
            {
                "model.safetensors": None,
                "model.safetensors.index.json": b'{"weight_map": {"a": "../b.safetensors"}}',
            },
            "'../b.safetensors' is no file name",
        ),
        ({"model.safetensors": None, "model.safetensors.index.json": b"[]"}, "no weight_map"),
    ],
)
def test_what_is_no_model(
    hub: SmallHub, cache: Path, files: dict[str, bytes | None], said: str
) -> None:
    for name, content in files.items():
        if content is None:
            del hub.files[name]
        else:
            hub.files[name] = content
    assert said in refusal(cache)
    assert not [path for path in hub.paths if ".bin" in path]


# --- a hub that misbehaves ------------------------------------------------------------------------


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)


def test_a_cut_body_is_taken_up_where_it_broke(
    hub: SmallHub, cache: Path, no_waiting: None
) -> None:
    hub.num_cuts = 3
    assert held(find_or_download(REPO, cache, ALL)) == TINY
    assert hub.paths.count("GET /model.safetensors") == 4


def test_always_cut_it_fails_and_the_next_try_goes_on(
    hub: SmallHub, cache: Path, no_waiting: None
) -> None:
    hub.num_cuts = 1000
    assert NAME in refusal(cache)
    assert find_snapshot(cache, REPO) is None
    hub.num_cuts = 0
    hub.requests.clear()
    assert held(find_or_download(REPO, cache, ALL)) == TINY
    assert [path for path in hub.paths if path.startswith("GET")] == [
        f"GET /api/models/{NAME}/revision/main",
        "GET /model.safetensors",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"), [("model.safetensors", "has the sha256 "), ("config.json", "has the sha1 ")]
)
@pytest.mark.parametrize("tells_hashes", [True, False])
def test_other_contents_are_found_out(
    hub: SmallHub, cache: Path, name: str, said: str, tells_hashes: bool
) -> None:
    hub.tells_hashes = tells_hashes
    hub.corrupt = {name}
    complaint = refusal(cache)
    assert f"{name} {said}" in complaint and complaint.endswith("; it was removed")
    hub.corrupt = set()
    assert held(find_or_download(REPO, cache, ALL)) == TINY


@pytest.mark.slow
def test_a_list_of_a_million_files(hub: SmallHub, cache: Path) -> None:
    entry = '{"rfilename": "%07d.json", "size": 1, "blobId": "' + "a" * 40 + '"}'
    body = ",".join(entry % number for number in range(10**6))
    hub.list_body = f'{{"sha": "{COMMIT}", "siblings": [{body}]}}'.encode()
    assert len(hub.list_body) > 4 * MAX_LIST_BYTES
    tracemalloc.start()
    try:
        assert f"its list of files has over {MAX_LIST_BYTES >> 20} MiB" in refusal(cache)
        assert tracemalloc.get_traced_memory()[1] < 3 * MAX_LIST_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "name", ["../config.json", "a/../../b.json", "/etc/x.json", "a//b", "", "a\\b", "a\nb", ".."]
)
def test_names_that_lead_elsewhere(hub: SmallHub, cache: Path, name: str) -> None:
    hub.listed_names = [name]
    assert f"{name!r} is no file name" in refusal(cache)
    assert not cache.exists()


@pytest.mark.parametrize("header", ["ETag", "X-Linked-ETag"])
def test_an_etag_that_leads_elsewhere(hub: SmallHub, cache: Path, header: str) -> None:
    hub.headers = {header: '"../../../../stolen"'}
    assert "is no hash" in refusal(cache)
    assert not list(cache.parent.rglob("stolen*"))


def test_files_of_another_commit(hub: SmallHub, cache: Path) -> None:
    hub.headers = {"X-Repo-Commit": OTHER_COMMIT}
    assert "of another commit" in refusal(cache)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "no list of files"),
        (b"<html>", "no list of files"),
        (b"[]", "no list of files"),
        (b'{"sha": "../../x", "siblings": []}', "'../../x' is no commit"),
        (b'{"sha": "%s", "siblings": [{"rfilename": 3}]}' % COMMIT.encode(), "no list of files"),
        (b'{"sha": "%s"' % COMMIT.encode(), "no list of files"),
        (b'{"sha": "\xff"}', "no list of files"),
    ],
)
def test_what_is_no_list(hub: SmallHub, cache: Path, body: bytes, said: str) -> None:
    hub.list_body = body
    assert said in refusal(cache)


def test_what_does_not_fit_on_the_disk(
    hub: SmallHub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(cache.parent)._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    said = refusal(cache)
    assert "4.09 MB to download, but" in said and "1 MB left: free some" in said
    assert "GET /model.safetensors" not in hub.paths


def test_a_download_that_was_ended_does_not_count(hub: SmallHub, cache: Path) -> None:
    folder = download(REPO, cache)
    unverified_mark(cache, REPO, COMMIT).touch()  # as after a kill
    assert find_snapshot(cache, REPO) is None
    hub.requests.clear()
    assert find_or_download(REPO, cache, ALL) == folder
    assert "GET /model.safetensors" not in hub.paths  # it is verified, not fetched
    assert find_snapshot(cache, REPO) == folder
