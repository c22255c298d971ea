"""Word lists of the generated text, and words that nobody has seen before."""

# ruff: noqa: SIM905  (a string to split is read, and changed, more easily than a list of strings)

from __future__ import annotations

import random

CAPITALS = dict(
    pair.split("=")
    for pair in (
        "France=Paris|Spain=Madrid|Portugal=Lisbon|Italy=Rome|Germany=Berlin|Austria=Vienna|"
        "Belgium=Brussels|Denmark=Copenhagen|Sweden=Stockholm|Norway=Oslo|Finland=Helsinki|"
        "Iceland=Reykjavík|Ireland=Dublin|Poland=Warsaw|Hungary=Budapest|Romania=Bucharest|"
        "Bulgaria=Sofia|Greece=Athens|Turkey=Ankara|Ukraine=Kyiv|Latvia=Riga|Lithuania=Vilnius|"
        "Estonia=Tallinn|Croatia=Zagreb|Serbia=Belgrade|Slovenia=Ljubljana|Slovakia=Bratislava|"
        "Albania=Tirana|Malta=Valletta|Cyprus=Nicosia|Moldova=Chișinău|Georgia=Tbilisi|"
        "Armenia=Yerevan|Japan=Tokyo|China=Beijing|India=New Delhi|Nepal=Kathmandu|"
        "Thailand=Bangkok|Vietnam=Hanoi|Laos=Vientiane|Cambodia=Phnom Penh|Malaysia=Kuala Lumpur|"
        "Indonesia=Jakarta|Mongolia=Ulaanbaatar|Bangladesh=Dhaka|Pakistan=Islamabad|Iran=Tehran|"
        "Iraq=Baghdad|Jordan=Amman|Lebanon=Beirut|Oman=Muscat|Qatar=Doha|Egypt=Cairo|"
        "Libya=Tripoli|Tunisia=Tunis|Algeria=Algiers|Morocco=Rabat|Senegal=Dakar|Ghana=Accra|"
        "Nigeria=Abuja|Cameroon=Yaoundé|Kenya=Nairobi|Uganda=Kampala|Ethiopia=Addis Ababa|"
        "Rwanda=Kigali|Zambia=Lusaka|Zimbabwe=Harare|Angola=Luanda|Namibia=Windhoek|"
        "Madagascar=Antananarivo|Canada=Ottawa|Mexico=Mexico City|Cuba=Havana|Jamaica=Kingston|"
        "Haiti=Port-au-Prince|Guatemala=Guatemala City|Honduras=Tegucigalpa|Nicaragua=Managua|"
        "Costa Rica=San José|Panama=Panama City|Colombia=Bogotá|Venezuela=Caracas|Ecuador=Quito|"
        "Peru=Lima|Chile=Santiago|Argentina=Buenos Aires|Uruguay=Montevideo|Paraguay=Asunción|"
        "Brazil=Brasília|Australia=Canberra|New Zealand=Wellington|Fiji=Suva|Samoa=Apia"
    ).split("|")
)

NAMES = (
    "Ada Alan Alice Amir Anna Ben Bob Carla Chen Clara Dana David Elena Emma Eva Felix Finn Grace "
    "Hana Hugo Ida Ivan Jack Jane Jonas Julia Kai Karl Lara Leo Lily Linus Lucy Maria Max Mia Nina "
    "Noah Nora Olga Omar Oscar Paul Petra Rosa Ruth Sam Sara Sofia Tara Theo Tom Uma Vera Victor "
    "Wanda Yara Yuki Zoe Zara"
).split()

ANIMALS = (
    "fox cat dog owl bear wolf hare mouse frog duck swan goat horse donkey otter beaver badger "
    "squirrel hedgehog deer eagle crow robin penguin whale dolphin seal turtle snail crab octopus "
    "lion tiger elephant giraffe zebra monkey panda koala kangaroo camel lizard snake dragon "
    "butterfly bee ant spider rabbit pig sheep cow hen goose parrot robot"
).split()

COLOURS = "red blue green yellow black white brown orange purple pink grey golden silver".split()

THINGS = (
    "box key lamp book chair table bottle cup plate spoon knife clock coin ring bag hat coat shoe "
    "boat car bike train drum flute kite ball doll rope tent map door window bridge tower garden "
    "candle mirror pencil basket blanket"
).split()

ITEMS = "apples pears plums books coins stamps cards pens shells marbles eggs nuts".split()

MORE_WORDS = (
    "water bread river stone cloud storm winter summer spring autumn morning evening night forest "
    "mountain valley island ocean desert village city street market school teacher doctor farmer "
    "baker painter writer singer king queen prince letter paper number circle square triangle "
    "music picture story dream voice silence shadow light fire smoke snow rain wind leaf flower "
    "tree root branch seed fruit lemon banana cherry peach grape melon carrot potato onion pepper "
    "honey butter cheese sugar coffee dinner breakfast kitchen bedroom ladder hammer engine rocket "
    "planet moon star galaxy computer keyboard network memory program language question answer "
    "friend family brother sister mother father window strawberry library hospital station airport "
    "happy quiet brave clever gentle strong little purple elegant curious famous ancient simple "
    "walk run jump swim sing dance read write think learn teach build break carry follow remember"
).split()

WORDS = sorted({*ANIMALS, *COLOURS, *THINGS, *ITEMS, *MORE_WORDS})

EMOJI = "🦊🐱🐶🦉🐻🐺🐸🦆🐳🐬🐢🐙🦁🐯🐘🌊🌳🌙⭐🔥🍎🍐🍋🍌🎈🎁🚀🚲🎵📚💡🔑❤😀😎🎉"

FOREIGN = (
    "naïve café jalapeño Straße Zürich Škoda привет мир 你好 世界 こんにちは 안녕 γειά שלום".split()
)

ONSETS = "b c d f g h k l m n p r s t v w z br cl dr fl gr pl st tr sh th".split()

RHYMES = "a e i o u an el in or us ar en il on um ai ea ou".split()


def made_up_word(rng: random.Random) -> str:
    """Two to four syllables; some 200,000 words of two."""
    return "".join(rng.choice(ONSETS) + rng.choice(RHYMES) for _ in range(rng.randint(2, 4)))


def an(noun: str) -> str:
    """The noun with its article."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"
