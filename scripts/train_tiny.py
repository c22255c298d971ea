#!/usr/bin/env python3
"""Train the built-in model and its draft from generated text, in minutes.

    python3 scripts/train_tiny.py --device cuda --out DIR --report FILE     # 16 cores, one H100
    python3 scripts/train_tiny.py --device cpu --steps 200                  # to try the path
    python3 scripts/train_tiny.py --adapter --device cpu --steps 300        # its adapter alone

Text (tiny_text), tokenizer (tiny_tokenizer), packed rows (tiny_shards), two trainings
(tiny_training), then accuracy on held-out questions through transformers (tiny_evaluate). Both
folders are complete before anything is evaluated.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tiny_evaluate import Score, evaluate, markdown_table
from tiny_shards import TOKEN, build_shards, sample_texts
from tiny_text import training_examples
from tiny_tokenizer import (
    END,
    END_OF_TEXT,
    PAD,
    SPECIAL_TOKENS,
    check_template,
    save_tokenizer,
    train_tokenizer,
)
from tiny_training import Budget, Result, RowStream, Shape, train
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaForCausalLM

ROOT = Path(__file__).resolve().parent.parent
TOKENIZER_PARTS = 16  # of the sample that the tokenizer learns from
CHECKED_EXAMPLES = 500
SHAPES = (
    Shape("tiny", 256, 7, 8, 768, peak_rate=2e-3, time_share=0.7),
    Shape("tiny-draft", 192, 3, 4, 512, peak_rate=3e-3, time_share=0.3),
)


def save_model(model: LlamaForCausalLM, shape: Shape, tokenizer: Tokenizer, out: Path) -> Path:
    """Write the Hugging Face folder `out/NAME`, replacing an older one in one move."""
    folder, fresh = out / shape.name, out / f".{shape.name}.new"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    weights = fresh / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)
    ends = [SPECIAL_TOKENS.index(END), SPECIAL_TOKENS.index(END_OF_TEXT)]
    generation = {
        "do_sample": False,
        "eos_token_id": ends,
        "pad_token_id": SPECIAL_TOKENS.index(PAD),
    }
    for name, content in (("config.json", shape.config()), ("generation_config.json", generation)):
        (fresh / name).write_text(json.dumps(content, indent=2) + "\n")
    save_tokenizer(tokenizer, fresh)
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)
    return folder


def learn_tokenizer(num_texts: int, num_processes: int) -> Tokenizer:
    """Learn the tokenizer from a sample, and check the chat template against the trained text."""
    # As many parts on every machine, so that the tokenizer does not depend on its cores.
    work = [(seed, max(1, num_texts // TOKENIZER_PARTS)) for seed in range(TOKENIZER_PARTS)]
    with get_context("fork").Pool(num_processes) as pool:
        texts = [text for part in pool.starmap(sample_texts, work) for text in part]
    tokenizer = train_tokenizer(texts)
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(tokenizer, Path(folder))
        loaded = AutoTokenizer.from_pretrained(folder)
        check_template(loaded, islice(training_examples(0), CHECKED_EXAMPLES))
    return tokenizer


def report_text(
    args: argparse.Namespace, results: dict[str, Result], scores: dict[str, dict[str, Score]]
) -> str:
    """The report in Markdown: what was trained for how long, and how well it answers."""
    device = torch.cuda.get_device_name() if args.device.startswith("cuda") else "CPU"
    lines = [
        f"Trained on {device}, torch {torch.__version__}, seed {args.seed}.",
        "",
        "| model | parameters | steps | tokens | seconds | last loss |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {name} | {r.parameters / 1e6:.2f} M | {r.steps} | {r.tokens / 1e6:.1f} M "
        f"| {r.seconds:.0f} | {r.loss:.4f} |"
        for name, r in results.items()
    ]
    lines += [
        "",
        "Exact greedy answers to held-out questions; margin: median over the questions of the",
        "smallest distance, in logits, between the right token and the best other one.",
        "",
        markdown_table(scores),
    ]
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=ROOT / "asyncllm" / "assets")
    parser.add_argument("--report", type=Path, help="Markdown file for the accuracy table")
    parser.add_argument("--minutes", type=float, default=7.0, help="training time of both models")
    parser.add_argument("--steps", type=int, help="stop each training after so many steps")
    parser.add_argument("--batch-tokens", type=int, help="default: 65536 on a GPU, 4096 on a CPU")
    parser.add_argument("--data-tokens", type=float, help="default: 400e6 on a GPU, 4e6 on a CPU")
    parser.add_argument("--data-seconds", type=float, default=60.0, help="stop making data then")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--tokenizer-texts", type=int, default=40000)
    parser.add_argument("--eval-per-kind", type=int, help="default: 100 on a GPU, 20 on a CPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--adapter", action="store_true", help="train tiny's adapter (tiny_adapter)"
    )
    args = parser.parse_args()
    on_gpu = args.device.startswith("cuda")
    args.batch_tokens = args.batch_tokens or (65536 if on_gpu else 4096)
    args.data_tokens = int(args.data_tokens or (400e6 if on_gpu else 4e6))
    args.eval_per_kind = args.eval_per_kind or (100 if on_gpu else 20)
    return args


def train_both(args: argparse.Namespace, began: float) -> tuple[list[Path], dict[str, Result]]:
    """Everything up to the two saved folders."""
    tokenizer = learn_tokenizer(args.tokenizer_texts, args.processes)
    print(f"tokenizer learnt after {time.monotonic() - began:.0f} s", flush=True)
    with tempfile.TemporaryDirectory(prefix="tiny_shards_") as work:
        tokenizer_path = Path(work) / "tokenizer.json"
        tokenizer.save(str(tokenizer_path))
        short, long = build_shards(
            tokenizer_path,
            Path(work),
            first_seed=1000 * (args.seed + 1),
            num_tokens=args.data_tokens,
            shard_tokens=min(1_000_000, args.data_tokens // args.processes),
            max_seconds=args.data_seconds,
            num_processes=args.processes,
        )
    total = short.size + long.size
    padding = np.mean((short & TOKEN) == SPECIAL_TOKENS.index(PAD))
    print(
        f"{total / 1e6:.1f} M tokens packed after {time.monotonic() - began:.0f} s: "
        f"{len(short)} short rows ({padding:.1%} padding), {len(long)} long rows",
        flush=True,
    )
    folders, results = [], {}
    for shape in SHAPES:
        rows = RowStream(short, long, args.batch_tokens, args.device, args.seed)
        budget = Budget(60 * args.minutes * shape.time_share, args.steps)
        model, result = train(shape, rows, budget, args.device)
        folders.append(save_model(model, shape, tokenizer, args.out))
        results[shape.name] = result
        print(f"{folders[-1]}: {result}", flush=True)
    return folders, results


def main() -> None:
    began = time.monotonic()
    args = parse_arguments()
    if args.adapter:
        from tiny_adapter import make_adapter  # peft: seconds

        print(make_adapter(args.out / SHAPES[0].name, args.steps or 300, args.batch_tokens,
                           args.device, args.seed))  # fmt: skip
        return
    folders, results = train_both(args, began)
    scores: dict[str, dict[str, Score]] = {}
    for folder in folders:
        scores[folder.name] = evaluate(
            folder, device=args.device, per_kind=args.eval_per_kind, max_rows=256
        )
    text = report_text(args, results, scores)
    if args.report:
        args.report.parent.mkdir(parents=True, exist_ok=True)
        args.report.write_text(text, encoding="utf-8")
    print(text)
    print(f"done after {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
