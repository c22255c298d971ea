"""Serves a tiny random checkpoint of each causal LM of transformers, and compares with `generate`.

    scripts/model_matrix.py [CLASS ...] [--json FILE] [--processes N]
        [--markdown docs/model_matrix.md] [--beside FILE]

transformers makes a folder for each class, with a configuration of small sizes and random weights.
The engine serves it in float32 on the CPU, with chunks, batches, prefix hits and preemption. Greedy
tokens and log-probabilities must equal those of transformers for one prompt at a time. The script
prints a Markdown table: native, by backend, refused (with the reason), wrong, failed, or without a
configuration. --markdown writes the page with the results of --json and of --beside, which are from
another version of transformers.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import random
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import transformers
import transformers.generation.utils
import transformers.modeling_layers  # slow: imported here, so that each forked process has it
from model_matrix_page import TOLERANCE, Results, counts, markdown
from tiny_configs import BY_CLASS, VOCAB_SIZE, random_model, small_config, tiny_config
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from asyncllm import LLM, SamplingParams
from asyncllm.attention.cache_spec import CacheLayout
from asyncllm.config import EngineArgs
from asyncllm.errors import ModelLoadError
from asyncllm.model_config import ARCHITECTURES, UNSERVED
from asyncllm.models.registry import settle

NUM_TOKENS = 12
SECONDS = 300  # per class
# Seven prompts of up to 40 + 12 tokens need about 90 pages of 4 in each cache group.
NUM_PAGES = 30  # per group
REGIME: dict[str, Any] = {
    "block_size": 4, "max_num_seqs": 7, "swap_space": 0,
    "max_num_batched_tokens": 9, "preemption_mode": "recompute", "max_model_len": 60,
}  # fmt: skip


def make_prompts() -> list[list[int]]:
    """Seven prompts; four of them share a prefix."""
    rng = random.Random(7)
    ids = lambda n: [rng.randrange(3, VOCAB_SIZE) for _ in range(n)]  # noqa: E731
    shared = ids(17)
    return [shared + ids(n) for n in (1, 3, 8, 22)] + [ids(1), ids(5), ids(30)]


def answer(model: Any, prompt: list[int]) -> tuple[list[int], list[torch.Tensor]]:
    """Greedy tokens, and for each the log-probabilities [V]."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=NUM_TOKENS,
        min_new_tokens=NUM_TOKENS,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    tokens = output.sequences[0, len(prompt) :].tolist()
    return tokens, [logits[0].float().log_softmax(0) for logits in output.logits]


def serve(
    folder: Path, prompts: list[list[int]], **regime: Any
) -> list[tuple[list[int], list[float]]]:
    """The engine's greedy tokens and their log-probabilities: of all prompts in a batch, then of
    one of them again."""
    params = SamplingParams(
        temperature=0, max_tokens=NUM_TOKENS, logprobs=0, detokenize=False, ignore_eos=True
    )
    regime = REGIME | {"num_gpu_blocks_override": NUM_PAGES * num_groups(folder)} | regime
    with LLM(str(folder), skip_tokenizer_init=True, **regime) as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params)
        outputs += llm.generate([{"prompt_token_ids": prompts[3]}], params)
    completions = [output.outputs[0] for output in outputs]
    return [
        (c.token_ids, [e[t].logprob for e, t in zip(c.logprobs or [], c.token_ids, strict=True)])
        for c in completions
    ]


def num_groups(folder: Path) -> int:
    """The number of the model's cache groups."""
    model_len = REGIME["max_model_len"]
    args = EngineArgs(
        str(folder), dtype="float32", max_model_len=model_len, skip_tokenizer_init=True
    )
    _, model = settle(args.create_engine_config())
    return CacheLayout(model.attention_layers, REGIME["block_size"], torch.float32).num_groups


