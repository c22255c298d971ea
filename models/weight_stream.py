"""Reads bytes of files into tensors on a CUDA device: threads read, one stream copies.

A thread reads a piece into a pinned buffer, without the GIL, and enqueues its copy. A buffer is
reused when its copy is done. From the page cache this is at least twice as fast as one thread that
copies from a mapped file (docs/log/start.md); from a cold disk both are limited by the disk.
It knows offsets and bytes, but no names or dtypes. It also runs on the CPU, for tests.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import torch

from asyncllm.errors import ModelLoadError

NUM_THREADS = 16
BUFFERS_PER_THREAD = 2  # one is filled while the other is copied
PIECE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of `file`, from `offset` on, to read into `target`, which is contiguous."""

    file: Path
    offset: int
    target: torch.Tensor


def stream_weights(spans: Iterable[Span], device: torch.device) -> Iterator[int]:
    """Fill all targets; yields the number of bytes of each piece that is read.

    At the end all bytes are on the device. Raises `ModelLoadError` for a file that is too short,
    `OSError` for one that cannot be read.
    """
    buffers: SimpleQueue[_Buffer] = SimpleQueue()
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    pieces = list(_pieces(spans))
    for _ in range(min(NUM_THREADS * BUFFERS_PER_THREAD, len(pieces))):
        buffers.put(_Buffer(stream))
    with ExitStack() as stack:
        opened: dict[Path, int] = {}
        for file in dict.fromkeys(piece.file for piece in pieces):
            opened[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, opened[file])  # once no thread reads
        threads = stack.enter_context(ThreadPoolExecutor(NUM_THREADS, "asyncllm-weights"))
        stack.callback(threads.shutdown, cancel_futures=True)  # stops reading after an error
        futures = [threads.submit(_move, piece, opened[piece.file], buffers) for piece in pieces]
        for future in as_completed(futures):
            yield future.result()
    if stream is not None:
        stream.synchronize()


class _Buffer:
    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream
        self._bytes = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=stream is not None)
        self._memory = self._bytes.numpy().data
        self._copied = torch.cuda.Event() if stream is not None else None

    def move(self, piece: Span, descriptor: int) -> None:
        size = piece.target.nbytes
        if self._copied is not None:
            self._copied.synchronize()
        filled = 0
        while filled < size:
            read = os.preadv(descriptor, [self._memory[filled:size]], piece.offset + filled)
            if not read:
                raise ModelLoadError(f"{piece.file}: ends at byte {piece.offset + filled}")
            filled += read
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            piece.target.copy_(self._bytes[:size], non_blocking=True)
            if self._copied is not None:
                self._copied.record()


@torch.inference_mode()  # threads do not inherit it, and the targets are made in it
def _move(piece: Span, descriptor: int, buffers: SimpleQueue[_Buffer]) -> int:
    buffer = buffers.get()
    try:
        buffer.move(piece, descriptor)
    finally:
        buffers.put(buffer)
    return piece.target.nbytes


def _pieces(spans: Iterable[Span]) -> Iterator[Span]:
    """Targets as bytes, at most PIECE_BYTES each."""
    for span in spans:
        flat = span.target.view(-1).view(torch.uint8)
        for start in range(0, len(flat), PIECE_BYTES):
            yield Span(span.file, span.offset + start, flat[start : start + PIECE_BYTES])
