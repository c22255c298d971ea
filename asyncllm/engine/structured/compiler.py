"""Compiles grammars off the loop: within a deadline, few at a time, each once.

llguidance lets go of the GIL while it compiles, and its own limits bound most of what it does. A
compilation cannot be stopped: one that is over the deadline is refused and goes on in its thread,
of which there are few; when it ends, its result is kept like any other.
The threads have a large stack: the library descends once per link of a chain of rules or of
references, and a stack that overflows would end the process.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace

import orjson
from llguidance import LLExecutor, LLMatcher

from asyncllm.engine.structured.constraint import GrammarConstraint
from asyncllm.engine.structured.grammar_text import grammar_text
from asyncllm.engine.structured.matchers import (
    another_matcher,
    check_noted_terminals,
    first_matcher,
)
from asyncllm.engine.structured.vocabulary import Vocabulary
from asyncllm.errors import InvalidRequestError, QueueFullError
from asyncllm.host import num_cores
from asyncllm.structured_outputs import PARAM, StructuredOutputsParams

logger = logging.getLogger("asyncllm")

STRUCTURED_OUTPUT_COMPILE_SECONDS = 5.0
MAX_CONCURRENT_COMPILES = 2
MAX_QUEUED_COMPILES = 128
MAX_FILL_THREADS = 8
MAX_CACHED_GRAMMARS = 64
MAX_REMEMBERED_REFUSALS = 1024
MAX_CACHED_LEXERS = 64  # that of a hostile grammar takes 20 MB, of a usual one nearly nothing
MAX_CACHED_GRAMMAR_BYTES = 2**22  # of their keys: what was asked, as JSON
COMPILE_STACK_BYTES = 2**29  # only what is touched is memory
"""For the longest chain that fits into `MAX_STRUCTURED_OUTPUT_CHARS`, twice over."""

# Copies of a matcher share its lexer, and a lock: a mask waits for the copies' masks. So a grammar
# has several lexers, as far as they are made quickly.
MAX_LEXERS_SECONDS = 0.05


@dataclass(slots=True)
class CompiledGrammar:
    """A grammar at its beginning, once for each lexer; constraints share what theirs has learnt."""

    matchers: list[LLMatcher]
    executor: LLExecutor
    eos_ids: tuple[int, ...]
    param: str
    num_constraints: int = 0

    def constraint(self, ignore_eos: bool) -> GrammarConstraint:
        """For one sequence."""
        lexer = self.num_constraints % len(self.matchers)
        self.num_constraints += 1
        matcher = self.matchers[lexer]
        ignored_ends = self.eos_ids if ignore_eos else ()
        return GrammarConstraint(
            matcher.deep_copy(), id(matcher), self.executor, self.param, ignored_ends
        )


class GrammarCompiler:
    """`make_vocabulary` is called on first use, or by `prepare`."""

    def __init__(self, make_vocabulary: Callable[[], Vocabulary]) -> None:
        self._vocabulary: Vocabulary | None = None
        self._make_vocabulary = make_vocabulary
        self._executor: LLExecutor | None = None  # its threads come with the first grammar
        self._lock = threading.Lock()  # of all below; held for a moment
        self._preparing = threading.Lock()
        self._cache: OrderedDict[bytes, CompiledGrammar] = OrderedDict()
        self._cache_bytes = 0
        self._refused: OrderedDict[bytes, str] = OrderedDict()  # why, by a hash of what was asked
        self._pending: dict[bytes, Future[CompiledGrammar]] = {}
        self._queue: deque[tuple[bytes, StructuredOutputsParams]] = deque()
        self._num_threads = 0

    @property
    def num_cached(self) -> int:
        return len(self._cache)

    def prepare(self) -> None:
        """Make what a grammar would have to wait for, a part at each of two calls."""
        try:
            with self._preparing:
                if self._vocabulary is None:
                    self._vocabulary = self._make_vocabulary()
                else:
                    self._vocabulary.prepare()
        except ValueError:  # said to the requests that ask for a grammar
            pass
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # a panic of the library too, which they meet again
            logger.exception("structured outputs could not be prepared")

    def compile(self, params: StructuredOutputsParams) -> CompiledGrammar:
        """Blocks. Raises `InvalidRequestError` naming the field, `QueueFullError`."""
        found = self._find_or_start(params)
        if isinstance(found, CompiledGrammar):
            return found
        try:
            return found.result(STRUCTURED_OUTPUT_COMPILE_SECONDS)
        except TimeoutError:
            raise self._too_slow(found, params) from None

    async def compile_async(self, params: StructuredOutputsParams) -> CompiledGrammar:
        """The same, without blocking the loop."""
        found = self._find_or_start(params)
        if isinstance(found, CompiledGrammar):
            return found
        # Others may wait for the same one: neither a deadline nor a cancelled task ends it.
        result = asyncio.wrap_future(found)
        result.add_done_callback(_look_at)
        try:
            async with asyncio.timeout(STRUCTURED_OUTPUT_COMPILE_SECONDS):
                return await asyncio.shield(result)
        except TimeoutError:
            raise self._too_slow(found, params) from None
        finally:
            del found, result  # they hold an error, whose traceback holds this frame

    def _find_or_start(
        self, params: StructuredOutputsParams
    ) -> CompiledGrammar | Future[CompiledGrammar]:
        key = _key(params)
        with self._lock:
            if (grammar := self._cache.get(key)) is not None:
                self._cache.move_to_end(key)
                return grammar
            if (complaint := self._refused.get(_digest(key))) is not None:
                self._refused.move_to_end(_digest(key))
                raise InvalidRequestError(complaint, params.param)
            if (pending := self._pending.get(key)) is not None:
                return pending
            if len(self._queue) >= MAX_QUEUED_COMPILES:
                raise QueueFullError(
                    f"{len(self._queue)} grammars wait to be compiled; try again later"
                )
            if self._num_threads < MAX_CONCURRENT_COMPILES:
                self._start_thread()  # it takes the lock first
            future = self._pending[key] = Future()
            self._queue.append((key, params))
        return future

    def _start_thread(self) -> None:
        """A thread ends when the queue is empty: its stack is not kept for nothing."""
        default = threading.stack_size(COMPILE_STACK_BYTES)
        try:
            threading.Thread(target=self._work, name="asyncllm-grammar", daemon=True).start()
            self._num_threads += 1
        finally:
            threading.stack_size(default)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._num_threads -= 1
                    return
                key, params = self._queue.popleft()
                future = self._pending[key]
            future.set_running_or_notify_cancel()  # nobody's cancelling may reach it from here on
            try:
                grammar, text = self._compile(params)
            except BaseException as error:  # a panic of the library too: it is this request's
                if isinstance(error, InvalidRequestError):
                    self._remember(key, str(error))
                self._settle(key)
                panicked = not isinstance(error, Exception)
                future.set_exception(RuntimeError(str(error)) if panicked else error)
            else:
                self._settle(key, grammar)
                future.set_result(grammar)
                self._add_lexers(grammar, text)
            finally:
                del future  # it holds an error, whose traceback holds this frame

    def _settle(self, key: bytes, grammar: CompiledGrammar | None = None) -> None:
        with self._lock:
            del self._pending[key]
            if grammar is None:
                return
            self._cache[key] = grammar
            self._cache_bytes += len(key)
            self._trim()

    def _remember(self, key: bytes, complaint: str) -> None:
        """To compile it again would take as long, and end in the same way."""
        with self._lock:
            self._refused[_digest(key)] = complaint
            if len(self._refused) > MAX_REMEMBERED_REFUSALS:
                self._refused.popitem(last=False)

    def _trim(self) -> None:
        """Drop what was not used for longest, while there is too much. With the lock held."""
        while (
            len(self._cache) > MAX_CACHED_GRAMMARS
            or self._cache_bytes > MAX_CACHED_GRAMMAR_BYTES
            or sum(len(kept.matchers) for kept in self._cache.values()) > MAX_CACHED_LEXERS
        ):
            dropped, _ = self._cache.popitem(last=False)
            self._cache_bytes -= len(dropped)

    def _compile(self, params: StructuredOutputsParams) -> tuple[CompiledGrammar, str]:
        """And its text."""
        vocabulary, executor = self._prepare()
        if params.after is not None:  # what no text satisfies would show only after the reasoning
            bare = replace(params, after=None)
            first_matcher(vocabulary, grammar_text(bare, vocabulary.special_ids), bare)
        text = grammar_text(params, vocabulary.special_ids)
        matcher = first_matcher(vocabulary, text, params)
        check_noted_terminals(text, params)
        return CompiledGrammar([matcher], executor, vocabulary.eos_ids, params.param), text

    def _add_lexers(self, grammar: CompiledGrammar, text: str) -> None:
        """As many as threads fill masks: there is no use for more."""
        vocabulary, _ = self._prepare()
        deadline = time.monotonic() + MAX_LEXERS_SECONDS
        while len(grammar.matchers) < _num_fill_threads() and time.monotonic() < deadline:
            grammar.matchers.append(another_matcher(vocabulary, text))
        with self._lock:
            self._trim()

    def _prepare(self) -> tuple[Vocabulary, LLExecutor]:
        with self._preparing:
            try:
                self._vocabulary = self._vocabulary or self._make_vocabulary()
            except ValueError as error:
                raise InvalidRequestError(f"{PARAM} is not supported: {error}", PARAM) from None
            self._executor = self._executor or LLExecutor(_num_fill_threads())
            return self._vocabulary, self._executor

    def _too_slow(
        self, future: Future[CompiledGrammar], params: StructuredOutputsParams
    ) -> Exception:
        with self._lock:
            waiting = any(self._pending.get(key) is future for key, _ in self._queue)
        if waiting:
            return QueueFullError("other grammars are being compiled; try again later")
        return InvalidRequestError(
            f"{params.param} did not compile within "
            f"{STRUCTURED_OUTPUT_COMPILE_SECONDS:g} s: it is too complex",
            params.param,
        )


def _num_fill_threads() -> int:
    """Half of the cores: the loop and the device's driver have work at the same time."""
    return min(max(num_cores() // 2, 1), MAX_FILL_THREADS)


def _look_at(result: asyncio.Future[CompiledGrammar]) -> None:
    """Asyncio would complain of an error that comes when nobody waits any more."""
    if not result.cancelled():
        result.exception()


def _digest(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=16).digest()


def _key(params: StructuredOutputsParams) -> bytes:
    """The request's wish as bytes, the same for the same."""
    after = params.after
    return orjson.dumps(
        [
            params.kind,
            getattr(params, params.kind),
            params.disable_any_whitespace,
            params.disable_additional_properties,
            params.whitespace_pattern,
            None if after is None else [after.begin, after.end],
            params.alternative,
        ]
    )
