"""Packed token shards for the built-in model: many processes write them, training reads them.

A row holds whole documents, one after the other, padded at its end. Rows come in two lengths,
since attention over a row costs its square and nearly all documents are short. One uint16 says
everything about a token: 12 bits of id, whether a document starts there, whether it is trained on.

    bit 15: trained on   bit 14: start of a document   bits 0-11: token id
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import tiny_text
from tiny_tokenizer import END_OF_TEXT, PAD, SPECIAL_TOKENS, VOCAB_SIZE
from tokenizers import Tokenizer
from tqdm import tqdm

TRAINED, START, TOKEN = 1 << 15, 1 << 14, (1 << 12) - 1
SHORT, LONG = 512, 2048
PLAIN_SHARE = 0.05  # of documents that are no chat
CHUNK_EXAMPLES = 500  # encoded in one call
OPEN_ROWS = 24  # rows that a document may still be put into

assert VOCAB_SIZE - 1 <= TOKEN


def sample_texts(seed: int, count: int) -> list[str]:
    """Rendered conversations and plain documents, to learn the tokenizer from."""
    rng = random.Random(f"sample {seed}")
    shown = itertools.islice(tiny_text.training_examples(seed), count)
    chats = ["".join(text for text, _ in tiny_text.segments(example)) for example in shown]
    return chats + [tiny_text.plain_document(rng) for _ in range(int(PLAIN_SHARE * count))]


def _documents(seed: int) -> Iterator[list[tuple[str, bool]]]:
    """Endless documents, each as (text, trained on?) pieces."""
    rng = random.Random(f"documents {seed}")
    for shown in tiny_text.training_examples(seed):
        yield tiny_text.segments(shown)
        if rng.random() < PLAIN_SHARE:
            yield [(tiny_text.plain_document(rng) + END_OF_TEXT, True)]


def encoded_documents(
    tokenizer: Tokenizer, documents: Iterator[list[tuple[str, bool]]]
) -> Iterator[np.ndarray]:
    """The documents as uint16 [tokens], with their START and TRAINED bits."""
    while chunk := list(itertools.islice(documents, CHUNK_EXAMPLES)):
        pieces = [piece for document in chunk for piece in document]
        encodings = tokenizer.encode_batch_fast([text for text, _ in pieces])
        parts = iter(
            np.array(encoding.ids, np.uint16) | np.uint16(TRAINED if trained else 0)
            for encoding, (_, trained) in zip(encodings, pieces, strict=True)
        )
        for document in chunk:
            tokens = np.concatenate([next(parts) for _ in document])
            tokens[0] |= START
            yield tokens


class Packer:
    """Puts documents into rows of one length: into the fullest open row that has room."""

    def __init__(self, row_tokens: int, pad_id: int) -> None:
        self.row_tokens = row_tokens
        self.padding = np.full(row_tokens, pad_id, np.uint16)
        self.padding[:1] |= START  # padding is a document of its own, never trained on
        self.open: list[tuple[int, list[np.ndarray]]] = []
        self.full: list[np.ndarray] = []

    def add(self, document: np.ndarray) -> None:
        fitting = [
            i for i, (used, _) in enumerate(self.open) if used + len(document) <= self.row_tokens
        ]
        if fitting:
            best = max(fitting, key=lambda i: self.open[i][0])
            used, parts = self.open.pop(best)
            self.open.append((used + len(document), [*parts, document]))
        else:
            self.open.append((len(document), [document]))
        if len(self.open) > OPEN_ROWS:
            self._close(max(range(len(self.open)), key=lambda i: self.open[i][0]))

    def _close(self, index: int) -> None:
        used, parts = self.open.pop(index)
        self.full.append(np.concatenate([*parts, self.padding[: self.row_tokens - used]]))

    def rows(self) -> np.ndarray:
        """All rows, the open ones closed: uint16 [rows, row_tokens]."""
        while self.open:
            self._close(0)
        return np.stack(self.full) if self.full else np.empty((0, self.row_tokens), np.uint16)


def pack(documents: Iterable[np.ndarray], pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Documents into (short rows, long rows); those longer than a long row are left out."""
    short, long = Packer(SHORT, pad_id), Packer(LONG, pad_id)
    for document in documents:
        if len(document) <= SHORT:
            short.add(document)
        elif len(document) <= LONG:
            long.add(document)
    return short.rows(), long.rows()


@functools.cache
def _load_tokenizer(path: Path) -> Tokenizer:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    return Tokenizer.from_file(str(path))


def write_shard(work: tuple[int, Path, Path, int]) -> Path:
    """One shard file of about `num_tokens` tokens, its content a function of the seed."""
    seed, tokenizer_path, folder, num_tokens = work
    tokenizer = _load_tokenizer(tokenizer_path)
    stream, documents, count = encoded_documents(tokenizer, _documents(seed)), [], 0
    while count < num_tokens:
        documents.append(next(stream))
        count += len(documents[-1])
    short, long = pack(documents, SPECIAL_TOKENS.index(PAD))
    path = folder / f"shard_{seed}.npz"
    np.savez(path, short=short, long=long)
    return path


def build_shards(
    tokenizer_path: Path,
    folder: Path,
    *,
    first_seed: int,
    num_tokens: int,
    shard_tokens: int,
    max_seconds: float,
    num_processes: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Write shards in parallel until there are `num_tokens`, or until time is up.

    At least one shard is always made. Returns (short rows, long rows), uint16.
    """
    deadline = time.monotonic() + max_seconds
    num_shards = max(1, round(num_tokens / shard_tokens))
    work = [(first_seed + i, tokenizer_path, folder, shard_tokens) for i in range(num_shards)]
    paths: list[Path] = []
    with multiprocessing.get_context("fork").Pool(num_processes) as pool:
        done = pool.imap_unordered(write_shard, work)
        for path in tqdm(done, "shards", num_shards, mininterval=bar_interval()):
            paths.append(path)
            if time.monotonic() > deadline:
                break
    loaded = [np.load(path) for path in paths]
    short = np.concatenate([shard["short"] for shard in loaded])
    long = np.concatenate([shard["long"] for shard in loaded])
    return short, long


def bar_interval() -> float:
    """Seconds between two updates of a progress bar: fewer where it goes into a file."""
    return 0.2 if sys.stderr.isatty() else 10.0
