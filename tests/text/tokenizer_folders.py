"""Small model folders to test the text side with: a config, a tokenizer, a chat template.

The tokenizers are trained here, on a few sentences, in the shapes that real models ship: byte-level
(Llama 3, Qwen), sentencepiece with byte fallback (Llama 2, Mistral, Gemma), and older decoders.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

SENTENCES = [
    "The quick brown fox jumps over the lazy dog, again and again.",
    "def main(): return {'answer': 42}  # the answer\n\n",
    "Äpfel über Größe, naïve café, déjà vu, 12345 + 67890 = ?",
    "你好世界。今天天气很好。こんにちは世界。",
    "combining e\u0301 a\u0308",
]

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'bad' %}{{ raise_exception('no bad roles') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}[{{ call.function.name }}"
    "{% for key, value in call.function.arguments.items() %} {{ key }}={{ value }}{% endfor %}]"
    "{% endfor %}<|end|>{% endfor %}"
    "{% for tool in tools or [] %}(tool {{ tool.function.name }}){% endfor %}"
    "{% if style is defined %}(style {{ style }}){% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

MODEL_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 1,
}


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=["<|bos|>", "<|eos|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.add_special_tokens(["<|end|>"])
    # Added tokens stand for their own text, even where it looks like the byte-level code.
    tokenizer.add_tokens(["<think>", "<|ünï☃|>", "<|\u0120é|>", "two words"])
    _begin_with(tokenizer, "<|bos|>")
    return tokenizer


def sentencepiece(strip: bool = True) -> Tokenizer:
    """Llama 2's shape; without `strip` Gemma's."""
    trained = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    trained.normalizer = normalizers.Replace(" ", "▁")
    specials = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=specials, show_progress=False)
    trained.train_from_iterator([sentence[:40] for sentence in SENTENCES[:3]], trainer)
    model = json.loads(trained.to_str())["model"]
    words = [word for word in model["vocab"] if word not in specials]
    vocabulary = [*specials, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={word: i for i, word in enumerate(vocabulary)},
            merges=[tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strip:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in specials])
    _begin_with(tokenizer, "<s>")
    return tokenizer


def metaspace() -> Tokenizer:
    """T5's shape: words of letters, the first one without its space."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


def wordpiece() -> Tokenizer:
    """BERT's shape: spaces come from the decoder, not from the tokens."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=400, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


def suffixed() -> Tokenizer:
    """GPT-1's shape: a word ends in </w>, which is a space everywhere but at the end."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>", "<s>", "</s>"],
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


def undecoded() -> Tokenizer:
    """No decoder at all: the library joins tokens with spaces."""
    tokenizer = suffixed()
    bare = Tokenizer(tokenizer.model)
    bare.pre_tokenizer = tokenizer.pre_tokenizer
    bare.add_special_tokens(["<unk>", "<s>", "</s>"])
    return bare


def write_folder(
    path: Path,
    tokenizer: Tokenizer,
    *,
    bos: str | None = None,
    eos: str | None = None,
    chat_template: str | None = CHAT_TEMPLATE,
    generation_config: dict[str, Any] | None = None,
    **config: Any,
) -> Path:
    """A model folder without weights. `config` goes over `MODEL_CONFIG`."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "clean_up_tokenization_spaces": False,
        "chat_template": chat_template,
    }
    _write_json(
        path / "tokenizer_config.json",
        {key: value for key, value in tokenizer_config.items() if value is not None},
    )
    _write_json(path / "config.json", MODEL_CONFIG | config)
    if generation_config is not None:
        _write_json(path / "generation_config.json", generation_config)
    return path


def id_of(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_to_id(token)
    assert found is not None, token
    return found


def _write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value), encoding="utf-8")


def _begin_with(tokenizer: Tokenizer, bos: str) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, id_of(tokenizer, bos))]
    )
