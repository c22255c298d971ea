"""Flags from dataclasses, the config file under them, and what fails before a model is loaded."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import closing
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from asyncllm import cli
from asyncllm.commands.flags import field_names, read_config_file
from asyncllm.config import EngineArgs
from asyncllm.server.args import ServerArgs
from asyncllm.server.http.listener import Listener

SMALL = ["--num-gpu-blocks-override", "8", "--swap-space", "0"]


def parse(*words: str) -> tuple[EngineArgs, ServerArgs]:
    parser, flags = cli._parsers()
    given = vars(parser.parse_args(cli.normalise(["serve", *words])))
    assert given.pop("command") == "serve"
    return cli.merge(flags, given)


def test_defaults_are_the_dataclasses_own() -> None:
    assert parse() == (EngineArgs(), ServerArgs())


def test_a_json_object_is_a_flag_and_a_mapping_of_the_file(tmp_path: Path) -> None:
    _, server = parse('--default-chat-template-kwargs={"enable_thinking": false}')
    assert server.default_chat_template_kwargs == {"enable_thinking": False}
    file = tmp_path / "config.yaml"
    file.write_text("default-chat-template-kwargs:\n  enable_thinking: true\n")
    _, server = parse(*read_config_file(str(file), field_names(ServerArgs)))
    assert server.default_chat_template_kwargs == {"enable_thinking": True}
    for bad in ("[1]", "{", "1"):
        with pytest.raises(SystemExit):
            parse(f"--default-chat-template-kwargs={bad}")


def test_every_kind_of_flag() -> None:
    engine, server = parse(
        "some/model",
        "--max_model_len=2k",
        "--max-num-batched-tokens",
        "2K",
        "--dtype",
        "bfloat16",
        "--no-enable-prefix-caching",
        "--enforce-eager",
        "--served-model-name",
        "a",
        "b_c",
        "--cuda-graph-sizes",
        "1",
        "2",
        "--gpu-memory-utilization",
        "0.5",
        "--api-key",
        "under_score",
        "--port",
        "0",
    )
    assert engine == EngineArgs(
        model="some/model",
        max_model_len=2000,
        max_num_batched_tokens=2048,
        dtype="bfloat16",
        enable_prefix_caching=False,
        enforce_eager=True,
        served_model_name=["a", "b_c"],
        cuda_graph_sizes=[1, 2],
        gpu_memory_utilization=0.5,
    )
    assert server == ServerArgs(api_key=["under_score"], port=0)


def test_every_field_is_a_flag_with_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["serve", "--help=all"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    for record in (EngineArgs, ServerArgs):
        for field in fields(record):
            assert f"--{field.name.replace('_', '-')}" in text
            assert field.metadata["help"]


@pytest.mark.parametrize(
    "words",
    [
        ["serve", "--no-such-flag"],
        ["serve", "--max-model", "1"],  # no abbreviations
        ["serve", "--dtype", "int3"],
        ["serve", "--port", "http"],
        ["serve", "a", "b"],
        ["serve", "a", "--model", "b"],
        ["launch"],
        ["serve", "--config", "/nowhere/config.yaml"],
    ],
)
def test_what_cannot_be_parsed(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    assert end.value.code == 2
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["serve", "--prot", "1"],
            "asyncllm serve: error: unrecognized arguments: --prot (did you mean --port?)",
        ),
        (
            ["serve", "--max_model_length=4", "--xyzzy", "5"],
            "--max-model-length=4 (did you mean --max-model-len?), --xyzzy\n",
        ),
        (["serve", "a", "b"], "asyncllm serve: error: unrecognized arguments: b\n"),
        (
            ["chat", "--ulr", "x"],
            "asyncllm chat: error: unrecognized arguments: --ulr (did you mean --url?)",
        ),
        (["kernels"], "the following arguments are required: build|list\n"),
        (["serve", "--dtype", "int3"], "argument --dtype: invalid choice: 'int3' (choose from "),
        (
            ["serve", "--config", "/nowhere.yaml"],
            "error: /nowhere.yaml: No such file or directory\n",
        ),
    ],
)
def test_what_is_wrong_is_said_in_two_lines(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(words)
    error = capsys.readouterr().err
    assert said in error
    _, where = error.splitlines()
    assert where.startswith("See 'asyncllm") and where.endswith("--help'.")


@pytest.mark.parametrize(("given", "expected"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_of_products_do_not_spin_unless_asked_to(
    given: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", given)
    assert cli.main([]) == 2
    assert os.environ["OMP_WAIT_POLICY"] == expected


def test_the_command_imports_no_torch_before_it_is_read() -> None:
    """OpenMP reads how its threads are to wait when torch is imported."""
    code = "import sys; import asyncllm.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out[0].isdigit()


def test_a_window_of_what_fits() -> None:
    for words in (["--max-model-len", "auto"], ["--max-model-len=-1"]):
        assert parse(*words)[0] == EngineArgs()
    with pytest.raises(SystemExit):
        parse("--seed", "auto")


def test_config_file(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "model: from/file\nport: 9000\nmax_num_seqs: 8\nmax-model-len: 4k\n"
        "enable-prefix-caching: false\nserved-model-name: [a, b]\nuds:\ngpu_memory_utilization: 1\n"
    )
    engine, server = parse("--config", str(file), "--port", "9001")
    assert engine == EngineArgs(
        model="from/file",
        max_num_seqs=8,
        max_model_len=4000,
        enable_prefix_caching=False,
        served_model_name=["a", "b"],
        gpu_memory_utilization=1.0,
    )
    assert server == ServerArgs(port=9001)
    assert parse("from/line", "--config", str(file))[0].model == "from/line"
    file.write_text("")
    assert parse("--config", str(file)) == (EngineArgs(), ServerArgs())


@pytest.mark.parametrize(
    "text", ["prot: 1", "port: x", "port: {a: 1}", "- port", "a: [", "config: x.yaml", "1: 2"]
)
def test_bad_config_file(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(SystemExit) as end:
        cli.main(["serve", "--config", str(file)])
    assert end.value.code == 2
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--port", "70000"], "port"),
        (["--ssl-keyfile", "key.pem"], "ssl_certfile"),
        (["--ssl-certfile", "/nowhere/cert.pem", "--port", "0"], "ssl_certfile"),
        (["--host", "256.1.1.1.1"], "host"),
        (["--api-key", ""], "api_key"),
        (["--api-key", "   "], "api_key"),
        (["--log-level", "loud"], "log_level"),
        (["--metrics-prefix", "a b"], "metrics_prefix"),
        (["--shutdown-timeout", "nan"], "shutdown_timeout"),
        (["--swap-space", "nan", "--port", "0"], "swap_space"),
        (["--swap-space", "inf", "--port", "0"], "swap_space"),
        (["--served-model-name", "", "--port", "0"], "served_model_name"),
        (["--uds", "/nowhere/server.sock", *SMALL], "/nowhere/server.sock"),
        (["/nowhere/model", "--port", "0"], "/nowhere/model"),
        (["--max-model-len", "0", "--port", "0"], "max_model_len"),
    ],
)
def test_what_cannot_start(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", *words]) == 1
    error = capsys.readouterr().err
    assert error.startswith("asyncllm: error: ")
    assert complaint in error
    assert error.count("\n") == 1


def test_taken_port(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["serve", "--port", str(port)]) == 1
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err


def test_of_two_servers_that_start_at_once_the_second_names_the_port() -> None:
    with closing(Listener.bind(ServerArgs(port=0))) as first:
        assert first.sock is not None
        port = first.sock.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}: .*in use"):
            Listener.bind(ServerArgs(port=port))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--device", "cuda", "--port", "0"]) == 1
    assert capsys.readouterr().err == "asyncllm: error: device cuda: torch finds no CUDA device\n"


def test_python_m_is_the_command() -> None:
    command = [sys.executable, "-m", "asyncllm", "serve", "--api-key", "   "]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("asyncllm: error: api_key ")


def test_what_fails_early_does_not_wait_for_torch() -> None:
    code = "import sys, asyncllm.cli; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["return 3", "raise SystemExit(3)"])
def test_the_process_ends_behind_its_exit_handlers(ends: str) -> None:
    code = f"""
import atexit, logging, logging.handlers, sys, threading, time
import asyncllm.__main__ as command

class Library:
    def __del__(self): print("taken apart")

def main():
    global library, held
    library = Library()
    held = logging.handlers.MemoryHandler(9, target=logging.StreamHandler(sys.stdout))
    logging.getLogger().addHandler(held)
    logging.getLogger().warning("logged")
    threading.Thread(target=lambda: (time.sleep(0.2), print("thread ended"))).start()
    atexit.register(print, "handler ran")
    {ends}

command.main = main
sys.exit(command.run())
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    said = ["thread ended", "handler ran", "logged"]
    assert done.stdout.splitlines() == (said if ends == "return 3" else [*said, "taken apart"])
