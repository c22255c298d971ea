"""Loading, encoding, single tokens, chat templates, and what is refused."""

from __future__ import annotations

import copy
import json
import random
import re
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as RawTokenizer

from asyncllm.engine.text import render_limit
from asyncllm.engine.text.chat_messages import MAX_MESSAGES, MAX_PARTS, MAX_TOOL_CALLS
from asyncllm.engine.text.chat_template import MAX_DOCUMENTS
from asyncllm.engine.text.token_pieces import build_token_pieces
from asyncllm.engine.text.tokenizer import LARGE_TEXT_CHARS, Tokenizer
from asyncllm.errors import InvalidRequestError, ModelLoadError
from asyncllm.formats.tools import MAX_TOOLS
from asyncllm.model_config import resolve_model_path
from tests.text import tokenizer_folders as folders

USER = {"role": "user", "content": "Hello"}


def refused(tokenizer: Tokenizer, messages: Any, **kwargs: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        tokenizer.render_chat(messages, **kwargs)
    return caught.value


# --- ids and text ------------------------------------------------------------------------------


def test_facts(byte_level: Tokenizer) -> None:
    raw = byte_level._raw
    assert byte_level.bos_token_id == raw.token_to_id("<|bos|>")
    assert byte_level.eos_token_ids == (raw.token_to_id("<|eos|>"),)
    assert byte_level.special_ids == {
        raw.token_to_id(token) for token in ("<|bos|>", "<|eos|>", "<|end|>")
    }
    assert byte_level.vocab_size == raw.get_vocab_size()


def test_info_is_json_without_paths(byte_level: Tokenizer) -> None:
    byte_level._hf.init_kwargs |= {"name_or_path": "/secret", "model_max_length": 10**30}
    info = byte_level.info()
    assert info["tokenizer_class"] and info["eos_token"] == "<|eos|>"
    assert "secret" not in json.dumps(info)
    assert info["model_max_length"] == 1e30
    assert info["chat_template"] == byte_level._hf.chat_template


def test_encode_adds_special_tokens_when_asked(byte_level: Tokenizer) -> None:
    plain = byte_level.encode("The fox", add_special_tokens=False)
    assert byte_level.encode("The fox") == [byte_level.bos_token_id, *plain]


def test_large_texts_encode_alike(byte_level: Tokenizer) -> None:
    text = "The fox jumps. " * (LARGE_TEXT_CHARS // 10)
    assert byte_level.encode(text) == byte_level._raw.encode(text).ids


def test_lone_surrogates_are_refused(byte_level: Tokenizer) -> None:
    for text in ("\ud800", "\ud800" * LARGE_TEXT_CHARS):
        with pytest.raises(InvalidRequestError, match="Unicode"):
            byte_level.encode(text)


def test_token_text_and_bytes(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    eos = byte_level.eos_token_ids[0]
    assert byte_level.token_text(eos) == "<|eos|>"
    the = byte_level.encode(" the", add_special_tokens=False)
    assert "".join(map(byte_level.token_text, the)) == " the"
    half = folders.id_of(byte_level._raw, "ä")  # the byte-level code's letter for byte 0xE4
    assert (byte_level.token_bytes(half), byte_level.token_text(half)) == (b"\xe4", "\ufffd")
    assert byte_level.token_bytes(byte_level.vocab_size + 9) == b""
    byte = folders.id_of(sentencepiece._raw, "<0xE4>")
    assert (sentencepiece.token_bytes(byte), sentencepiece.token_text(byte)) == (b"\xe4", "\ufffd")
    ids = sentencepiece.encode("The", add_special_tokens=False)
    assert "".join(map(sentencepiece.token_text, ids)) == " The"


def test_tokens_without_a_table(windowed: Tokenizer) -> None:
    for token_id in range(windowed.vocab_size):
        assert windowed.token_bytes(token_id) == windowed.token_text(token_id).encode()


@pytest.mark.parametrize("added", [[], ["<|a|>"], ["x", "<|a|>"], ["x", "y"]])
@pytest.mark.parametrize("ids", [[0, 1, 2], [0, 2, 3], [1, 2, 3], [0, 1, 9], [4, 8, 9], [0, 1, 3]])
def test_every_id_has_its_token_and_holes_have_none(
    ids: list[int], added: list[str], tmp_path: Path
) -> None:
    raw = RawTokenizer(models.BPE(vocab=dict(zip("xyz", ids, strict=True)), merges=[]))
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(token, special=True) for token in added])
    tokenizer = Tokenizer.from_folder(folders.write_folder(tmp_path, raw))
    expected = {i: token.encode() for token, i in raw.get_vocab(with_added_tokens=True).items()}
    hiding = raw.get_added_tokens_decoder().items()  # an added token may have the id of another
    expected |= {i: token.content.encode() for i, token in hiding}
    assert tokenizer.vocab_size == max(expected) + 1
    for token_id in range(16):
        assert tokenizer.token_bytes(token_id) == expected.get(token_id, b"")


def test_padding_and_truncation_of_the_file_are_switched_off(tmp_path: Path) -> None:
    raw = folders.byte_level()
    raw.enable_truncation(4)
    raw.enable_padding(length=9)
    tokenizer = Tokenizer.from_folder(folders.write_folder(tmp_path, raw))
    assert len(tokenizer.encode("The quick brown fox jumps over the lazy dog")) > 9
    assert len(tokenizer.encode("a")) == 2


def test_a_large_table_is_built_fast(byte_level: Tokenizer) -> None:
    tokens: list[str | None] = [f"Ġtoken{i}é" for i in range(128_000)]
    started = time.process_time()
    assert build_token_pieces(byte_level._raw, tokens, frozenset()) is not None
    assert time.process_time() - started < 1  # 0.1 s on an idle machine


# --- loading -----------------------------------------------------------------------------------


def test_a_folder_without_a_tokenizer_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(folders.MODEL_CONFIG))
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json is missing"):
        Tokenizer.from_folder(tmp_path)


