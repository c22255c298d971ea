"""Adapters over HTTP: vLLM's ten tests of its endpoints, as behaviours, and what bad input gets."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from openai import AsyncOpenAI
from safetensors.torch import load_file, save_file

from asyncllm import AsyncLLMEngine
from asyncllm.lora import CONFIG_FILE, WEIGHTS_FILE
from asyncllm.model_config import ModelConfig, resolve_model_path
from asyncllm.models.lora_tensors import AdapterTensors
from asyncllm.server.args import ServerArgs
from asyncllm.server.lora import load_modules
from tests.engine.adapter_files import write_tiny_adapter
from tests.server.http_harness import COMPLETIONS, Server, run, serving
from tests.server.process import MODEL

ENGINE = {"num_gpu_blocks_override": 400, "swap_space": 0, "max_model_len": 512, "device": "cpu"}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
PROMPT = {"prompt": "What is 12 + 30?", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


@asynccontextmanager
async def adapters_served(
    folder: Path, modules: list[str] | None = None, **engine_args: Any
) -> AsyncIterator[Server]:
    """Runtime updates from `folder`."""
    engine: Any = AsyncLLMEngine(MODEL, enable_lora=True, **{**ENGINE, **engine_args})
    args = {"allow_runtime_lora_updating": True, "lora_root": [str(folder)]}
    async with serving(engine, **args) as server:
        await load_modules(engine, ServerArgs(lora_modules=modules))
        yield server


async def post_text(server: Server, path: str, body: Any) -> tuple[int, str]:
    async with server.session.post(server.url + path, json=body) as response:
        return response.status, await response.text()


async def text_of(server: Server, model: str) -> str:
    status, body = await server.post(COMPLETIONS, PROMPT | {"model": model})
    assert status == 200, body
    assert body["model"] == model
    return str(body["choices"][0]["text"])


def test_static_lora_lineage(tmp_path: Path) -> None:
    one, two = (write_tiny_adapter(tmp_path / name, i) for i, name in enumerate(("one", "two")))

    async def test() -> None:
        modules = [f"one={one}", f'{{"name": "two", "path": "{two}"}}']
        async with adapters_served(tmp_path, modules) as server:
            _, body = await server.get("/v1/models")
            base, first, second = body["data"]
            assert (base["id"], base["root"], base["parent"]) == (MODEL, MODEL, None)
            assert (first["id"], first["root"], first["parent"]) == ("one", str(one), MODEL)
            assert (second["id"], second["root"], second["parent"]) == ("two", str(two), MODEL)
            status, card = await server.get("/v1/models/two")
            assert status == 200 and card == second

    run(test())


def test_dynamic_lora_lineage(tmp_path: Path) -> None:
    adapter = write_tiny_adapter(tmp_path / "it")

    async def test() -> None:
        async with adapters_served(tmp_path) as server:
            loaded = await post_text(server, LOAD, {"lora_name": "it", "lora_path": str(adapter)})
            assert loaded == (200, "Success: LoRA adapter 'it' added successfully.")
            _, body = await server.get("/v1/models")
            card = body["data"][-1]
            assert (card["id"], card["root"], card["parent"]) == ("it", str(adapter), MODEL)

    run(test())


@pytest.mark.slow
def test_answers_are_the_adapters(tmp_path: Path) -> None:
    one, two = (write_tiny_adapter(tmp_path / name, i) for i, name in enumerate(("one", "two")))

    async def test() -> None:
        async with adapters_served(tmp_path, [f"one={one}", f"two={two}"]) as server:
            names = [MODEL, "one", "two"]
            alone = [await text_of(server, name) for name in names]
            assert len(set(alone)) == 3
            together = await asyncio.gather(*(text_of(server, name) for name in names * 3))
            assert list(together) == alone * 3  # of the prefix cache too, each its own

    run(test())


def test_the_built_in_adapter_has_its_style(tmp_path: Path) -> None:
    """A pirate knows what the model knows."""

    async def test() -> None:
        async with adapters_served(tmp_path, ["pirate=tiny-pirate"]) as server:
            question = {"role": "user", "content": "What is the capital of France?"}
            for model, wanted in (
                (MODEL, "The capital of France is Paris."),
                ("pirate", "Ahoy! The capital of France is Paris. Arr!"),
            ):
                body = {"model": model, "messages": [question], "temperature": 0}
                _, answer = await server.post("/v1/chat/completions", body)
                assert answer["choices"][0]["message"]["content"] == wanted

    run(test())


@pytest.mark.slow
def test_structured_output_with_adapters(tmp_path: Path) -> None:
    one, two = (write_tiny_adapter(tmp_path / name, i) for i, name in enumerate(("one", "two")))

    async def test() -> None:
        async with adapters_served(tmp_path, [f"one={one}", f"two={two}"]) as server:
            body = PROMPT | {"structured_outputs": {"regex": "(red|green|blue){4}"}}

            async def ask(model: str) -> str:
                status, answer = await server.post(COMPLETIONS, body | {"model": model})
                assert status == 200, answer
                return str(answer["choices"][0]["text"])

            names = [MODEL, "one", "two"]
            alone = [await ask(name) for name in names]
            together = await asyncio.gather(*(ask(name) for name in names * 3))
            assert list(together) == alone * 3
            assert all(re.fullmatch("(red|green|blue)*(r|re|g|gr|gre|gree|b|bl|blu)?", text)
                       for text in alone)  # fmt: skip

    run(test())


def test_dynamic_lora_not_found(tmp_path: Path) -> None:
    async def test() -> None:
        async with adapters_served(tmp_path) as server:
            body = {"lora_name": "it", "lora_path": str(tmp_path / "nothing")}
            status, error = await server.post(LOAD, body)
            assert status == 404 and error["error"]["param"] == "lora_path"

    run(test())


def _no_config(folder: Path) -> None:
    (folder / "adapter_config.json").unlink()


def _cut_config(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("this is no JSON {{{")


def _cut_weights(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:100])


def _pickled(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def _misshapen(folder: Path) -> None:
    _change(folder, "layers.0.self_attn.q_proj.lora_A", lambda t: t[:, :-1].contiguous())


def _not_a_number(folder: Path) -> None:
    _change(folder, "layers.0.self_attn.q_proj.lora_B", lambda t: t.fill_(float("nan")))


def _half_a_pair(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    del tensors[next(name for name in tensors if name.endswith("lora_B.weight"))]
    save_file(tensors, file)


def _unknown_target(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    save_file(
        {name.replace("q_proj", "z_proj"): tensor for name, tensor in load_file(file).items()}, file
    )


def _with(folder: Path, name: str, tensor: torch.Tensor) -> None:
    file = folder / "adapter_model.safetensors"
    save_file(load_file(file) | {f"base_model.model.{name}": tensor}, file)


def _whole_without_room(folder: Path) -> None:
    hf = ModelConfig.from_folder(resolve_model_path("tiny")).hf_config
    _with(folder, "model.embed_tokens.weight", torch.ones(hf.vocab_size, hf.hidden_size))


def _whole_of_a_new_vocabulary(folder: Path) -> None:
    _with(folder, "model.embed_tokens.weight", torch.ones(3, 5))


def _norm(folder: Path) -> None:
    _with(folder, "model.norm.weight", torch.ones(3))


def _magnitudes_of_an_embedding(folder: Path) -> None:
    _with(folder, "model.embed_tokens.lora_magnitude_vector", torch.ones(3))


def _misshapen_magnitudes(folder: Path) -> None:
    _with(folder, "model.layers.0.self_attn.q_proj.lora_magnitude_vector", torch.ones(3))


def _change(folder: Path, part: str, change: Any) -> None:
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if part in name)
    tensors[name] = change(tensors[name])
    save_file(tensors, file)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_no_config, "adapter_config.json: No such file"),
        (_cut_config, "adapter_config.json: JSON is malformed"),
        (_cut_weights, "adapter_model.safetensors"),
        (_pickled, "only adapter_model.bin, and pickled weights are never read"),
        (_misshapen, "q_proj.lora_A.weight has shape"),
        (_not_a_number, "q_proj.lora_B.weight holds NaN"),
        (_half_a_pair, "has no lora_B"),
        (_unknown_target, "the model has no linear layer model.layers.0.self_attn.z_proj"),
        (_whole_without_room, "start with --lora-modules-to-save embed_tokens"),
        (_whole_of_a_new_vocabulary, "model.embed_tokens.weight has shape [3, 5], the model needs"),
        (_norm, "model.norm.weight: the model has no linear layer model.norm"),
        (_magnitudes_of_an_embedding, "embed_tokens.lora_magnitude_vector: DoRA of embeddings"),
        (_misshapen_magnitudes, "q_proj.lora_magnitude_vector has shape [3], the model needs"),
    ],
)
def test_dynamic_lora_invalid_files(tmp_path: Path, spoil: Any, words: str) -> None:
    adapter = write_tiny_adapter(tmp_path / "it")
    spoil(adapter)

    async def test() -> None:
        async with adapters_served(tmp_path) as server:
            status, error = await server.post(LOAD, {"lora_name": "it", "lora_path": str(adapter)})
            assert status == 400 and words in error["error"]["message"]
            status, _ = await server.post(COMPLETIONS, PROMPT | {"model": "it"})
            assert status == 404
            assert await text_of(server, MODEL)

    run(test())


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("trainable_token_indices", [1]),
        ("peft_type", "IA3"),
        ("init_lora_weights", "pissa_niter_16"),
        ("init_lora_weights", "olora"),
    ],
)
def test_what_is_not_served_is_refused_by_name(tmp_path: Path, setting: str, value: Any) -> None:
    adapter = write_tiny_adapter(tmp_path / "it", **{setting: value})

    async def test() -> None:
        async with adapters_served(tmp_path) as server:
            status, error = await server.post(LOAD, {"lora_name": "it", "lora_path": str(adapter)})
            assert status == 400 and f"{setting} {value!r}" in error["error"]["message"]

    run(test())


def test_dora_needs_its_magnitudes(tmp_path: Path) -> None:
    adapter = write_tiny_adapter(tmp_path / "it", use_dora=True)

    async def test() -> None:
        async with adapters_served(tmp_path) as server:
            status, error = await server.post(LOAD, {"lora_name": "it", "lora_path": str(adapter)})
            assert status == 400 and "no lora_magnitude_vector" in error["error"]["message"]

    run(test())


def test_room_for_what_the_model_does_not_have() -> None:
    engine = AsyncLLMEngine(MODEL, enable_lora=True, lora_modules_to_save=["norm"], **ENGINE)

    async def test() -> None:
        with pytest.raises(ValueError, match=r"lora_modules_to_save: the model has no .* 'norm'"):
            await engine.start()

    run(test())


def test_dynamic_lora_invalid_lora_rank(tmp_path: Path) -> None:
    adapter = write_tiny_adapter(tmp_path / "it", rank=64)

    async def test() -> None:
        async with adapters_served(tmp_path, max_lora_rank=16) as server:
            status, error = await server.post(LOAD, {"lora_name": "it", "lora_path": str(adapter)})
            assert status == 400
            assert "rank 64 is over max_lora_rank 16" in error["error"]["message"]

    run(test())


@pytest.mark.slow
def test_multiple_lora_adapters(tmp_path: Path) -> None:
    """Many more than there are slots and places, each asked while the others are."""
    names = [f"adapter{i}" for i in range(12)]
    for seed, name in enumerate(names):
        write_tiny_adapter(tmp_path / name, seed)

    async def test() -> None:
        async with adapters_served(tmp_path, max_loras=2, max_cpu_loras=3) as server:
            for name in names:
                path = str(tmp_path / name)
                status, _ = await post_text(server, LOAD, {"lora_name": name, "lora_path": path})
                assert status == 200
            first = await asyncio.gather(*(text_of(server, name) for name in names))
            assert len(set(first)) == len(names)
            again = await asyncio.gather(*(text_of(server, name) for name in reversed(names)))
            assert list(reversed(again)) == list(first)

    run(test())


@pytest.mark.slow
def test_loading_invalid_adapters_does_not_break_others(tmp_path: Path) -> None:
    good, bad = (write_tiny_adapter(tmp_path / name) for name in ("good", "bad"))
    _no_config(bad)

    async def test() -> None:
        async with adapters_served(tmp_path, [f"good={good}"]) as server:
            wanted = await text_of(server, "good")

            async def load_bad() -> int:
                body = {"lora_name": "bad", "lora_path": str(bad)}
                return (await server.post(LOAD, body))[0]

            asked = [text_of(server, "good") if i % 2 else load_bad() for i in range(20)]
            assert set(await asyncio.gather(*asked)) == {400, wanted}

    run(test())


def test_beam_search_with_lora_adapters(tmp_path: Path) -> None:
    adapter = write_tiny_adapter(tmp_path / "it")

    async def test() -> None:
        async with adapters_served(tmp_path, [f"it={adapter}"]) as server:
            body = PROMPT | {"use_beam_search": True, "n": 2, "max_tokens": 6}
            answers = [
                (await server.post(COMPLETIONS, body | {"model": name}))[1]["choices"]
                for name in (MODEL, "it")
            ]
            assert [len(choices) for choices in answers] == [2, 2]
            assert answers[0][0]["text"] != answers[1][0]["text"]

    run(test())


@pytest.mark.slow
def test_load_lora_adapter_with_same_name_replaces_inplace(tmp_path: Path) -> None:
    one, two = (write_tiny_adapter(tmp_path / name, i) for i, name in enumerate(("one", "two")))

    async def test() -> None:
        async with adapters_served(tmp_path, [f"it={one}", f"two={two}"]) as server:
            before = await text_of(server, "it")
            body = {"lora_name": "it", "lora_path": str(two), "load_inplace": True}
            assert (await post_text(server, LOAD, body))[0] == 200
            after = await text_of(server, "it")
            assert after != before and after == await text_of(server, "two")

    run(test())


@pytest.mark.slow
def test_a_broken_replacement_leaves_the_old_one(tmp_path: Path) -> None:
    adapter, broken = (write_tiny_adapter(tmp_path / name) for name in ("it", "broken"))
    _not_a_number(broken)

    async def test() -> None:
        async with adapters_served(tmp_path, [f"it={adapter}"]) as server:
            wanted = await text_of(server, "it")
            for path in (broken, adapter):
                if path == adapter:  # the same folder, changed meanwhile
                    _not_a_number(adapter)
                body = {"lora_name": "it", "lora_path": str(path), "load_inplace": True}
                assert (await server.post(LOAD, body))[0] == 400
                assert await text_of(server, "it") == wanted

    run(test())


def test_load_lora_adapter_with_load_inplace_false_errors(tmp_path: Path) -> None:
    adapter = write_tiny_adapter(tmp_path / "it")

    async def test() -> None:
        async with adapters_served(tmp_path, [f"it={adapter}"]) as server:
            body = {"lora_name": "it", "lora_path": str(adapter)}
            status, error = await server.post(LOAD, body)
            assert status == 400
            assert "has already been loaded" in error["error"]["message"]

    run(test())


@pytest.mark.slow
def test_unload(tmp_path: Path) -> None:
    """Who streams goes on; who comes gets 404; another adapter of the name is another."""
    adapter = write_tiny_adapter(tmp_path / "it")

    async def test() -> None:
        async with adapters_served(tmp_path, [f"it={adapter}"]) as server:
            wanted = await text_of(server, "it")
            async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as api:
                stream = await api.completions.create(
                    model="it", prompt=PROMPT["prompt"], max_tokens=12, temperature=0, stream=True,
                    extra_body={"ignore_eos": True},
                )  # fmt: skip
                said = [(await anext(aiter(stream))).choices[0].text]
                removed = await post_text(server, UNLOAD, {"lora_name": "it"})
                assert removed == (200, "Success: LoRA adapter 'it' removed successfully.")
                with pytest.raises(openai.NotFoundError, match="does not exist"):
                    await api.completions.create(model="it", prompt="Hi")
                said += [chunk.choices[0].text async for chunk in stream if chunk.choices]
                assert "".join(said) == wanted
            status, _ = await server.post(UNLOAD, {"lora_name": "it"})
            assert status == 404
            write_tiny_adapter(adapter, seed=5)
            body = {"lora_name": "it", "lora_path": str(adapter)}
            assert (await post_text(server, LOAD, body))[0] == 200
            assert await text_of(server, "it") != wanted

    run(test())


def test_paths_outside_the_roots(tmp_path: Path) -> None:
    outside = write_tiny_adapter(tmp_path / "outside")
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "link").symlink_to(outside)

    async def test() -> None:
        async with adapters_served(inside) as server:
            for path in (str(outside), str(inside / ".." / "outside"), str(inside / "link")):
                status, error = await server.post(LOAD, {"lora_name": "it", "lora_path": path})
                assert (status, error["error"]["param"]) == (403, "lora_path")
            for body in ({"lora_name": "it"}, {"lora_path": str(outside)}, {}, {"lora_name": ""}):
                assert (await server.post(LOAD, body))[0] == 400
            status, _ = await server.post(LOAD, {"lora_name": "it", "lora_path": "\0"})
            assert status == 400

    run(test())


@pytest.mark.parametrize("file", [CONFIG_FILE, WEIGHTS_FILE])
def test_links_to_files_outside_the_roots(tmp_path: Path, file: str) -> None:
    outside, roots = write_tiny_adapter(tmp_path / "outside"), tmp_path / "roots"
    folder = write_tiny_adapter(roots / "it")
    (folder / file).unlink()
    (folder / file).symlink_to(outside / file)

    async def test() -> None:
        body = {"lora_name": "it", "lora_path": str(folder)}
        async with adapters_served(roots) as server:
            status, error = await server.post(LOAD, body)
            assert (status, error["error"]["param"]) == (403, "lora_path")
        async with adapters_served(tmp_path) as server:  # as a hub's cache has it
            assert (await post_text(server, LOAD, body))[0] == 200

    run(test())


@pytest.mark.slow
@pytest.mark.parametrize("failure", [MemoryError("no"), RuntimeError("can't allocate memory")])
def test_a_load_without_memory_fails_alone(
    tmp_path: Path, failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its place in host memory is there for the next one."""
    one, two = (write_tiny_adapter(tmp_path / name, i) for i, name in enumerate(("one", "two")))
    read = AdapterTensors.read

    def fail(tensors: AdapterTensors, name: str, *args: Any) -> torch.Tensor:
        if str(two) in str(tensors.error("")) and "down_proj.lora_B" in name:
            raise failure
        return read(tensors, name, *args)

    async def test() -> None:
        async with adapters_served(tmp_path, [f"one={one}"], max_loras=2) as server:
            wanted = await text_of(server, "one")
            body = {"lora_name": "two", "lora_path": str(two)}
            with monkeypatch.context() as patch:
                patch.setattr(AdapterTensors, "read", fail)
                answers = await asyncio.gather(
                    *(server.post(LOAD, body) for _ in range(5)),
                    *(text_of(server, "one") for _ in range(3)),
                )
            for status, error in answers[:5]:
                assert status == 400 and "no memory to read it" in error["error"]["message"]
            assert list(answers[5:]) == [wanted] * 3
            assert (await post_text(server, LOAD, body))[0] == 200
            assert await text_of(server, "two") != wanted

    run(test())


