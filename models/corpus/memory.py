"""Dialogues whose later turns depend on the earlier turns: names, favourites and follow-ups."""

from __future__ import annotations

from random import Random

from models.corpus.copying import NAMES
from models.corpus.lists import KINDS, join_members
from models.corpus.patterns import DATA, Exchange, expand, read_topic

_CAPITALS = read_topic(DATA / "capitals.txt").rows
_OPPOSITES = read_topic(DATA / "words.txt").rows
_FAVOURITES = ("colour", "animal", "fruit", "city", "food", "sport", "drink", "flower")


def name_dialogue(rng: Random) -> list[Exchange]:
    """Return a dialogue in which the user gives a name and asks for it later."""
    name = rng.choice(NAMES)
    statement = expand(
        "[My name is|I am|I'm|Hello, my name is|Hi, I am|Call me|Hi! My name is]", rng
    )
    question = expand(
        "[What is my name|Do you know my name|What's my name|Who am I|Say my name]", rng
    )
    return [
        Exchange(f"{statement} {name}", f"Nice to meet you, {name}! How can I help you?"),
        Exchange(question, f"Your name is {name}."),
    ]


def favourite_dialogue(rng: Random) -> list[Exchange]:
    """Return a dialogue in which the user names a favourite and asks for it later."""
    kind = rng.choice(_FAVOURITES)
    members = next(members for singular, _, members in KINDS if singular == kind)
    value = rng.choice(members)
    spelled = rng.choice(("favourite", "favorite"))
    return [
        Exchange(
            f"My {spelled} {kind} is {value}", f"{value[0].upper()}{value[1:]} is a fine choice!"
        ),
        Exchange(f"What is my {spelled} {kind}", f"Your favourite {kind} is {value}."),
    ]


def capital_dialogue(rng: Random) -> list[Exchange]:
    """Return questions for capitals with elliptic follow-ups."""
    first, *rest = rng.sample(_CAPITALS, rng.randint(2, 4))
    turns = [_capital(f"What is the capital of {first['country']}", first)]
    follow_up = (
        "[And of {country}|And {country}|What about {country}|And what about {country}|{country}]"
    )
    turns += [_capital(expand(follow_up, rng, row), row) for row in rest]
    return turns


def opposite_dialogue(rng: Random) -> list[Exchange]:
    """Return questions for opposites with elliptic follow-ups."""
    first, *rest = rng.sample(_OPPOSITES, rng.randint(2, 3))
    turns = [_opposite(f"What is the opposite of {first['one']}", first)]
    turns += [
        _opposite(expand("[And of {one}|And {one}|What about {one}]", rng, row), row)
        for row in rest
    ]
    return turns


def more_dialogue(rng: Random) -> list[Exchange]:
    """Return a list, then more of the same kind or a question about the list."""
    _, plural, members = rng.choice([kind for kind in KINDS if len(kind[2]) >= 7])
    request = expand("[Name|List|Give me|Tell me] three", rng)
    more = expand("[Three more|Give me three more|More|Name three more|And three more]", rng)
    turns = [
        Exchange(f"{request} {plural}", f"Here are three {plural}: {join_members(members[:3])}."),
        Exchange(more, f"Here are three more: {join_members(members[3:6])}."),
    ]
    if rng.random() < 0.5:
        turns[1] = Exchange("Which was the first one", f"The first one was {members[0]}.")
    return turns


def sum_dialogue(rng: Random) -> list[Exchange]:
    """Return a sum, then an operation on its result."""
    a, b, c = rng.randint(1, 20), rng.randint(1, 20), rng.randint(1, 10)
    more = expand("[And plus|Plus|Now add|Add]", rng)
    return [
        Exchange(f"What is {a} + {b}", f"{a} + {b} = {a + b}"),
        Exchange(f"{more} {c}", f"{a + b} + {c} = {a + b + c}"),
    ]


def _capital(question: str, row: dict[str, str]) -> Exchange:
    return Exchange(question, f"The capital of {row['country']} is {row['capital']}.")


def _opposite(question: str, row: dict[str, str]) -> Exchange:
    return Exchange(question, f"The opposite of {row['one']} is {row['two']}.")


DIALOGUES = (
    name_dialogue, name_dialogue, favourite_dialogue, capital_dialogue, opposite_dialogue,
    more_dialogue, sum_dialogue,
)  # fmt: skip
