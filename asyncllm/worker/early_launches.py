"""What steps will launch, launched before by threads on tensors that nobody reads.

Triton compiles a kernel at its first launch, for a second or so, or finds it in its cache; most of
that is outside of the GIL. So it happens while FlashInfer is imported and the weights load, a
variant to a thread. Which variant a launch takes follows from its tensors' types and sizes: only
what the launch's own code makes of such tensors is sure to be what a step asks for.

To look for its first kernel Triton hashes its own libraries, 300 MB and more, in pieces between
which it takes the GIL; every thread that comes before the end does so again. So one does it first.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch

from asyncllm.attention.base import AttentionLayer, Rotation
from asyncllm.graphs.token_buffers import TokenBuffers
from asyncllm.model_config import ModelConfig
from asyncllm.models.base import CausalLM
from asyncllm.models.layers.ops import Norm, Ops
from asyncllm.worker.device_state import DeviceState
from asyncllm.worker.kernels import SlotKernels
from asyncllm.worker.memory import forward_without_attention
from asyncllm.worker.slot_changes import RECORD_WORDS
from asyncllm.worker.token_masks import RowMasks
from asyncllm.worker.triton_key import hash_compiler

MAX_THREADS = 8  # more launches wait; each is a second or two of one core
FEW_PAGES = 16
MANY_ROWS = 128  # what no kernel of few rows takes


class EarlyLaunches:
    """On a CPU, where nothing is compiled, nothing is launched."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="asyncllm-early")
        self._launches: list[Future[None]] = []

    def begin(self, launch: Callable[[], object], stream: torch.cuda.Stream | None = None) -> None:
        """Call it in a thread, on this stream, else on the default one."""
        if self._device.type != "cuda":
            return
        self._launches.append(self._threads.submit(_run, launch, stream))

    def begin_sampling(self, kernels: SlotKernels, vocab_size: int, dtype: torch.dtype) -> None:
        """One row, in each way that a step may sample. `dtype`: of the model's logits."""
        # In float32 after `Sampler.full` has edited the logits, which masks them by itself.
        for of_logits, is_masked in dict.fromkeys(
            [(dtype, False), (dtype, True), (torch.float32, False)]
        ):
            self.begin(partial(self._sample, kernels, vocab_size, of_logits, is_masked))
        self.begin(partial(self._mask, kernels, vocab_size))

    def begin_slots(self, kernels: SlotKernels, block_size: int) -> None:
        """One slot, read and written."""
        self.begin(partial(self._gather, kernels))
        self.begin(partial(self._fill, kernels, block_size))
        self.begin(partial(self._write, kernels))

    def begin_ops(self, ops: Ops, config: ModelConfig, dtype: torch.dtype) -> None:
        """What is between products of many rows."""
        hf = config.hf_config
        self.begin(partial(self._normalise, ops, hf.hidden_size, dtype))
        self.begin(partial(self._add_and_normalise, ops, hf.hidden_size, dtype))
        self.begin(partial(self._gate, ops, hf.intermediate_size, dtype))

    def begin_heads(self, layer: AttentionLayer, block_size: int, dtype: torch.dtype) -> None:
        """Between projection and attention, where the backend is not torch's."""
        for num_tokens in (1, MANY_ROWS):
            self.begin(partial(self._rotate, layer, num_tokens, block_size, dtype))

    def begin_one_row(self, model: CausalLM) -> None:
        """Its products, which are other kernels than those of more rows. Weights may be missing."""

        def launch() -> torch.Tensor:
            return model.compute_logits(forward_without_attention(model, 1, self._device))

        self.begin(launch)

    def wait_for_hash(self) -> None:
        """Until a launch from another thread does not have to hash the compiler itself."""
        if self._device.type == "cuda":
            hash_compiler()

    def wait(self) -> None:
        """Until all are launched, and the threads gone. Raises what the first one raised."""
        self._threads.shutdown()
        for launch in self._launches:
            launch.result()

    def _sample(
        self, kernels: SlotKernels, vocab_size: int, dtype: torch.dtype, is_masked: bool
    ) -> None:
        state = DeviceState(1, 1, vocab_size, self._device)
        slots = self._zeros(1)
        masks = self._masks(vocab_size) if is_masked else None
        logits = torch.zeros(1, vocab_size, dtype=dtype, device=self._device)
        kernels.sample_slots(state, logits, slots, slots, masks)

    def _gather(self, kernels: SlotKernels) -> None:
        kernels.gather_slots(self._few_pages(), self._zeros(1))

    def _fill(self, kernels: SlotKernels, block_size: int) -> None:
        row = self._zeros(1)
        tokens = TokenBuffers(row, row, row, row.long(), row, row)
        kernels.fill_decodes(self._few_pages(), row, tokens, block_size)

    def _write(self, kernels: SlotKernels) -> None:
        kernels.write_slots(self._few_pages(), self._zeros(1, RECORD_WORDS), self._zeros(3, 1))

    def _rotate(
        self, layer: AttentionLayer, num_tokens: int, block_size: int, dtype: torch.dtype
    ) -> None:
        from asyncllm.attention.heads_kernel import rotate_and_write  # needs Triton

        num_heads, kv_heads, head_dim = layer.num_heads, layer.num_kv_heads, layer.head_dim
        rotate_and_write(
            layer,
            self._zeros(num_tokens, num_heads + 2 * kv_heads, head_dim, dtype=dtype),
            Rotation(self._zeros(num_tokens), self._zeros(1, head_dim, dtype=torch.float32)),
            self._zeros(1, 2, block_size, kv_heads, head_dim, dtype=dtype),
            self._zeros(num_tokens, dtype=torch.int64),
        )

    def _normalise(self, ops: Ops, size: int, dtype: torch.dtype) -> None:
        ops.rms_norm(self._zeros(MANY_ROWS, size, dtype=dtype), self._norm(size, dtype))

    def _add_and_normalise(self, ops: Ops, size: int, dtype: torch.dtype) -> None:
        x, residual = (self._zeros(MANY_ROWS, size, dtype=dtype) for _ in range(2))
        ops.add_rms_norm(x, residual, self._norm(size, dtype))

    def _gate(self, ops: Ops, size: int, dtype: torch.dtype) -> None:
        ops.swiglu(self._zeros(MANY_ROWS, 2 * size, dtype=dtype))

    def _norm(self, size: int, dtype: torch.dtype) -> Norm:
        return Norm(self._zeros(size, dtype=dtype), 1.0)

    def _few_pages(self) -> DeviceState:
        """Of one slot, its pages as aligned as those of usual context windows."""
        return DeviceState(1, FEW_PAGES, 1, self._device)

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._device)

    def _mask(self, kernels: SlotKernels, vocab_size: int) -> None:
        logits = torch.zeros(1, vocab_size, device=self._device)
        kernels.apply_masks(logits, self._masks(vocab_size))

    def _masks(self, vocab_size: int) -> RowMasks:
        """Of one row, which allow every token."""
        return RowMasks(self._zeros(1), self._zeros(1, -(-vocab_size // 32)) - 1)


def _run(launch: Callable[[], object], stream: torch.cuda.Stream | None) -> None:
    hash_compiler()
    with torch.inference_mode(), torch.cuda.stream(stream):
        launch()
