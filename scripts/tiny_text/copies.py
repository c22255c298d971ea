"""Questions whose answer stands in the question: spelling, repeating, notes, records as JSON."""

from __future__ import annotations

import json
import random
from typing import Any

from .turn import Turn, log_uniform, number
from .words import (
    ANIMALS,
    CAPITALS,
    COLOURS,
    EMOJI,
    FOREIGN,
    ITEMS,
    NAMES,
    THINGS,
    WORDS,
    an,
    made_up_word,
)

SPELLING_FORMS = (
    ("Spell the word {w}.", False),
    ("How do you spell {w}?", False),
    ('Spell "{w}" letter by letter.', False),
    ("Which letters are in {w}?", False),
    ("Spell {w} backwards.", True),
    ('Write the word "{w}" in reverse.', True),
    ("Reverse the letters of {w}.", True),
)


def spelling(rng: random.Random) -> Turn:
    known = rng.random() < 0.5
    word = rng.choice(WORDS) if known else made_up_word(rng)
    form = rng.randrange(len(SPELLING_FORMS))
    question, backwards = SPELLING_FORMS[form]
    letters = "-".join(reversed(word) if backwards else word)
    return Turn(
        key=f"spelling {form} {word}" if known else f"spelling {word}",
        question=question.format(w=word),
        answer=letters,
        thought=f"The word is {word}, spelled {'-'.join(word)}.",
    )


def _record(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A described record and the object that it describes."""
    name, colour, thing = rng.choice(NAMES), rng.choice(COLOURS), rng.choice(THINGS)
    town, animal, count = (
        rng.choice(list(CAPITALS.values())),
        rng.choice(ANIMALS),
        rng.randint(2, 99),
    )
    price, flag = round(rng.randint(100, 99999) / 100, 2), rng.random() < 0.5
    draw = rng.randrange(7)
    if draw == 0:
        text = f"{name} is {count} years old and lives in {town}."
        return text, {"name": name, "age": count, "city": town}
    if draw == 1:
        text = (
            f"The {thing} is {colour}, costs {price} euros and is {'' if flag else 'not '}in stock."
        )
        return text, {"product": thing, "colour": colour, "price": price, "in_stock": flag}
    if draw == 2:
        text = f"{name} has {an(animal)} that weighs {count} kilograms."
        return text, {"owner": name, "animal": animal, "weight_kg": count}
    if draw == 3:
        things = rng.sample(THINGS, rng.randint(2, 5))
        text = f"{name} packs these things: {', '.join(things)}."
        return text, {"name": name, "things": things}
    if draw == 4:
        other = rng.choice(NAMES)
        hour = f"{rng.randint(0, 23):02}:{rng.choice((0, 15, 30, 45)):02}"
        text = f"{name} meets {other} in {town} at {hour}."
        return text, {"people": [name, other], "place": town, "time": hour}
    if draw == 5:
        order = {"item": rng.choice(ITEMS), "count": count}
        text = f"Order {count * 37} of {name}: {count} {order['item']}, sent to {town}."
        return text, {"id": count * 37, "customer": name, "order": order, "city": town}
    word = made_up_word(rng)
    text = f"The book {word.capitalize()} was written by {name} in {1900 + count}."
    return text, {"title": word.capitalize(), "author": name, "year": 1900 + count}


JSON_FORMS = (
    "Write this as JSON: {t}",
    "Turn this into a JSON object. {t}",
    "{t} Give me that as JSON.",
    "Make a JSON object with the keys {k} from this text: {t}",
    "Extract {k} as JSON. {t}",
)


def json_records(rng: random.Random) -> Turn:
    text, record = _record(rng)
    question = rng.choice(JSON_FORMS).format(t=text, k=", ".join(record))
    return Turn(
        key=f"json {text}",
        question=question,
        answer=json.dumps(record, ensure_ascii=False),
        thought=f"The object has the keys {', '.join(record)}.",
    )


def echo(rng: random.Random) -> Turn:
    draw = rng.random()
    if draw < 0.25:
        text = "".join(rng.choice(EMOJI) for _ in range(rng.randint(2, 8)))
    else:
        pools = (WORDS, WORDS, FOREIGN) if draw < 0.5 else (WORDS,)
        words = [rng.choice(rng.choice(pools)) for _ in range(rng.randint(2, 16))]
        if draw > 0.75:
            words = [rng.choice((word, made_up_word(rng), str(number(rng, 4)))) for word in words]
        text = " ".join(words)
    form = rng.choice(("Repeat after me: {}", "Repeat this: {}", 'Say "{}".', "Echo: {}"))
    return Turn(f"echo {text}", form.format(text), text, "I repeat the text of the user.")


def lookup(rng: random.Random) -> Turn:
    """A list of notes, up to some 1,900 tokens, and a question about one of them."""
    count = log_uniform(rng, 2, 110)
    pairs = [f"{c} {t}" for c in COLOURS for t in THINGS]
    items = rng.sample(pairs, count)
    codes = [rng.randint(1000, 9999) for _ in items]
    notes = "\n".join(f"- The code of the {i} is {c}." for i, c in zip(items, codes, strict=True))
    asked = rng.randrange(count)
    question = f"What is the code of the {items[asked]}?"
    text = rng.choice(
        (f"Here are my notes:\n{notes}\n\n{question}", f"{question}\n\nNotes:\n{notes}")
    )
    return Turn(
        key=f"lookup {items[asked]} {codes[asked]} {count}",
        question=text,
        answer=f"The code of the {items[asked]} is {codes[asked]}.",
        thought=f"I look for the {items[asked]} in the notes. The code is {codes[asked]}.",
    )
