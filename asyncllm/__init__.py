"""asyncllm: an LLM inference engine and OpenAI-compatible server in one asyncio process.

Public names are imported on first use, so `import asyncllm` costs nothing, and the parts without
torch (scheduler, block manager) can be used without it.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncllm.config import EngineArgs as EngineArgs
    from asyncllm.engine.async_engine import AsyncLLMEngine as AsyncLLMEngine
    from asyncllm.engine.llm import LLM as LLM
    from asyncllm.errors import ContextLengthError as ContextLengthError
    from asyncllm.errors import EngineDeadError as EngineDeadError
    from asyncllm.errors import InvalidRequestError as InvalidRequestError
    from asyncllm.errors import LoRALoadError as LoRALoadError
    from asyncllm.errors import ModelLoadError as ModelLoadError
    from asyncllm.errors import QueueFullError as QueueFullError
    from asyncllm.errors import RequestFailedError as RequestFailedError
    from asyncllm.lora import LoRARequest as LoRARequest
    from asyncllm.outputs import BeamSearchOutput as BeamSearchOutput
    from asyncllm.outputs import BeamSearchSequence as BeamSearchSequence
    from asyncllm.outputs import CompletionOutput as CompletionOutput
    from asyncllm.outputs import Logprob as Logprob
    from asyncllm.outputs import RequestMetrics as RequestMetrics
    from asyncllm.outputs import RequestOutput as RequestOutput
    from asyncllm.sampling_params import BeamSearchParams as BeamSearchParams
    from asyncllm.sampling_params import RepetitionDetectionParams as RepetitionDetectionParams
    from asyncllm.sampling_params import RequestOutputKind as RequestOutputKind
    from asyncllm.sampling_params import SamplingParams as SamplingParams
    from asyncllm.structured_outputs import ReasoningMarkers as ReasoningMarkers
    from asyncllm.structured_outputs import StructuredOutputsParams as StructuredOutputsParams
    from asyncllm.worker.logits_processors import LogitsProcessor as LogitsProcessor
    from asyncllm.worker.logits_processors import ProcessorRow as ProcessorRow

__version__ = version("asyncllm")

_NAMES = {
    "config": "EngineArgs",
    "engine.async_engine": "AsyncLLMEngine",
    "engine.llm": "LLM",
    "errors": "ContextLengthError EngineDeadError InvalidRequestError LoRALoadError ModelLoadError "
    "QueueFullError RequestFailedError",
    "lora": "LoRARequest",
    "outputs": "BeamSearchOutput BeamSearchSequence CompletionOutput Logprob RequestMetrics "
    "RequestOutput",
    "sampling_params": "BeamSearchParams RepetitionDetectionParams RequestOutputKind "
    "SamplingParams",
    "structured_outputs": "ReasoningMarkers StructuredOutputsParams",
    "worker.logits_processors": "LogitsProcessor ProcessorRow",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'asyncllm' has no attribute {name!r}")
    return getattr(import_module(f"asyncllm.{_MODULE_OF[name]}"), name)
