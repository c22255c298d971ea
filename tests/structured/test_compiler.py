"""Compiling off the loop: each grammar once, a deadline, bounds, and inputs made to hurt."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from asyncllm.engine.structured import compiler as compiler_module
from asyncllm.engine.structured.compiler import CompiledGrammar, GrammarCompiler
from asyncllm.engine.structured.gbnf import MAX_GBNF_CHARS, MAX_TERMINAL_DEPTH, MAX_TERMINALS
from asyncllm.engine.structured.vocabulary import Vocabulary
from asyncllm.engine.text.tokenizer import Tokenizer
from asyncllm.errors import InvalidRequestError, QueueFullError
from asyncllm.structured_outputs import (
    MAX_STRUCTURED_OUTPUT_CHARS,
    ReasoningMarkers,
    StructuredOutputsParams,
)
from tests import waiting
from tests.structured.walks import accept, allowed_ids, compile_now
from tests.waiting import PATIENCE_SECONDS, until

Compiled = Callable[..., CompiledGrammar]
COMPILE_SECONDS = compiler_module.STRUCTURED_OUTPUT_COMPILE_SECONDS  # conftest.py has more patience


def on_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        waiting.run(test(*args, **kwargs))

    return run


def join_compile_threads() -> None:
    for thread in threading.enumerate():
        if thread.name == "asyncllm-grammar":
            thread.join(PATIENCE_SECONDS)
            assert not thread.is_alive()


class Held:
    """Compilations begin and wait for `release`."""

    def __init__(self) -> None:
        self.begun: list[StructuredOutputsParams] = []
        self._released = threading.Event()
        self.release = self._released.set

    def wait(self, params: StructuredOutputsParams) -> None:
        self.begun.append(params)
        assert self._released.wait(PATIENCE_SECONDS)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    held = Held()
    real = GrammarCompiler._compile

    def wait(self: GrammarCompiler, params: StructuredOutputsParams) -> tuple[CompiledGrammar, str]:
        held.wait(params)
        return real(self, params)

    monkeypatch.setattr(GrammarCompiler, "_compile", wait)
    yield held
    held.release()


@on_a_loop
async def test_the_same_is_compiled_once(compiler: GrammarCompiler, held: Held) -> None:
    params = [StructuredOutputsParams(choice=["a"]) for _ in range(5)]
    tasks = [asyncio.create_task(compiler.compile_async(p)) for p in params]
    await asyncio.sleep(0)
    held.release()
    grammars = await asyncio.gather(*tasks)
    assert len({id(grammar) for grammar in grammars}) == 1
    assert await compiler.compile_async(params[0]) is grammars[0]
    other = await compiler.compile_async(StructuredOutputsParams(choice=["b"]))
    assert other is not grammars[0]
    marked = [
        StructuredOutputsParams(choice=["a"], after=ReasoningMarkers("</t>", header=header))
        for header in ("", "<a>")
    ]
    assert len({id(await compiler.compile_async(each)) for each in marked}) == 2


@on_a_loop
async def test_over_the_deadline_is_refused_and_kept_when_it_is_done(
    compiler: GrammarCompiler, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = StructuredOutputsParams(choice=["a"])
    patient = asyncio.create_task(compiler.compile_async(params))
    await until(lambda: held.begun)
    monkeypatch.setattr(compiler_module, "STRUCTURED_OUTPUT_COMPILE_SECONDS", 0.05)
    with pytest.raises(InvalidRequestError, match=r"within 0\.05 s") as caught:
        await compiler.compile_async(params)
    assert caught.value.param == "structured_outputs.choice"
    held.release()
    assert await patient
    assert len(compiler._cache) == 1
    assert await compiler.compile_async(params)


@on_a_loop
async def test_who_waits_behind_slow_ones_is_told_to_come_back(
    compiler: GrammarCompiler, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [StructuredOutputsParams(choice=[str(i)]) for i in range(3)]
    slow = [asyncio.create_task(compiler.compile_async(p)) for p in params[:2]]
    await until(lambda: len(held.begun) == 2)
    monkeypatch.setattr(compiler_module, "STRUCTURED_OUTPUT_COMPILE_SECONDS", 0.05)
    results = await asyncio.gather(*map(compiler.compile_async, params), return_exceptions=True)
    kinds = [type(result) for result in results]
    assert kinds == [InvalidRequestError, InvalidRequestError, QueueFullError]
    held.release()
    assert all(await asyncio.gather(*slow))


@on_a_loop
async def test_the_queue_is_bounded(
    compiler: GrammarCompiler, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler_module, "MAX_QUEUED_COMPILES", 3)
    names = [str(i) for i in range(10)]
    tasks = [
        asyncio.create_task(compiler.compile_async(StructuredOutputsParams(choice=[name])))
        for name in names
    ]
    done, waiting = await asyncio.wait(tasks, timeout=0.1)
    assert done
    assert all(isinstance(task.exception(), QueueFullError) for task in done)
    assert 3 <= len(waiting) <= 5
    held.release()
    await asyncio.wait(waiting)


@on_a_loop
async def test_a_cancelled_request_does_not_take_it_from_others(
    compiler: GrammarCompiler, held: Held
) -> None:
    params = StructuredOutputsParams(choice=["a"])
    gone = asyncio.create_task(compiler.compile_async(params))
    stays = asyncio.create_task(compiler.compile_async(params))
    await asyncio.sleep(0)
    gone.cancel()
    held.release()
    assert await stays


def test_the_cache_is_bounded_and_drops_what_was_not_used(
    compiler: GrammarCompiler, compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler_module, "MAX_CACHED_GRAMMARS", 3)
    first = compiled(choice=["0"])
    for i in range(1, 5):
        compiled(choice=[str(i)])
        assert compiled(choice=["0"]) is first
    assert len(compiler._cache) == 3
    monkeypatch.setattr(compiler_module, "MAX_CACHED_GRAMMAR_BYTES", 500)
    compiled(choice=["x" * 440])
    assert len(compiler._cache) == 1
    compiled(choice=["y" * 600])
    assert len(compiler._cache) == 0


def test_the_lexers_of_all_grammars_are_bounded(
    compiler: GrammarCompiler, compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler_module, "_num_fill_threads", lambda: 4)
    monkeypatch.setattr(compiler_module, "MAX_LEXERS_SECONDS", 60.0)
    monkeypatch.setattr(compiler_module, "MAX_CACHED_LEXERS", 9)
    for i in range(5):
        grammar = compiled(choice=[str(i)])
        join_compile_threads()
        assert len(grammar.matchers) == 4
    assert len(compiler._cache) == 2


class Panic(BaseException):
    """As the library's own, which is no `Exception`."""


