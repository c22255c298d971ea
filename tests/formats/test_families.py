"""Each family's answers, in the shapes that their chat templates and cards show."""

from __future__ import annotations

from typing import Any

import pytest

from asyncllm.formats import ModelFormat, resolve
from asyncllm.formats.families import REASONING_PARSERS, TOOL_PARSERS
from tests.formats.answers import MANY, TOOLS, read, read_in_all_cuts

OSLO = ("get_weather", {"city": "Oslo"})
ROME = ("get_weather", {"city": "Rome"})
NOW: tuple[str, dict[str, Any]] = ("clock", {})
TYPES = (
    MANY.name,
    {
        "text": "5",
        "count": 5,
        "ratio": 2.5,
        "on": True,
        "nothing": None,
        "items": ["a", {"b": 1}],
        "more": {"c": [1, 2]},
    },
)


def model_format(calls: str = "none", reasoning: str = "none") -> ModelFormat:
    found = resolve(None, tool_parser=calls, reasoning_parser=reasoning)
    assert found is not None
    return found


# parser's name -> (answer, its calls)
CALLS: dict[str, list[tuple[str, list[tuple[str, dict[str, Any]]]]]] = {
    "apertus": [
        ('<|tools_prefix|>[{"get_weather": {"city": "Oslo"}}]<|tools_suffix|>', [OSLO]),
        (
            '<|tools_prefix|>[{"clock": {}}, {"get_weather": {"city": "Rome"}}]<|tools_suffix|>',
            [NOW, ROME],
        ),
    ],
    "cohere_command3": [
        (
            '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", '
            '"parameters": {"city": "Oslo"}},\n    {"tool_call_id": "1", "tool_name": "clock", '
            '"parameters": {}}\n]<|END_ACTION|>',
            [OSLO, NOW],
        )
    ],
    "deepseek_v3": [
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
            '{"city": "Oslo"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>'
            "clock\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            [OSLO, NOW],
        )
    ],
    "deepseek_v31": [
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
            '{"city": "Oslo"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>clock<｜tool▁sep｜>{}'
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            [OSLO, NOW],
        ),
        ('<｜tool▁call▁begin｜>clock<｜tool▁sep｜>{}<｜tool▁call▁end｜>', [NOW]),
    ],
    "deepseek_v32": [
        (
            '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
            '<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n'
            '</｜DSML｜invoke>\n<｜DSML｜invoke name="clock">\n</｜DSML｜invoke>\n'
            "</｜DSML｜function_calls>",
            [OSLO, NOW],
        ),
        (
            '<｜DSML｜function_calls><｜DSML｜invoke name="many-types.v2">'
            '<｜DSML｜parameter name="text" string="true">5</｜DSML｜parameter>'
            '<｜DSML｜parameter name="count" string="false">5</｜DSML｜parameter>'
            '<｜DSML｜parameter name="ratio" string="false">2.5</｜DSML｜parameter>'
            '<｜DSML｜parameter name="on" string="false">true</｜DSML｜parameter>'
            '<｜DSML｜parameter name="nothing" string="false">null</｜DSML｜parameter>'
            '<｜DSML｜parameter name="items" string="false">["a", {"b": 1}]</｜DSML｜parameter>'
            '<｜DSML｜parameter name="more" string="false">{"c": [1, 2]}</｜DSML｜parameter>'
            "</｜DSML｜invoke></｜DSML｜function_calls>",
            [TYPES],
        ),
    ],
    "deepseek_v4": [
        (
            '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n'
            '<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n'
            "</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
            [OSLO],
        )
    ],
    "functiongemma": [
        (
            "<start_function_call>call:get_weather{city:<escape>Oslo<escape>}<end_function_call>"
            "<start_function_call>call:clock{}<end_function_call>",
            [OSLO, NOW],
        )
    ],
    "gemma4": [
        ('<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>}<tool_call|>', [OSLO]),
        (
            '<|tool_call>call:many-types.v2{text:<|"|>5<|"|>,count:5,ratio:2.5,on:true,'
            'nothing:null,items:[<|"|>a<|"|>,{b:1}],more:{c:[1,2]}}<tool_call|>',
            [TYPES],
        ),
    ],
    "gigachat3": [
        ('<|function_call|>{"name": "get_weather", "arguments": {"city": "Oslo"}}', [OSLO]),
        (
            '<|message_sep|>\n\nfunction call<|role_sep|>\n'
            '{"name": "get_weather", "arguments": {"city": "Oslo"}}',
            [OSLO],
        ),
    ],
    "glm45": [
        (
            "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
            "</tool_call>\n<tool_call>clock\n</tool_call>",
            [OSLO, NOW],
        ),
        (
            "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>"
            "<tool_call>clock</tool_call>",
            [OSLO, NOW],
        ),
        (
            "<tool_call>many-types.v2\n<arg_key>text</arg_key>\n<arg_value>5</arg_value>\n"
            "<arg_key>count</arg_key>\n<arg_value>5</arg_value>\n"
            "<arg_key>ratio</arg_key>\n<arg_value>2.5</arg_value>\n"
            "<arg_key>on</arg_key>\n<arg_value>True</arg_value>\n"
            "<arg_key>nothing</arg_key>\n<arg_value>null</arg_value>\n"
            '<arg_key>items</arg_key>\n<arg_value>["a", {"b": 1}]</arg_value>\n'
            '<arg_key>more</arg_key>\n<arg_value>{"c": [1, 2]}</arg_value>\n</tool_call>',
            [TYPES],
        ),
    ],
    "granite": [
        (
            '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Oslo"}}, '
            '{"name": "clock", "arguments": {}}]',
            [OSLO, NOW],
        ),
        ('<tool_call>[{"name": "clock", "arguments": {}}]', [NOW]),
    ],
    "granite-20b-fc": [
        (
            '<function_call> {"name": "get_weather", "arguments": {"city": "Oslo"}} '
            '<function_call> {"name": "clock", "arguments": {}}',
            [OSLO, NOW],
        )
    ],
    "hermes": [
        (
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
            [OSLO],
        )
    ],
    "hunyuan_a13b": [
        (
            '<tool_calls>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]</tool_calls>',
            [OSLO],
        )
    ],
    "hy_v3": [
        (
            "<tool_calls>\n<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n"
            "<arg_value>Oslo</arg_value>\n</tool_call>\n<tool_call>clock<tool_sep>\n</tool_call>\n"
            "</tool_calls>",
            [OSLO, NOW],
        )
    ],
    "internlm": [
        (
            '<|action_start|><|plugin|>\n{"name": "get_weather", "parameters": {"city": "Oslo"}}'
            "<|action_end|>",
            [OSLO],
        )
    ],
    "jamba": [
        (
            '<tool_calls>[\n    {"name": "get_weather", "arguments": {"city": "Oslo"}},\n'
            '    {"name": "clock", "arguments": {}}\n]</tool_calls>',
            [OSLO, NOW],
        )
    ],
    "kimi_k2": [
        (
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
            '<|tool_call_argument_begin|>{"city": "Oslo"}<|tool_call_end|><|tool_call_begin|>'
            "functions.clock:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
            "<|tool_calls_section_end|>",
            [OSLO, NOW],
        ),
        (
            "<|tool_calls_section_begin|> <|tool_call_begin|>\nfunctions.many-types.v2:0 "
            '<|tool_call_argument_begin|> {"text": "5", "count": 5, "ratio": 2.5, "on": true, '
            '"nothing": null, "items": ["a", {"b": 1}], "more": {"c": [1, 2]}} '
            "<|tool_call_end|> <|tool_calls_section_end|>",
            [TYPES],
        ),
    ],
    "lfm2": [
        ("<|tool_call_start|>[get_weather(city=\"Oslo\"), clock()]<|tool_call_end|>", [OSLO, NOW])
    ],
    "llama3_json": [
        ('{"name": "get_weather", "parameters": {"city": "Oslo"}}', [OSLO]),
        ('<|python_tag|>{"name": "get_weather", "parameters": {"city": "Oslo"}}', [OSLO]),
        ('{"type": "function", "name": "get_weather", "arguments": {"city": "Oslo"}}', [OSLO]),
        (
            '{"name": "get_weather", "parameters": {"city": "Oslo"}}; '
            '{"name": "clock", "parameters": {}} ;{"name": "get_weather", "parameters": '
            '{"city": "Rome"}}',
            [OSLO, NOW, ROME],
        ),
    ],
    "llama4_pythonic": [
        ("[get_weather(city='Oslo'), clock()]", [OSLO, NOW]),
        ("<|python_start|>[get_weather(city='Oslo'),clock()]<|python_end|>", [OSLO, NOW]),
    ],
    "longcat": [
        (
            '<longcat_tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}'
            "</longcat_tool_call>",
            [OSLO],
        )
    ],
    "minicpm5": [
        (
            '<function name="get_weather"><param name="city">Oslo</param></function>'
            '<function name="clock"></function>',
            [OSLO, NOW],
        )
    ],
    "minimax_m2": [
        (
            '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Oslo'
            '</parameter>\n</invoke>\n<invoke name="clock">\n</invoke>\n</minimax:tool_call>',
            [OSLO, NOW],
        )
    ],
    "mistral": [
        ('[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Oslo"}}]', [OSLO]),
        (
            '[TOOL_CALLS] [{"arguments":{"city": "Oslo"}, "name": "get_weather"}, '
            '{"name": "clock", "arguments": {}}]',
            [OSLO, NOW],
        ),
        ('[TOOL_CALLS]get_weather{"city": "Oslo"}[TOOL_CALLS]clock{}', [OSLO, NOW]),
        ('[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}', [OSLO]),
        ('[TOOL_CALLS]get_weather[CALL_ID]abc123XYZ[ARGS]{"city": "Oslo"}', [OSLO]),
    ],
    "olmo3": [
        (
            '<function_calls>\nget_weather(city="Oslo")\nclock()\n</function_calls>',
            [OSLO, NOW],
        )
    ],
    "openai": [
        (
            '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>'
            '{"city": "Oslo"}<|call|>',
            [OSLO],
        ),
        (' to=functions.clock<|channel|>commentary json<|message|><|call|>', [NOW]),
        (
            "<|start|>assistant<|channel|>commentary to=functions.clock<|message|>{}<|end|>"
            "<|start|>assistant<|channel|>commentary to=functions.get_weather<|message|>"
            '{"city": "Rome"}',
            [NOW, ROME],
        ),
    ],
    "phi4_mini_json": [
        ('functools[{"name": "get_weather", "arguments": {"city": "Oslo"}}]', [OSLO])
    ],
    "pythonic": [
        ("[get_weather(city='Oslo')]", [OSLO]),
        ("[\n  clock(),\n  get_weather(city=\"Rome\",),\n]", [NOW, ROME]),
        (
            "[many-types.v2(text='5', count=5, ratio=2.5, on=True, nothing=None, "
            "items=['a', {'b': 1}], more={'c': (1, 2)})]",
            [TYPES],
        ),
    ],
    "qwen3_coder": [
        (
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n"
            "</function>\n</tool_call>\n<tool_call>\n<function=clock>\n</function>\n</tool_call>",
            [OSLO, NOW],
        ),
        ("<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</function>", [OSLO]),
        (
            "<tool_call>\n<function=many-types.v2>\n<parameter=text>\n5\n</parameter>\n"
            "<parameter=count>\n5\n</parameter>\n<parameter=ratio>\n2.5\n</parameter>\n"
            "<parameter=on>\ntrue\n</parameter>\n<parameter=nothing>\nnull\n</parameter>\n"
            '<parameter=items>\n["a", {"b": 1}]\n</parameter>\n'
            '<parameter=more>\n{"c": [1, 2]}\n</parameter>\n</function>\n</tool_call>',
            [TYPES],
        ),
    ],
    "seed_oss": [
        (
            "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Oslo</parameter>\n"
            "</function>\n</seed:tool_call>",
            [OSLO],
        )
    ],
    "solar_open2": [
        (
            "<|tool_call:start|>get_weather\n<|tool_arg:start|>city<|tool_arg:value|>Oslo"
            "<|tool_arg:end|>\n<|tool_call:end|><|tool_call:start|>clock\n<|tool_call:end|>",
            [OSLO, NOW],
        )
    ],
    "step3": [
        (
            '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>'
            '<steptml:invoke name="get_weather"><steptml:parameter name="city">Oslo'
            "</steptml:parameter></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>",
            [OSLO],
        ),
        (
            '<｜tool_calls_begin｜><｜tool_call_begin｜><steptml:invoke name="clock">'
            "</steptml:invoke><｜tool_call_end｜><｜tool_sep｜><｜tool_call_begin｜>"
            '<steptml:invoke name="get_weather"><steptml:parameter name="city">Rome'
            "</steptml:parameter></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>",
            [NOW, ROME],
        ),
    ],
    "xlam": [
        (
            '[{"name": "get_weather", "arguments": {"city": "Oslo"}}, '
            '{"name": "clock", "arguments": {}}]',
            [OSLO, NOW],
        ),
        ('```json\n[{"name": "clock", "arguments": {}}]\n```', [NOW]),
        ('<tool_call>[{"name": "clock", "arguments": {}}]</tool_call>', [NOW]),
        ('[TOOL_CALLS][{"name": "clock", "arguments": {}}]', [NOW]),
    ],
}  # fmt: skip
SAME_AS = {
    "cohere_command4": "cohere_command3",
    "ernie45": "hermes",
    "glm47": "glm45",
    "granite4": "hermes",
    "llama4_json": "llama3_json",
    "mimo": "qwen3_coder",
    "poolside_v1": "glm45",
    "qwen3_xml": "qwen3_coder",
    "step3p5": "qwen3_coder",
}
SAMPLES = [(name, *sample) for name, samples in CALLS.items() for sample in samples]


