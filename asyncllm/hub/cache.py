"""The local cache of the hub, with models that this or other programs have downloaded.

The layout is huggingface_hub's: `models--ORG--NAME/refs/REVISION` holds a commit, and the files in
`models--ORG--NAME/snapshots/COMMIT/` are links to `models--ORG--NAME/blobs/HASH`. The network is
not used here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from asyncllm.errors import ModelLoadError

MAX_NAME = 96  # characters, the hub's own limit
MAIN = "main"
_PART = r"(?!.*(?:--|\.\.))[A-Za-z0-9][\w.-]*(?<![.-])"
_NAME = re.compile(f"{_PART}/{_PART}", re.ASCII)
_REVISION = re.compile(r"(?!.*\.\.)\w[\w.+-]*(/\w[\w.+-]*)*", re.ASCII)
COMMIT = re.compile("[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class Repo:
    """A model on the hub. `revision` is a branch, a tag or a commit."""

    name: str  # ORG/NAME
    revision: str = MAIN

    @classmethod
    def parse(cls, text: str, revision: str | None = None) -> Repo | None:
        """Parse ORG/NAME[@REVISION]; None for anything else.

        Raises `ModelLoadError` for two different revisions, or an invalid one.
        """
        name, at, own = text.partition("@")
        if not _NAME.fullmatch(name) or len(name) > MAX_NAME:
            return None
        if at and revision is not None and own != revision:
            raise ModelLoadError(f"model {text!r}: two revisions, {own!r} and {revision!r}")
        wanted = own if at else MAIN if revision is None else revision
        if not _REVISION.fullmatch(wanted):
            raise ModelLoadError(f"model {text!r}: {wanted!r} is no branch, tag or commit")
        return cls(name, wanted)

    def __str__(self) -> str:
        return self.name if self.revision == MAIN else f"{self.name}@{self.revision}"


def cache_folder(download_dir: str | None) -> Path:
    """download_dir, or the folder of HF_HUB_CACHE or HF_HOME, or huggingface_hub's default."""
    if download_dir is not None:
        return Path(download_dir).expanduser()
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def storage_folder(cache: Path, repo: Repo) -> Path:
    return cache / f"models--{repo.name.replace('/', '--')}"


def snapshot_folder(cache: Path, repo: Repo, commit: str) -> Path:
    return storage_folder(cache, repo) / "snapshots" / commit


def unverified_mark(cache: Path, repo: Repo, commit: str) -> Path:
    """A file that exists until a download is complete and verified."""
    return storage_folder(cache, repo) / f"{commit}.unverified"


def find_snapshot(cache: Path, repo: Repo) -> Path | None:
    """The snapshot of a revision, complete or not; None if there is none, or it is unverified."""
    commit = repo.revision
    if not COMMIT.fullmatch(commit):
        try:
            commit = (storage_folder(cache, repo) / "refs" / repo.revision).read_text().strip()
        except (OSError, UnicodeDecodeError):
            return None
    folder = snapshot_folder(cache, repo, commit)
    usable = COMMIT.fullmatch(commit) and folder.is_dir()
    return folder if usable and not unverified_mark(cache, repo, commit).exists() else None


def cached_repos(cache: Path) -> Iterator[Repo]:
    """All models and named revisions in the cache, in order, including incomplete downloads."""
    for storage in sorted(cache.glob("models--*--*")):
        repo = Repo.parse(storage.name.removeprefix("models--").replace("--", "/", 1))
        if repo is None:
            continue
        refs = [file for file in sorted((storage / "refs").rglob("*")) if file.is_file()]
        if not refs and any(storage.glob("*.unverified")):
            yield repo
        for ref in refs:
            revision = ref.relative_to(storage / "refs").as_posix()
            if _REVISION.fullmatch(revision):
                yield Repo(repo.name, revision)
