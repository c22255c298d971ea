"""`asyncllm run-batch`: every line of the input has one line of the output, in its order."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest

from asyncllm import cli
from asyncllm.commands import batch as batch_module
from asyncllm.commands.batch import Batch
from tests.engine.adapter_files import write_tiny_adapter

SMALL = ["--model", "tiny", "--num-gpu-blocks-override", "200", "--swap-space", "0"]
CHAT = {"messages": [{"role": "user", "content": "What is 2 + 2?"}], "max_tokens": 8}
DEAD_END = 'start: "ab" END\nEND: /a/ & /bbb/'
LINES: list[Any] = [
    {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": CHAT},
    {"custom_id": "two", "url": "/v1/completions", "body": {"prompt": ["a", "b"], "max_tokens": 2}},
    "nonsense",
    {"custom_id": "range", "url": "/v1/completions", "body": {"prompt": "a", "temperature": -1}},
    {"custom_id": "model", "url": "/v1/completions", "body": {"prompt": "a", "model": "other"}},
    {"custom_id": "get", "method": "GET", "url": "/v1/models", "body": {}},
    {"custom_id": "route", "url": "/v1/models", "body": {}},
    {"custom_id": "stream", "url": "/v1/completions", "body": {"prompt": "a", "stream": True}},
    {"custom_id": "body", "url": "/v1/completions", "body": []},
    {
        "custom_id": "dead end",
        "url": "/v1/completions",
        "body": {"prompt": "a", "structured_outputs": {"grammar": DEAD_END}},
    },
    {"custom_id": "messages", "url": "/v1/messages", "body": CHAT},
]


def write(folder: Path, lines: list[Any]) -> tuple[str, str]:
    source = folder / "in.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    source.write_text("\n\n".join(texts))  # empty lines count for nothing, nor does a missing end
    return str(source), str(folder / "out.jsonl")


def answers(target: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(target).read_text().splitlines()]


def test_each_line_is_answered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCLLM_API_KEY", "of somebody")
    source, target = write(tmp_path, LINES)
    assert cli.main(["run-batch", "-i", source, "-o", target, *SMALL]) == 1
    said = capsys.readouterr().err
    assert "3 answered, 8 failed" in said and "2 of them are no requests of a batch" in said
    found = answers(target)
    assert [line["custom_id"] for line in found] == [
        line["custom_id"] if isinstance(line, dict) else None for line in LINES
    ]
    assert len({line["id"] for line in found}) == len(found)
    by_id = {line["custom_id"]: line for line in found}
    for name in ("chat", "two", "messages"):
        assert by_id[name]["error"] is None and by_id[name]["response"]["status_code"] == 200
    assert "4" in by_id["chat"]["response"]["body"]["choices"][0]["message"]["content"]
    assert len(by_id["two"]["response"]["body"]["choices"]) == 2
    assert by_id["messages"]["response"]["body"]["content"][0]["type"] == "text"
    for name, status, param in (
        ("range", 400, "temperature"), ("model", 404, "model"),
        ("dead end", 400, "structured_outputs.grammar"),
    ):  # fmt: skip
        assert by_id[name]["response"]["status_code"] == status
        assert by_id[name]["error"]["param"] == param
        assert by_id[name]["response"]["body"] == {"error": by_id[name]["error"]}
    for custom_id, words in (
        (None, "line 5"), ("get", "POST"), ("route", "/v1/chat/completions"),
        ("stream", "stream"), ("body", "body must be an object"),
    ):  # fmt: skip
        assert by_id[custom_id]["response"] is None
        assert words in by_id[custom_id]["error"]["message"]


def test_what_is_asked_and_refused_is_exit_code_0(tmp_path: Path) -> None:
    source, target = write(tmp_path, [LINES[0], LINES[3], LINES[6]])
    assert cli.main(["run-batch", "--input-file", source, "--output-file", target, *SMALL]) == 0
    assert [line["error"] is None for line in answers(target)] == [True, False, False]


def test_adapters_logs_and_answers_that_are_no_json(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch does what the flags of a server ask for."""
    set_up: list[tuple[str, ...]] = []
    monkeypatch.setattr(cli, "set_up_logging", lambda *given: set_up.append(given))
    caplog.set_level("INFO")
    folder = str(write_tiny_adapter(tmp_path / "one", 1))
    completion = {"prompt": "a", "max_tokens": 2}
    lines = [
        ("static", "/v1/completions", completion | {"model": "given"}),
        ("load", "/v1/load_lora_adapter", {"lora_name": "late", "lora_path": folder}),
        ("again", "/v1/load_lora_adapter", {"lora_name": "given", "lora_path": folder}),
        ("base", "/v1/completions", completion),
    ]
    source, target = write(
        tmp_path, [{"custom_id": name, "url": url, "body": body} for name, url, body in lines]
    )
    flags = ["--enable-lora", f"--lora-modules=given={folder}", f"--lora-root={tmp_path}"]
    flags += ["--allow-runtime-lora-updating", "--enable-log-requests"]
    flags += ["--log-level=debug", "--log-format=json"]
    assert cli.main(["run-batch", "-i", source, "-o", target, *flags, *SMALL]) == 0
    by_id = {line["custom_id"]: line for line in answers(target)}
    assert {name for name, line in by_id.items() if line["error"] is None} == {
        "static", "load", "base"
    }  # fmt: skip
    assert by_id["load"]["response"]["body"].startswith("Success: LoRA adapter 'late'")
    assert by_id["static"]["response"]["body"]["model"] == "given"
    assert set_up == [("debug", "json")]
    assert sum(" prompt tokens (" in message for message in caplog.messages) == 2


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--port=8001", "port has no meaning in a batch"),
        ("--api-key=secret", "api_key has no meaning in a batch"),
        ("--stream-interval=4", "stream_interval has no meaning in a batch"),
        ("--max-body-bytes=0", "max_body_bytes must be at least 1"),
        ("--otlp-traces-endpoint=", "otlp_traces_endpoint must not be empty"),
    ],
)
def test_flags_of_a_server_that_a_batch_cannot_have(
    flag: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = write(tmp_path, LINES)
    assert cli.main(["run-batch", "-i", source, "-o", target, flag, *SMALL]) == 1
    assert said in capsys.readouterr().err and not Path(target).exists()


@pytest.mark.parametrize("name", ["missing.jsonl", "in.jsonl"])
def test_files_that_cannot_be_used(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, _ = write(tmp_path, LINES)
    before = Path(source).read_text()
    files = ["-i", str(tmp_path / name), "-o", source if name == "in.jsonl" else str(tmp_path)]
    assert cli.main(["run-batch", *files, *SMALL]) == 1
    error = capsys.readouterr().err
    assert name in error and "Errno" not in error
    assert Path(source).read_text() == before


class SlowFirst:
    """A session whose answer to the first request comes after all that may be asked beside it."""

    def __init__(self) -> None:
        self.num_live = self.most_live = self.num_asked = 0
        self.release = asyncio.Event()

    def post(self, url: str, json: dict[str, Any]) -> SlowFirst._Answer:
        return self._Answer(self, json["number"])

    class _Answer:
        status = 200

        def __init__(self, session: SlowFirst, number: int) -> None:
            self._session, self._number = session, number

        async def __aenter__(self) -> SlowFirst._Answer:
            session = self._session
            session.num_asked += 1
            session.num_live += 1
            session.most_live = max(session.most_live, session.num_live)
            if self._number == 0:
                await session.release.wait()
            else:
                await asyncio.sleep(0)
            return self

        async def __aexit__(self, *exc: object) -> None:
            self._session.num_live -= 1

        async def read(self) -> bytes:
            return json.dumps({"number": self._number}).encode()


def test_what_is_asked_and_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_module, "LINES_AHEAD", 2)

    async def work() -> None:
        session: Any = SlowFirst()
        batch = Batch(session, frozenset(["/x"]), num_at_once=4)
        lines = b"".join(
            json.dumps({"custom_id": str(i), "url": "/x", "body": {"number": i}}).encode() + b"\n"
            for i in range(100)
        )
        out = io.BytesIO()
        running = asyncio.create_task(batch.run(io.BytesIO(lines), out))
        for _ in range(200):
            await asyncio.sleep(0)
        assert (session.num_asked, out.getvalue()) == (8, b"")  # none is written before the first
        session.release.set()
        await running
        assert session.most_live == 4
        numbers = [json.loads(x)["response"]["body"]["number"] for x in out.getvalue().splitlines()]
        assert numbers == list(range(100))

    asyncio.run(work())


def test_a_line_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_module, "MAX_LINE_BYTES", 100)
    session: Any = SlowFirst()

    async def work() -> None:
        with pytest.raises(ValueError, match="line 2 is longer than 100 bytes"):
            await Batch(session, frozenset(), 1).run(io.BytesIO(b"{}\n" + b"x" * 101), io.BytesIO())

    asyncio.run(work())
