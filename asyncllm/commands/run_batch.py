"""`asyncllm run-batch -i IN -o OUT`: a file of requests in OpenAI's batch format, answered.

Each line asks one POST route of the server, and the server's own app answers it, through a socket
in a private folder and no port: what a request may say, and every error, are as over HTTP. Answers
are written in the order of the requests, as soon as that allows, so what is done stays done
whatever happens later.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from asyncllm.commands.flag_groups import GROUPS
from asyncllm.config import EngineArgs
from asyncllm.server.args import ServerArgs

HELP = "answer a file of requests in OpenAI's batch format"
# Flags of connections, clients and streams.
REFUSED = f"""{GROUPS["access"][1]}
    host port uds root_path ssl_certfile ssl_keyfile max_connections shutdown_timeout disable_page
    stream_interval enable_force_include_usage enable_request_id_headers metrics_prefix
    """.split()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-i", "--input-file", required=True, metavar="FILE", help="a JSON object per line"
    )
    parser.add_argument("-o", "--output-file", required=True, metavar="FILE", help="is overwritten")


def run(engine_args: EngineArgs, server_args: ServerArgs, options: argparse.Namespace) -> int:
    """The exit code. Raises `OSError`, `ValueError`, `ModelLoadError`."""
    import uvloop

    for name in REFUSED:
        if getattr(server_args, name) != getattr(ServerArgs(), name):
            raise ValueError(f"{name} has no meaning in a batch, which has no clients")
    from asyncllm.commands.batch import answer_file  # aiohttp and torch are behind it

    source, target = Path(options.input_file), Path(options.output_file)
    with source.open("rb") as lines:
        if target.exists() and target.samefile(source):
            raise ValueError(f"{target} is both the input and the output")
        with target.open("wb") as out:
            return uvloop.run(answer_file(engine_args, server_args, lines, out))
