"""Against `asyncllm serve` with the built-in model: its counts, texts and metrics agree."""

from __future__ import annotations

import json
from collections.abc import Iterator

import loadtest
import pytest

from tests.server.process import served


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served() as server:
        yield server.url


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


def test_defaults_fit_the_built_in_model(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its vocabulary is smaller than most; and a seed's second run says what helped it."""
    flags = ["--base-url", url, "--num-prompts", "4", "--max-concurrency", "2"]
    flags += ["--output-len", "4", "--num-warmups", "1", "--max-client-lag-ms", "1e6"]
    for is_second in (False, True):
        assert loadtest.main(flags) == 0
        shown = capsys.readouterr()
        report = json.loads(shown.out.splitlines()[-1])
        assert report["conditions"]["vocab_size"] == 4096
        assert (report["cached_share"] > 0.5) == is_second
        warned = "came from the server's prefix cache" in shown.err
        assert warned == is_second and ("seed 0? Take another" in shown.err) == is_second


def test_turns_and_cancelled_requests(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--num-turns 2 --input-len 6 --output-len 6 --num-prompts 12 --request-rate 20"
    more = "--cancel-share 0.5 --num-warmups 0 --max-client-lag-ms 1e6 --processes 2"
    assert loadtest.main(["--base-url", url, *flags.split(), *more.split()]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["num_cancelled"] > 0
    assert report["num_output_tokens"] == (12 - report["num_cancelled"]) * 6
