"""asyncllm: an LLM inference engine and OpenAI-compatible server in one asyncio process.

The public names are imported on first use, so that `import asyncllm` costs nothing and the parts
without torch (scheduler, block manager) can be used without it.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncllm.engine.async_engine import AsyncLLMEngine
    from asyncllm.engine.llm import LLM
    from asyncllm.engine_args import EngineArgs
    from asyncllm.errors import (
        ContextLengthError,
        EngineDeadError,
        InvalidRequestError,
        ModelLoadError,
        QueueFullError,
        RequestFailedError,
    )
    from asyncllm.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        CompletionOutput,
        Logprob,
        RequestMetrics,
        RequestOutput,
    )
    from asyncllm.sampling_params import (
        BeamSearchParams,
        RepetitionDetectionParams,
        RequestOutputKind,
        SamplingParams,
    )
    from asyncllm.structured_outputs import ReasoningMarkers, StructuredOutputsParams
    from asyncllm.worker.logits_processors import LogitsProcessor, ProcessorRow

__version__ = version("asyncllm")

_HOMES = {
    "LLM": "engine.llm",
    "AsyncLLMEngine": "engine.async_engine",
    "BeamSearchOutput": "outputs",
    "BeamSearchParams": "sampling_params",
    "BeamSearchSequence": "outputs",
    "CompletionOutput": "outputs",
    "ContextLengthError": "errors",
    "EngineArgs": "engine_args",
    "EngineDeadError": "errors",
    "InvalidRequestError": "errors",
    "Logprob": "outputs",
    "LogitsProcessor": "worker.logits_processors",
    "ModelLoadError": "errors",
    "ProcessorRow": "worker.logits_processors",
    "QueueFullError": "errors",
    "ReasoningMarkers": "structured_outputs",
    "RepetitionDetectionParams": "sampling_params",
    "RequestFailedError": "errors",
    "RequestMetrics": "outputs",
    "RequestOutput": "outputs",
    "RequestOutputKind": "sampling_params",
    "SamplingParams": "sampling_params",
    "StructuredOutputsParams": "structured_outputs",
}

__all__ = [
    "LLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "ContextLengthError",
    "EngineArgs",
    "EngineDeadError",
    "InvalidRequestError",
    "LogitsProcessor",
    "Logprob",
    "ModelLoadError",
    "ProcessorRow",
    "QueueFullError",
    "ReasoningMarkers",
    "RepetitionDetectionParams",
    "RequestFailedError",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'asyncllm' has no attribute {name!r}")
    return getattr(import_module(f"asyncllm.{_HOMES[name]}"), name)