def compare(architecture: str, config: Any, folder: Path, **regime: Any) -> float:
    """The largest difference of log-probabilities; inf if a token differs that is no tie."""
    with torch.inference_mode():
        model = random_model(config, architecture)
        model.save_pretrained(folder)
    prompts, worst = make_prompts(), 0.0
    ours = serve(folder, prompts, **regime)  # first, as a refusal needs no reference
    with torch.inference_mode():
        wanted = [answer(model, prompt) for prompt in prompts]
    for (tokens, logprobs), (expected, rows) in zip(ours, [*wanted, wanted[3]], strict=True):
        for token, logprob, other, row in zip(tokens, logprobs, expected, rows, strict=True):
            if token != other and row[other] - row[token] > TOLERANCE:
                return float("inf")
            worst = max(worst, abs(logprob - row[token].item()))
            if token != other:
                break
    return worst


def examine(architecture: str) -> tuple[str, str]:
    """The (verdict, details) of one class."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    if architecture in UNSERVED:
        return by_name(architecture)
    try:
        config = tiny_config(architecture)
    except Exception as error:  # of no common base
        return refusal(architecture) or (
            "no tiny configuration",
            f"{type(error).__name__}: {error}",
        )
    try:
        with tempfile.TemporaryDirectory() as folder:
            worst = compare(architecture, config, Path(folder))
    except ModelLoadError as error:
        return "refused", _reason(error)
    except Exception as error:
        return "failed", f"{type(error).__name__}: {error}"
    if worst > TOLERANCE:
        return "wrong", f"{worst:.2g}"
    return ("native" if architecture in ARCHITECTURES else "by backend"), f"{worst:.2g}"


def by_name(architecture: str) -> tuple[str, str]:
    """The verdict on a class in UNSERVED, which is refused before its configuration is read."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({"architectures": [architecture]}))
        return _refused(folder) or ("failed", "is in UNSERVED, and not refused")


def refusal(architecture: str) -> tuple[str, str] | None:
    """The verdict on a class that is refused because of its configuration; None if it is not."""
    try:
        config = small_config(architecture, BY_CLASS.get(architecture, {}))
    except Exception:  # of no common base
        config = getattr(transformers, architecture).config_class()
    config.architectures = [architecture]
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        return _refused(folder)


def _refused(folder: str) -> tuple[str, str] | None:
    try:
        num_groups(Path(folder))
    except ModelLoadError as error:
        return "refused", _reason(error)
    return None


def _reason(error: ModelLoadError) -> str:
    return str(error).partition("config.json: ")[2] or str(error)


def _child(architecture: str, results: Any) -> None:
    try:
        results.put(examine(architecture))
    except Exception as error:  # else the parent would wait until the timeout
        results.put(("failed", f"{type(error).__name__}: {error}"))


def in_a_process(architecture: str) -> tuple[str, str]:
    results: Any = multiprocessing.Queue()
    child = multiprocessing.Process(target=_child, args=(architecture, results))
    child.start()
    try:
        verdict: tuple[str, str] = results.get(timeout=SECONDS)
    except Exception:
        verdict = "failed", f"no answer in {SECONDS} s"
        child.kill()
    child.join()
    return verdict


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("classes", nargs="*")
    parser.add_argument("--json", type=Path, help="file of results: read if it exists, and written")
    parser.add_argument("--processes", type=int, default=1, help="classes at the same time")
    parser.add_argument("--markdown", type=Path, help="page to write")
    parser.add_argument("--beside", type=Path, help="results with another transformers")
    args = parser.parse_args()
    results = Results(transformers.__version__, {})
    if args.json and args.json.exists():
        results = Results.read(args.json)
    print("| class | verdict | worst difference, or reason |\n| --- | --- | --- |")
    names = args.classes or sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()))
    with ThreadPoolExecutor(args.processes) as pool:
        for name, row in zip(names, pool.map(in_a_process, names), strict=True):
            verdict, details = results.rows[name] = row
            print(f"| {name} | {verdict} | {' '.join(details.split())[:200]} |", flush=True)
            if args.json:
                results.write(args.json)
    if args.markdown:
        other = Results.read(args.beside) if args.beside else None
        args.markdown.write_text(markdown(results, other))
    print(counts(results))


if __name__ == "__main__":
    main()
