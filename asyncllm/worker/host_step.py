"""A step in two parts: what is sampled from waits on the device for what the host has to say."""

from __future__ import annotations

from collections.abc import Callable

from asyncllm.types import StepResult, TokenMasks
from asyncllm.worker.executor import LaunchedStep
from asyncllm.worker.step_timer import DeviceTimes


class HostStep:
    """A step whose forward pass is launched. `sample`, once, launches the rest; then `wait`."""

    def __init__(self, end: Callable[[TokenMasks], LaunchedStep]) -> None:
        self._end = end
        self._whole: LaunchedStep | None = None

    def sample(self, masks: TokenMasks) -> None:
        """From any thread, all steps before being finished, and before any other launch."""
        assert self._whole is None, "a step is sampled twice"
        self._whole = self._end(masks)

    async def wait(self) -> StepResult:
        assert self._whole is not None, "a step is awaited that nobody samples"
        return await self._whole.wait()

    def device_times(self) -> DeviceTimes:
        assert self._whole is not None
        return self._whole.device_times()