def test_a_broken_tokenizer_names_the_file(model_folder: Path, tmp_path: Path) -> None:
    folders.write_folder(tmp_path, folders.byte_level())
    (tmp_path / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_of_two_files_the_broken_one_is_named(tmp_path: Path) -> None:
    folders.write_folder(tmp_path, folders.byte_level())
    (tmp_path / "tokenizer_config.json").write_text("zz")
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json"):
        Tokenizer.from_folder(tmp_path)


def test_chat_template_as_file_and_as_text(model_folder: Path, tmp_path: Path) -> None:
    text = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    file = tmp_path / "template.jinja"
    file.write_text(text)
    for template in (text, str(file)):
        tokenizer = Tokenizer.from_folder(model_folder, template)
        assert tokenizer.render_chat([USER]) == "<Hello>"


@pytest.mark.parametrize("template", ["{{ messages", "{% broken"])
def test_chat_template_with_a_syntax_error(
    model_folder: Path, tmp_path: Path, template: str
) -> None:
    """One that the operator gave fails the start; the folder's own fails chats, and only them."""
    with pytest.raises(ModelLoadError, match="chat template: "):
        Tokenizer.from_folder(model_folder, template)
    folder = folders.write_folder(tmp_path, folders.byte_level(), chat_template=template)
    assert refused(Tokenizer.from_folder(folder), [USER]).param == "messages"
    # What a template refuses about messages is no reason not to start.
    picky = "{{ raise_exception('system first') }}"
    assert Tokenizer.from_folder(model_folder, picky).vocab_size > 0


def test_chat_template_that_is_neither(model_folder: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no_such_file\.jinja"):
        Tokenizer.from_folder(model_folder, "no_such_file.jinja")


# --- chat --------------------------------------------------------------------------------------


def test_render(byte_level: Tokenizer) -> None:
    rendered = byte_level.render_chat([USER])
    assert rendered == "<|bos|><|user|>Hello<|end|><|assistant|>"
    assert byte_level.render_chat([USER], add_generation_prompt=False) == rendered[:-13]


def test_special_tokens_come_once(byte_level: Tokenizer) -> None:
    ids = byte_level.encode(byte_level.render_chat([USER]), add_special_tokens=False)
    assert [i for i in ids if i == byte_level.bos_token_id] == ids[:1]


def test_continue_final_message(byte_level: Tokenizer) -> None:
    messages = [USER, {"role": "assistant", "content": "It is"}]
    rendered = byte_level.render_chat(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    assert rendered == "<|bos|><|user|>Hello<|end|><|assistant|>It is"
    error = refused(byte_level, messages, continue_final_message=True)
    assert error.param == "continue_final_message"


def test_template_kwargs_and_tools(byte_level: Tokenizer) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    rendered = byte_level.render_chat([USER], tools, template_kwargs={"style": "terse"})
    assert "(tool add)(style terse)" in rendered
    for name in ("chat_template", "tokenize", "messages", "tools", "conversation"):
        error = refused(byte_level, [USER], template_kwargs={name: "x"})
        assert error.param == "chat_template_kwargs"


def test_tool_call_arguments_are_parsed(byte_level: Tokenizer) -> None:
    for arguments in ('{"a": 1, "b": [2]}', {"a": 1, "b": [2]}):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        before = copy.deepcopy(message)
        rendered = byte_level.render_chat([USER, message])
        assert "<|assistant|>[f a=1 b=[2]]<|end|>" in rendered
        assert message == before, "the client's messages stay as they are"


def test_tool_calls_without_arguments(byte_level: Tokenizer) -> None:
    cases: list[Any] = ["", None, {}]
    for arguments in cases:
        message = {
            "role": "assistant",
            "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
        }
        assert "[f]" in byte_level.render_chat([USER, message])


def test_content_parts_become_one_string(byte_level: Tokenizer) -> None:
    parts = [
        {"type": "text", "text": "one"},
        {"type": "input_text", "text": "two"},
        {"type": "refusal", "refusal": "no"},
    ]
    rendered = byte_level.render_chat([{"role": "user", "content": parts}])
    assert "<|user|>one\ntwo\nno<|end|>" in rendered


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "at least one message"),
        ("hi", "list"),
        (["hi"], r"messages\[0\] must be an object"),
        ([USER, {"content": "x"}], r"messages\[1\] role"),
        ([{"role": 5, "content": "x"}], "role"),
        ([{"role": "user", "content": 5}], "content"),
        ([{"role": "user", "content": [7]}], "content parts"),
        ([{"role": "user", "content": [{"type": "text"}]}], "not a string"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "takes text only"),
        ([{"role": "user", "content": [{"type": ["text"]}]}], "not a string"),
        ([{"role": "assistant", "tool_calls": {}}, USER], None),
        ([{"role": "assistant", "tool_calls": "x"}], "tool_calls must be a list"),
        ([{"role": "assistant", "tool_calls": ["x"]}], "function"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "name"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "no JSON",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "1"}}]}],
            "no JSON object",
        ),
        ([{"role": "bad", "content": "x"}], "no bad roles"),
    ],
)
def test_bad_messages(byte_level: Tokenizer, messages: Any, words: str | None) -> None:
    if words is None:
        byte_level.render_chat(messages)
        return
    error = refused(byte_level, messages)
    assert error.param == "messages"
    assert re.search(words, str(error))


