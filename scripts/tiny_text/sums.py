"""Questions about numbers: sums, counting, units, word problems."""

from __future__ import annotations

import random

from .turn import Turn, log_uniform, number, sum_key
from .words import ITEMS, NAMES, WORDS, made_up_word

STEP_FORM = -1  # a sum as a step of something longer
SUM_FORMS = (
    ("What is {e}?", "{e} = {r}"),
    ("{e} = ?", "{e} = {r}"),
    ("Calculate {e}.", "{e} = {r}"),
    ("{e}", "{r}"),
    ("How much is {e}?", "The result is {r}."),
    ("Please compute {e} for me.", "The result is {r}."),
    ("What is {e}? Answer with the number only.", "{r}"),
)

OPERATOR_WORDS = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}


def arithmetic(rng: random.Random) -> Turn:
    operator = rng.choice("++--*/")
    if operator == "+":
        a, b = number(rng, 4), number(rng, 4)
        result = a + b
    elif operator == "-":
        b, a = sorted((number(rng, 4), number(rng, 4)))
        result = a - b
    else:
        a, b = rng.randint(0, 99), rng.randint(1, 12)
        if operator == "*":
            a, b = rng.choice(((a, b), (b, a)))
            result = a * b
        else:
            a, b, result = a * b, b, a
    form = rng.randrange(len(SUM_FORMS))
    question, answer = SUM_FORMS[form]
    written = f"{a} {operator} {b}"
    if rng.random() < 0.15:
        written = f"{a} {OPERATOR_WORDS[operator]} {b}"
    return Turn(
        key=sum_key(operator, a, b, form),
        question=question.format(e=written),
        answer=answer.format(e=written, r=result),
        thought=f"I have to compute {a} {operator} {b}. That is {result}.",
    )


STEP_WORDS = {2: "twos", 3: "threes", 5: "fives", 10: "tens"}


def counting(rng: random.Random) -> Turn:
    draw = rng.random()
    if draw < 0.55:
        return _count_range(rng)
    if draw < 0.8:
        word = rng.choice(WORDS) if rng.random() < 0.7 else made_up_word(rng)
        letter = rng.choice(word if rng.random() < 0.8 else "abcdefghilmnoprstu")
        count = word.count(letter)
        times = "once" if count == 1 else f"{count} times"
        return Turn(
            key=f"counting {letter} in {word}",
            question=f"How often does the letter {letter} appear in {word}?",
            answer=f"{'-'.join(word)}: the letter {letter} appears {times}.",
            thought=f"I spell the word: {'-'.join(word)}. Then I count the letter {letter}.",
            reveals=(f"spelling {word}",),
        )
    words = [rng.choice(WORDS) for _ in range(rng.randint(2, 12))]
    lines = " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))
    return Turn(
        key=f"counting {' '.join(words)}",
        question=f"How many words are in this list: {', '.join(words)}?",
        answer=f"{lines} There are {len(words)} words in the list.",
        thought="I number the words of the list one by one.",
    )


def _count_range(rng: random.Random) -> Turn:
    start, step = number(rng, 3), rng.choice((1, 1, 1, 2, 3, 5, 10))
    if rng.random() < 0.3:
        start = 1 if step == 1 else step
    stop = start + step * (log_uniform(rng, 3, 101) - 1)
    by = f" by {STEP_WORDS[step]}" if step > 1 else ""
    numbers = list(range(start, stop + 1, step))
    if rng.random() < 0.3:
        numbers.reverse()
        question = f"Count down from {stop} to {start}{by}."
    else:
        question = rng.choice(("Count from {} to {}{}.", "Please count{2} from {0} to {1}."))
        question = question.format(start, stop, by)
    return Turn(
        key=f"counting {numbers[0]} {numbers[-1]} {step}",
        question=question,
        answer=", ".join(map(str, numbers)),
        thought=f"I count from {numbers[0]} to {numbers[-1]} in steps of {step}.",
    )


