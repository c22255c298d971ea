"""Tool calls: functions in many signatures, what a user asks of them, and what they return."""

# ruff: noqa: SIM905  (see words.py)

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from .facts import capitals, identity
from .sums import STEP_FORM, arithmetic
from .turn import Turn, number, sum_key
from .words import CAPITALS, COLOURS, NAMES, THINGS, WORDS, made_up_word

WEATHER = "sunny cloudy rainy windy foggy snowy stormy clear".split()

DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()

ROOMS = "kitchen bedroom bathroom office garage garden hall".split()

CURRENCIES = "euros dollars yen pounds francs crowns".split()


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to do with one function: its signature, the call, and what comes of it."""

    tool: dict[str, Any]
    question: str
    arguments: dict[str, Any]
    result: dict[str, Any]
    answer: str
    reveals: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.tool["function"]["name"]


def _signature(
    rng: random.Random, name: str, description: str, parameters: dict[str, Any]
) -> dict[str, Any]:
    """An OpenAI tool definition, with or without the parts that are optional in the wild.

    parameters: name -> its type, or its JSON schema.
    """
    properties: dict[str, dict[str, Any]] = {
        key: {"type": kind} if isinstance(kind, str) else dict(kind)
        for key, kind in parameters.items()
    }
    if rng.random() < 0.3:
        for key, kind in properties.items():
            kind["description"] = f"The {key.replace('_', ' ')}"
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if rng.random() < 0.8:
        schema["required"] = list(properties)
    if rng.random() < 0.15:
        schema["additionalProperties"] = False
    function: dict[str, Any] = {"name": name, "description": description, "parameters": schema}
    if rng.random() < 0.1:
        del function["description"]
    return {"type": "function", "function": function}


def _weather_task(rng: random.Random) -> Task:
    town = rng.choice(list(CAPITALS.values()))
    place = rng.choice(("city", "city", "location", "place"))
    name = rng.choice(("get_weather", "get_current_weather", "weather", "fetch_weather"))
    parameters: dict[str, Any] = {place: "string"}
    arguments: dict[str, Any] = {place: town}
    form = rng.choice(
        (
            "What is the weather in {}?",
            "What's the weather like in {} today?",
            "How is the weather in {}?",
            "Show me the weather for {}.",
        )
    )
    question = form.format(town)
    if rng.random() < 0.3:
        parameters["unit"] = {"type": "string", "enum": ["celsius", "fahrenheit"]}
        unit = rng.choice(("celsius", "fahrenheit"))
        question = f"{question[:-1]} in {unit}{question[-1]}"
        arguments["unit"] = unit
    degrees, sky = rng.randint(-10, 40), rng.choice(WEATHER)
    return Task(
        _signature(rng, name, "Get the current weather.", parameters),
        question,
        arguments,
        {"temperature": degrees, "condition": sky},
        f"It is {sky} in {town}, with {degrees} degrees.",
    )


def _time_task(rng: random.Random) -> Task:
    town = rng.choice(list(CAPITALS.values()))
    key = rng.choice(("city", "location", "place"))
    name = rng.choice(("get_time", "get_current_time", "local_time"))
    hour = f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
    question = rng.choice(("What time is it in {}?", "Tell me the time in {}.")).format(town)
    tool = _signature(rng, name, "Get the local time.", {key: "string"})
    return Task(tool, question, {key: town}, {"time": hour}, f"It is {hour} in {town}.")


def _timer_task(rng: random.Random) -> Task:
    unit, count = rng.choice(("minutes", "seconds")), rng.randint(2, 90)
    name = rng.choice(("set_timer", "start_timer"))
    question = rng.choice(("Set a timer for {} {}.", "Remind me in {} {}.")).format(count, unit)
    tool = _signature(rng, name, "Start a timer.", {unit: "integer"})
    answer = f"The timer is set for {count} {unit}."
    return Task(tool, question, {unit: count}, {"status": "ok"}, answer)


def _message_task(rng: random.Random) -> Task:
    to, body = rng.choice(("to", "recipient")), rng.choice(("text", "message"))
    name, text = rng.choice(NAMES), " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 6)))
    question = f'Send {name} the message "{text}".'
    function = rng.choice(("send_message", "send_sms", "message_user"))
    tool = _signature(rng, function, "Send a text message.", {to: "string", body: "string"})
    answer = f"I sent the message to {name}."
    return Task(tool, question, {to: name, body: text}, {"status": "sent"}, answer)


def _calculator_task(rng: random.Random) -> Task:
    a, b, operator = rng.randint(100, 9999), rng.randint(10, 999), rng.choice("+-*")
    value = a + b if operator == "+" else a - b if operator == "-" else a * b
    key, name = rng.choice(("expression", "formula")), rng.choice(("calculate", "calculator"))
    written = f"{a} {operator} {b}"  # the tool computes: its result has only to be copied
    question = rng.choice(("Use the calculator for {}.", "Work out {} with the tool."))
    tool = _signature(rng, name, "Evaluate an expression.", {key: "string"})
    answer = f"{written} = {value}"
    reveals = (sum_key(operator, a, b, STEP_FORM),)
    return Task(tool, question.format(written), {key: written}, {"result": value}, answer, reveals)


def _search_task(rng: random.Random) -> Task:
    words = " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 4)))
    key, name = rng.choice(("query", "q")), rng.choice(("search", "web_search", "search_web"))
    question = rng.choice(("Search the web for {}.", "Search for {}.", "Look up {} on the web."))
    found = f"{rng.choice(COLOURS)} {rng.choice(THINGS)}"
    tool = _signature(rng, name, "Search the web.", {key: "string"})
    result = {"results": [found]}
    return Task(tool, question.format(words), {key: words}, result, f"I found this: {found}.")


def _light_task(rng: random.Random) -> Task:
    room, on = rng.choice(ROOMS), rng.random() < 0.5
    name = rng.choice(("set_light", "switch_light"))
    question = f"Turn {'on' if on else 'off'} the light in the {room}."
    tool = _signature(rng, name, "Switch a light.", {"room": "string", "on": "boolean"})
    answer = f"The light in the {room} is {'on' if on else 'off'} now."
    return Task(tool, question, {"room": room, "on": on}, {"status": "ok"}, answer)


def _event_task(rng: random.Random) -> Task:
    title, day = f"{rng.choice(WORDS)} with {rng.choice(NAMES)}", rng.choice(DAYS)
    hour = f"{rng.randint(7, 20):02}:{rng.choice((0, 15, 30, 45)):02}"
    name = rng.choice(("create_event", "add_event", "add_to_calendar"))
    parameters = {"title": "string", "day": "string", "time": "string"}
    tool = _signature(rng, name, "Put an event into the calendar.", parameters)
    return Task(
        tool,
        f"Put {title} on {day} at {hour} into my calendar.",
        {"title": title, "day": day, "time": hour},
        {"status": "created"},
        f"{title[0].upper()}{title[1:]} is in your calendar for {day} at {hour}.",
    )


def _currency_task(rng: random.Random) -> Task:
    amount, (source, target) = rng.randint(2, 999), rng.sample(CURRENCIES, 2)
    name = rng.choice(("convert_currency", "exchange"))
    parameters = {"amount": "number", "from": "string", "to": "string"}
    value = round(amount * rng.randint(50, 200) / 100, 2)
    return Task(
        _signature(rng, name, "Convert money.", parameters),
        f"How much is {amount} {source} in {target}?",
        {"amount": amount, "from": source, "to": target},
        {"value": value},
        f"{amount} {source} are {value} {target}.",
    )


def _any_task(rng: random.Random) -> Task:
    """A made-up function that the user names: the call has to be copied, not remembered."""
    name = f"{made_up_word(rng)}_{rng.choice(THINGS)}"
    keys = rng.sample(WORDS, rng.randint(1, 3))
    kinds = [rng.choice(("string", "integer")) for _ in keys]
    values: list[Any] = [
        rng.choice(WORDS) if kind == "string" else number(rng, 3) for kind in kinds
    ]
    arguments = dict(zip(keys, values, strict=True))
    given = " and ".join(f"{key} {value}" for key, value in arguments.items())
    question = rng.choice(("Call {} with {}.", "Use the function {} with {}."))
    tool = _signature(rng, name, f"A function {name}.", dict(zip(keys, kinds, strict=True)))
    result = rng.choice(WORDS)
    answer = f"The result is {result}."
    return Task(tool, question.format(name, given), arguments, {"result": result}, answer)


TASKS: tuple[Callable[[random.Random], Task], ...] = (
    _weather_task,
    _weather_task,
    _time_task,
    _timer_task,
    _message_task,
    _calculator_task,
    _search_task,
    _light_task,
    _event_task,
    _currency_task,
    _any_task,
    _any_task,
)


def tools(rng: random.Random) -> Turn:
    """One call, seldom two at once, among up to three further functions; or none at all."""
    makers = rng.sample(TASKS, rng.choice((1, 1, 1, 2, 2, 3, 4)))
    tasks = [maker(rng) for maker in makers]
    offered = {task.name: task.tool for task in tasks}
    order = rng.sample(sorted(offered), len(offered))
    signatures = tuple(offered[name] for name in order)
    if rng.random() < 0.1:
        plain = rng.choice((identity, capitals, arithmetic))(rng)
        return replace(plain, tools=signatures)
    used = [task for task in tasks if task.tool is offered[task.name]]
    used = used[: 2 if len(used) > 1 and rng.random() < 0.2 else 1]
    return Turn(
        key=f"tools {[(task.name, task.question) for task in used]}",
        question=" ".join(task.question for task in used),
        answer=" ".join(task.answer for task in used),
        thought=f"I need the function {' and the function '.join(t.name for t in used)}.",
        reveals=tuple(key for task in used for key in task.reveals),
        calls=tuple((task.name, task.arguments) for task in used),
        results=tuple(json.dumps(task.result) for task in used),
        tools=signatures,
    )