def test_limits_of_messages_and_tools(byte_level: Tokenizer) -> None:
    """At the limit, and one above."""
    assert byte_level.render_chat([USER] * MAX_MESSAGES)
    assert refused(byte_level, [USER] * (MAX_MESSAGES + 1)).param == "messages"
    tool = {"type": "function", "function": {"name": "f"}}
    assert byte_level.render_chat([USER], tools=[tool] * MAX_TOOLS)
    assert refused(byte_level, [USER], tools=[tool] * (MAX_TOOLS + 1)).param == "tools"
    documents = {"documents": [{"text": "x"}] * (MAX_DOCUMENTS + 1)}
    assert refused(byte_level, [USER], template_kwargs=documents).param == "documents"
    half = {"role": "user", "content": [{"type": "text", "text": "x"}] * (MAX_PARTS // 2)}
    assert byte_level.render_chat([half, half])
    assert refused(byte_level, [half, half, {**half, "content": ["x"]}]).param == "messages"
    call = {"type": "function", "id": "a", "function": {"name": "f", "arguments": "{}"}}
    calls = {"role": "assistant", "tool_calls": [call] * (MAX_TOOL_CALLS + 1)}
    assert refused(byte_level, [USER, calls]).param == "messages"


@pytest.mark.slow
def test_random_junk_is_refused_or_rendered(
    byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but `InvalidRequestError` comes out."""
    # A server that another test ran here has installed the signal, and its deadline may be short.
    monkeypatch.setattr(render_limit._Signal, "is_installed", False)
    rng = random.Random(9)
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    part = {"type": "text", "text": "x"}
    call = {"function": {"name": "f", "arguments": "{}"}}
    values: list[Any] = [None, 0, True, 1.5, "", "text", [], {}, [1], ["a"], part, [part], [call]]
    values += [deep, "{", "[" * 9999, 10**5000, [{"type": deep}], [{"type": "t" * 10_000}]]
    keys = ["role", "content", "tool_calls", "name", "tool_call_id", "function", "reasoning"]
    num_rendered = 0
    for _ in range(2000):
        message = {key: rng.choice(values) for key in rng.sample(keys, rng.randint(0, 4))}
        if rng.random() < 0.8:
            message["role"] = rng.choice(["user", "assistant", "tool", "system"])
        try:
            assert isinstance(byte_level.render_chat([USER, message]), str)
            num_rendered += 1
        except InvalidRequestError as error:
            assert error.param == "messages"
            assert len(str(error)) < 1000
    assert num_rendered > 100


def test_no_chat_template(tmp_path: Path) -> None:
    folder = folders.write_folder(tmp_path, folders.byte_level(), chat_template=None)
    error = refused(Tokenizer.from_folder(folder), [USER])
    assert error.param == "messages"
    assert "no chat template" in str(error)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ 1 / 0 }}",
        "{{ undefined_function() }}",
        "{% for x in range(10000000) %}{% endfor %}",
    ],
)
def test_templates_are_sandboxed_and_fail_alone(model_folder: Path, template: str) -> None:
    tokenizer = Tokenizer.from_folder(model_folder, template)
    assert refused(tokenizer, [USER]).param == "messages"


def test_tokens_as_the_vocabulary_spells_them() -> None:
    tokenizer = Tokenizer.from_folder(resolve_model_path("tiny"))
    ids = tokenizer.encode("it is", add_special_tokens=False)
    assert "".join(map(tokenizer.token, ids)) == "it\u0120is"
    assert tokenizer.token(10**6) == ""
