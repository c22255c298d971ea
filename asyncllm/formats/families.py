"""The formats of model families, with vLLM's names.

They are taken from the models' chat templates and cards; common syntaxes are in `call_syntaxes.py`.
vLLM has separate parsers for reasoning and tool calls, which users may combine. So there are two
tables here, and `detection.py` joins their entries. Missing are formats that cannot be read in one
pass over flat arguments: kimi_k3 and minimax_m3 (arguments as nested tags), inkling, and
minimax_m2_append_think (reasoning left in the content).
"""

from __future__ import annotations

from typing import Any

from asyncllm.formats.answer_format import (
    AnswerFormat,
    CallSyntax,
    ChannelSyntax,
    JsonCall,
    LiteralArguments,
    NamedJson,
    ReasoningMarks,
    TaggedArguments,
)
from asyncllm.formats.call_syntaxes import (
    between,
    deepseek,
    function_tags,
    gemma,
    invoke_tags,
    json_list,
    python_list,
)

_DSML = "｜DSML｜"


def _calls(*syntaxes: CallSyntax, **more: Any) -> AnswerFormat:
    """A format of calls alone. more: other fields of `AnswerFormat`."""
    return AnswerFormat(calls=syntaxes, **more)


def _dsml_calls(name: str) -> AnswerFormat:
    begin, end = (f"<{_DSML}{name}>\n",), (f"\n</{_DSML}{name}>",)
    return _calls(invoke_tags(begin, end, prefix=_DSML, tells_strings=True))


_HERMES = _calls(between("<tool_call>\n", "\n</tool_call>"))
_QWEN3_CODER = _calls(
    function_tags(("<tool_call>\n",), ("\n</tool_call>",)),
    function_tags((), ()),  # models sometimes omit the outer tag
)
_GLM45 = _calls(
    CallSyntax(
        TaggedArguments(
            ("\n",),
            "<arg_key>",
            ("</arg_key>\n", "<arg_value>"),
            "</arg_value>\n",
            ("</tool_call>",),
        ),
        call_begin=("<tool_call>",),
        separator="\n",
    )
)
_LLAMA_JSON = _calls(
    CallSyntax(
        JsonCall(argument_keys=("parameters", "arguments"), bare=True),
        call_begin=("{",),
        separator="; ",
    ),
    noise=("<|python_tag|>", "<|python_start|>", "<|python_end|>"),
)
HARMONY = ChannelSyntax(
    begins=("<|start|>", "<|channel|>"),
    message="<|message|>",
    ends=("<|end|>", "<|return|>", "<|call|>"),
    reasoning="analysis",
    recipient="to=functions.",
    final="final",
)
_HARMONY = AnswerFormat(
    ReasoningMarks("<|channel|>analysis<|message|>", "<|end|>"), channels=HARMONY
)
_COHERE = AnswerFormat(
    ReasoningMarks("<|START_THINKING|>", "<|END_THINKING|>"),
    (
        json_list(
            ("<|START_ACTION|>",),
            ("<|END_ACTION|>",),
            JsonCall(("tool_name",), ("parameters",), id_key="tool_call_id"),
        ),
    ),
    noise=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
)

