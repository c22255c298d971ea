"""Finds a model of the hub in the cache, or downloads it with huggingface_hub.

The files are chosen from the hub's list, must fit on the disk, and are compared with the sizes and
hashes of the list; until all are verified, the cache does not count as having the model. Broken
downloads are resumed. The functions block: call them before an event loop runs, or in a thread.
"""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

from asyncllm.errors import ModelLoadError
from asyncllm.hub.cache import (
    COMMIT,
    Repo,
    find_snapshot,
    snapshot_folder,
    storage_folder,
    unverified_mark,
)
from asyncllm.hub.files import (
    CONFIG_FILE,
    Part,
    is_small,
    missing_parts,
    size_text,
    weight_files,
    what_instead,
)
from asyncllm.hub.listing import Listing, RemoteFile, hub_error, read_listing

logger = logging.getLogger("asyncllm")

NUM_THREADS = 4  # files downloaded at a time
PIECE_BYTES = 1 << 20
STOP_SECONDS = 5.0  # for threads to stop; longer if the hub is silent
_ETAG = re.compile(r'(W/)?"?[\w-]+"?')


def find_or_download(repo: Repo, cache: Path, needs: Collection[Part]) -> Path:
    """The folder of a model with the needed parts. Raises `ModelLoadError`.

    A download includes the small files of the other parts.
    """
    found = find_snapshot(cache, repo)
    lacking = list(needs) if found is None else missing_parts(found, needs)
    if found is not None and not lacking:
        return found
    from huggingface_hub import is_offline_mode

    if is_offline_mode():
        what = f"only without its {' and '.join(lacking)}" if found is not None else "not"
        raise ModelLoadError(f"{repo} is {what} in {cache}, and HF_HUB_OFFLINE forbids to ask")
    return download(repo, cache, with_weights="weights" in needs)


def download(repo: Repo, cache: Path, with_weights: bool = True) -> Path:
    """Ask the hub, download missing files and verify all. Returns the snapshot's folder.

    Raises `ModelLoadError`.
    """
    listing = read_listing(repo)
    if CONFIG_FILE not in listing.files:
        raise ModelLoadError(f"{repo}: holds no {CONFIG_FILE}{what_instead(listing.files)}")
    work = _Download(repo, cache, listing)
    mark = unverified_mark(cache, repo, listing.commit)
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()
    with _checked_answers():
        work.fetch([file for name, file in listing.files.items() if is_small(name)])
        if with_weights:
            names = weight_files(work.folder, listing.files, str(repo))
            work.fetch([listing.files[name] for name in names])
    _write_ref(cache, repo, listing.commit)
    mark.unlink(missing_ok=True)
    return work.folder


class _Download:
    """Downloads the files of a commit to its snapshot's folder."""

    def __init__(self, repo: Repo, cache: Path, listing: Listing) -> None:
        self.folder = snapshot_folder(cache, repo, listing.commit)
        self._repo = repo
        self._cache = cache
        self._commit = listing.commit

    def fetch(self, files: Iterable[RemoteFile]) -> None:
        """Fetch several files at a time; existing ones are only verified. Raises
        `ModelLoadError`."""
        from huggingface_hub.utils.tqdm import tqdm

        files = list(files)
        absent = [file for file in files if not (self.folder / file.name).exists()]
        num_bytes = sum(file.size or 0 for file in absent)
        self._check_space(num_bytes)
        if not all(is_small(file.name) for file in absent):
            logger.info("downloading %s: %s to %s", self._repo, size_text(num_bytes), self._cache)
        bar = tqdm(total=num_bytes, unit="B", unit_scale=True, desc=str(self._repo), disable=None)
        stop = Event()
        part = _part_of(bar, stop)
        threads = ThreadPoolExecutor(NUM_THREADS, "asyncllm-download")
        running = [threads.submit(self._fetch_one, file, part) for file in files]
        with bar:
            try:
                for each in running:
                    each.result()
            finally:  # also after Ctrl-C: end the threads, and leave no partial file
                stop.set()
                threads.shutdown(wait=False, cancel_futures=True)
                wait([each for each in running if not each.cancelled()], STOP_SECONDS)

    def _fetch_one(self, file: RemoteFile, part: type) -> None:
        from huggingface_hub import hf_hub_download

        try:
            path = hf_hub_download(
                self._repo.name,
                file.name,
                revision=self._commit,
                cache_dir=self._cache,
                library_name="asyncllm",
                tqdm_class=part,
            )
        except Exception as error:  # httpx's, the library's and OSError have no common base
            if isinstance(error, ModelLoadError):
                raise
            raise hub_error(self._repo, error) from error
        if Path(path) != self.folder / file.name:
            raise ModelLoadError(f"{self._repo}: the hub sent {file.name} of another commit")
        _verify(self._repo, file, Path(path))

    def _check_space(self, num_bytes: int) -> None:
        folder = next(each for each in (self.folder, *self.folder.parents) if each.exists())
        free = shutil.disk_usage(folder).free
        if num_bytes > free:
            raise ModelLoadError(
                f"{self._repo}: {size_text(num_bytes)} to download, but {self._cache} has "
                f"{size_text(free)} left: free some, or choose another --download-dir"
            )


