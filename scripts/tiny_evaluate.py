"""Accuracy of a built-in model on held-out questions, as transformers runs it.

An answer counts when every token is right: the greedy text equals the expected text, end included.
Beside it stands the margin: the smallest difference, along the expected answer, between the right
token's logit and the best other one; what rounding may eat before a greedy answer changes.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny_text
import torch
from tiny_tokenizer import render_prompt
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

MAX_BATCH_TOKENS = 131072  # rows x longest prompt, so that long prompts come in smaller batches
SPARE_TOKENS = 4  # a wrong answer needs no more than this beyond the right one's length


@dataclass(frozen=True, slots=True)
class Score:
    """Held-out answers of one kind: how many were asked and right, and their median margin."""

    asked: int
    right: int
    margin: float

    @property
    def share(self) -> float:
        return self.right / self.asked if self.asked else 0.0


@dataclass(frozen=True, slots=True)
class Question:
    """Prompt and expected answer as token ids; the answer ends with the end token."""

    prompt: list[int]
    answer: list[int]


def _questions(tokenizer: Any, kind: str, count: int) -> list[Question]:
    asked = []
    for shown in tiny_text.held_out_examples(kind, count):
        prompt = tokenizer.encode(render_prompt(tokenizer, shown), add_special_tokens=False)
        answer = tokenizer.encode(shown.answer, add_special_tokens=False)
        asked.append(Question(prompt, [*answer, tokenizer.eos_token_id]))
    return sorted(asked, key=lambda question: len(question.prompt))


def _batches(questions: list[Question], max_rows: int) -> list[list[Question]]:
    """Neighbours in length together. The questions come sorted by length of the prompt."""
    batches: list[list[Question]] = []
    for question in questions:
        rows = len(batches[-1]) + 1 if batches else 0
        if not batches or rows > max_rows or rows * len(question.prompt) > MAX_BATCH_TOKENS:
            batches.append([])
        batches[-1].append(question)
    return batches


def _count_right(model: Any, batch: list[Question], pad_id: int) -> int:
    """How many greedy answers are exactly right. Prompts are padded on the left."""
    width = max(len(q.prompt) for q in batch)
    prompts = [[pad_id] * (width - len(q.prompt)) + q.prompt for q in batch]
    mask = [[0] * (width - len(q.prompt)) + [1] * len(q.prompt) for q in batch]
    out = model.generate(
        input_ids=torch.tensor(prompts, device=model.device),
        attention_mask=torch.tensor(mask, device=model.device),
        max_new_tokens=max(len(q.answer) for q in batch) + SPARE_TOKENS,
        do_sample=False,
    )
    written = out[:, width:].tolist()
    return sum(row[: len(q.answer)] == q.answer for row, q in zip(written, batch, strict=True))


def _margins(model: Any, batch: list[Question], pad_id: int) -> list[float]:
    """The smallest margin along each expected answer, in logits; negative where it is wrong."""
    width = max(len(q.prompt) + len(q.answer) for q in batch)
    rows = [q.prompt + q.answer for q in batch]
    tokens = torch.tensor([r + [pad_id] * (width - len(r)) for r in rows], device=model.device)
    hidden = model.model(input_ids=tokens).last_hidden_state  # [rows, width, hidden]
    margins = []
    for row, q in enumerate(batch):
        first = len(q.prompt) - 1
        logits = model.lm_head(hidden[row, first : first + len(q.answer)]).float()
        answer = torch.tensor(q.answer, device=model.device)[:, None]
        right = logits.gather(1, answer)[:, 0]
        other = logits.scatter(1, answer, -torch.inf).amax(1)
        margins.append((right - other).min().item())
    return margins


@torch.inference_mode()
def evaluate(folder: Path, *, device: str, per_kind: int, max_rows: int) -> dict[str, Score]:
    """Score every kind."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    scores: dict[str, Score] = {}
    for kind in tqdm(tiny_text.WEIGHTS, f"evaluating {folder.name}"):
        questions = _questions(tokenizer, kind, per_kind)
        asked = right = 0
        margins: list[float] = []
        for batch in _batches(questions, max_rows):
            right += _count_right(model, batch, tokenizer.pad_token_id)
            margins += _margins(model, batch, tokenizer.pad_token_id)
            asked += len(batch)
        scores[kind] = Score(asked, right, statistics.median(margins))
    return scores


def markdown_table(scores: dict[str, dict[str, Score]]) -> str:
    """scores: folder name -> kind -> score. Margins are medians, in logits."""
    names = list(scores)
    head = "".join(f" {name} | margin |" for name in names)
    lines = [f"| kind | asked |{head}", "| --- | --- |" + " --- | --- |" * len(names)]
    for kind in tiny_text.WEIGHTS:
        found = [scores[name][kind] for name in names]
        cells = "".join(f" {score.share:.1%} | {score.margin:.1f} |" for score in found)
        lines.append(f"| {kind} | {found[0].asked} |{cells}")
    return "\n".join(lines) + "\n"