def test_names_that_cannot_be(tmp_path: Path) -> None:
    adapter = write_tiny_adapter(tmp_path / "it")

    async def test() -> None:
        async with adapters_served(tmp_path) as server:
            for name, words in ((MODEL, "own name"), ("n" * 257, "257 characters, at most 256")):
                body = {"lora_name": name, "lora_path": str(adapter)}
                status, error = await server.post(LOAD, body)
                assert status == 400 and words in error["error"]["message"]

    run(test())


@pytest.mark.slow
def test_metrics_name_the_adapters_in_use(tmp_path: Path) -> None:
    """And those that requests wait for, as there is one slot."""
    one, two = (write_tiny_adapter(tmp_path / name, i) for i, name in enumerate(("one", "two")))

    async def labels(server: Server, wanted: str) -> str:
        found = ""
        while wanted not in found:
            async with server.session.get(f"{server.url}/metrics") as response:
                (found,) = re.findall(r"lora_requests_info\{(.*)\}", await response.text())
        return found

    async def test() -> None:
        modules = [f"one={one}", f"two={two}"]
        async with adapters_served(tmp_path, modules, max_loras=1) as server:
            body = PROMPT | {"max_tokens": 100, "stream": True}
            first = asyncio.create_task(post_text(server, COMPLETIONS, body | {"model": "one"}))
            alone = 'running_lora_adapters="one",waiting_lora_adapters=""'
            assert 'max_lora="1"' in await labels(server, alone)
            second = asyncio.create_task(post_text(server, COMPLETIONS, body | {"model": "two"}))
            both = 'running_lora_adapters="one",waiting_lora_adapters="two"'
            await labels(server, both)
            assert [status for status, _ in await asyncio.gather(first, second)] == [200, 200]

    run(test())


def test_updates_are_off_by_default() -> None:
    async def test() -> None:
        async with serving() as server:
            assert (await server.post(LOAD, {"lora_name": "a", "lora_path": "/"}))[0] == 404

    run(test())
