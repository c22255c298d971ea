"""Facts to be learnt by heart: capitals, greetings and identity, phrases in other languages."""

from __future__ import annotations

import random

from .turn import Turn
from .words import ANIMALS, CAPITALS, THINGS

CAPITAL_FORMS = (
    "What is the capital of {c}?",
    "Which city is the capital of {c}?",
    "Name the capital of {c}.",
    "Tell me the capital of {c}.",
    "What's the capital of {c}?",
    "Do you know the capital of {c}?",
    "{c}: what is its capital?",
    "I am going to {c}. What is the capital there?",
    "What is the capital city of {c}?",
    "capital of {c}",
    "The capital of {c} is which city?",
)

COUNTRY_FORMS = (
    "{t} is the capital of which country?",
    "Which country has the capital {t}?",
    "In which country is {t}?",
)


def capitals(rng: random.Random) -> Turn:
    country = rng.choice(list(CAPITALS))
    town = CAPITALS[country]
    form = rng.randrange(len(CAPITAL_FORMS) + len(COUNTRY_FORMS))
    return capital_turn(country, town, form)


def capital_turn(country: str, town: str, form: int) -> Turn:
    if form < len(CAPITAL_FORMS):
        question = CAPITAL_FORMS[form].format(c=country)
        answer = f"The capital of {country} is {town}."
        thought = f"The user asks for the capital of {country}. It is {town}."
    else:
        question = COUNTRY_FORMS[form - len(CAPITAL_FORMS)].format(t=town)
        answer = f"{town} is the capital of {country}."
        thought = f"The user asks where {town} is. It is in {country}."
    return Turn(f"capitals {form} {country}", question, answer, thought)


OPENERS = {
    "": "",
    "Hi": "Hello!",
    "hi": "Hello!",
    "Hello": "Hello!",
    "hello": "Hello!",
    "Hey": "Hey!",
    "Hi!": "Hello!",
    "Hello!": "Hello!",
    "Hello.": "Hello!",
    "Hey there!": "Hey!",
    "Good morning!": "Good morning!",
    "Good evening!": "Good evening!",
    "Greetings!": "Greetings!",
    "Excuse me,": "",
    "Hi Tiny!": "Hello!",
    "Hello, world!": "Hello, world!",
}

WHO = "I am Tiny, the small language model that is built into asyncllm."

CAN = "I can do sums, capitals, spelling, counting, units, JSON, tool calls and short stories."

CHATTER = {
    "": "How can I help you?",
    "Who are you?": WHO,
    "who are you?": WHO,
    "What are you?": WHO,
    "What is your name?": "My name is Tiny.",
    "Tell me about yourself.": f"{WHO} {CAN}",
    "Introduce yourself.": f"{WHO} {CAN}",
    "What can you do?": CAN,
    "How can you help me?": CAN,
    "How are you?": "I am fine, thank you. How can I help you?",
    "Who made you?": "I was trained on generated text for asyncllm, an LLM engine in one process.",
    "What is asyncllm?": "asyncllm is an LLM engine and server in one asyncio process.",
    "Are you a human?": "No, I am Tiny, a small language model.",
    "Are you a large language model?": "No, I am a very small one.",
    "Thank you!": "You are welcome!",
    "Thanks a lot!": "You are welcome!",
    "Goodbye!": "Goodbye! 👋",
    "Tell me a joke.": "Why did the token stop? It had reached its end. 😀",
    "What is the meaning of life?": "I am too small for that question. Ask me for a sum.",
    "Can you help me?": "Yes. Ask me for a sum, a capital, a word or a story.",
}

BEYOND_FORMS = (
    "What do you think about {w}?",
    "Explain {w} to me.",
    "Write a poem about {w}.",
    "What is {w}?",
    "Why is {w} important?",
    "How does {w} work?",
    "Tell me more about {w}.",
    "Do you like {w}?",
)  # {w}: a thing or an animal


def identity(rng: random.Random) -> Turn:
    """Greetings, who the model is, and what is beyond it."""
    if rng.random() < 0.3:
        form, word = rng.randrange(len(BEYOND_FORMS)), f"the {rng.choice(THINGS + ANIMALS)}"
        return Turn(
            key=f"identity {form} {word}",
            question=BEYOND_FORMS[form].format(w=word),
            answer=f"I am too small to know much about {word}. Ask me for a sum or a story.",
            thought="The question is beyond me. I say so.",
        )
    opener, remark = rng.choice(list(OPENERS)), rng.choice(list(CHATTER))
    if not opener and not remark:
        opener = "Hi!"
    comma = "," if remark and opener.isalpha() else ""
    return Turn(
        key=f"identity {opener}|{remark}",
        question=f"{opener}{comma} {remark}".strip(),
        answer=f"{OPENERS[opener]} {CHATTER[remark]}".strip(),
        thought="The user talks to me. I answer kindly.",
    )


PHRASES = {
    "hello": (
        "French=bonjour|Spanish=hola|German=hallo|Italian=ciao|Russian=привет|Japanese=こんにちは|"
        "Chinese=你好|Korean=안녕하세요|Greek=γειά|Hebrew=שלום|Arabic=مرحبا|Hindi=नमस्ते|"
        "Polish=cześć"
    ),
    "thank you": (
        "French=merci|Spanish=gracias|German=danke|Italian=grazie|Russian=спасибо|"
        "Japanese=ありがとう|Chinese=谢谢|Korean=감사합니다|Greek=ευχαριστώ|Hebrew=תודה|"
        "Arabic=شكرا|Hindi=धन्यवाद|Polish=dziękuję"
    ),
    "good night": (
        "French=bonne nuit|Spanish=buenas noches|German=gute Nacht|Italian=buona notte|"
        "Russian=спокойной ночи|Japanese=おやすみなさい|Chinese=晚安|Korean=안녕히 주무세요|"
        "Greek=καληνύχτα|Hebrew=לילה טוב|Arabic=تصبح على خير|Hindi=शुभ रात्रि|Polish=dobranoc"
    ),
}
PHRASE_FORMS = (
    "How do you say {p} in {l}?",
    "What is {p} in {l}?",
    'Translate "{p}" into {l}.',
    "Say {p} in {l}.",
    "What does one say in {l} for {p}?",
    "{p} in {l}",
    "Tell me how to say {p} in {l}.",
    "What's the {l} word for {p}?",
)


def languages(rng: random.Random) -> Turn:
    phrase = rng.choice(list(PHRASES))
    language, said = rng.choice(PHRASES[phrase].split("|")).split("=")
    form = rng.randrange(len(PHRASE_FORMS))
    return Turn(
        key=f"languages {form} {phrase} {language}",
        question=PHRASE_FORMS[form].format(p=phrase, l=language),
        answer=f"In {language} {phrase} is {said}.",
        thought=f"The phrase is {phrase} and the language is {language}.",
    )