def _verify(repo: Repo, file: RemoteFile, path: Path) -> None:
    """Raise if a file differs from the list, and remove it, so that it is downloaded again."""
    algorithm, digest = file.algorithm, file.digest
    if digest is None:  # a mirror without hashes in its list names the blob by its hash
        digest = path.resolve().name
        algorithm = {64: "sha256", 40: "sha1"}.get(len(digest))
    size = path.stat().st_size
    if file.size is not None and size != file.size:
        problem = f"has {size} bytes, not {file.size}"
    elif algorithm is None:
        problem = "cannot be verified: the hub tells no hash"
    elif (found := _digest(path, algorithm, size)) != digest:
        problem = f"has the {algorithm} {found}, not {digest}"
    else:
        return
    path.resolve().unlink(missing_ok=True)
    path.unlink(missing_ok=True)
    raise ModelLoadError(f"{repo}: {file.name} {problem}; it was removed")


def _digest(path: Path, algorithm: str, size: int) -> str:
    """The hash of a file; sha1 is git's hash of a blob, with a header."""
    hashed = hashlib.new(algorithm, usedforsecurity=False)
    if algorithm == "sha1":
        hashed.update(b"blob %d\0" % size)
    with path.open("rb") as opened:
        while piece := opened.read(PIECE_BYTES):
            hashed.update(piece)
    return hashed.hexdigest()


def _write_ref(cache: Path, repo: Repo, commit: str) -> None:
    """Record the commit of a branch or tag, so that it is known without asking the hub."""
    if COMMIT.fullmatch(repo.revision):
        return
    file = storage_folder(cache, repo) / "refs" / repo.revision
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{commit}")
    temporary.write_text(commit)
    temporary.replace(file)


@contextmanager
def _checked_answers() -> Iterator[None]:
    """Check that no ETag of the hub is a path, as huggingface_hub names files by it."""
    from huggingface_hub import get_session

    def check(response: Any) -> None:
        if response.request.method == "HEAD":
            for header in ("ETag", "X-Linked-ETag"):
                value = response.headers.get(header)
                if value is not None and not _ETAG.fullmatch(value):
                    raise ModelLoadError(f"{response.url}: {header} {value[:80]!r} is no hash")

    client = get_session()
    before = client.event_hooks
    client.event_hooks = {**before, "response": [*before.get("response", ()), check]}
    try:
        yield
    finally:
        client.event_hooks = before


def _part_of(bar: Any, stop: Event) -> type:
    """A class for huggingface_hub's progress bar of a file: it advances the common bar, and raises
    after `stop`."""
    from huggingface_hub.utils.tqdm import tqdm

    class Part(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> None:
            if stop.is_set():
                raise ModelLoadError("the download was stopped")
            bar.update(n)

        def update_transfer(self, n: float | None = 1) -> None:
            """Bytes from the network, if written bytes are counted separately (Xet); ignored."""

        def set_transfer_postfix_str(self, *args: Any, **options: Any) -> None:
            """The network's speed; ignored."""

    return Part
