"""Dynamic RoPE past its window, where the frequencies depend on lengths, and the table's edges."""

import pytest
import torch
from transformers import Glm4Config

from tests.models.dense_sequence import DenseSequence
from tests.models.tiny_checkpoints import (
    CONFIGS,
    PAD,
    SHAPE,
    VOCAB_SIZE,
    llama,
    load,
    random_reference,
    rope,
)

ORIGINAL_WINDOW = 16
MAX_LEN = 64


def save(folder, config):
    with torch.inference_mode():
        random_reference(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def dynamic_folder(tmp_path_factory):
    config = llama(max_position_embeddings=ORIGINAL_WINDOW, **rope("dynamic", factor=1.7))
    return save(tmp_path_factory.mktemp("dynamic"), config)


@pytest.fixture(scope="module")
def partial_folder(tmp_path_factory):
    """Interleaved angles for half of each head."""
    parameters = rope("dynamic", factor=4.0, partial_rotary_factor=0.5)
    shape = SHAPE | {"max_position_embeddings": ORIGINAL_WINDOW}
    return save(
        tmp_path_factory.mktemp("partial"), Glm4Config(**shape, **PAD, head_dim=16, **parameters)
    )


def reference_greedy(folder, prompt, num_tokens):
    """transformers' cached generate: (new token ids, their logits [num_tokens, vocab])."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder
    ).eval()  # fresh: its frequencies are a state
    output = model.generate(
        prompt[None],
        attention_mask=torch.ones_like(prompt[None]),
        max_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return output.sequences[0, len(prompt) :], torch.cat(output.logits)


def our_greedy(folder, prompt, num_tokens, chunk):
    sequence = DenseSequence(load(folder, MAX_LEN), len(prompt))
    for piece in prompt.split(chunk):
        logits = [sequence.logits(piece)[-1:]]
    while len(logits) < num_tokens:
        logits.append(sequence.logits(logits[-1].argmax(dim=-1)))
    return torch.cat(logits).argmax(dim=-1), torch.cat(logits)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [MAX_LEN, 5])
@pytest.mark.parametrize("num_prompt_tokens", [4, ORIGINAL_WINDOW, ORIGINAL_WINDOW + 1, 30])
def test_dynamic_equals_cached_generate_past_the_window(dynamic_folder, num_prompt_tokens, chunk):
    prompt = torch.randint(VOCAB_SIZE, (num_prompt_tokens,))
    expected_ids, expected = reference_greedy(dynamic_folder, prompt, 25)
    token_ids, logits = our_greedy(dynamic_folder, prompt, 25, chunk)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert token_ids.tolist() == expected_ids.tolist()


@pytest.mark.parametrize("num_prompt_tokens", [4, 30])
def test_dynamic_of_a_part_of_each_head_equals_cached_generate(partial_folder, num_prompt_tokens):
    prompt = torch.randint(VOCAB_SIZE, (num_prompt_tokens,))
    expected_ids, expected = reference_greedy(partial_folder, prompt, 25)
    token_ids, logits = our_greedy(partial_folder, prompt, 25, chunk=5)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert token_ids.tolist() == expected_ids.tolist()


def test_dynamic_rows_depend_on_their_own_sequence_alone(dynamic_folder):
    """A step that mixes a short sequence, a long prompt and a long decode, in int64."""
    rotary = load(dynamic_folder, MAX_LEN).rotaries[0]
    positions, prompt_lens = torch.tensor([[3, 3, 40, 15, 16], [4, 30, 4, 4, 4]])
    rotation = rotary.rotation(positions, prompt_lens)
    table = rotation.cos_sin
    assert rotation.rows.tolist() == [0, 1, 2, 3, 4] and table.dtype == torch.float32
    for i in range(5):
        alone = rotary.rotation(positions[i : i + 1], prompt_lens[i : i + 1]).cos_sin
        assert torch.equal(alone[0], table[i])
    assert not torch.equal(table[0], table[1])  # equal positions, another prompt length


def test_dynamic_within_the_window_is_default(dynamic_folder, tmp_path):
    random_reference(llama(**rope("default"))).save_pretrained(tmp_path)
    positions = torch.arange(ORIGINAL_WINDOW, dtype=torch.int32)
    prompt_lens = torch.full_like(positions, ORIGINAL_WINDOW)
    dynamic = load(dynamic_folder, MAX_LEN).rotaries[0].rotation(positions, prompt_lens)
    static = load(tmp_path).rotaries[0].rotation(positions, None)
    assert torch.equal(dynamic.cos_sin, static.cos_sin[static.rows])


def test_static_table_has_max_model_len_rows(tmp_path):
    random_reference(llama()).save_pretrained(tmp_path)
    model = load(tmp_path, max_model_len=24)
    assert not model.uses_prompt_lens
    positions = torch.tensor([0, 23])
    rotation = model.rotaries[0].rotation(positions, None)
    table = rotation.cos_sin
    assert rotation.rows is positions and table.shape == (24, 8) and table.dtype == torch.float32
    assert table[0].tolist() == [1.0] * 4 + [0.0] * 4


@pytest.mark.parametrize("name", ["llama-longrope", "llama-dynamic"])
def test_rows_are_of_the_positions_type(name, tmp_path):
    """Kernels of decodes take int32 alone."""
    random_reference(CONFIGS[name]).save_pretrained(tmp_path)
    (rotary,) = load(tmp_path).rotaries
    positions = torch.arange(5, dtype=torch.int32)
    assert rotary.uses_prompt_lens
    assert rotary.rotation(positions, positions + 1).rows.dtype is torch.int32
