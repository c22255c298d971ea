"""Which texts each kind of grammar takes, and which it does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from asyncllm.engine.structured.compiler import CompiledGrammar, GrammarCompiler
from asyncllm.engine.structured.forced_text import (
    MAX_FORCED_CHARS,
    lark_forces_little,
    regex_forces_little,
    schema_forces_little,
)
from asyncllm.engine.structured.structural_tag import MAX_STRUCTURAL_TAGS
from asyncllm.engine.text.tokenizer import Tokenizer
from asyncllm.errors import InvalidRequestError
from asyncllm.structured_outputs import ReasoningMarkers
from tests.structured.fits import fits

Compiled = Callable[..., CompiledGrammar]
Fields = dict[str, Any]

INTEGER_TAG = {
    "structures": [{"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"},
                   {"begin": "<f=b>", "schema": {"type": "null"}, "end": "</f>"}],
    "triggers": ["<f="],
}  # fmt: skip


def formatted(node: Fields) -> Fields:
    return {"structural_tag": {"type": "structural_tag", "format": node}}


def tag(begin: str, content: Fields, end: str) -> Fields:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


ANY: Fields = {"type": "any_text"}
BOOL: Fields = {"type": "json_schema", "json_schema": {"type": "boolean"}}
AB = [tag("<a>", BOOL, "</a>"), tag("<b>", ANY, "</b>")]

CASES: list[tuple[Fields, list[str], list[str]]] = [
    ({"regex": "^a|b$"}, ["a", "b"], ["", "ab"]),
    ({"regex": r"\d+/\w"}, ["12/x"], ["12", "/x"]),
    ({"regex": "a\nb"}, ["a\nb"], ["ab"]),
    ({"regex": "(?i)yes"}, ["yes", "YeS"], ["no"]),
    ({"choice": ["a", "ab", "b/c"]}, ["a", "ab", "b/c"], ["", "abb", "b"]),
    ({"choice": ['"q"\\', "é\x00\x7f", "😀 x", "<|im_end|"]},
     ['"q"\\', "é\x00\x7f", "😀 x", "<|im_end|"], ["q", "é", "😀"]),
    ({"grammar": 'start: "a" b+\nb: /[xyz]{2}/ | %json {"type": "boolean"}\n'},
     ["axy", "axytrue"], ["a", "ax"]),
    ({"grammar": 'start: <|im_start|> "x" <[3]>\n'}, ["<|im_start|>x<|pad|>"], ["x"]),
    ({"grammar": 'root ::= "a" [0-9]+ ("x" | "y"){2,3}\n'}, ["a1xy", "a12yyy"], ["axy", "a1x"]),
    ({"grammar": 'root ::= p\np ::= "(" p ")" | "z" # nested\n'}, ["z", "((z))"], ["((z)", "()"]),
    ({"grammar": r'root ::= [\u0041-\u0043]+ "\u00e9\U0001F600" "\\u0041" "\u0022"'},
     ['ABé😀\\u0041"'], ["Dé😀", "AB"]),
    ({"grammar": r'root ::= [^"\\\x7F\x00-\x1F]+ "\n"? [\]/-]'}, ["a]", "a\n/", "é-"], ['"]', "a"]),
    ({"grammar": 'start: "a ::= " NAME\nNAME: /[a-z]+/\n'}, ["a ::= b"], ["a"]),
    ({"json_object": True}, ["{}", '{"a": [1, {"b": null}]}'], ["[]", "1", "{", '{"a"}']),
    # structural tags
    ({"structural_tag": INTEGER_TAG},
     ["", "free text", "x<f=a>12</f> and <f=b>null</f>.", "<f=a>1</f>"],
     ["<f=", "<f=c>1</f>", "<f=a>x</f>", "<f=a>1", "<f=b>1</f>"]),
    ({"structural_tag": json.dumps(INTEGER_TAG)}, ["", "<f=a>1</f>"], ["<f=a>x</f>"]),
    (formatted({"type": "const_string", "value": "é<|pad|>!"}), ["é<|pad|>!"], ["é", "é!"]),
    (formatted(BOOL), ["true"], ["1"]),
    (formatted({"type": "const_string", "value": ""}), [""], ["x"]),
    (formatted(tag("", ANY, "\n<|pad|>")), ["\n<|pad|>", "a\nb\n<|pad|>"], ["a<|pad|>", "a\n"]),
    (formatted(ANY), ["", "anything"], ["x<|pad|>"]),
    (formatted({"type": "regex", "pattern": "[ab]{2}"}), ["ab"], ["a"]),
    (formatted({"type": "grammar", "grammar": 'root ::= "x" | "y"'}), ["y"], ["z"]),
    (formatted({"type": "or", "elements": [BOOL, {"type": "const_string", "value": "no"}]}),
     ["true", "no"], ["yes"]),
    (formatted({"type": "sequence", "elements": [*AB, ANY]}),
     ["<a>true</a><b>x y</b>", "<a>true</a><b></b> rest"], ["<a>true</a>", "<b>x</b>"]),
    (formatted({"type": "tags_with_separator", "separator": ", ", "tags": AB}),
     ["", "<a>true</a>", "<a>true</a>, <b>x</b>"], ["x", "<a>true</a><b>x</b>"]),
    (formatted({"type": "tags_with_separator", "separator": ",", "tags": AB,
                "at_least_one": True, "stop_after_first": True}),
     ["<a>true</a>"], ["", "<a>true</a>,<b>x</b>"]),
    (formatted({"type": "triggered_tags", "triggers": ["<a", "<b"], "tags": AB}),
     ["", "text", "text <a>true</a> text <b>x</b>"], ["<a>1</a>"]),
    (formatted({"type": "triggered_tags", "triggers": ["<a", "<b"], "tags": AB,
                "at_least_one": True}), ["t <a>true</a> t"], ["", "text"]),
    (formatted({"type": "triggered_tags", "triggers": ["<a", "<b"], "tags": AB,
                "at_least_one": True, "stop_after_first": True}),
     ["t <a>true</a>"], ["t", "t <a>true</a> t"]),
    (formatted({"type": "triggered_tags", "triggers": ["<|im_start|>"], "stop_after_first": True,
                "tags": [tag("<|im_start|>f ", BOOL, "<|pad|>")]}),
     ["", "text", "call <|im_start|>f true<|pad|>"], ["<|im_start|>g true<|pad|>"]),
    ({"json": {"type": "boolean"}, "alternative": 'start: "call " /[a-z]+/\n'},
     ["true", "call me"], ["call ", "call true1", "truecall me"]),
    # reasoning first
    ({"choice": ["yes"], "after": ReasoningMarkers("</think>")},
     ["</think>yes", "hm, <think> no\n</think>\n\nyes"],
     ["yes", "hm</think>\n\n\nyes", "hm</think>no", "a</think></think>yes"]),
    ({"choice": ["yes"], "after": ReasoningMarkers("</think>", "<think>")},
     ["yes", "<think>\nhm</think>\nyes"], ["hm</think>yes", "<think>yes", "<think></think>"]),
    ({"choice": ["yes"], "alternative": 'start: "call"\n', "after": ReasoningMarkers("</t>")},
     ["r</t>yes", "</t>\ncall"], ["call", "yes"]),
    ({"regex": "[0-9]+", "after": ReasoningMarkers("<|pad|>", "<|im_start|>")},
     ["1", "<|im_start|>so<|pad|>\n12"], ["so<|pad|>1", "<|im_start|>1"]),
    ({"grammar": 'start: A\nA: "x"\n', "after": ReasoningMarkers("</t>")}, ["r</t>x"], ["x"]),
    # messages with headers
    ({"choice": ["yes"],
      "after": ReasoningMarkers("<|pad|>", "<|im_start|>a", "b", "<|im_start|>c:")},
     ["<|im_start|>c:yes", "<|im_start|>aso<|pad|>b<|im_start|>c:yes"],
     ["yes", "<|im_start|>aso<|pad|>yes", "<|im_start|>aso<|pad|>\nb<|im_start|>c:yes",
      "<|im_start|>aso<|pad|>b<|im_start|>c:no", "so<|pad|>b<|im_start|>c:yes"]),
    ({"choice": ["yes"], "after": ReasoningMarkers("<|pad|>", None, "b", "<|im_start|>c:")},
     ["so<|pad|>b<|im_start|>c:yes"], ["<|im_start|>c:yes"]),
    ({"choice": ["yes"], "alternative": 'start: "call"\n',
      "after": ReasoningMarkers("<|pad|>", "<|im_start|>a", "b", "<|im_start|>c:")},
     ["<|im_start|>c:yes", "call"], ["<|im_start|>c:call", "<|im_start|>aso<|pad|>bcall"]),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "good", "bad"), CASES)
def test_texts(
    fields: Fields, good: list[str], bad: list[str], compiled: Compiled, tokenizer: Tokenizer
) -> None:
    grammar = compiled(**fields)
    assert [text for text in good if not fits(grammar, tokenizer, text)] == []
    assert [text for text in bad if fits(grammar, tokenizer, text)] == []


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"regex": "a(?=b)"}, "look-ahead"),
        ({"regex": r"(a)\1"}, "backreferences"),
        ({"regex": "["}, "unclosed"),
        ({"grammar": 'start: "a" b\n'}, 'unknown name: "b"'),
        ({"grammar": "start: <|nothing|>\n"}, "unknown special token"),
        ({"grammar": 'first: "a"\n'}, "structured_outputs.grammar"),
        ({"grammar": '{"grammars": [{"json_schema": {"x-guidance": {"lenient": true}}}]}'},
         "structured_outputs.grammar"),
        ({"grammar": 'start: %json {"not": {}}\n'}, "not"),
        ({"grammar": 'root ::= "a" b\n'}, "'b' not found"),
        ({"grammar": 'root ::= "a'}, "no GBNF"),
        ({"grammar": r'root ::= "\ud800"'}, "no GBNF"),
        ({"grammar": r'root ::= "\UFFFFFFFF"'}, "no GBNF"),
        ({"grammar": 'a ::= "a"'}, "root"),
        (formatted({"type": "json_schema", "json_schema": {"not": {}}}), "'not'"),
        (formatted({"type": "json_schema", "json_schema": 5}), "schema object"),
        (formatted({"type": "qwen_xml_parameter", "json_schema": {}}), "qwen_xml_parameter"),
        (formatted({"type": "sequence", "elements": [ANY, BOOL]}), "any_text"),
        (formatted({"type": "sequence", "elements": []}), "elements"),
        (formatted({"type": "or", "elements": [BOOL] * (MAX_STRUCTURAL_TAGS + 1)}), "elements"),
        (formatted({"type": "tag", "begin": "<a>", "content": BOOL}), "'end'"),
        (formatted({"type": "tag", "begin": "<a>", "content": BOOL, "end": ["x"]}), "'end'"),
        (formatted({"type": "triggered_tags", "triggers": ["<b"], "tags": AB}), "trigger"),
        (formatted({"type": "triggered_tags", "triggers": ["<"], "tags": AB, "excludes": ["x"]}),
         "excludes"),
        (formatted({"type": "triggered_tags", "triggers": ["<"], "tags": AB, "at_least_one": 1}),
         "at_least_one"),
        ({"structural_tag": {"type": "structural_tag"}}, "'format'"),
        ({"structural_tag": {"structures": [], "triggers": ["<"]}}, "structures"),
        ({"structural_tag": {"structures": [{"begin": "<a"}], "triggers": ["<"]}}, "'end'"),
        ({"json_object": True, "whitespace_pattern": "["}, "structured_outputs.json_object"),
    ],
)  # fmt: skip
def test_refused_by_name(fields: Fields, named: str, compiled: Compiled) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        compiled(**fields)
    assert (caught.value.param or "").startswith("structured_outputs.")
    assert named in str(caught.value)
    assert len(str(caught.value)) < 700


def test_what_may_force_a_long_text() -> None:
    limit = MAX_FORCED_CHARS
    assert regex_forces_little(f"a{{{limit}}}")
    assert not regex_forces_little(f"a{{{limit + 1}}}")
    assert not regex_forces_little("(a{200}){200}")
    assert not regex_forces_little("a" * (limit + 1))
    assert schema_forces_little({"maximum": 10**9, "maxLength": 10**6, "const": "a" * limit})
    assert not schema_forces_little({"const": "a" * (limit + 1)})
    assert not schema_forces_little({"properties": {"a": {"minLength": limit + 1}}})
    assert not schema_forces_little({"properties": {"a" * (limit + 1): {}}})
    assert lark_forces_little('start: "a" B{100}\nB: "b"{20}\n')
    assert not lark_forces_little("start: A\nA: B{200}\nB: C{200}\nC: /x/\n")
    assert not lark_forces_little(f'start: "{"a" * limit}"\n')
    assert not lark_forces_little('start: A\nA: "a" A\n')


def test_a_grammar_that_forces_much_gets_no_forcing(
    compiler: GrammarCompiler, compiled: Compiled
) -> None:
    assert compiled(regex="ab{100}").constraint(False).forced_tokens()
    assert compiled(regex="ab{100000}").constraint(False).forced_tokens() == []
