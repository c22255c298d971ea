"""Predicts how long a step takes on an H200, on several, or on an H100, from measured tables.

Steps with prompts are padded to a captured size. The tables are straight in between, and GEMMs
compute 128 tokens at once, so sizes a little above a multiple of that have entries of their own.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Any

from asyncllm.flag_values import PREFILL_GRAPH_SIZES
from asyncllm.kernels.persistent_decode import MAX_ROWS as PERSISTENT_ROWS
from asyncllm.step_plan import StepPlan
from asyncllm.types import StepCost


@dataclass(frozen=True)
class Device:
    """A step is one forward pass: all tokens' GEMMs together, plus attention."""

    decode_ms: tuple[tuple[int, float], ...]  # (rows, all but attention), straight in between
    mixed_ms: tuple[tuple[int, float], ...]  # (tokens), of steps with prompts
    kv_bytes_per_token: int
    attention_flops: float  # per pair of a new token and a position it reads
    num_pages: int
    num_gpus: int = 1  # tensor-parallel: times and pages of all, bytes and operations of one
    kv_bytes_per_s: float = 4.0e12
    attention_flops_per_s: float = 557e12

    def step_s(self, plan: StepPlan) -> float:
        context = int((plan.decodes.positions + 1).sum())
        num_tokens = plan.num_tokens
        place = bisect_left(PREFILL_GRAPH_SIZES, num_tokens)
        if plan.prefills and place < len(PREFILL_GRAPH_SIZES):
            num_tokens = PREFILL_GRAPH_SIZES[place]  # a captured step is padded
        seconds = _between(self.mixed_ms if plan.prefills else self.decode_ms, num_tokens) / 1e3
        seconds += context * self.kv_bytes_per_token / self.kv_bytes_per_s
        for row in plan.prefills:
            new = len(row.token_ids)
            seconds += self._attention_s(new, row.start)
        return seconds

    def _attention_s(self, num_tokens: int, start: int) -> float:
        pairs = num_tokens * (start + num_tokens / 2)
        return pairs * self.attention_flops / self.attention_flops_per_s

    @property
    def cost(self) -> StepCost:
        """The cost that the worker would measure at its start."""
        prefill_s = _between(self.mixed_ms, 1024) / 1e3 + self._attention_s(1024, 0)
        by_layers = _between(self.decode_ms, PERSISTENT_ROWS + 1) / 1e3
        return StepCost(by_layers, prefill_s / 1024)


def _between(points: tuple[tuple[int, float], ...], place: float) -> float:
    i = min(max(1, bisect_left(points, (place, 0.0))), len(points) - 1)
    (x0, y0), (x1, y1) = points[i - 1], points[i]
    return y0 + (y1 - y0) * max(0.0, place - x0) / (x1 - x0)


WEIGHT_BYTES_8B, PAGE_BYTES_8B = 16_000_000_000, 16 * 131_072
# Up to 8 rows by the persistent kernel, 9 and more padded to 16 by the layers.
# fmt: off
DECODES_8B = (
    (1, 3.52), (2, 3.65), (4, 3.72), (8, 3.9), (9, 4.39), (64, 5.0), (128, 5.4), (256, 6.45),
)
# Of an H200: captured steps of so many tokens beside 8 decodes of 1000, less attention. The 8B's of
# 128, 256, 384, 512, 528, 640, 768, 896, 1024, 1280, 1536 and 2048 tokens are one GPU's. Others
# above 16 are a slower GPU's, times 0.935: scaled, not measured. Step behind step:
# the GPU lowers its clock.
DEVICES = {
    "8b": Device(
        DECODES_8B,
        ((16, 5.4), (64, 5.09), (128, 4.99), (144, 5.73), (160, 5.82), (192, 6.57), (256, 6.86),
         (272, 7.99), (320, 8.73), (384, 9.76), (400, 10.52), (448, 11.69), (512, 11.76),
         (528, 12.95), (544, 13.56), (560, 13.65), (576, 14.13), (640, 14.93), (656, 16.21),
         (704, 17.28), (768, 17.03), (784, 18.03), (832, 20.36), (896, 20.55), (960, 21.6),
         (1024, 22.56), (1040, 22.97), (1152, 24.82), (1280, 28.0), (1408, 31.33), (1536, 34.1),
         (1792, 39.31), (2048, 44.5), (8192, 160.82)),
        kv_bytes_per_token=131_072,
        attention_flops=4.0 * 32 * 128 * 32,
        num_pages=50_000,
    ),
    "0.6b": Device(
        ((1, 0.47), (2, 0.52), (4, 0.56), (8, 0.65), (9, 1.1), (64, 1.27), (256, 1.35)),
        ((16, 1.6), (64, 1.71), (128, 1.79), (256, 1.94), (272, 2.01), (384, 2.11), (448, 2.27),
         (512, 2.31), (528, 2.4), (640, 2.51), (768, 2.67), (784, 2.71), (896, 2.86), (1024, 3.0),
         (1040, 3.26), (1152, 3.35), (1280, 3.52), (1408, 3.79), (1536, 4.0), (1792, 4.54),
         (2048, 4.84), (8192, 17.0)),
        kv_bytes_per_token=114_688,
        attention_flops=4.0 * 16 * 128 * 28,
        num_pages=70_000,
    ),
}
# fmt: on


