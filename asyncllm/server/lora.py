"""LoRA adapters under model names: those of --lora-modules, and those loaded while it serves.

Loading by a request is off unless `--allow-runtime-lora-updating` is given, and then takes folders
below `--lora-root` alone: a path is a claim on what this process may read.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from aiohttp import web

from asyncllm.engine.async_engine import AsyncLLMEngine
from asyncllm.errors import LoRALoadError
from asyncllm.lora import CONFIG_FILE, WEIGHTS_FILE, LoRARequest
from asyncllm.server.args import ServerArgs
from asyncllm.server.http.bodies import read_body
from asyncllm.server.http.errors import ApiError, bad_request
from asyncllm.server.service import SERVICE, Service

MAX_NAME_CHARS = 256


class LoRAModule(msgspec.Struct):
    """One of --lora-modules, written as JSON."""

    name: str
    path: str
    base_model_name: str | None = None


class LoadLoRARequest(msgspec.Struct):
    lora_name: str | None = None
    lora_path: str | None = None
    load_inplace: bool = False  # under a name that is there already, in its place


class UnloadLoRARequest(msgspec.Struct):
    lora_name: str | None = None
    lora_int_id: int | None = None  # vLLM's; names tell adapters apart


def parse_modules(given: list[str]) -> list[LoRARequest]:
    """ "name=path" or a JSON object each. Raises `ValueError`."""
    modules = []
    for text in given:
        if text.startswith("{"):
            try:
                module = msgspec.json.decode(text, type=LoRAModule)
            except msgspec.MsgspecError as error:
                raise ValueError(f"lora_modules {text}: {error}") from error
        else:
            name, equals, path = text.partition("=")
            if not (name and equals and path):
                raise ValueError(f"lora_modules must be name=path or JSON, got {text!r}")
            module = LoRAModule(name, path)
        modules.append(LoRARequest(module.name, lora_path=module.path))
    return modules


async def load_modules(engine: AsyncLLMEngine, args: ServerArgs) -> None:
    """Those of the command line. Raises `ValueError` where one cannot be served."""
    for module in parse_modules(args.lora_modules or []):
        if module.lora_name in engine.config.served_model_names:
            raise ValueError(f"lora_modules: {module.lora_name} is the model's own name")
        await engine.add_lora(module)


async def load_lora_adapter(http: web.Request) -> web.Response:
    service = http.app[SERVICE]
    service.check_open()
    request = await read_body(http, LoadLoRARequest)
    name, path = request.lora_name, request.lora_path
    if not name or not path:
        raise bad_request("lora_name and lora_path must both be given", "lora_name")
    if len(name) > MAX_NAME_CHARS:
        why = f"lora_name has {len(name)} characters, at most {MAX_NAME_CHARS}"
        raise bad_request(why, "lora_name")
    if name in service.model_names:
        raise bad_request(f"lora_name {name!r} is the model's own name", "lora_name")
    if service.engine.find_lora(name) is not None and not request.load_inplace:
        raise bad_request(f"the lora adapter {name!r} has already been loaded", "lora_name")
    folder = _allowed(path, service)
    adapter = LoRARequest(name, lora_path=folder)
    try:
        await service.engine.add_lora(adapter, load_inplace=request.load_inplace)
    except LoRALoadError as error:
        raise bad_request(str(error), "lora_path") from error
    return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")


async def unload_lora_adapter(http: web.Request) -> web.Response:
    service = http.app[SERVICE]
    service.check_open()
    request = await read_body(http, UnloadLoRARequest)
    if not request.lora_name:
        raise bad_request("lora_name must be given", "lora_name")
    if not await service.engine.remove_lora(request.lora_name):
        raise ApiError(404, f"the lora adapter {request.lora_name!r} cannot be found", "lora_name")
    return web.Response(text=f"Success: LoRA adapter '{request.lora_name}' removed successfully.")


def _allowed(path: str, service: Service) -> Path:
    """The folder, if it and its files lie below one of --lora-root, wherever links lead."""
    roots = [Path(root).resolve() for root in service.args.lora_root or []]
    try:
        folder = Path(path).resolve()
        files = (folder, *((folder / name).resolve() for name in (CONFIG_FILE, WEIGHTS_FILE)))
        is_allowed = all(any(each.is_relative_to(root) for root in roots) for each in files)
        is_there = is_allowed and folder.is_dir()
    except (OSError, ValueError) as error:  # a name with a zero byte, or too long
        raise bad_request(f"lora_path: {error}", "lora_path") from error
    if not is_allowed:
        why = f"lora_path {path}, or a file in it, is below none of the folders of --lora-root"
        raise ApiError(403, why, "lora_path")
    if not is_there:
        raise ApiError(404, f"lora_path {path} is no folder", "lora_path")
    return folder
