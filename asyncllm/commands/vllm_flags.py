"""vLLM's flags that are no fields of `EngineArgs` or `ServerArgs`: what each of them means here.

A command line written for vLLM should start where it asks for what is the case here, and else say
which flag cannot be kept and why. A row names the flags that share a reason:

    name       takes a value, refused whatever it is     name=a,b   these values are accepted
    name=*     any value is accepted                     name+      takes several values
    name?      a switch, accepted only when off          name?on    only when on
    name?*     accepted on or off

docs/flags.md is made from these rows; a test holds them to the list of vLLM's names.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["accepted", "other name", "not yet", "never"]
ANY = "*"
REMOTE_CODE = "trust-remote-code"
# The short names of those that a command line is likely to have.
SHORT = {
    "-asc": "api-server-count",
    "-cc": "compilation-config",
    "-ac": "attention-config",
    "-sc": "speculative-config",
}
ROWS: tuple[tuple[Status, str, str], ...] = (
    ("accepted", "always so", """
        enable-chunked-prefill?on enable-server-load-tracking?* tokenizer-mode=auto,hf,fast
        runner=auto,generate convert=auto,none config-format=auto,hf
        prefix-caching-hash-algo=sha256 logprobs-mode=raw_logprobs language-model-only?on
        enable-log-deltas?on worker-cls=auto performance-mode=balanced enable-ep-weight-filter?*
        """),
    ("accepted", "one process: there is nothing to choose", """
        api-server-count=1 renderer-num-workers=1 max-parallel-loading-workers=*
        disable-custom-all-reduce?* disable-nccl-for-dp-synchronization?*
        cpu-distributed-timeout-seconds=*
        """),
    ("other name", "asyncllm worker --join, on the other hosts", "node-rank=0 headless?"),
    ("accepted", "no access log is written; there are --log-level and --enable-log-requests", """
        uvicorn-log-level=* disable-uvicorn-access-log?* disable-access-log-for-endpoints=*
        """),
    ("accepted", "no code of a model is ever run; a warning says so", "trust-remote-code?*"),
    ("accepted", "no code of a model is downloaded", "code-revision=*"),
    ("accepted", "only safetensors, configurations, tokenizer and templates are downloaded", """
        ignore-patterns+=*
        """),
    ("accepted", "without effect: there is nothing here that it switches", """
        aggregate-engine-logging?* use-tqdm-on-load?* disable-cascade-attn?*
        disable-hybrid-kv-cache-manager?* fail-on-environ-validation?* enable-cumem-allocator?
        enable-flash-late-interaction?* enable-offline-docs?* jit-monitor-verbose?*
        """),
    ("accepted", "models here take text only", """
        limit-mm-per-prompt=* mm-processor-cache-gb=* mm-processor-cache-type=*
        mm-shm-cache-max-object-size-mb=* skip-mm-profiling?* disable-chunked-mm-input?*
        interleave-mm-strings?
        """),
    ("other name", "--cuda-graph-sizes", "cudagraph-capture-sizes+ max-cudagraph-capture-size"),
    ("other name", "--chunked-prefill-size", "long-prefill-token-threshold=0"),
    ("other name", "--disable-page: /docs is one of the pages", "disable-fastapi-docs?"),
    ("other name", "--max-body-bytes for bodies; headers have limits of their own", """
        h11-max-incomplete-event-size h11-max-header-count
        """),
    ("other name", "--log-level and --log-format", "log-config-file"),
    ("other name", "the environment's HF_TOKEN", "hf-token"),
    ("other name", "--tokenizer ORG/NAME@REVISION", "tokenizer-revision"),
    ("not yet", "there are --tensor-, --pipeline- and --data-parallel-size", """
        data-parallel-size-local=1 prefill-context-parallel-size=1 decode-context-parallel-size=1
        all2all-backend=allgather_reducescatter cp-kv-cache-interleave-size=1
        dcp-kv-cache-interleave-size=1 dcp-comm-backend device-ids+ data-parallel-address
        data-parallel-external-lb? data-parallel-hybrid-lb? data-parallel-multi-port-external-lb?
        data-parallel-rpc-port data-parallel-start-rank=0
        data-parallel-supervisor-port=* dp-supervisor-probe-failure-threshold=*
        dp-supervisor-probe-interval-s=* dp-supervisor-probe-timeout-s=*
        enable-elastic-ep? enable-eplb? eplb-config
        expert-placement-strategy=linear
        """),
    ("not yet", "a checkpoint's own config.json says how it is quantised", """
        quantization-config allow-deprecated-quantization?
        """),
    ("not yet", "all layers' attention and KV cache have one type", """
        kv-cache-dtype-skip-layers+ override-attention-dtype
        """),
    ("not yet", "config.json is the model's own", "hf-config-path"),
    ("not yet", "adapters have the model's dtype and all their layers", """
        lora-dtype=auto lora-target-modules+ fully-sharded-loras? default-mm-loras
        enable-mixed-moe-lora-format? enable-tower-connector-lora? specialize-active-lora?
        """),
    ("not yet", "no speculative decoding", """
        speculative-config spec-method spec-model spec-tokens=0
        """),
    ("not yet", "models here take text only", """
        allowed-local-media-path allowed-media-domains+ enable-mm-embeds? media-io-kwargs
        mm-encoder-attn-backend mm-encoder-attn-dtype mm-encoder-fp8-scale-path
        mm-encoder-fp8-scale-save-margin mm-encoder-fp8-scale-save-path mm-encoder-only?
        mm-encoder-tp-mode mm-processor-kwargs mm-tensor-ipc video-pruning-rate
        """),
    ("not yet", "no pooling models", "pooler-config io-processor-plugin"),
    ("not yet", "states of recurrent layers have one dtype and one kernel", """
        mamba-backend mamba-block-size mamba-cache-dtype=auto mamba-cache-mode
        mamba-cache-philox-rounds mamba-ssm-cache-dtype=auto gdn-prefill-backend
        enable-mamba-cache-stochastic-rounding?
        """),
    ("not yet", "no diffusion models", "diffusion-config"),
    ("not yet", "prompts are text or token ids", "enable-prompt-embeds?"),
    ("not yet", "weights and pages stay on the GPU; --swap-space is for preempted sequences", """
        cpu-offload-gb=0 cpu-offload-params+ offload-backend offload-group-size offload-num-in-group
        offload-params+ offload-prefetch-step kv-offloading-backend kv-offloading-size
        kv-sharing-fast-prefill?
        """),
    ("not yet", "one server does both prefill and decode", """
        kv-transfer-config kv-events-config ec-transfer-config tokens-only?
        """),
    ("not yet", "an engine sleeps only by ending", "enable-sleep-mode? weight-transfer-config"),
    ("not yet", "answers do not tell it", "enable-return-routed-experts?"),
    ("not yet", "TLS has a certificate and a key", """
        ssl-ca-certs ssl-cert-reqs=0 ssl-ciphers enable-ssl-refresh?
        """),
    ("not yet", "no such series: docs/metrics.md", """
        show-hidden-metrics-for-version kv-cache-metrics? kv-cache-metrics-sample=*
        cudagraph-metrics? enable-mfu-metrics? enable-logging-iteration-details?
        """),
    ("not yet", "traces are one span for each request", """
        collect-detailed-traces+ enable-layerwise-nvtx-tracing? profiler-config
        """),
    ("not yet", "no parsers by plugin; those that there are: README", """
        tool-parser-plugin reasoning-parser-plugin tool-server reasoning-config
        """),
    ("not yet", "system_fingerprint is the version's", "fingerprint-mode fingerprint-value"),
    ("not yet", "no such server", "grpc?"),
    ("never", "the config.json of the model's folder is what it is", """
        hf-overrides disable-sliding-window?
        """),
    ("never", "kernels are chosen by measurement; there is --attention-backend and --enforce-eager",
     """
        compilation-config optimization-level=* attention-config kernel-config linear-backend=auto
        moe-backend=auto ir-op-priority enable-flashinfer-autotune?* use-fp64-gumbel?
        additional-config
        """),
    ("never", "one scheduler: --max-num-seqs, --max-num-batched-tokens, --chunked-prefill-size", """
        scheduler-cls max-num-partial-prefills=1 max-long-partial-prefills=1
        prefill-schedule-interval scheduler-reserve-full-isl?* watermark enable-dbo?
        dbo-decode-token-threshold dbo-prefill-token-threshold ubatch-size=0
        """),
    ("never", "only safetensors are read, in order", """
        model-loader-extra-config pt-load-map-location safetensors-load-strategy=lazy
        safetensors-prefetch-block-size safetensors-prefetch-num-threads
        """),
    ("never", "ranks run no other code", "worker-extension-cls ray-workers-use-nsight?"),
    ("never", "numactl does so from outside", "numa-bind? numa-bind-cpus+ numa-bind-nodes+"),
    ("never", "prompts and answers are not logged", "max-log-len=* enable-log-outputs?"),
    ("never", "errors are logged with their stack, and never sent", "log-error-stack?*"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class VllmFlag:
    name: str
    status: Status
    why: str
    is_switch: bool
    takes_several: bool
    accepted: tuple[str, ...]  # values; of a switch "on" and "off"

    def takes(self, value: str) -> bool:
        return ANY in self.accepted or value in self.accepted

    def about(self) -> str:
        """Say what becomes of it, in a line."""
        values = "" if ANY in self.accepted else ", ".join(self.accepted)
        only = f" ({values})" if self.status == "accepted" else f", but for {values}"
        return f"--{self.name}: vLLM's; {self.status}{only if values else ''}: {self.why}"

    def refusal(self, value: str) -> str:
        shown = f"--{self.name}" if self.is_switch and value == "on" else f"--{self.name} {value}"
        if self.status == "other name":
            return f"{shown}: here it is {self.why}"
        is_never = self.status == "never"
        return f"{shown} is {'not served' if is_never else 'not served yet'}: {self.why}"


def vllm_flags() -> Iterator[VllmFlag]:
    for status, why, words in ROWS:
        for word in words.split():
            name, equals, values = word.partition("=")
            name, switch, when = name.partition("?")
            accepted = tuple(values.split(",")) if equals else ()
            if switch:
                accepted = {"": ("off",), "on": ("on",), ANY: (ANY,)}[when]
            yield VllmFlag(
                name.rstrip("+"), status, why, bool(switch), name.endswith("+"), accepted
            )


def add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    """None of them is a flag of `parser` already; `--help` does not list them."""
    for flag in vllm_flags():
        options = [f"--{flag.name}", *(short for short, name in SHORT.items() if name == flag.name)]
        if flag.is_switch:
            options.append(f"--no-{flag.name}")
        nargs: Any = 0 if flag.is_switch else "+" if flag.takes_several else None
        parser.add_argument(
            *options, action=_Judge, flag=flag, nargs=nargs, dest=argparse.SUPPRESS,
            default=argparse.SUPPRESS, help=argparse.SUPPRESS,
        )  # fmt: skip


class _Judge(argparse.Action):
    """Accepts or refuses, and leaves nothing behind."""

    def __init__(self, flag: VllmFlag, **options: Any) -> None:
        super().__init__(**options)
        self._flag = flag
        self.about = flag.about()

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: Any,
        values: Any,
        option: str | None = None,
    ) -> None:
        flag = self._flag
        value = values if isinstance(values, str) else " ".join(values)
        if flag.is_switch:
            value = "off" if (option or "").startswith("--no-") else "on"
        if not flag.takes(value):
            parser.error(flag.refusal(value))
        if flag.name == REMOTE_CODE and value == "on":
            print(f"asyncllm: --{REMOTE_CODE}: no code of a model is ever run", file=sys.stderr)
