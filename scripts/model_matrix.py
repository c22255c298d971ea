"""Serve a tiny random checkpoint of each causal LM of transformers, and compare with `generate`.

    scripts/model_matrix.py [CLASS ...] [--json FILE] [--processes N]
        [--markdown docs/model_matrix.md] [--beside FILE]

Each class gets a configuration of small sizes, random weights, and a folder by transformers. The
engine serves it in float32 on the CPU, chunked, batched, with prefix hits and preemption: greedy
tokens and log-probabilities must be transformers' own, of one prompt at a time. Prints a Markdown
table: native, by backend, refused with its reason, wrong, failed, or without a configuration.
--markdown writes the results of --json, and of --beside, those of another transformers.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import random
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
import transformers.generation.utils
import transformers.modeling_layers  # both take seconds; the process of each class then has them
from tiny_configs import BY_CLASS, VOCAB_SIZE, random_model, small_config, tiny_config
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from asyncllm import LLM, SamplingParams
from asyncllm.attention.cache_spec import CacheLayout
from asyncllm.config import EngineArgs
from asyncllm.errors import ModelLoadError
from asyncllm.model_config import ARCHITECTURES, UNSERVED
from asyncllm.models.registry import settle

NUM_TOKENS = 12
TOLERANCE = 1e-3
SECONDS = 300  # for one class
# Seven prompts of up to 40 + 12 tokens need about 90 pages of 4 in each cache group.
NUM_PAGES = 30  # for each
REGIME: dict[str, Any] = {
    "block_size": 4, "max_num_seqs": 7, "swap_space": 0,
    "max_num_batched_tokens": 9, "preemption_mode": "recompute", "max_model_len": 60,
}  # fmt: skip


def make_prompts() -> list[list[int]]:
    """Seven, four of which share a prefix."""
    rng = random.Random(7)
    ids = lambda n: [rng.randrange(3, VOCAB_SIZE) for _ in range(n)]  # noqa: E731
    shared = ids(17)
    return [shared + ids(n) for n in (1, 3, 8, 22)] + [ids(1), ids(5), ids(30)]


def answer(model: Any, prompt: list[int]) -> tuple[list[int], list[torch.Tensor]]:
    """Greedy tokens and the log-probabilities [V] that each was taken from."""
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
    """Greedy tokens and their log-probabilities by the engine: all at once, then one again."""
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
    """The model's cache groups."""
    model_len = REGIME["max_model_len"]
    args = EngineArgs(
        str(folder), dtype="float32", max_model_len=model_len, skip_tokenizer_init=True
    )
    _, model = settle(args.create_engine_config())
    return CacheLayout(model.attention_layers, REGIME["block_size"], torch.float32).num_groups


def compare(architecture: str, config: Any, folder: Path, **regime: Any) -> float:
    """The largest difference of log-probabilities; inf where a token differs that is no tie."""
    with torch.inference_mode():
        model = random_model(config, architecture)
        model.save_pretrained(folder)
    prompts, worst = make_prompts(), 0.0
    ours = serve(folder, prompts, **regime)  # first: a refusal needs no reference
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
    """(verdict, details) of one class."""
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
    """Why a class is refused before its configuration is read."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({"architectures": [architecture]}))
        try:
            num_groups(Path(folder))
        except ModelLoadError as error:
            return "refused", _reason(error)
    return "failed", "is in UNSERVED, and not refused"


def refusal(architecture: str) -> tuple[str, str] | None:
    """Why a class is refused by its configuration alone; None where it is not, or has none."""
    try:
        config = small_config(architecture, BY_CLASS.get(architecture, {}))
    except Exception:  # of no common base
        config = getattr(transformers, architecture).config_class()
    config.architectures = [architecture]
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
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
    except Exception as error:  # else who waits would wait for the whole time
        results.put(("failed", f"{type(error).__name__}: {error}"))


class Results(NamedTuple):
    """(verdict, details) by class, of one version of transformers."""

    version: str
    rows: dict[str, tuple[str, str]]

    @classmethod
    def read(cls, file: Path) -> Results:
        content = json.loads(file.read_text())
        return cls(content["transformers"], {n: (r[0], r[1]) for n, r in content["rows"].items()})

    def write(self, file: Path) -> None:
        file.write_text(json.dumps({"transformers": self.version, "rows": self.rows}, indent=1))


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


SERVED = {"native": "native", "by backend": "transformers' code"}
HEADER = """\
# Models

What `scripts/model_matrix.py` found for every class in the causal-LM table of
transformers {version}: tiny random weights, served in float32 on the CPU in chunks and batches,
with prefix hits and preemption, against transformers' own `generate` (log-probabilities within
{tolerance}). "native" is our model code; "transformers' code" is the library's over our pages,
which `--model-impl transformers` takes for native classes, too. What is not served is refused at
the start, with class, field and value. Where an index chooses tokens for sparse attention, the
class is served up to the `max_model_len` of which it chooses all. Made by the script: do not edit.

{counts}{beside}

| class | served by | why not |
| --- | --- | --- |
"""


BESIDE = """
## transformers {version}

Of {number} classes that were examined with it: {counts} {differ}

| class | served by | why not |
| --- | --- | --- |
"""


def markdown(results: Results, other: Results | None = None) -> str:
    """docs/model_matrix.md; of another version of transformers what differs."""
    rows, beside, end = results.rows, "", ""
    if other is not None:
        beside = f" With transformers {other.version}, the oldest that is served: below."
        both = rows.keys() & other.rows.keys()
        changed = sorted(n for n in both if _served(*rows[n]) != _served(*other.rows[n]))
        differ = "These differ:" if changed else "None differs."
        end = BESIDE.format(
            version=other.version, number=len(other.rows), counts=_counts(other), differ=differ
        ) + _table(other, changed)
    header = HEADER.format(
        version=results.version, tolerance=TOLERANCE, counts=_counts(results), beside=beside
    )
    return header + _table(results, sorted(rows)) + end


def _served(verdict: str, details: str) -> str:
    return SERVED.get(verdict, "-")


def _counts(results: Results) -> str:
    counts = Counter(SERVED.get(verdict, verdict) for verdict, _ in results.rows.values())
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()) + "."


def _table(results: Results, names: list[str]) -> str:
    return "".join(f"| {name} | {_cells(name, *results.rows[name])} |\n" for name in names)


def _cells(name: str, verdict: str, details: str) -> str:
    if verdict in SERVED:
        return f"{SERVED[verdict]} | "
    reason = (
        details.replace(f"architectures {name!r} ", "")
        .removesuffix(", which is not served")
        .removesuffix(": not served")
    )
    return f"- | {verdict}: {' '.join(reason.replace('|', '/').split())[:160]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("classes", nargs="*")
    parser.add_argument("--json", type=Path, help="results: read where it is there, and written")
    parser.add_argument("--processes", type=int, default=1, help="classes at the same time")
    parser.add_argument("--markdown", type=Path, help="written from all results")
    parser.add_argument("--beside", type=Path, help="results of another transformers, for that")
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
    print(_counts(results))


if __name__ == "__main__":
    main()
