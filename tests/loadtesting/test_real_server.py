"""Against `asyncllm serve` with the built-in model: its counts, texts and metrics agree."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import loadtest
import pytest


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "asyncllm.cli", "serve", "tiny", f"--port={port}"]
    few = os.environ | {"OMP_NUM_THREADS": "1"}  # its threads would spin against ours
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=few) as server:
        try:
            wait_until_healthy(f"http://127.0.0.1:{port}", server)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()


def wait_until_healthy(url: str, server: subprocess.Popen[bytes]) -> None:
    for _ in range(1200):
        assert server.poll() is None, "the server ended"
        try:
            urllib.request.urlopen(f"{url}/health", timeout=2)
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            time.sleep(0.1)
        else:
            return
    raise AssertionError("the server was not healthy in two minutes")


def test_counts_texts_and_metrics_agree(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--endpoint chat --input-len 8 --output-len 6 --num-prompts 4 --max-concurrency 2"
    more = "--num-warmups 1 --token-counts --check-outputs 2 --max-client-lag-ms 1e6"
    assert loadtest.main(["--base-url", url, *flags.split(), *more.split()]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["num_output_tokens"] == 4 * 6
    assert report["num_first_token_unknown"] == 0
    assert report["output_check"]["num_equal"] == 2  # float32 on the CPU
    said = report["server_metrics"]
    assert said["asyncllm:generation_tokens_total"] == 5 * 6
    assert said["asyncllm:request_queue_time_seconds_count"] == 5


def test_turns_and_cancelled_requests(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--num-turns 2 --input-len 6 --output-len 6 --num-prompts 12 --request-rate 20"
    more = "--cancel-share 0.5 --num-warmups 0 --max-client-lag-ms 1e6 --processes 2"
    assert loadtest.main(["--base-url", url, *flags.split(), *more.split()]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["num_cancelled"] > 0
    assert report["num_output_tokens"] == (12 - report["num_cancelled"]) * 6