# vLLM's --tool-call-parser -> the format of calls
TOOL_PARSERS: dict[str, AnswerFormat] = {
    "apertus": _calls(
        json_list(("<|tools_prefix|>",), ("<|tools_suffix|>",), JsonCall(name_is_key=True))
    ),
    "cohere_command3": _COHERE,
    "cohere_command4": _COHERE,
    "deepseek_v3": _calls(
        deepseek(("function", "<｜tool▁sep｜>"), ("\n```json\n",), ("\n```",), "\n")
    ),
    "deepseek_v31": _calls(deepseek((), ("<｜tool▁sep｜>",))),
    "deepseek_v32": _dsml_calls("function_calls"),
    "deepseek_v4": _dsml_calls("tool_calls"),
    "ernie45": _HERMES,
    "functiongemma": _calls(gemma("<start_function_call>", "<end_function_call>", "<escape>")),
    "gemma4": _calls(gemma("<|tool_call>", "<tool_call|>", '<|"|>')),
    "gigachat3": _calls(
        CallSyntax(JsonCall(), call_begin=("<|function_call|>",)),
        CallSyntax(JsonCall(), call_begin=("function call<|role_sep|>\n",)),
        noise=("<|message_sep|>",),
    ),
    "glm45": _GLM45,
    "glm47": _GLM45,
    "granite": _calls(json_list(("<|tool_call|>",)), json_list(("<tool_call>",))),
    "granite-20b-fc": _calls(CallSyntax(JsonCall(), call_begin=("<function_call> ",))),
    "granite4": _HERMES,
    "hermes": _HERMES,
    "hunyuan_a13b": _calls(json_list(("<tool_calls>",), ("</tool_calls>",))),
    "hy_v3": _calls(
        CallSyntax(
            TaggedArguments(
                ("<tool_sep>\n",),
                "<arg_key>",
                ("</arg_key>\n", "<arg_value>"),
                "</arg_value>\n",
                ("</tool_call>",),
            ),
            ("<tool_calls>\n",),
            ("<tool_call>",),
            separator="\n",
            end=("\n</tool_calls>",),
        )
    ),
    "internlm": _calls(
        CallSyntax(
            JsonCall(argument_keys=("parameters", "arguments")),
            call_begin=("<|action_start|>", "<|plugin|>\n"),
            call_end=("<|action_end|>",),
        )
    ),
    "jamba": _calls(json_list(("<tool_calls>",), ("</tool_calls>",))),
    "kimi_k2": _calls(
        CallSyntax(
            NamedJson(("<|tool_call_argument_begin|>",), prefix="functions.", numbered=True),
            ("<|tool_calls_section_begin|>",),
            ("<|tool_call_begin|>",),
            ("<|tool_call_end|>",),
            end=("<|tool_calls_section_end|>",),
        ),
        calls_end_reasoning=True,
    ),
    "lfm2": _calls(python_list(("<|tool_call_start|>",), ("<|tool_call_end|>",))),
    "llama3_json": _LLAMA_JSON,
    "llama4_json": _LLAMA_JSON,
    "llama4_pythonic": _calls(
        python_list(), python_list(("<|python_start|>",), ("<|python_end|>",))
    ),
    "longcat": _calls(between("<longcat_tool_call>", "</longcat_tool_call>")),
    "mimo": _QWEN3_CODER,
    "minicpm5": _calls(
        CallSyntax(
            TaggedArguments(('">',), '<param name="', ('">',), "</param>", ("</function>",)),
            call_begin=('<function name="',),
        )
    ),
    "minimax_m2": _calls(invoke_tags(("<minimax:tool_call>\n",), ("\n</minimax:tool_call>",))),
    "mistral": _calls(
        json_list(("[TOOL_CALLS]",)),
        CallSyntax(NamedJson(("[ARGS]",), id_begin="[CALL_ID]"), call_begin=("[TOOL_CALLS]",)),
        short_ids=True,
    ),
    "olmo3": _calls(
        CallSyntax(LiteralArguments(), begin=("<function_calls>",), end=("</function_calls>",))
    ),
    "openai": _HARMONY,
    "phi4_mini_json": _calls(json_list(("functools",))),
    "poolside_v1": _GLM45,
    "pythonic": _calls(python_list()),
    "qwen3_coder": _QWEN3_CODER,
    "qwen3_xml": _QWEN3_CODER,
    "seed_oss": _calls(function_tags(("<seed:tool_call>\n",), ("\n</seed:tool_call>",))),
    "solar_open2": _calls(
        CallSyntax(
            TaggedArguments(
                ("\n",),
                "<|tool_arg:start|>",
                ("<|tool_arg:value|>",),
                "<|tool_arg:end|>\n",
                ("<|tool_call:end|>",),
            ),
            call_begin=("<|tool_call:start|>",),
        ),
        calls_end_reasoning=True,
    ),
    "step3": AnswerFormat(
        calls=tuple(
            invoke_tags(
                ("<｜tool_calls_begin｜>",),
                ("<｜tool_calls_end｜>",),
                prefix="steptml:",
                call_begin=("<｜tool_call_begin｜>", *kind),
                call_end=("<｜tool_call_end｜>",),
                separator="<｜tool_sep｜>",
            )
            for kind in (("function", "<｜tool_sep｜>"), ())
        )
    ),
    "step3p5": _QWEN3_CODER,
    "xlam": _calls(
        CallSyntax(JsonCall(bare=True), ("[",), ("{",), separator=", ", end=("]",)),
        json_list(("[TOOL_CALLS]",)),
        json_list(("<tool_call>",), ("</tool_call>",)),
        json_list(("```json\n",), ("\n```",)),
    ),
}

_THINK = AnswerFormat(ReasoningMarks("<think>", "</think>"))
_THINK_ASSUMED = AnswerFormat(ReasoningMarks("<think>", "</think>", assumed=True))

# vLLM's --reasoning-parser -> the format of reasoning
REASONING_PARSERS: dict[str, AnswerFormat] = {
    "cohere_command3": _COHERE,
    "cohere_command4": _COHERE,
    "deepseek_r1": _THINK_ASSUMED,
    "deepseek_v3": _THINK,
    "deepseek_v4": _THINK,
    "ernie45": AnswerFormat(_THINK_ASSUMED.reasoning, noise=("<response>", "</response>")),
    "gemma4": AnswerFormat(ReasoningMarks("<|channel>thought", "<channel|>")),
    "glm45": _THINK,
    "glm47": _THINK,
    "granite": AnswerFormat(ReasoningMarks("Here is my thought process:", "Here is my response:")),
    "holo2": _THINK,
    "hunyuan_a13b": AnswerFormat(_THINK.reasoning, noise=("<answer>", "</answer>")),
    "hy_v3": _THINK,
    "kimi_k2": _THINK,
    "mimo": _THINK,
    "minimax_m2": _THINK_ASSUMED,
    "mistral": AnswerFormat(ReasoningMarks("[THINK]", "[/THINK]")),
    "nemotron_v3": _THINK,
    "olmo3": _THINK_ASSUMED,
    "openai_gptoss": _HARMONY,
    "poolside_v1": _THINK,
    "qwen3": _THINK,
    "seed_oss": AnswerFormat(ReasoningMarks("<seed:think>", "</seed:think>")),
    "solar_open2": AnswerFormat(ReasoningMarks("<|think:start|>", "<|think:end|>")),
    "step3": _THINK_ASSUMED,
    "step3p5": _THINK_ASSUMED,
}
