"""`asyncllm pull MODEL`: download a model of the hub, or what is new of it, and verify all."""

from __future__ import annotations

import argparse
import os

from asyncllm.commands.terminal import EXIT_CODE_INTERRUPTED
from asyncllm.errors import ModelLoadError
from asyncllm.hub.cache import Repo, cache_folder
from asyncllm.hub.download import download
from asyncllm.model_config import BUILTIN_MODELS

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
        why = " (it is built in)" if options.model in BUILTIN_MODELS else ""
        raise ModelLoadError(f"{options.model!r} is no name on the hub: ORG/NAME[@REVISION]{why}")
    try:
        print(download(repo, cache_folder(options.download_dir)))
    except KeyboardInterrupt:
        os._exit(EXIT_CODE_INTERRUPTED)  # a usual exit would wait for a hub that is silent
    return 0
