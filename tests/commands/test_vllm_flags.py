"""vLLM's flags: each is one of ours, or in the table that says what it means here.

`vllm_flags.txt` has the names that `vllm serve` of vLLM 0.24.0 takes.
`python -m tests.commands.test_vllm_flags` writes docs/flags.md anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncllm import cli
from asyncllm.commands.flags import field_names
from asyncllm.commands.vllm_flags import ANY, SHORT, VllmFlag, vllm_flags
from asyncllm.config import EngineArgs
from asyncllm.server.args import ServerArgs

VLLM = frozenset(Path(__file__).with_name("vllm_flags.txt").read_text().split())
OURS = {name.replace("_", "-") for name in field_names(EngineArgs) | field_names(ServerArgs)}
OURS.add("config")
ROWS = {flag.name: flag for flag in vllm_flags()}
DOCUMENT = Path(__file__).parents[2] / "docs" / "flags.md"
MARK = "<!-- flags -->\n"


def parse(*words: str) -> tuple[EngineArgs, ServerArgs]:
    parser, flags = cli._parsers()
    given = vars(parser.parse_args(cli.normalise(["serve", *words])))
    assert given.pop("command") == "serve"
    return cli.merge(flags, given)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as left:
        parse(*words)
    assert left.value.code == 2
    return capsys.readouterr().err


def test_each_flag_of_vllm_has_its_place() -> None:
    assert len(VLLM) == 266
    assert OURS | ROWS.keys() >= VLLM and not OURS & ROWS.keys()
    assert ROWS.keys() <= VLLM, "rows of flags that vLLM has not"
    assert len(ROWS) == len(list(vllm_flags())), "a flag has two rows"
    assert set(SHORT.values()) <= ROWS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("flag", ROWS.values(), ids=ROWS)
def test_what_is_accepted_changes_nothing(flag: VllmFlag) -> None:
    for value in flag.accepted:
        if flag.is_switch:
            words = [f"--{flag.name}", f"--no-{flag.name}"]
            kept = {ANY: words, "on": words[:1], "off": words[1:]}[value]
        else:
            kept = [f"--{flag.name}={'7' if value == ANY else value}"]
        assert parse("tiny", *kept) == parse("tiny")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--decode-context-parallel-size=2"], "-size 2 is not served yet: there are --tensor-"),
        (["-sc", "{}"], "--speculative-config {} is not served yet: no speculative"),
        (["--mamba_backend", "x"], "--mamba-backend x is not served yet: states of recurrent"),
        (["--no-enable-chunked-prefill"], "--enable-chunked-prefill off is not served yet"),
        (["--fully-sharded-loras"], "--fully-sharded-loras is not served yet: adapters have"),
        (["--cudagraph-capture-sizes", "1", "2"], "1 2: here it is --cuda-graph-sizes"),
        (["--hf-overrides", "{}"], "--hf-overrides {} is not served: the config.json"),
        (["--compilation-config.mode", "3"], '--compilation-config {"mode": 3} is not served: ker'),
        (["--pooler-config.a.b=x"], '--pooler-config {"a": {"b": "x"}} is not served yet: no pool'),
        (["--tensor-paralel-size", "2"], "did you mean --tensor-parallel-size?"),
    ],
)
def test_what_is_not_served_says_so(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refused(capsys, "tiny", *words)
    assert complaint in error
    assert error.count("\n") == 2


def test_no_code_is_run_whatever_is_trusted(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse("--trust-remote-code", "tiny") == parse("tiny")
    assert (
        capsys.readouterr().err == "asyncllm: --trust-remote-code: no code of a model is ever run\n"
    )


@pytest.mark.parametrize("words", [["-O3"], ["-O", "3"], ["-O=3"]])
def test_the_short_way_to_optimize(words: list[str]) -> None:
    assert parse("tiny", *words) == parse("tiny")


def test_keys_of_a_json_flag_one_by_one() -> None:
    words = ["--default_chat_template_kwargs.enable_thinking", "false"]
    words += ["--default-chat-template-kwargs.style.name=short", "--port", "7"]
    _, server = parse("tiny", *words)
    wanted = {"enable_thinking": False, "style": {"name": "short"}}
    assert server.default_chat_template_kwargs == wanted and server.port == 7


def test_torchs_short_names_of_dtypes() -> None:
    for name, meant in (("half", "float16"), ("float", "float32")):
        engine, _ = parse("tiny", "--dtype", name)
        assert engine.create_engine_config().dtype == meant


def test_help_does_not_list_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help=all")
    listed = capsys.readouterr().out
    assert "--max-num-seqs" in listed and "--decode-context-parallel-size" not in listed


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("speculative-config", "vLLM's; not yet: no speculative decoding"),
        ("--hf_overrides", "vLLM's; never: the config.json of the model's folder is what it is"),
        ("tokenizer-mode", "vLLM's; accepted (auto, hf, fast): always so"),
        ("enable-sleep-mode", "vLLM's; not yet, but for off: an engine sleeps only by ending"),
    ],
)
def test_what_becomes_of_one_is_asked_by_its_name(
    asked: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parse(f"--help={asked}")
    name = asked.lstrip("-").replace("_", "-")
    assert end.value.code == 0 and capsys.readouterr().out == f"--{name}: {said}\n"


def test_a_config_file_may_hold_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "flags.yaml"
    file.write_text("decode-context-parallel-size: 1\nenable_lora: false\nport: 7\n")
    assert parse("tiny", "--config", str(file))[1].port == 7
    file.write_text("decode-context-parallel-size: 2\n")
    assert "is not served yet" in refused(capsys, "tiny", "--config", str(file))


def table() -> Iterator[str]:
    yield "| vLLM's flag | here | accepted | |"
    yield "| --- | --- | --- | --- |"
    for name in sorted(VLLM):
        if name in OURS:
            yield f"| `--{name}` | same | | |"
            continue
        flag = ROWS[name]
        accepted = ", ".join("any" if value == ANY else f"`{value}`" for value in flag.accepted)
        yield f"| `--{name}` | {flag.status} | {accepted} | {flag.why} |"


def test_the_document_is_what_the_command_does() -> None:
    written = DOCUMENT.read_text().partition(MARK)[2]
    assert written.splitlines() == list(table()), "see the head of this file"


if __name__ == "__main__":
    head = DOCUMENT.read_text().partition(MARK)[0]
    DOCUMENT.write_text(head + MARK + "\n".join(table()) + "\n")
