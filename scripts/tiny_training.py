"""Training of one built-in model on packed rows, within a budget of wall-clock time.

The learning rate follows the share of the budget that has passed, so that a slower machine makes
fewer steps and still ends at rate zero. All rows lie on the device from the start, and attention
stays inside each document. Knows nothing of text, files or the tokenizer's words.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tiny_shards import LONG, SHORT, START, TOKEN, TRAINED, bar_interval
from tiny_tokenizer import END, MAX_POSITIONS, PAD, SPECIAL_TOKENS, VOCAB_SIZE
from torch.nn import functional
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

HEAD_DIM = 64
WARM_UP_SHARE = 0.03
IGNORED = -100


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of a model; four query heads share one key-value head in each."""

    name: str
    hidden: int
    layers: int
    heads: int
    intermediate: int
    peak_rate: float
    time_share: float

    def config(self) -> dict[str, Any]:
        """config.json, in the form that transformers 4 and 5 both read."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads // 4,
            "head_dim": HEAD_DIM,
            "hidden_act": "silu",
            "max_position_embeddings": MAX_POSITIONS,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "rope_scaling": None,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
            "use_cache": True,
            "bos_token_id": None,
            "eos_token_id": SPECIAL_TOKENS.index(END),
            "pad_token_id": SPECIAL_TOKENS.index(PAD),
            "torch_dtype": "bfloat16",
        }


@dataclass(frozen=True, slots=True)
class Budget:
    """How long to train: until `seconds` have passed, or `steps` were made where given."""

    seconds: float
    steps: int | None

    def share(self, elapsed: float, step: int) -> float:
        """The share of the training that is done, from 0 to 1."""
        by_steps = step / self.steps if self.steps else 0.0
        return min(1.0, max(elapsed / self.seconds, by_steps))


@dataclass(frozen=True, slots=True)
class Result:
    """A finished training, for the report."""

    parameters: int
    steps: int
    tokens: int
    seconds: float
    loss: float


def learning_rate(share: float, peak: float) -> float:
    """Linear warm-up, then a cosine down to zero."""
    return peak * min(1.0, share / WARM_UP_SHARE) * 0.5 * (1 + math.cos(math.pi * share))


class RowStream:
    """Endless batches of packed rows, short and long ones mixed, all on the device.

    short, long: int16 [rows, row tokens] on the device, bits as in tiny_shards.
    """

    def __init__(
        self, short: np.ndarray, long: np.ndarray, batch_tokens: int, device: str, seed: int
    ) -> None:
        self.tables = [torch.from_numpy(rows.view(np.int16)).to(device) for rows in (short, long)]
        self.batch_rows = [max(1, batch_tokens // length) for length in (SHORT, LONG)]
        self.rng = np.random.default_rng(seed)

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Yields int32 [rows, row tokens], each row at most once in an epoch."""
        while True:
            batches = []
            for table, rows in zip(self.tables, self.batch_rows, strict=True):
                order = torch.from_numpy(self.rng.permutation(len(table)))
                full = len(order) // rows * rows or len(order)  # a rest joins a later epoch
                batches += [(table, chosen) for chosen in order[:full].split(rows) if len(chosen)]
            for index in self.rng.permutation(len(batches)):
                table, chosen = batches[index]
                yield table[chosen.to(table.device)].to(torch.int32)


@dataclass(frozen=True, slots=True)
class Batch:
    """tokens, positions, targets: int64 [rows, tokens]; mask: bool [rows, 1, tokens, tokens]."""

    tokens: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def unpack(cls, packed: torch.Tensor) -> Batch:
        """Positions restart and attention stops at the start of each document."""
        tokens = (packed & TOKEN).long()
        start, trained = (packed & START) != 0, (packed & TRAINED) != 0
        index = torch.arange(packed.shape[1], device=packed.device)
        begin = torch.where(start, index, 0).cummax(1).values
        mask = (begin[:, :, None] == begin[:, None, :]) & (index[:, None] >= index)
        targets = torch.where(trained & ~start, tokens, IGNORED).roll(-1, 1)
        targets[:, -1] = IGNORED
        return cls(tokens, index - begin, targets, mask[:, None])


def batch_loss(model: LlamaForCausalLM, batch: Batch) -> torch.Tensor:
    """Mean cross entropy over the trained tokens, in nats."""
    hidden = model.model(
        input_ids=batch.tokens,
        position_ids=batch.positions,
        attention_mask=batch.mask,
        use_cache=False,
    ).last_hidden_state
    logits = model.lm_head(hidden)
    return functional.cross_entropy(logits.float().flatten(0, 1), batch.targets.flatten())


def progress_bar(name: str) -> tqdm[Any]:
    """A bar that counts percent of the budget."""
    form = "{desc}: {percentage:3.0f}% |{bar:20}| {elapsed} {postfix}"
    return tqdm(total=100, desc=name, bar_format=form, mininterval=bar_interval())


def train(
    shape: Shape, rows: RowStream, budget: Budget, device: str
) -> tuple[LlamaForCausalLM, Result]:
    """Train one model from scratch: float32 weights, bf16 products, AdamW."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape.config())).float().to(device).train()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    fused = device.startswith("cuda")
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=fused)
    began, step, num_tokens, loss_value = time.monotonic(), 0, 0, math.nan
    stream = iter(rows)
    with progress_bar(shape.name) as bar:
        while (share := budget.share(time.monotonic() - began, step)) < 1.0:
            packed = next(stream)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(share, shape.peak_rate)
            with torch.autocast(device.split(":")[0], torch.bfloat16):
                loss = batch_loss(model, Batch.unpack(packed))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step, num_tokens = step + 1, num_tokens + packed.numel()
            if step % 20 == 1:  # reading the loss waits for the device and keeps the clock honest
                loss_value = loss.item()
                speed = num_tokens / (time.monotonic() - began)
                bar.set_postfix_str(f"step {step}, loss {loss_value:.4f}, {speed:.0f} tokens/s")
                bar.update(100 * share - bar.n)
    seconds = time.monotonic() - began
    parameters = sum(p.numel() for p in model.parameters())
    return model.eval(), Result(parameters, step, num_tokens, seconds, loss_value)
