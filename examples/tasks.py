"""The task that `rl_loop.py` learns: complete a fact sheet with exactly the name of a country's capital.

    Country: Peru
    Capital:

A small instruction model knows many of these names but rambles, guesses or adds to them, so about a third of its first
answers count. Reinforcement learning teaches it to give the name and nothing else. Sample with `STOP` and `MAX_TOKENS`.

The table holds countries whose capital SmolLM2-135M-Instruct names at least once in sixteen samples: a policy gradient
sharpens what a policy can already say, and a group of samples that are all wrong teaches nothing. Every sixth country
is held out, which shows how much of the gain is a skill rather than memory.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

STOP = ("\n",)
MAX_TOKENS = 6

# fmt: off
CAPITALS = {
    "Afghanistan": "Kabul", "Albania": "Tirana", "Argentina": "Buenos Aires", "Armenia": "Yerevan",
    "Austria": "Vienna", "Bangladesh": "Dhaka", "Belgium": "Brussels", "Bulgaria": "Sofia",
    "Canada": "Ottawa", "Chile": "Santiago", "China": "Beijing", "Colombia": "Bogota",
    "Cuba": "Havana", "Denmark": "Copenhagen", "Ecuador": "Quito", "Egypt": "Cairo",
    "England": "London", "Estonia": "Tallinn", "Ethiopia": "Addis Ababa", "Finland": "Helsinki",
    "France": "Paris", "Germany": "Berlin", "Ghana": "Accra", "Greece": "Athens",
    "Hungary": "Budapest", "Iceland": "Reykjavik", "India": "New Delhi", "Indonesia": "Jakarta",
    "Iran": "Tehran", "Iraq": "Baghdad", "Ireland": "Dublin", "Italy": "Rome",
    "Jamaica": "Kingston", "Japan": "Tokyo", "Kenya": "Nairobi", "Latvia": "Riga",
    "Lithuania": "Vilnius", "Mexico": "Mexico City", "Morocco": "Rabat", "the Netherlands": "Amsterdam",
    "New Zealand": "Wellington", "Nigeria": "Abuja", "North Korea": "Pyongyang", "Norway": "Oslo",
    "Pakistan": "Islamabad", "Peru": "Lima", "the Philippines": "Manila", "Poland": "Warsaw",
    "Portugal": "Lisbon", "Qatar": "Doha", "Romania": "Bucharest", "Russia": "Moscow",
    "Rwanda": "Kigali", "Saudi Arabia": "Riyadh", "Scotland": "Edinburgh", "Senegal": "Dakar",
    "Serbia": "Belgrade", "South Korea": "Seoul", "Spain": "Madrid", "Sweden": "Stockholm",
    "Switzerland": "Bern", "Syria": "Damascus", "Thailand": "Bangkok", "Tunisia": "Tunis",
    "Uganda": "Kampala", "Uruguay": "Montevideo", "Vietnam": "Hanoi", "Zambia": "Lusaka",
}
# fmt: on


@dataclass(frozen=True)
class Question:
    """A prompt, sent to the model as plain text without a chat template, and the only answer that counts."""

    prompt: str
    answer: str


def _question(country: str) -> Question:
    return Question(prompt=f"Country: {country}\nCapital:", answer=CAPITALS[country])


HELD_OUT = tuple(_question(country) for country in list(CAPITALS)[::6])
TRAINING = tuple(question for country in CAPITALS if (question := _question(country)) not in HELD_OUT)


def questions(rng: random.Random) -> Iterator[Question]:
    """Yield the training questions endlessly, each once per pass, in a new order on every pass."""
    while True:
        yield from rng.sample(TRAINING, len(TRAINING))


def reward(completion: str, answer: str) -> float:
    """Return 1.0 if `completion` is `answer`, ignoring outer whitespace and a final full stop; otherwise 0.0."""
    return float(completion.strip().removesuffix(".") == answer)
