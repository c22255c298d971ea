"""The API key: on every route but /health, whatever the spelling, and before the body is read."""

from __future__ import annotations

import asyncio

import pytest

from asyncllm.server.args import ServerArgs
from tests.server.http_harness import CHAT, HELLO, run, serving

KEYS = {"api_key": ["secret-1", "schlüssel"]}
ROUTES = [
    "/v1/models",
    "/v1/models/fake",
    "/version",
    "/metrics",
    "/nothing",
    "/health/",
    "//health",
]


def test_needs_key() -> None:
    async def test() -> None:
        async with serving(**KEYS) as server:
            for path in ROUTES:
                status, body = await server.get(path)
                assert status == 401, path
                assert set(body["error"]) == {"message", "type", "param", "code"}
                assert body["error"]["type"] == "authentication_error"
                assert body["error"]["code"] == "invalid_api_key"
            for path in (CHAT, "/v1/completions", "/tokenize", "/detokenize"):
                assert (await server.post(path, {}))[0] == 401
            assert (await server.get("/health"))[0] == 200

    run(test())


@pytest.mark.parametrize("key", ["secret-1", "schlüssel"])
def test_right_key(key: str) -> None:
    async def test() -> None:
        async with serving(**KEYS) as server:
            headers = {"Authorization": f"Bearer {key}"}
            assert (await server.post(CHAT, {"messages": HELLO}, **headers))[0] == 200
            assert (await server.get("/version", **headers))[0] == 200

    run(test())


@pytest.mark.parametrize(
    "value", ["secret-1", "Basic secret-1", "Bearer", "Bearer secret-", "Bearer secret-12", ""]
)
def test_wrong_key(value: str) -> None:
    async def test() -> None:
        async with serving(**KEYS) as server:
            assert (await server.get("/v1/models", Authorization=value))[0] == 401

    run(test())


def test_refused_before_the_body_is_read() -> None:
    async def test() -> None:
        async with serving(**KEYS) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(
                f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n".encode()
            )  # and no body
            assert (await reader.readline()).split()[1] == b"401"
            writer.close()

    run(test())


def test_key_from_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "from-vllm")
    monkeypatch.setenv("ASYNCLLM_API_KEY", "from-env")
    assert ServerArgs().keys() == ["from-env"]
    assert ServerArgs(api_key=["flag"]).keys() == ["flag"]
    monkeypatch.setenv("ASYNCLLM_API_KEY", "")
    assert ServerArgs().keys() == ["from-vllm"]
    monkeypatch.delenv("ASYNCLLM_API_KEY")
    assert ServerArgs().keys() == ["from-vllm"]
    monkeypatch.delenv("VLLM_API_KEY")
    assert ServerArgs().keys() == []


def test_vllms_variable_closes_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "from-vllm")

    async def test() -> None:
        async with serving() as server:
            assert (await server.get("/v1/models"))[0] == 401
            headers = {"Authorization": "Bearer from-vllm"}
            assert (await server.get("/v1/models", **headers))[0] == 200

    run(test())


@pytest.mark.parametrize("key", ["", "   ", "\t", " secret", "secret\n"])
def test_a_key_that_no_client_can_send_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match=r"api_key .* must not be blank"):
        ServerArgs(api_key=["good", key]).check()


@pytest.mark.parametrize("name", ["ASYNCLLM_API_KEY", "VLLM_API_KEY"])
def test_a_blank_variable_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "   ")
    with pytest.raises(ValueError, match=rf"{name}.* must not be blank"):
        ServerArgs().check()