def _scaled(device: Device, decode: float, mixed: float, **changes: Any) -> Device:
    """With its tables' times so many times as long."""
    return replace(
        device,
        decode_ms=tuple((rows, ms * decode) for rows, ms in device.decode_ms),
        mixed_ms=tuple((tokens, ms * mixed) for tokens, ms in device.mixed_ms),
        **changes,
    )


def _of_ranks(num_gpus: int, decode_ms: dict[int, float], prompt_ms: dict[int, float]) -> Device:
    """The 8B on tensor-parallel H200s, from what `gpu_ranks.py --steps` prints: decodes with a
    context of 40 tokens, and prompts that are a step each."""
    one = DEVICES["8b"]
    kv_bytes, flops = one.kv_bytes_per_token // num_gpus, one.attention_flops / num_gpus
    reads_ms = 40 * kv_bytes / one.kv_bytes_per_s * 1e3
    attention_ms = flops / one.attention_flops_per_s * 1e3
    return replace(
        one,
        decode_ms=tuple((rows, ms - rows * reads_ms) for rows, ms in decode_ms.items()),
        mixed_ms=tuple((n, ms - n * n / 2 * attention_ms) for n, ms in prompt_ms.items()),
        kv_bytes_per_token=kv_bytes,
        attention_flops=flops,
        # What the shards leave free of 16 GB holds keys and values, too.
        num_pages=one.num_pages * num_gpus + WEIGHT_BYTES_8B * (num_gpus - 1) // PAGE_BYTES_8B,
        num_gpus=num_gpus,
    )


# The H200's, scaled until `simulate_schedule.py` gives the H100's figures of docs/PERFORMANCE.md:
# tests/test_simulate_cluster.py compares them. 80 GB hold so many pages beside the weights.
DEVICES["8b-h100"] = _scaled(DEVICES["8b"], 1.36, 1.03, kv_bytes_per_s=2.7e12, num_pages=26_000)

# fmt: off
# docs/log/ranks.md, R25: two and four H200s; 1 and 8 rows by the time per token over HTTP.
DEVICES["8b-tp2"] = _of_ranks(
    2,
    {1: 1.87, 8: 2.3, 9: 2.641, 16: 2.627, 32: 3.014, 64: 3.152, 128: 3.671, 256: 5.186},
    {16: 3.44, 64: 3.72, 128: 4.11, 256: 5.18, 512: 7.94, 1024: 13.8, 2048: 27.55, 4096: 61.14,
     8190: 128.07},
)
DEVICES["8b-tp4"] = _of_ranks(
    4,
    {1: 1.15, 8: 1.49, 9: 2.067, 16: 2.061, 32: 2.247, 64: 2.456, 128: 2.798, 256: 3.659},
    {16: 2.77, 64: 2.97, 128: 3.38, 256: 4.12, 512: 7.28, 1024: 11.4, 2048: 19.35, 4096: 39.12,
     8190: 77.77},
)
# fmt: on