def test_a_panic_is_one_requests_and_the_thread_goes_on(
    compiler: GrammarCompiler, compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    def panic(*args: object) -> str:
        raise Panic("unreachable")

    with monkeypatch.context() as patched:
        patched.setattr(compiler_module, "grammar_text", panic)
        for _ in range(compiler_module.MAX_CONCURRENT_COMPILES + 1):
            with pytest.raises(RuntimeError, match="unreachable"):
                compiled(choice=["a"])
    assert compiled(choice=["a"]).matchers


def test_errors_are_not_kept(compiler: GrammarCompiler, compiled: Compiled) -> None:
    for _ in range(2):
        with pytest.raises(InvalidRequestError):
            compiled(regex="[")
    assert len(compiler._cache) == 0


def choices_of_keys(num_objects: int) -> dict[str, Any]:
    """Each of its objects may begin with any of 50 keys: all of them are followed at once."""
    keys = {f"p{number}": {"type": "integer"} for number in range(50)}
    return {"anyOf": [{"type": "object", "properties": keys} for _ in range(num_objects)]}


@pytest.mark.slow
def test_what_would_hold_everybodys_step_is_refused_when_it_is_compiled(
    compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is remembered: the second time nothing is compiled."""
    with pytest.raises(InvalidRequestError, match="Too many items") as first:
        compiled(json=choices_of_keys(200))
    monkeypatch.setattr(GrammarCompiler, "_compile", None)
    with pytest.raises(InvalidRequestError) as second:
        compiled(json=choices_of_keys(200))
    assert str(second.value) == str(first.value)
    assert second.value.param == first.value.param == "structured_outputs.json"


def test_what_is_remembered_of_refusals_is_bounded(
    compiler: GrammarCompiler, compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler_module, "MAX_REMEMBERED_REFUSALS", 2)
    for number in range(5):
        with pytest.raises(InvalidRequestError):
            compiled(regex="[" * (1 + number))
    assert len(compiler._refused) == 2


def test_threads_end_with_the_work(compiler: GrammarCompiler, compiled: Compiled) -> None:
    compiled(choice=["a"])
    join_compile_threads()
    assert threading.stack_size() != compiler_module.COMPILE_STACK_BYTES


def test_the_vocabulary_is_made_once_before_or_with_the_first_grammar(
    vocabulary: Vocabulary,
) -> None:
    for prepares in (True, False):
        made: list[Vocabulary] = []

        def make(made: list[Vocabulary] = made) -> Vocabulary:
            made.append(vocabulary)
            return vocabulary

        compiler = GrammarCompiler(make)
        if prepares:
            compiler.prepare()
            assert len(made) == 1
        compile_now(compiler, StructuredOutputsParams(choice=["a"]))
        compiler.prepare()
        assert len(made) == 1


@pytest.mark.parametrize("error", [ValueError("no token ends"), BaseException("panic")])
def test_what_cannot_be_prepared_is_told_to_the_first_grammar(error: BaseException) -> None:
    def make() -> Vocabulary:
        raise error

    compiler = GrammarCompiler(make)
    compiler.prepare()
    with pytest.raises((InvalidRequestError, RuntimeError), match=str(error)):
        compile_now(compiler, StructuredOutputsParams(choice=["a"]))


def test_a_model_without_tokens_bytes_is_said(tokenizer: Tokenizer) -> None:
    for tokens, ends in ((None, [2]), (tokenizer, [])):
        compiler = GrammarCompiler(lambda t=tokens, e=ends: Vocabulary(t, 4096, e))  # type: ignore[misc]
        with pytest.raises(InvalidRequestError, match="not supported") as caught:
            compile_now(compiler, StructuredOutputsParams(regex="a"))
        assert caught.value.param == "structured_outputs"


def chain_of_references(num_chars: int) -> str:
    count = num_chars // 32
    links = ",".join(f'"d{i}":{{"$ref":"#/$defs/d{i + 1}"}}' for i in range(count))
    return f'{{"$ref":"#/$defs/d0","$defs":{{{links},"d{count}":{{"type":"null"}}}}}}'


def chain_of_nested_references(num_chars: int) -> str:
    count, deep = num_chars // 480, 40
    links = ",".join(
        f'"d{i}":' + '{"allOf":[' * deep + f'{{"$ref":"#/$defs/d{i + 1}"}}' + "]}" * deep
        for i in range(count)
    )
    return f'{{"$ref":"#/$defs/d0","$defs":{{{links},"d{count}":{{"type":"null"}}}}}}'


def chain_of_rules(num_chars: int) -> str:
    count = num_chars // 20
    rules = "".join(f'r{i}: r{i + 1} "b"\n' for i in range(count))
    return f'start: r0\n{rules}r{count}: "x"\n'


def terminals(count: int, body: str) -> str:
    """`body` with `?` for the next terminal's name."""
    chain = "".join(f"A{i}: {body.replace('?', f'A{i + 1}')}\n" for i in range(count))
    return f'start: A0\n{chain}A{count}: "ab"\n'


HURTFUL = {
    "references": {"json": chain_of_references(MAX_STRUCTURED_OUTPUT_CHARS // 4)},
    "nested references": {"json": chain_of_nested_references(MAX_STRUCTURED_OUTPUT_CHARS // 4)},
    "rules": {"grammar": chain_of_rules(MAX_STRUCTURED_OUTPUT_CHARS // 4)},
    "parentheses": {"grammar": f'start: {"(" * 50_000}"a"{")" * 50_000}'},
    "regex parentheses": {"regex": f"{'(' * 50_000}a{')' * 50_000}"},
    "gbnf parentheses": {"grammar": f'root ::= {"(" * 6000}"a"{")" * 6000}'},
    "deep terminals": {"grammar": terminals(MAX_TERMINAL_DEPTH - 1, '((? "c")* "d")*')},
    "branching terminals": {"grammar": terminals(18, '(? "c") ?')},
    "endless rule": {"grammar": 'start: "a" start\n'},
    "ambiguous": {"grammar": 'start: s\ns: s s | "a" |\n'},
    "alternatives": {"regex": "|".join(f"{i}x{i}" for i in range(20_000))},
    "nested counts": {"regex": "(a{1000}){1000}"},
    "long count": {"regex": "a{1000000}"},
    "huge count": {"regex": "a{99999999999999999999}"},
    "optional counts": {"regex": "(?:(?:a?){50}){50}a{50}"},
    "long constant": {"json": {"const": "lorem ipsum " * 15_000}},
    "long choice": {"choice": ["lorem ipsum " * 15_000]},
    "doubled terminals": {"grammar": terminals(10, "? ? ? ?")},
    "many items": {
        "json": {"type": "array", "items": {"const": "x"}, "minItems": 10**9, "maxItems": 10**9}
    },
    "long pattern text": {"json": {"type": "string", "pattern": "^a*$", "minLength": 10**6}},
    "product of unions": {
        "json": {
            "allOf": [
                {"anyOf": [{"type": "string", "pattern": f"a{i}{j}"} for i in range(8)]}
                for j in range(8)
            ]
        }
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", HURTFUL)
def test_what_is_made_to_hurt_ends(
    name: str, compiled: Compiled, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused, or compiled to something whose first masks come at once. It must not crash."""
    monkeypatch.setattr(compiler_module, "STRUCTURED_OUTPUT_COMPILE_SECONDS", COMPILE_SECONDS)
    try:
        grammar = compiled(**HURTFUL[name])
    except InvalidRequestError as error:
        assert (error.param or "").startswith("structured_outputs.")
        assert len(str(error)) < 700
        return
    constraint = grammar.constraint(False)
    for _ in range(3):
        allowed = allowed_ids(constraint, tokenizer.vocab_size)
        assert len(constraint.forced_tokens()) <= 30_000
        accept(constraint, int(allowed[0]))


def test_gbnf_at_its_limit(compiled: Compiled) -> None:
    rule = 'root ::= "a"'
    compiled(grammar=rule + " " * (MAX_GBNF_CHARS - len(rule)))
    with pytest.raises(InvalidRequestError, match=str(MAX_GBNF_CHARS)):
        compiled(grammar=rule + " " * (MAX_GBNF_CHARS - len(rule) + 1))


def test_terminals_at_their_limit(compiled: Compiled) -> None:
    def flat(count: int) -> str:
        return "start: T0\n" + "".join(f'T{i}: "a"\n' for i in range(count))

    compiled(grammar=flat(MAX_TERMINALS))
    with pytest.raises(InvalidRequestError, match=str(MAX_TERMINALS)):
        compiled(grammar=flat(MAX_TERMINALS + 1))
    compiled(grammar=terminals(MAX_TERMINAL_DEPTH - 1, '? "x"'))
    for too_deep in (terminals(MAX_TERMINAL_DEPTH, '? "x"'), 'start: A\nA: "x" A\n'):
        with pytest.raises(InvalidRequestError, match=f"{MAX_TERMINAL_DEPTH} deep"):
            compiled(grammar=too_deep)
