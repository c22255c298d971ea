"""Compiles grammars in threads: within a deadline, a few at a time, each once.

llguidance releases the GIL while it compiles, and has limits of its own. A compilation cannot be
stopped: if it exceeds the deadline, the request is refused, but the compilation continues in its
thread and its result is cached.
The threads have a large stack, because the library recurses over chains of rules and references,
and a stack overflow would end the process.
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
MAX_CACHED_LEXERS = 64  # one of a hostile grammar takes 20 MB, usual ones hardly any memory
MAX_CACHED_GRAMMAR_BYTES = 2**22  # of their keys, the parameters as JSON
COMPILE_STACK_BYTES = 2**29  # only touched pages take memory
"""Twice as much as the longest chain in `MAX_STRUCTURED_OUTPUT_CHARS` needs."""

# Copies of a matcher share its lexer and a lock, so their masks are filled one after the other. So
# a grammar has several lexers, if they can be made quickly.
MAX_LEXERS_SECONDS = 0.05


@dataclass(slots=True)
class CompiledGrammar:
    """The initial matchers of a grammar, one per lexer. Constraints share the lexers' states."""

    matchers: list[LLMatcher]
    executor: LLExecutor
    eos_ids: tuple[int, ...]
    param: str
    num_constraints: int = 0

    def constraint(self, ignore_eos: bool) -> GrammarConstraint:
        """A constraint for one sequence."""
        lexer = self.num_constraints % len(self.matchers)
        self.num_constraints += 1
        matcher = self.matchers[lexer]
        ignored_ends = self.eos_ids if ignore_eos else ()
        return GrammarConstraint(
            matcher.deep_copy(), id(matcher), self.executor, self.param, ignored_ends
        )


class GrammarCompiler:
    """make_vocabulary: called at the first use, or by `prepare`."""

    def __init__(self, make_vocabulary: Callable[[], Vocabulary]) -> None:
        self._vocabulary: Vocabulary | None = None
        self._make_vocabulary = make_vocabulary
        self._executor: LLExecutor | None = None  # starts its threads with the first grammar
        self._lock = threading.Lock()  # for all attributes below; held shortly
        self._preparing = threading.Lock()
        self._cache: OrderedDict[bytes, CompiledGrammar] = OrderedDict()
        self._cache_bytes = 0
        self._refused: OrderedDict[bytes, str] = OrderedDict()  # the reason, by a hash of the key
        self._pending: dict[bytes, Future[CompiledGrammar]] = {}
        self._queue: deque[tuple[bytes, StructuredOutputsParams]] = deque()
        self._num_threads = 0

    def prepare(self) -> None:
        """Make what the first grammar would wait for, in two parts, one per call."""
        try:
            with self._preparing:
                if self._vocabulary is None:
                    self._vocabulary = self._make_vocabulary()
                else:
                    self._vocabulary.prepare()
        except ValueError:  # reported to requests with a grammar
            pass
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # also a panic of the library; requests will get it
            logger.exception("structured outputs could not be prepared")

    async def compile_async(self, params: StructuredOutputsParams) -> CompiledGrammar:
        """Raises `InvalidRequestError` naming the field, or `QueueFullError`."""
        found = self._find_or_start(params)
        if isinstance(found, CompiledGrammar):
            return found
        # Other requests may wait for it, so neither a deadline nor a cancelled task cancels it.
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
                self._start_thread()  # which takes the lock first
            future = self._pending[key] = Future()
            self._queue.append((key, params))
        return future

    def _start_thread(self) -> None:
        """The thread ends when the queue is empty, which frees its stack."""
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
            future.set_running_or_notify_cancel()  # it cannot be cancelled from here on
            try:
                grammar, text = self._compile(params)
            except BaseException as error:  # also a panic of the library
                if isinstance(error, InvalidRequestError):
                    self._remember(key, str(error))
                self._settle(key)
                panicked = not isinstance(error, Exception)
                future.set_exception(RuntimeError(str(error)) if panicked else error)
            else:
                self._settle(key, grammar)
                future.set_result(grammar)
                try:
                    self._add_lexers(grammar, text)
                except BaseException:  # it has one, and this thread must go on
                    logger.exception("a grammar has no lexers for further threads")
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
        """Remember why a grammar was refused; compiling it again would take as long."""
        with self._lock:
            self._refused[_digest(key)] = complaint
            if len(self._refused) > MAX_REMEMBERED_REFUSALS:
                self._refused.popitem(last=False)

    def _trim(self) -> None:
        """Drop the least recently used grammars above the limits. The lock must be held."""
        while (
            len(self._cache) > MAX_CACHED_GRAMMARS
            or self._cache_bytes > MAX_CACHED_GRAMMAR_BYTES
            or sum(len(kept.matchers) for kept in self._cache.values()) > MAX_CACHED_LEXERS
        ):
            dropped, _ = self._cache.popitem(last=False)
            self._cache_bytes -= len(dropped)

    def _compile(self, params: StructuredOutputsParams) -> tuple[CompiledGrammar, str]:
        """The compiled grammar and its text."""
        vocabulary, executor = self._prepare()
        if params.after is not None:  # an unsatisfiable grammar would only show after the reasoning
            bare = replace(params, after=None)
            first_matcher(vocabulary, grammar_text(bare, vocabulary.special_ids), bare)
        text = grammar_text(params, vocabulary.special_ids)
        matcher = first_matcher(vocabulary, text, params)
        check_noted_terminals(text, params)
        return CompiledGrammar([matcher], executor, vocabulary.eos_ids, params.param), text

    def _add_lexers(self, grammar: CompiledGrammar, text: str) -> None:
        """Add lexers up to the number of threads that fill masks."""
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
    """Half of the cores, as the event loop and the device's driver work at the same time."""
    return min(max(num_cores() // 2, 1), MAX_FILL_THREADS)


def _look_at(result: asyncio.Future[CompiledGrammar]) -> None:
    """Retrieve the exception: asyncio would log one that comes when nobody waits any more."""
    if not result.cancelled():
        result.exception()


def _digest(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=16).digest()


def _key(params: StructuredOutputsParams) -> bytes:
    """The parameters as bytes, the key of the cache."""
    return orjson.dumps(
        [
            params.kind,
            getattr(params, params.kind),
            params.disable_any_whitespace,
            params.disable_additional_properties,
            params.whitespace_pattern,
            params.after,
            params.alternative,
        ]
    )
