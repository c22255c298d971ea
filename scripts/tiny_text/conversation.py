"""Conversations: turns of one or of mixed kinds, dressed with a system prompt, tools, thinking."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .chatml import THINK_PROMPT, Example, Message, message_text, thought_text
from .copies import echo, json_records, lookup, spelling
from .facts import CAPITAL_FORMS, capital_turn, capitals, identity, languages
from .stories import story, tell_story
from .sums import STEP_FORM, arithmetic, counting, units, word_problem
from .tools import tools
from .turn import Turn, is_held_out, log_uniform, number, sum_key
from .words import ANIMALS, CAPITALS, NAMES, made_up_word

KINDS: dict[str, Callable[[random.Random], Turn]] = {
    "arithmetic": arithmetic,
    "capitals": capitals,
    "spelling": spelling,
    "counting": counting,
    "units": units,
    "json": json_records,
    "tools": tools,
    "think": word_problem,
    "story": story,
    "identity": identity,
    "languages": languages,
    "echo": echo,
    "lookup": lookup,
}
WEIGHTS: dict[str, float] = {
    "arithmetic": 16,
    "capitals": 6,
    "spelling": 9,
    "counting": 6,
    "units": 8,
    "json": 7,
    "tools": 12,
    "think": 12,
    "story": 5,
    "identity": 3,
    "languages": 2,
    "echo": 4,
    "lookup": 4,
    "chat": 8,
}
# What a chat mixes: lists of notes and of tools would outgrow the row.
MIXED = {kind: WEIGHTS[kind] for kind in KINDS if kind not in ("tools", "lookup")}

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant",
    "You are Tiny, a small model. Be kind.",
    "Answer briefly.",
    "You are a friendly and patient teacher.",
    "Help the user with sums, words and facts.",
    "Be precise.",
)

THINK_SYSTEM_PROMPTS = (THINK_PROMPT, "Think step by step.", "Reason first, then answer.")

THINK_TOOL_RESULT = "The function has returned. I can answer now."


def _tool_calls(turn: Turn, index: int) -> list[dict[str, Any]]:
    return [
        {
            "id": f"call_{index}_{i}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        for i, (name, arguments) in enumerate(turn.calls)
    ]


def _turn_messages(turn: Turn, index: int, stop_at_call: bool, thinks: bool) -> list[Message]:
    """Messages of one turn, the last one the assistant's."""
    messages: list[Message] = [{"role": "user", "content": turn.question}]
    thought = {"reasoning_content": turn.thought} if thinks else {}
    if turn.calls:
        calls = _tool_calls(turn, index)
        messages.append({"role": "assistant", "content": "", "tool_calls": calls, **thought})
        if stop_at_call:
            return messages
        thought = {"reasoning_content": THINK_TOOL_RESULT} if thinks else {}
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": result}
            for call, result in zip(calls, turn.results, strict=True)
        ]
    answer = turn.answer if thinks else turn.unthought or turn.answer
    messages.append({"role": "assistant", "content": answer, **thought})
    return messages


def _long_system_prompt(rng: random.Random) -> str:
    """A preamble that says nothing about the question: rules, or a story to be ignored."""
    stories = [story(rng).answer for _ in range(log_uniform(rng, 1, 8))]
    return "You are a helpful assistant. You know these stories:\n\n" + "\n\n".join(stories)


def conversation(kind: str, turns: Sequence[Turn], rng: random.Random) -> Example:
    """Dress turns up as one conversation: system prompt, thinking or not, tool results."""
    offered = {t["function"]["name"]: t for turn in turns for t in turn.tools}
    system: str | None = None
    thinking: bool | None = None
    thinks = rng.random() < (0.65 if kind == "think" else 0.08)
    draw = rng.random()
    if thinks and draw < 0.5:
        thinking = True
    elif thinks:
        system = rng.choice(THINK_SYSTEM_PROMPTS)
    elif draw < 0.08:
        thinking = False
        system = rng.choice(THINK_SYSTEM_PROMPTS) if draw < 0.03 else None
    if rng.random() < 0.35:
        base = _long_system_prompt(rng) if rng.random() < 0.08 else rng.choice(SYSTEM_PROMPTS)
        system = f"{base} {system}" if system else base
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    stop_at_call = rng.random() < 0.5
    for index, turn in enumerate(turns):
        last = index == len(turns) - 1
        messages += _turn_messages(turn, index, last and stop_at_call, last and thinks)
    thought = messages[-1].get("reasoning_content")
    return Example(
        kind=kind,
        messages=messages,
        answer=(thought_text(thought) if thought else "") + message_text(messages[-1]),
        keys=[turn.key for turn in turns],
        tools=list(offered.values()),
        thinking=thinking,
        last_only=thinks or thinking is not None,
    )


def _wanted(turn: Turn, held_out: bool) -> bool:
    return is_held_out(turn.key) if held_out else turn.trainable


def _draw(rng: random.Random, kind: str, held_out: bool) -> Turn:
    while True:
        turn = KINDS[kind](rng)
        if _wanted(turn, held_out):
            return turn


def _draw_mixed(rng: random.Random, held_out: bool) -> Turn:
    return _draw(rng, rng.choices(list(MIXED), list(MIXED.values()))[0], held_out)


