"""`asyncllm pull MODEL`: download a model of the hub, or what is new of it, and verify all."""

from __future__ import annotations

import argparse

from asyncllm.errors import ModelLoadError
from asyncllm.hub.cache import Repo, cache_folder
from asyncllm.hub.download import download

HELP = "download a model of the hub, or what is new of it, and verify all of it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="ORG/NAME[@REVISION]")
    parser.add_argument("--revision", help="branch, tag or commit (default: main)")
    add_download_dir(parser)


def add_download_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--download-dir", metavar="FOLDER", help="where models are kept (default: the hub's cache)"
    )


def run(options: argparse.Namespace) -> int:
    """Raises `ModelLoadError`."""
    repo = Repo.parse(options.model, options.revision)
    if repo is None:
        raise ModelLoadError(f"{options.model!r} is no name on the hub: ORG/NAME[@REVISION]")
    print(download(repo, cache_folder(options.download_dir)))
    return 0
