"""The `asyncllm` command. An error at start is one line on stderr, with exit code 1."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import select
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from importlib.metadata import version
from typing import Any

import uvloop

from asyncllm.commands import (
    bench,
    chat,
    complete,
    doctor,
    kernels,
    models,
    pull,
    run_batch,
    worker,
)
from asyncllm.commands.fast_start import begin_fast_start
from asyncllm.commands.flags import (
    FlagParser,
    add_flags,
    field_names,
    normalise,
    pick,
    read_config_file,
)
from asyncllm.commands.terminal import EXIT_CODE_INTERRUPTED
from asyncllm.commands.vllm_flags import add_vllm_flags, vllm_flags
from asyncllm.config import EngineArgs
from asyncllm.errors import EngineDeadError, ModelLoadError
from asyncllm.server.args import ServerArgs
from asyncllm.server.http.listener import Listener
from asyncllm.server.observability.logs import set_up_logging

STARTED = time.perf_counter()
EXIT_CODE_BROKEN_PIPE = 141  # as a shell has it of SIGPIPE
COMMANDS: dict[str, Any] = {"bench": bench, "kernels": kernels, "doctor": doctor}
STARTING = {"serve", "run-batch"}  # commands that start an engine in this process at once
# Commands for a running server, or for the hub: without an engine and its flags.
PLAIN: dict[str, Any] = {
    "chat": chat, "complete": complete, "pull": pull, "models": models, "worker": worker,
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    # OpenMP threads that spin while they wait take cores from the threads that they wait for: on a
    # machine with other work, a token takes 10 to 20 times as long. OpenMP reads this when torch is
    # imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    parser, flags = _parsers()
    given = vars(parser.parse_args(normalise(sys.argv[1:] if argv is None else argv)))
    command = given.pop("command")
    if command is None:
        parser.print_help(sys.stderr)
        return 2
    if command in PLAIN:
        _set_up_logging("info")
        return _run_command(partial(PLAIN[command].run, argparse.Namespace(**given)))
    try:
        engine_args, server_args = merge(flags, given)
    except ValueError as error:
        parser.error(str(error))
    if command in STARTING:
        # With an engine per process this process needs no device.
        is_one = engine_args.data_parallel_size == 1
        begin_fast_start(engine_args.device if is_one else "cpu")
    if command == "serve":
        return _run_command(partial(_serve, engine_args, server_args))
    options = argparse.Namespace(**given)
    if command == "run-batch":
        return _run_command(partial(_run_batch, engine_args, server_args, options))
    _set_up_logging("info" if command == "kernels" else "warning")
    return _run_command(partial(COMMANDS[command].run, engine_args, options))


def merge(flags: argparse.ArgumentParser, given: dict[str, Any]) -> tuple[EngineArgs, ServerArgs]:
    """The arguments: the command line overrides the config file, which overrides defaults. Raises
    `ValueError`."""
    config, positional = given.pop("config"), given.pop("model_tag")
    if positional is not None and given.setdefault("model", positional) != positional:
        raise ValueError(f"two models: {positional} and --model {given['model']}")
    if config is not None:
        known = field_names(EngineArgs) | field_names(ServerArgs)
        known |= {flag.name.replace("-", "_") for flag in vllm_flags()}
        from_file = vars(flags.parse_args(read_config_file(config, known)))
        given = {**from_file, **given}
    return EngineArgs(**pick(EngineArgs, given)), ServerArgs(**pick(ServerArgs, given))


def _parsers() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """The parser of the command line, and one of the flags alone, for config files."""
    flags = FlagParser(prog="asyncllm serve", add_help=False)
    add_flags(flags, EngineArgs)
    add_flags(flags, ServerArgs)
    add_vllm_flags(flags)
    engine_flags = FlagParser(add_help=False)
    add_flags(engine_flags, EngineArgs)
    add_vllm_flags(engine_flags)
    parser = FlagParser(
        prog="asyncllm",
        description="An LLM engine and OpenAI-compatible server in one asyncio process.",
    )
    parser.add_argument("--version", action="version", version=version("asyncllm"))
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    serve = commands.add_parser("serve", parents=[flags], help="serve a model over HTTP")
    _add_model(serve)
    batch = commands.add_parser("run-batch", parents=[flags], help=run_batch.HELP)
    run_batch.add_arguments(batch)
    _add_model(batch)
    for name, module in PLAIN.items():
        module.add_arguments(commands.add_parser(name, help=module.HELP))
    for name, module in COMMANDS.items():
        command = commands.add_parser(name, parents=[engine_flags], help=module.HELP)
        module.add_arguments(command)
        _add_model(command)
    return parser, flags


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model_tag",
        nargs="?",
        metavar="MODEL",
        help="folder, GGUF file, ORG/NAME[@REVISION] on the hub, or built-in name",
    )
    parser.add_argument("--config", metavar="FILE", help="YAML of flags; the command line wins")


def _run_command(work: Callable[[], int]) -> int:
    try:
        code = work()
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return EXIT_CODE_INTERRUPTED
    except (ModelLoadError, EngineDeadError, ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError) and _has_lost_its_reader():
            return EXIT_CODE_BROKEN_PIPE
        print(f"asyncllm: error: {_error_text(error)}", file=sys.stderr)
        return 1


def _has_lost_its_reader() -> bool:
    """Whether nobody reads stdout any more, as by `| head`. Then it is left: Python would flush it
    once more at its end."""
    if sys.stdout is None:
        return False
    poll = select.poll()
    poll.register(stdout := sys.stdout.fileno(), 0)
    if not any(events & select.POLLERR for _, events in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), stdout)
    return True


def _serve(engine_args: EngineArgs, server_args: ServerArgs) -> int:
    server_args.check()
    _set_up_logging(server_args.log_level, server_args.log_format)
    try:
        with closing(Listener.bind(server_args)) as listener:
            _run(engine_args, server_args, listener)
    except KeyboardInterrupt:  # while loading
        os._exit(EXIT_CODE_INTERRUPTED)  # a normal exit would wait for the loading thread
    return 0


def _run_batch(
    engine_args: EngineArgs, server_args: ServerArgs, options: argparse.Namespace
) -> int:
    server_args.check()
    _set_up_logging(server_args.log_level, server_args.log_format)
    return run_batch.run(engine_args, server_args, options)


def _error_text(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _set_up_logging(level: str, log_format: str = "text") -> None:
    set_up_logging(level, log_format)
    logging.getLogger("huggingface_hub").propagate = False  # it has its own handler
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # else it logs each request
    # Our middleware logs errors of handlers. aiohttp would only log tracebacks of invalid HTTP.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)


def _run(engine_args: EngineArgs, server_args: ServerArgs, listener: Listener) -> None:
    # torch is behind these imports: seconds that --help and a taken port should not cost. What they
    # make stays: the collector would walk over it again and again, for a tenth of the time.
    gc.disable()
    from asyncllm.engine.async_engine import AsyncLLMEngine
    from asyncllm.server.serve import serve

    gc.freeze()
    gc.enable()

    engine = AsyncLLMEngine.from_engine_args(engine_args)  # before the loop: it may download
    engine.show_progress = sys.stderr.isatty()
    uvloop.run(serve(engine, server_args, listener, STARTED))
