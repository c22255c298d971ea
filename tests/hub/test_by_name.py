"""A name of the hub wherever a model is named: commands, engine, tokenizer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from asyncllm import LLM, AsyncLLMEngine, EngineArgs, SamplingParams
from asyncllm.cli import main
from asyncllm.errors import ModelLoadError
from asyncllm.hub.cache import Repo
from asyncllm.model_config import hub_repo, resolve_model_path
from tests.hub.small_hub import COMMIT, NAME, SmallHub, small_hub
from tests.server.process import served
from tests.waiting import PATIENCE_SECONDS

SMALL = {"num_gpu_blocks_override": 20, "swap_space": 0}


@pytest.mark.parametrize(
    ("text", "revision", "repo"),
    [
        ("Qwen/Qwen3-0.6B", None, Repo("Qwen/Qwen3-0.6B", "main")),
        ("Qwen/Qwen3-0.6B@v1.0", None, Repo("Qwen/Qwen3-0.6B", "v1.0")),
        ("Qwen/Qwen3-0.6B", "refs/pr/7", Repo("Qwen/Qwen3-0.6B", "refs/pr/7")),
        ("a/b@c", "c", Repo("a/b", "c")),
        *((text, None, None) for text in ("gpt2", "a/b/c", "/a/b", "./a/b", "a/../b", "a--b/c")),
        *(
            (text, None, None)
            for text in ("a/b.", "a/", "/b", "a b/c", "a/b\n", "ä/b", "a/" + 99 * "b")
        ),
    ],
)
def test_names(text: str, revision: str | None, repo: Repo | None) -> None:
    assert Repo.parse(text, revision) == repo


@pytest.mark.parametrize("revision", ["..", "a/../b", "/etc", "", "a b", "a\n"])
def test_what_is_no_revision(revision: str) -> None:
    for given in [("a/b", revision), (f"a/b@{revision}", None)]:
        with pytest.raises(ModelLoadError, match="is no branch, tag or commit"):
            Repo.parse(*given)


def test_two_revisions_and_one_for_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="two revisions, 'x' and 'y'"):
        hub_repo("a/b@x", "y")
    with pytest.raises(ModelLoadError, match=r"revision 'x': .* is not on the hub, but here"):
        hub_repo(str(tmp_path), "x")


def test_a_folder_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_model_path("a/b") == tmp_path / "a" / "b"
    assert hub_repo("a/b") is None


def test_engine_args(hub: SmallHub, cache: Path, tmp_path: Path) -> None:
    config = EngineArgs(NAME, revision="v1").create_engine_config()
    assert config.served_model_names == (NAME,)
    assert config.model.path == config.tokenizer_path
    assert config.model.path.name == COMMIT and cache in config.model.path.parents
    config = EngineArgs(f"{NAME}@v1", download_dir=str(tmp_path / "mine")).create_engine_config()
    assert tmp_path / "mine" in config.model.path.parents
    assert config.served_model_names == (NAME,)


def test_only_what_is_needed(hub: SmallHub, cache: Path) -> None:
    EngineArgs(NAME, load_format="dummy").create_engine_config()
    config = EngineArgs("tiny", tokenizer=f"{NAME}@{COMMIT}").create_engine_config()
    assert config.tokenizer_path is not None and config.tokenizer_path.name == COMMIT
    assert not [path for path in hub.paths if "safetensors" in path]
    del hub.files["tokenizer.json"]
    hub.requests.clear()
    EngineArgs(NAME, skip_tokenizer_init=True, download_dir=f"{cache}2").create_engine_config()
    hub.requests.clear()
    EngineArgs(NAME, tokenizer="tiny", download_dir=f"{cache}2").create_engine_config()
    assert hub.requests == []


def test_an_engine_and_an_llm(hub: SmallHub) -> None:
    with LLM(NAME, **SMALL) as llm:
        (output,) = llm.generate(["Once upon a time"], SamplingParams(max_tokens=3), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 3
    assert AsyncLLMEngine(NAME, **SMALL).config.served_model_names == (NAME,)


# --- the commands ---------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(words)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_pull(
    hub: SmallHub,
    cache: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO", "asyncllm"):
        code, out, _ = run(capsys, "pull", NAME)
    assert code == 0 and out == f"{cache}/models--our-org--tiny/snapshots/{COMMIT}\n"
    assert caplog.messages == [f"downloading {NAME}: 4.09 MB to {cache}"]
    code, out, errors = run(capsys, "pull", f"{NAME}@nowhere")
    assert (code, out) == (1, "") and errors.startswith(f"asyncllm: error: {NAME}@nowhere at http")
    code, out, errors = run(capsys, "pull", "tiny")
    assert (code, out) == (1, "") and "'tiny' is no name on the hub" in errors
    assert errors.endswith("(it is built in)\n")


def test_models(hub: SmallHub, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "pull", NAME)
    config = json.loads(hub.files["config.json"])
    hub.revisions["part"] = hub.revisions["other"] = COMMIT
    mine = f"{cache}2"
    other = Path(run(capsys, "pull", NAME, "--revision", "other", "--download-dir", mine)[1][:-1])
    (other / "config.json").unlink()
    (other / "config.json").write_text(json.dumps(config | {"architectures": ["Unheard"]}))
    (Path(mine) / "models--nonsense").mkdir()
    (Path(mine) / "models--a--b" / "refs").mkdir(parents=True)
    (Path(mine) / "models--a--b" / "refs" / "main").write_text("../../elsewhere")
    code, out, _ = run(capsys, "models")
    words = next(line for line in out.splitlines() if line.startswith(NAME)).split()
    assert code == 0 and words[1:] == ["main", "4.35", "MB", "natively", "(LlamaForCausalLM)"]
    code, out, _ = run(capsys, "models", "--download-dir", mine, "--json")
    found = {model["name"]: model for model in json.loads(out)}
    assert found["tiny"]["revision"] == "built in" and found["tiny"]["served"].startswith(
        "natively"
    )
    assert found[NAME]["served"].startswith("not: config.json: architectures 'Unheard' is not")
    assert found["a/b"]["served"] == "not yet: asyncllm pull completes it"
    assert set(found) == {"tiny", "tiny-draft", NAME, "a/b"}


def test_models_says_what_is_missing(
    hub: SmallHub, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    EngineArgs(NAME, load_format="dummy").create_engine_config()
    out = run(capsys, "models")[1]
    assert "not yet: without its weights; asyncllm pull completes it" in out


def test_models_shows_a_download_that_was_not_completed(
    hub: SmallHub, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.corrupt = {"model.safetensors"}
    assert run(capsys, "pull", NAME)[0] == 1
    line = next(line for line in run(capsys, "models")[1].splitlines() if NAME in line)
    _, revision, _, unit, *served = line.split()
    assert (revision, unit) == ("main", "kB")  # of the small files
    assert " ".join(served) == "not yet: asyncllm pull completes it"


def test_doctor_needs_no_weights(hub: SmallHub, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "doctor", NAME, "--device", "cpu", "--json")
    found = {each["name"]: each for each in json.loads(out)["findings"]}
    assert code == 0 and found["implementation"]["value"] == "asyncllm"
    assert found["files"]["value"] == "no weights here yet" and found["files"]["state"] == "note"
    assert not [path for path in hub.paths if "safetensors" in path]


# --- in processes of their own --------------------------------------------------------------------


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[tuple[SmallHub, dict[str, str]]]:
    with small_hub() as (hub, url):
        yield hub, {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}


@pytest.mark.slow
def test_serve_by_name_and_no_request_downloads(
    environment: tuple[SmallHub, dict[str, str]],
) -> None:
    hub, variables = environment
    hub.token = variables["HF_TOKEN"] = "secret"
    with served(model=NAME, **variables) as (_, url, _):
        with urllib.request.urlopen(url + "/v1/models", timeout=PATIENCE_SECONDS) as response:
            assert json.load(response)["data"][0]["id"] == NAME
        asked = len(hub.requests)
        assert asked > 0

        def post(model: str, path: str) -> int:
            body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi"}
            body |= {"max_tokens": 2}
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
            try:
                with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as response:
                    return int(response.status)
            except urllib.error.HTTPError as error:
                return error.code

        assert post(NAME, "/v1/chat/completions") == 200
        for other in ("our-org/other", f"{NAME}@v1", f"{NAME}@{COMMIT}", "../tiny"):
            assert post(other, "/v1/chat/completions") == 404
            assert post(other, "/v1/completions") == 404
        assert len(hub.requests) == asked


@pytest.mark.slow
def test_offline_by_the_environment(environment: tuple[SmallHub, dict[str, str]]) -> None:
    hub, variables = environment
    variables["HF_HUB_OFFLINE"] = "1"
    done = subprocess.run(
        [sys.executable, "-m", "asyncllm", "serve", NAME, "--port", "0"],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert f"{NAME} is not in {variables['HF_HOME']}/hub, and HF_HUB_OFFLINE forbids" in done.stderr
    assert hub.requests == []


@pytest.mark.slow
@pytest.mark.parametrize("is_silent", [False, True])
def test_ctrl_c_ends_a_download(
    environment: tuple[SmallHub, dict[str, str]], is_silent: bool
) -> None:
    hub, variables = environment
    hub.go.clear()
    command = [sys.executable, "-m", "asyncllm", "pull", NAME]
    # A shell that starts the tests in the background has them, and so their children, ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(command, env=os.environ | variables, stderr=subprocess.PIPE)
    signal.signal(signal.SIGINT, before)
    with process:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while "GET /model.safetensors" not in hub.paths:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        if not is_silent:
            hub.go.set()
        assert process.wait(PATIENCE_SECONDS) == 130
        hub.go.set()
    left = list(Path(variables["HF_HOME"]).rglob("*.incomplete"))
    assert is_silent or not left
    assert not list(Path(variables["HF_HOME"]).rglob("refs/main"))


def test_no_test_asks_the_real_hub() -> None:
    assert constants.HF_HUB_OFFLINE