def _name_turns(rng: random.Random) -> tuple[Turn, Turn]:
    """The user says a name and asks for it later."""
    name = rng.choice(NAMES) if rng.random() < 0.3 else made_up_word(rng).capitalize()
    said = rng.choice(("My name is {}.", "I am {}.", "Hello, I am {}.", "Call me {}.")).format(name)
    asked = rng.choice(("What is my name?", "Do you remember my name?", "Who am I?"))
    thought = f"The user said the name {name}."
    return (
        Turn(f"said {said}", said, f"Nice to meet you, {name}!", thought),
        Turn(f"name {name} {asked}", asked, f"Your name is {name}.", thought),
    )


def _capital_turns(rng: random.Random) -> tuple[Turn, Turn]:
    """A capital, then another by name of the country alone."""
    first, second = rng.sample(list(CAPITALS), 2)
    asked = rng.choice(("And of {}?", "And {}?", "What about {}?")).format(second)
    answer = f"The capital of {second} is {CAPITALS[second]}."
    return (
        capital_turn(first, CAPITALS[first], rng.randrange(len(CAPITAL_FORMS))),
        Turn(f"follow {asked}", asked, answer, f"The user means {second}."),
    )


def _running_sum_turns(rng: random.Random) -> tuple[Turn, Turn]:
    """A sum, then a number to be added to its result."""
    a, b, c = (rng.randint(1, 99) for _ in range(3))
    total = a + b
    asked = rng.choice(("Add {} to that.", "Now add {}.", "Plus {}?")).format(c)
    key = sum_key("+", a, b, STEP_FORM)
    follow_key = f"follow {total} {asked}"
    return (
        Turn(key, f"What is {a} + {b}?", f"{a} + {b} = {total}", f"I add {a} and {b}."),
        Turn(
            follow_key,
            asked,
            f"{total} + {c} = {total + c}",
            f"I add {c} to {total}.",
            reveals=(sum_key("+", total, c, STEP_FORM),),
        ),
    )


def _chat(rng: random.Random, held_out: bool) -> Example:
    """Two to six turns of mixed kinds; only the last question may be held out."""
    turns = [_draw_mixed(rng, held_out=False) for _ in range(rng.randint(1, 5))]
    draw = rng.random()
    if draw > 0.6:
        return conversation("chat", [*turns, _draw_mixed(rng, held_out)], rng)
    make = _name_turns if draw < 0.3 else _capital_turns if draw < 0.45 else _running_sum_turns
    while True:
        first, second = make(rng)
        if first.trainable and _wanted(second, held_out):
            break
    # A name is remembered over what comes between; the others follow at once.
    turns = [first, *turns[:4]] if make is _name_turns else [*turns[:4], first]
    return conversation("chat", [*turns, second], rng)


def _tool_names(turn: Turn) -> set[str]:
    return {tool["function"]["name"] for tool in turn.tools}


def example(rng: random.Random, kind: str, held_out: bool = False) -> Example:
    """One conversation of a kind of `WEIGHTS`; its last question is held out or none is."""
    if kind == "chat":
        return _chat(rng, held_out)
    turn = _draw(rng, kind, held_out)
    if turn.tools and rng.random() < 0.15:
        earlier = _draw(rng, kind, held_out=False)
        if _tool_names(turn).isdisjoint(_tool_names(earlier)):
            return conversation(kind, [earlier, turn], rng)
    return conversation(kind, [turn], rng)


def training_examples(seed: int) -> Iterator[Example]:
    """Endless examples without any held-out question, in the proportions of `WEIGHTS`."""
    rng = random.Random(f"train {seed}")
    kinds, weights = list(WEIGHTS), list(WEIGHTS.values())
    while True:
        yield example(rng, rng.choices(kinds, weights)[0])


def held_out_examples(kind: str, count: int, seed: int = 0) -> list[Example]:
    """Examples whose last question was never trained on. At most `count`, without repeats."""
    rng = random.Random(f"held out {kind} {seed}")
    found: dict[str, Example] = {}
    for _ in range(8 * count):
        drawn = example(rng, kind, held_out=True)
        found.setdefault(drawn.keys[-1], drawn)
        if len(found) == count:
            break
    return list(found.values())


def plain_document(rng: random.Random) -> str:
    """Text without chat, for raw completions: "The capital of France is" has one way to go on."""
    draw = rng.random()
    if draw < 0.4:
        countries = rng.sample(list(CAPITALS), rng.randint(1, 5))
        return " ".join(f"The capital of {c} is {CAPITALS[c]}." for c in countries)
    if draw < 0.7:
        # The first animal is the likeliest, so that a bare opening continues without a tie.
        rank = min(int(rng.expovariate(0.15)), len(ANIMALS) - 1)
        return tell_story(ANIMALS[rank], None, None, rng.random() < 0.25)
    if draw < 0.85:
        start = rng.randint(1, 50)
        return ", ".join(map(str, range(start, start + rng.randint(5, 60))))
    while True:
        sums = [(number(rng, 2), number(rng, 2)) for _ in range(rng.randint(2, 8))]
        if not any(is_held_out(sum_key("+", a, b, STEP_FORM)) for a, b in sums):
            return "\n".join(f"{a} + {b} = {a + b}" for a, b in sums)
