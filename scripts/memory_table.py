#!/usr/bin/env python3
"""How many KV pages a memory budget leaves beside a model's weights, in each format: by arithmetic.

    scripts/memory_table.py [--budget-gb 24] [NAME ...]

The arithmetic is `asyncllm doctor`'s, activations not counted; NAME is one of model_shapes.py's.
Prints a table in Markdown; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from model_shapes import SHAPES, write_shape

from asyncllm.attention.cache_spec import CacheLayout
from asyncllm.config import EngineArgs
from asyncllm.models.registry import settle
from asyncllm.worker.memory import GRAPH_RESERVE_BYTES

FORMATS: list[tuple[Any, Any]] = [
    (quantization, pages) for quantization in (None, "fp8", "int8", "int4")
    for pages in ("auto", "fp8")
]  # fmt: skip


def row_of(name: str, quantization: Any, pages: Any, budget: float) -> dict[str, Any]:
    """Weights in bytes, and the pages and tokens that the rest of the budget holds."""
    with tempfile.TemporaryDirectory() as folder:
        write_shape(SHAPES[name], Path(folder))
        args = EngineArgs(
            folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16",
            quantization=quantization, kv_cache_dtype=pages,
        )  # fmt: skip
        config, model = settle(args.create_engine_config())
        weights = sum(load.num_bytes for load in model.loads())
    kv_dtype = getattr(torch, config.kv_cache_dtype)
    layout = CacheLayout(model.attention_layers, config.block_size, kv_dtype)
    num_pages = max(0, int((budget - weights - GRAPH_RESERVE_BYTES) / layout.page_bytes))
    return {
        "model": name, "weights": quantization or "as published", "kv": pages,
        "weight_bytes": weights, "page_bytes": layout.page_bytes, "pages": num_pages,
        "tokens": num_pages * config.block_size // max(1, layout.num_groups),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=["llama-3.1-8b"], metavar="NAME")
    parser.add_argument("--budget-gb", type=float, default=24.0)
    options = parser.parse_args()
    rows = []
    print("| model | weights | KV | GB of weights | pages | tokens |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in options.names:
        is_quantised = "quantization_config" in SHAPES[name]
        for quantization, pages in FORMATS:
            if is_quantised and quantization is not None:
                continue
            row = row_of(name, quantization, pages, options.budget_gb * 1e9)
            rows.append(row)
            print(
                f"| {name} | {row['weights']} | {pages} | {row['weight_bytes'] / 1e9:.2f} | "
                f"{row['pages']:,} | {row['tokens']:,} |",
                flush=True,
            )
    print(json.dumps({"budget_gb": options.budget_gb, "rows": rows}))


if __name__ == "__main__":
    main()
