"""Every family and RoPE variant gives transformers' logits, prefilled at once or in pieces."""

import pytest
import torch

from asyncllm.worker.packed_step import padding_prompt
from tests.models.dense_sequence import DenseSequence
from tests.models.tiny_checkpoints import (
    CONFIGS,
    VOCAB_SIZE,
    WINDOW,
    load,
    random_reference,
    weights,
)

TOLERANCE = 1e-4
NUM_TOKENS = 40


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory):
    """(our model, transformers' logits [T, vocab], the token ids) of one checkpoint."""
    folder = tmp_path_factory.mktemp(request.param)
    with torch.inference_mode():
        reference = random_reference(CONFIGS[request.param])
        reference.save_pretrained(folder)
        token_ids = torch.randint(VOCAB_SIZE, (NUM_TOKENS,))
        return load(folder), reference(token_ids[None]).logits[0], token_ids


@pytest.mark.slow
def test_prefill_at_once(pair):
    model, expected, token_ids = pair
    logits = DenseSequence(model, len(token_ids)).logits(token_ids)
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


def test_chunks_then_token_by_token(pair):
    model, expected, token_ids = pair
    sequence = DenseSequence(model, num_prompt_tokens=20)
    pieces = [token_ids[:13], token_ids[13:20], *token_ids[20:].split(1)]
    logits = torch.cat([sequence.logits(piece) for piece in pieces])
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


def test_the_references_differ():
    """Else a variant that is silently ignored would pass."""
    token_ids = torch.arange(NUM_TOKENS)[None]
    variants = ("llama", "llama-linear", "llama-llama3", "llama-yarn", "llama-yarn-mscale")
    logits = [random_reference(CONFIGS[name])(token_ids).logits for name in variants]
    for i, one in enumerate(logits):
        for other in logits[:i]:
            assert (one - other).abs().max() > 100 * TOLERANCE


def test_sharded_checkpoint_loads_the_same(tmp_path):
    reference = random_reference(CONFIGS["qwen3"])
    reference.save_pretrained(tmp_path / "single")
    reference.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 3
    single, sharded = (weights(load(tmp_path / f)) for f in ("single", "sharded"))
    assert single.keys() == sharded.keys()
    for name, tensor in single.items():
        assert torch.equal(tensor, sharded[name]), name


def test_windows_are_per_layer_and_dropped_where_they_hide_nothing(tmp_path):
    random_reference(CONFIGS["qwen2-layer-types"]).save_pretrained(tmp_path)
    windows = [layer.window for layer in load(tmp_path).attention_layers]
    assert windows == [8, None, 8]
    assert {layer.window for layer in load(tmp_path, max_model_len=8).attention_layers} == {None}


def test_bfloat16_is_close_to_transformers(tmp_path):
    reference = random_reference(CONFIGS["qwen3"]).to(torch.bfloat16)
    reference.save_pretrained(tmp_path)
    token_ids = torch.randint(VOCAB_SIZE, (WINDOW,))
    expected = reference(token_ids[None]).logits[0]
    exact = reference.float()(token_ids[None]).logits[0]
    logits = DenseSequence(load(tmp_path, dtype=torch.bfloat16), WINDOW).logits(token_ids)
    assert logits.dtype == torch.bfloat16
    assert (logits - exact).abs().mean() < 1.5 * (expected - exact).abs().mean()


def test_how_many_tokens_read_all_weights(tmp_path):
    for name, expected in (("llama", 1), ("qwen3-moe", 12), ("deepseek-v3", 12)):
        random_reference(CONFIGS[name]).save_pretrained(tmp_path / name)
        assert load(tmp_path / name).full_read_tokens == expected, name
    ids = padding_prompt(12, block_size=4, vocab_size=VOCAB_SIZE).tokens[0]
    assert len(set(ids.tolist())) == 12 and 0 <= ids.min() <= ids.max() < VOCAB_SIZE
