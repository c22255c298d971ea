"""The server's own flags. `help` in a field's metadata is the flag's help text."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import ssl
from dataclasses import dataclass
from typing import Any, Literal

from asyncllm.flag_values import check_fields, flag

TRACING_MODULES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto")
API_KEY_VARIABLES = ("ASYNCLLM_API_KEY", "VLLM_API_KEY")  # the first that is set
ORIGIN = re.compile("[a-z][a-z0-9+.-]*://[^/?#*]+")  # RFC 6454, as browsers send it
METRICS_PREFIX = re.compile("[a-zA-Z_][a-zA-Z0-9_]*")
LogFormat = Literal["text", "json"]
JSON_FORM = ("disable_any_whitespace", "disable_additional_properties")
# vLLM's keys -> the values that can be kept here
STRUCTURED_OUTPUTS_CONFIG: dict[str, tuple[Any, ...]] = {
    # All ask for the same texts; llguidance makes them here, whichever is named.
    "backend": ("auto", "guidance", "xgrammar", "outlines", "lm-format-enforcer"),
    "reasoning_parser": ("",),
    "reasoning_parser_plugin": ("",),
    "enable_in_reasoning": (False,),
    **dict.fromkeys(JSON_FORM, (False, True)),
}
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass
class ServerArgs:
    host: str = flag("127.0.0.1", "address to listen on")
    port: int = flag(8000, "port to listen on, 0: any free one")
    uds: str | None = flag(None, "Unix socket to listen on, instead of host and port")
    api_key: list[str] | None = flag(
        None, "keys that clients must send one of, default: $" + " or $".join(API_KEY_VARIABLES)
    )
    allowed_hosts: list[str] | None = flag(
        None,
        "names in Host headers to answer to, beside addresses and localhost; * "
        "for any; default: no others on loopback without a key, else any",
    )
    public_metrics: bool = flag(False, "GET /metrics without the API key, for scrapers")
    allowed_origins: list[str] | None = flag(
        None, "origins whose pages may call this server (CORS), * for any; default: none"
    )
    allowed_methods: list[str] = flag(["*"], "methods that such pages may use")
    allowed_headers: list[str] = flag(["*"], "headers that such pages may send")
    allow_credentials: bool = flag(False, "such pages may send their cookies along")
    root_path: str | None = flag(None, "prefix that a proxy leaves in paths, such as /llm")
    middleware: list[str] | None = flag(
        None, "aiohttp middlewares as module:name, behind all checks"
    )
    enable_request_id_headers: bool = flag(
        False, "X-Request-Id in every response, not only where sent"
    )
    ssl_certfile: str | None = flag(None, "TLS certificate, PEM")
    ssl_keyfile: str | None = flag(None, "TLS private key, PEM")
    max_body_bytes: int = flag(4 * 1024 * 1024, "largest request body, decompressed", least=1)
    max_connections: int = flag(
        4096, "open connections, idle ones included; one more gets a 503", least=1
    )
    responses_store_bytes: int = flag(
        64 * 1024 * 1024, "kept of /v1/responses for previous_response_id; 0: nothing", least=0
    )
    shutdown_timeout: float = flag(
        30.0, "seconds that running answers get at shutdown", least=0, below=math.inf
    )
    metrics_prefix: str = flag("asyncllm", "of /metrics; vllm for dashboards made for it")
    enable_log_requests: bool = flag(False, "log one line per finished request")
    disable_log_stats: bool = flag(False, "no line of statistics every 10 s while there is work")
    enable_tokenizer_info_endpoint: bool = flag(
        False, "GET /tokenizer_info: its configuration, chat template too"
    )
    enable_force_include_usage: bool = flag(
        False, "usage in every chunk of every stream, asked for or not"
    )
    stream_interval: int = flag(1, "tokens in each chunk of a stream, but the first", least=1)
    structured_outputs_config: dict[str, Any] | None = flag(
        None,
        "JSON object: disable_any_whitespace, disable_additional_properties where "
        "requests leave them open",
    )
    tool_call_parser: str = flag("auto", "how the model writes tool calls; auto: see its template")
    enable_auto_tool_choice: bool = flag(True, "the model may decide for itself to call tools")
    exclude_tools_when_tool_choice_none: bool = flag(
        False, "with tool_choice none no tools stand in the prompt"
    )
    default_chat_template_kwargs: dict[str, Any] | None = flag(
        None, "JSON object: the chat template's arguments where requests omit them"
    )
    trust_request_chat_template: bool = flag(
        False, "let requests bring a chat_template, which is a program"
    )
    escape_special_tokens: bool = flag(
        False, "text of special tokens inside messages stays text: a zero-width space parts it"
    )
    lora_modules: list[str] | None = flag(
        None, "adapters under names of their own: name=folder, or JSON objects with name and path"
    )
    allow_runtime_lora_updating: bool = flag(False, "let requests load and unload adapters")
    lora_root: list[str] | None = flag(None, "folders that such adapters may lie in")
    response_role: str = flag("assistant", "role of the messages that chats answer with")
    return_tokens_as_token_ids: bool = flag(False, "spell tokens as token_id:7 in logprobs")
    enable_prompt_tokens_details: bool = flag(
        True, "usage tells how many prompt tokens were cached"
    )
    disable_page: bool = flag(False, "no page at / and no dashboard feed")
    log_level: str = flag("info", ", ".join(LOG_LEVELS))
    log_format: LogFormat = flag("text", "json: one object a line, numbers as fields")
    otlp_traces_endpoint: str | None = flag(
        None, "URL that OpenTelemetry spans go to, one per request"
    )

    def check(self) -> None:
        """Raises `ValueError` naming the flag."""
        check_fields(self)
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be between 0 and 65535, got {self.port}")
        if not METRICS_PREFIX.fullmatch(self.metrics_prefix):
            raise ValueError(f"metrics_prefix must be a metric name, got {self.metrics_prefix!r}")
        if self.ssl_keyfile and not self.ssl_certfile:
            raise ValueError("ssl_keyfile needs ssl_certfile")
        if self.log_level not in LOG_LEVELS:
            raise ValueError(f"log_level must be one of {', '.join(LOG_LEVELS)}")
        if self.allow_runtime_lora_updating and not self.lora_root:
            raise ValueError(
                "allow_runtime_lora_updating needs lora_root, the folders to load from"
            )
        self._check_tracing()
        self._check_paths()
        self._check_structured_outputs()
        if any(not key or key != key.strip() for key in self.keys()):
            raise ValueError(
                f"api_key (or {' or '.join(API_KEY_VARIABLES)}) must not be blank or have white "
                "space at its ends: no client can send that"
            )

    def _check_tracing(self) -> None:
        if self.otlp_traces_endpoint is None:
            return
        if not self.otlp_traces_endpoint:
            raise ValueError("otlp_traces_endpoint must not be empty")
        if not all(_is_installed(name) for name in TRACING_MODULES):
            raise ValueError("otlp_traces_endpoint needs OpenTelemetry: install 'asyncllm[otel]'")

    def _check_paths(self) -> None:
        for name in ("allowed_origins", "allowed_methods", "allowed_headers"):
            setattr(self, name, _list_of_json(name, getattr(self, name)))
        for origin in self.allowed_origins or ():
            if origin not in ("*", "null") and not ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"allowed_origins: {origin!r} can match no page: an origin is such as "
                    "https://example.com or http://localhost:3000, without a path"
                )
        path = self.root_path
        if path is not None and not re.fullmatch("(/[^/?#{}]+)+", path):
            raise ValueError(f"root_path must be a path such as /llm, got {path!r}")

    def _check_structured_outputs(self) -> None:
        for name, value in (self.structured_outputs_config or {}).items():
            taken = STRUCTURED_OUTPUTS_CONFIG.get(name)
            if taken is None or value not in taken:
                known = "" if taken is None else f" must be one of {taken}, got {value!r}:"
                raise ValueError(
                    f"structured_outputs_config: {name}{known} is not served; reasoning has "
                    "--reasoning-parser, grammars are llguidance's"
                )

    def json_form(self) -> dict[str, bool]:
        """Fields of `StructuredOutputsParams` for JSON, where requests leave them open."""
        given = self.structured_outputs_config or {}
        return {name: True for name in JSON_FORM if given.get(name)}

    def keys(self) -> list[str]:
        """The API keys in force; without any the server is open."""
        if self.api_key:
            return self.api_key
        key = key_from_environment()
        return [] if key is None else [key]

    def ssl_context(self) -> ssl.SSLContext | None:
        """Raises `ValueError` for files that cannot be read or do not match."""
        if self.ssl_certfile is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile)
        except OSError as error:  # ssl.SSLError is one
            raise ValueError(
                f"ssl_certfile {self.ssl_certfile}: {error.strerror or error}"
            ) from error
        return context


def key_from_environment() -> str | None:
    """An empty variable counts as not set."""
    return next((key for name in API_KEY_VARIABLES if (key := os.environ.get(name))), None)


def _list_of_json(name: str, given: list[str] | None) -> list[str] | None:
    """vLLM writes these lists as JSON."""
    if given is None or len(given) != 1 or not given[0].startswith("["):
        return given
    try:
        values = json.loads(given[0])
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    if not all(isinstance(value, str) for value in values):
        raise ValueError(f"{name} must be a list of strings, got {given[0]}")
    return list(values)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even its parent is
        return False