UNITS = (
    ("kilometres", "metres", 1000),
    ("metres", "centimetres", 100),
    ("centimetres", "millimetres", 10),
    ("kilograms", "grams", 1000),
    ("tonnes", "kilograms", 1000),
    ("litres", "millilitres", 1000),
    ("hours", "minutes", 60),
    ("minutes", "seconds", 60),
    ("days", "hours", 24),
    ("weeks", "days", 7),
    ("years", "months", 12),
    ("feet", "inches", 12),
    ("yards", "feet", 3),
    ("euros", "cents", 100),
    ("gigabytes", "megabytes", 1000),
)

UNIT_FORMS = (
    "How many {b} are {n} {a}?",
    "Convert {n} {a} to {b}.",
    "What is {n} {a} in {b}?",
    "{n} {a} in {b}",
)


def units(rng: random.Random) -> Turn:
    form = rng.randrange(len(UNIT_FORMS))
    if rng.random() < 0.1:
        celsius = 5 * rng.randint(-8, 40)
        result = celsius * 9 // 5 + 32
        return Turn(
            key=f"units {form} {celsius} celsius",
            question=UNIT_FORMS[form].format(
                a="degrees Celsius", b="degrees Fahrenheit", n=celsius
            ),
            answer=f"{celsius} degrees Celsius = {result} degrees Fahrenheit",
            thought=f"Fahrenheit is Celsius * 9 / 5 + 32, which gives {result}.",
        )
    large, small, factor = rng.choice(UNITS)
    count = rng.randint(2, 99)
    a, b, n, result = large, small, count, count * factor
    thought = f"1 {large[:-1]} has {factor} {small}, so I multiply by {factor}."
    if large == "feet":
        thought = f"1 foot has {factor} {small}, so I multiply by {factor}."
    if rng.random() < 0.4:
        a, b, n, result = small, large, count * factor, count
        thought = thought.replace("multiply", "divide")
    return Turn(
        key=f"units {count} {large} {small}",
        question=UNIT_FORMS[form].format(a=a, b=b, n=n),
        answer=f"{n} {a} = {result} {b}",
        thought=thought,
    )


def word_problem(rng: random.Random) -> Turn:
    """Two steps of arithmetic, written out in the thought, or in the answer where there is none."""
    name, other = rng.sample(NAMES, 2)
    item = rng.choice(ITEMS)
    a, b, c = rng.randint(2, 60), rng.randint(2, 12), rng.randint(2, 12)
    form = rng.randrange(5)
    text = (
        f"{name} has {a} {item}. {name} buys {b} bags with {c} {item} each. "
        f"How many {item} does {name} have now?",
        f"{name} has {a} {item} and gets {b} more from {other}. Then {name} gives away {c}. "
        f"How many {item} does {name} have now?",
        f"{name} shares {b * c} {item} among {b} friends and adds {a} to each share. "
        f"How many {item} does each friend get?",
        f"What is ({a} + {b}) * {c}?",
        f"What is {a} * {b} + {c}?",
    )[form]
    steps: list[tuple[str, int, int, int]] = [
        [("*", b, c, b * c), ("+", a, b * c, a + b * c)],
        [("+", a, b, a + b), ("-", a + b, c, a + b - c)],
        [("/", b * c, b, c), ("+", c, a, c + a)],
        [("+", a, b, a + b), ("*", a + b, c, (a + b) * c)],
        [("*", a, b, a * b), ("+", a * b, c, a * b + c)],
    ][form]
    written = ", and ".join(f"{x} {operator} {y} = {z}" for operator, x, y, z in steps)
    result = steps[-1][-1]
    return Turn(
        key=f"think {form} {a} {b} {c}",
        question=text,
        answer=f"The answer is {result}.",
        thought=f"There are two steps. {written}. So the answer is {result}.",
        unthought=f"{written}. The answer is {result}.",
        reveals=tuple(sum_key(operator, x, y, STEP_FORM) for operator, x, y, _ in steps),
    )
