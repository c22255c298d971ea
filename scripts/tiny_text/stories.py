"""Short stories by template, one for each animal."""

# ruff: noqa: SIM905  (see words.py)

from __future__ import annotations

import random
from collections.abc import Sequence

from .turn import Turn, fixed_choice
from .words import ANIMALS, COLOURS, NAMES, THINGS, an

HOMES = (
    "a deep forest|a small house by the river|an old tower|a cave in the mountains|"
    "a garden full of roses|a village near the sea|a barn on a quiet farm|a tree at the lake"
).split("|")

HOBBIES = (
    "to sing|to dance in the rain|to count the stars|to bake bread|to read old books|"
    "to paint pictures|to climb high hills|to tell jokes"
).split("|")

PLACES = "desert|forest|city|mountains|garden|jungle|snow|library|castle|harbour".split("|")

FEELINGS = "happy|proud|surprised|tired but glad|thankful|full of joy".split("|")

STORY_FORMS = (
    "Tell me a story about {a}.",
    "Write a short story about {a}.",
    "Can you tell me a story about {a}?",
    "I want to hear a story about {a}.",
    "Please write a little story about {a}.",
    "Tell a bedtime story about {a}.",
    "A story about {a}, please.",
    "Do you know a story about {a}?",
)


def story(rng: random.Random) -> Turn:
    animal = rng.choice(ANIMALS)
    form = rng.randrange(len(STORY_FORMS))
    name = rng.choice(NAMES) if rng.random() < 0.3 else None
    place = rng.choice(PLACES) if rng.random() < 0.3 else None
    long = rng.random() < 0.25
    subject = an(animal)
    subject += f" called {name}" if name else ""
    subject += f" in the {place}" if place else ""
    question = STORY_FORMS[form].format(a=subject)
    if long:
        question += " Make it long."
    return Turn(
        key=f"story {form} {animal} {name} {place} {long}",
        question=question,
        answer=tell_story(animal, name, place, long),
        thought=f"The user wants a story about {subject}.",
    )


def tell_story(animal: str, name: str | None, place: str | None, long: bool) -> str:
    """One story per animal; a name or a place in the request replaces the animal's own."""

    def own(options: Sequence[str], what: str) -> str:
        return fixed_choice(options, f"{what} of the {animal}")

    name = name or own(NAMES, "name")
    home = f"the {place}" if place else own(HOMES, "home")
    friend = own([a for a in ANIMALS if a != animal], "friend")
    other = own([n for n in NAMES if n != name], "friend's name" + name)
    thing = f"{own(COLOURS, 'colour')} {own(THINGS, 'thing')}"
    lines = [
        f"Once upon a time there was {an(animal)} called {name}.",
        f"{name} lived in {home} and loved {own(HOBBIES, 'hobby')}.",
        f"One day {name} met {an(friend)} called {other}, who had lost {an(thing)}.",
        "They looked for it together the whole day.",
        f"In the evening {name} found the {thing} under a stone.",
        f"{other} was {own(FEELINGS, 'feeling')}, and the two became good friends.",
    ]
    if long:
        wish = own([h for h in HOBBIES if h != own(HOBBIES, "hobby")], "wish")
        second = own([t for t in THINGS if t not in thing], "second thing")
        lines += [
            f"On the next morning {other} came back and brought {an(second)} as a present.",
            f'"Thank you," said {name}, "but what shall I do with {an(second)}?"',
            f'"Keep it," said {other}, "and teach me {own(HOBBIES, "hobby")}."',
            f"So {name} taught {other} {own(HOBBIES, 'hobby')}, and {other} taught {name} {wish}.",
            f"They practised every day, and soon the whole {own(PLACES, 'town')} talked of them.",
            f"In winter the snow fell, and {name} and {other} sat by the fire.",
            f"They looked at the {thing} and at the {second} and remembered how it had begun.",
            "In spring they went on a long journey, but that is another story.",
        ]
    return " ".join([*lines, "The end."])