def test_every_parser_has_a_sample() -> None:
    assert CALLS.keys() | SAME_AS.keys() == TOOL_PARSERS.keys()
    for name, other in SAME_AS.items():
        assert TOOL_PARSERS[name] == TOOL_PARSERS[other]


@pytest.mark.parametrize(("name", "text", "calls"), SAMPLES)
def test_calls(name: str, text: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    answer = read_in_all_cuts(model_format(name), text)
    assert answer.parsed_calls == calls
    assert (answer.content, answer.reasoning) == ("", "")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "text", "calls"), SAMPLES)
def test_text_around_calls(name: str, text: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    if name == "openai":
        text = f"<|channel|>commentary<|message|>One moment.<|end|><|start|>assistant{text}"
        after = ""
    else:
        text = f"{text}\n\nSee above."
        after = "See above."
    answer = read_in_all_cuts(model_format(name), text)
    assert answer.parsed_calls == calls
    assert answer.content == (after or "One moment.")


@pytest.mark.parametrize(("name", "text", "calls"), SAMPLES)
def test_truncated_anywhere(name: str, text: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    """The part of a call that was said is the beginning of what would have been said."""
    found = model_format(name)
    whole = read(lambda: found.parser(TOOLS), [text]).calls
    for end in range(len(text)):
        cut = read(lambda: found.parser(TOOLS), [text[:end]]).calls
        for (cut_name, cut_arguments), (said_name, arguments) in zip(cut, whole, strict=False):
            assert cut_name == said_name
            assert arguments.startswith(cut_arguments)


REASONING = {
    "cohere_command3": (
        "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>"
    ),
    "gemma4": "<|channel>thought\nHm.\n<channel|>Yes.",
    "granite": "Here is my thought process: Hm. Here is my response: Yes.",
    "hunyuan_a13b": "<think>\nHm.\n</think>\n<answer>\nYes.\n</answer>",
    "ernie45": "Hm.\n</think>\n\n<response>\nYes.\n</response>",
    "mistral": "[THINK]Hm.[/THINK]Yes.",
    "openai_gptoss": (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>"
        "Yes.<|return|>"
    ),
    "seed_oss": "<seed:think>Hm.</seed:think>Yes.",
    "solar_open2": "<|think:start|>Hm.<|think:end|>Yes.",
}  # fmt: skip
THINK = [name for name in REASONING_PARSERS if name not in (*REASONING, "cohere_command4")]


@pytest.mark.parametrize("name", REASONING_PARSERS)
def test_reasoning(name: str) -> None:
    text = REASONING.get(name, "<think>\nHm.\n</think>\n\nYes.")
    if name == "cohere_command4":
        text = REASONING["cohere_command3"].replace("RESPONSE", "TEXT")
    answer = read_in_all_cuts(model_format(reasoning=name), text)
    assert answer.told() == ("Yes.", "Hm.", [])


def test_families_that_begin_inside_their_reasoning() -> None:
    for name, found in REASONING_PARSERS.items():
        if found.reasoning and found.reasoning.assumed:
            opened = model_format(reasoning=name)
            assert read_in_all_cuts(opened, "Hm.</think>Yes.").told() == ("Yes.", "Hm.", [])
            closed = read_in_all_cuts(opened, "Yes.", prompt="<think>\n\n</think>\n\n")
            assert closed.told() == ("Yes.", "", [])


def test_ids_of_their_own() -> None:
    kimi = read_in_all_cuts(model_format("kimi_k2"), CALLS["kimi_k2"][0][0])
    assert kimi.ids == ["functions.get_weather:0", "functions.clock:1"]
    mistral = read_in_all_cuts(model_format("mistral"), CALLS["mistral"][0][0])
    assert len(mistral.ids[0]) == 9 and mistral.ids[0].isalnum()
    given = read_in_all_cuts(model_format("mistral"), CALLS["mistral"][4][0])
    assert given.ids == ["abc123XYZ"]


def test_a_call_ends_kimi_s_reasoning() -> None:
    text = "<think>Hm. " + CALLS["kimi_k2"][0][0]
    answer = read_in_all_cuts(model_format("kimi_k2", "kimi_k2"), text)
    assert answer.reasoning == "Hm." and answer.parsed_calls == [OSLO, NOW]


def test_harmony_in_full() -> None:
    text = (
        "<|channel|>analysis<|message|>First.<|end|><|start|>assistant<|channel|>analysis"
        "<|message|>Then.<|end|><|start|>assistant<|channel|>commentary<|message|>Wait.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.nothing_known <|constrain|>json"
        "<|message|>{}<|call|><|start|>assistant<|channel|>final<|message|>Done.<|return|>"
    )
    answer = read_in_all_cuts(model_format("openai", "openai_gptoss"), text)
    assert answer.told() == ("Wait.\nDone.", "First.\nThen.", [["nothing_known", "{}"]])


HALF = {
    "glm45": 'many-types.v2\n<arg_key>items</arg_key>\n<arg_value>["\\ud83d"]</arg_value>\n',
    "qwen3_coder": '<function=many-types.v2>\n<parameter=items>\n["\\ud83d"]\n</parameter>\n'
    "</function>\n",
    "hermes": '{"name": "many-types.v2", "arguments": "{\\"items\\": [\\"\\ud83d\\"]}"}',
}


@pytest.mark.parametrize("name", HALF)
def test_half_a_surrogate_pair_stays_escaped(name: str) -> None:
    """It is JSON, but no UTF-8: sent as it is, it would end the answer with an error."""
    answer = read_in_all_cuts(model_format(name), f"<tool_call>{HALF[name]}</tool_call>")
    ((_, arguments),) = answer.calls
    assert arguments.encode().replace(b" ", b"") == rb'{"items":["\ud83d"]}'


@pytest.mark.parametrize("text", ["Plain.", "<|channel|>final<|mess", "a <|chan"])
def test_harmony_that_is_none(text: str) -> None:
    assert read_in_all_cuts(model_format("openai"), text).told() == (text, "", [])


LOOKALIKES = {
    "llama3_json": [
        '{"city": "Oslo", "name": "get_weather"}',
        '{"name": "get_weather"}',
        '{"name": "nobody", "parameters": {}}',
        "if (a) { b[0]; }",
        '{"parameters": {}}',
    ],
    "pythonic": ["[1, 2, 3]", "[nobody(a=1)]", "[clock", "see [clock()]", "[]", "[a](b)"],
    "mistral": ["[TOOL_CALLS] not much{}", "[TOOL_CALLS][1]", "[TOO_LONG]"],
    "qwen3_coder": ["<function=no body>\n</function>", "<tool_call>\n<function=get_wea"],
    "glm45": ["<tool_call>nobody", "<tool_call>", "<arg_key>x</arg_key>"],
    "deepseek_v31": ["<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>nobody<｜tool▁sep｜>1"],
    "phi4_mini_json": ["from functools import wraps", "functools[0]"],
    "xlam": [
        "[link](url)", "```json\n[1]\n```", '{"a": 1}', "[{}]",
        '```json\n[{"name": "Ann", "age": 5}]\n```', '[{"name": "nobody", "arguments": {}}]',
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name, texts in LOOKALIKES.items() for text in texts]
)
def test_what_only_looks_like_a_call(name: str, text: str) -> None:
    assert read_in_all_cuts(model_format(name), text).told() == (text, "", [])


UNKNOWN_TOOL = [
    ("hermes", '<tool_call>\n{"name": "nobody", "arguments": {"a": 1}}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"arguments": {"a": 1}, "name": "nobody"}\n</tool_call>'),
    ("mistral", '[TOOL_CALLS] nobody{"a": 1}'),
    ("qwen3_coder", "<function=nobody>\n<parameter=a>\n1\n</parameter>\n</function>"),
    ("glm45", "<tool_call>nobody\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"),
    ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>nobody<｜tool▁sep｜>"
     '{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.nobody:0"
     '<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_calls_section_end|>'),
    ("openai", "<|channel|>commentary to=functions.nobody <|constrain|>json<|message|>"
     '{"a": 1}<|call|>'),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text"), UNKNOWN_TOOL)
def test_a_marked_call_of_an_unknown_tool_is_a_call(name: str, text: str) -> None:
    """As in vLLM: the client says that there is no such tool."""
    found = model_format(name)
    answer = read_in_all_cuts(found, text)
    assert answer.content.strip() == ""
    assert answer.parsed_calls == [("nobody", {"a": 1})]
    assert read(found.parser, [text]).calls == []  # without tools nothing is called


BROKEN = [
    (
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n<oops>\n"
        "</function>\n</tool_call> ok",
        '{"city": "Oslo"}',
        "<oops> ok",
    ),
    (
        "glm45",
        "<tool_call>get_weather\n<arg_key>city</arg_value></tool_call>",
        "{}",
        "<arg_key>city</arg_value>",
    ),
    ("pythonic", "[get_weather(city='Oslo', oops)] ok", '{"city": "Oslo"}', "oops)] ok"),
    ("pythonic", "[get_weather(city=[1, {'a': oops}])]", '{"city": [1, {}]}', "oops}])]"),
    ("pythonic", "[get_weather('Oslo')]", "{}", "'Oslo')]"),
    ("llama3_json", '{"name": "clock", "parameters": {}, oops', "{}", "oops"),
    ("kimi_k2", CALLS["kimi_k2"][0][0].replace('"Oslo"}', "<no>"), '{"city": ', "<no>"),
]


@pytest.mark.parametrize(("name", "text", "arguments", "content"), BROKEN)
def test_arguments_that_break_off(name: str, text: str, arguments: str, content: str) -> None:
    """They are closed where we write the JSON ourselves; what follows is content."""
    answer = read_in_all_cuts(model_format(name), text)
    assert answer.calls[0][1] == arguments
    assert "".join(answer.content.split()) == "".join(content.split())
    if name == "kimi_k2":
        assert answer.calls[1:] == [["clock", "{}"]]
