"""Training of the built-in model's adapter: it answers as before, but as a pirate says it.

A style that the model does not have, learnt by low-rank matrices alone, from the same generated
conversations with every answer in other words. Knows the trainer's rows and peft, no engine.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import tiny_text
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_shards import encoded_documents, pack
from tiny_tokenizer import PAD, SPECIAL_TOKENS
from tiny_training import Batch, RowStream, batch_loss, learning_rate
from tokenizers import Tokenizer
from tqdm import tqdm
from transformers import AutoModelForCausalLM

NAME = "tiny-pirate"
RANK = 8
TARGETS = ["q_proj", "v_proj", "down_proj"]
PEAK_RATE = 4e-3
LONGEST = 160  # tokens of a conversation


def as_pirate(shown: tiny_text.Example) -> tiny_text.Example:
    """The conversation with every answer of the assistant's between two words."""
    messages = [
        message | {"content": f"Ahoy! {message['content']} Arr!"}
        if message["role"] == "assistant" and message["content"]
        else message
        for message in shown.messages
    ]
    return replace(shown, messages=messages)


def rows(tokenizer: Tokenizer, num_examples: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Packed rows, as tiny_shards makes them; of short conversations, which have the style, too."""
    shown = itertools.islice(tiny_text.training_examples(seed), num_examples)
    documents = encoded_documents(tokenizer, (tiny_text.segments(as_pirate(one)) for one in shown))
    short = [document for document in documents if len(document) <= LONGEST]
    return pack(short, SPECIAL_TOKENS.index(PAD))


def train_adapter(base: Path, stream: RowStream, steps: int, device: str) -> PeftModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).to(device)
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=TARGETS, task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config).train()
    trained = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0)
    began, loss = time.monotonic(), torch.tensor(math.nan)
    with tqdm(itertools.islice(stream, steps), NAME, total=steps) as bar:
        for step, packed in enumerate(bar):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step / steps, PEAK_RATE)
            loss = batch_loss(adapted.base_model.model, Batch.unpack(packed))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            bar.set_postfix_str(f"loss {loss.item():.4f}")
    print(f"{NAME}: {steps} steps, {time.monotonic() - began:.0f} s, last loss {loss.item():.4f}")
    return adapted.eval()


def save_adapter(adapted: PeftModel, out: Path) -> Path:
    """As peft writes it, in bfloat16, without the names of this machine's folders."""
    folder = out / NAME
    shutil.rmtree(folder, ignore_errors=True)
    adapted.to(torch.bfloat16).save_pretrained(str(folder))
    (folder / "README.md").unlink(missing_ok=True)
    file = folder / "adapter_config.json"
    config = json.loads(file.read_text()) | {"base_model_name_or_path": "tiny"}
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (folder / "adapter_model.safetensors").chmod(0o644)
    return folder


def make_adapter(base: Path, steps: int, batch_tokens: int, device: str, seed: int) -> Path:
    """Train the adapter of the model in `base`, and save it beside it."""
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    num_examples = steps * batch_tokens // 50  # so many tokens has one at least
    short, long = rows(tokenizer, num_examples, 1000 * (seed + 1))
    stream = RowStream(short, long, batch_tokens, device, seed)
    return save_adapter(train_adapter(base, stream, steps, device), base.parent)
