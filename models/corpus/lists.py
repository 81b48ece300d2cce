"""Lists on request: three fruits, five animals with numbers, one colour."""

from __future__ import annotations

from random import Random

from models.corpus.numbers import words
from models.corpus.patterns import Exchange, expand, read_lines


def kinds() -> tuple[tuple[str, str, tuple[str, ...]], ...]:
    """Return (one, many, members) for each kind of thing that can be listed."""
    found = []
    for line in read_lines("lists.txt"):
        head, _, tail = line.partition(":")
        one, many = head.split("|")
        found.append((one, many, tuple(member.strip() for member in tail.split(","))))
    return tuple(found)


KINDS = kinds()


def joined(members: tuple[str, ...]) -> str:
    """Return 'a, b and c'."""
    if len(members) == 1:
        return members[0]
    return ", ".join(members[:-1]) + " and " + members[-1]


def list_question(rng: Random) -> Exchange:
    """Ask for N things of a kind; the answer takes the first N, so that it is stable."""
    one, many, members = rng.choice(KINDS)
    size = rng.choice((1, 2, 2, 3, 3, 3, 3, 4, 5, 5, 6, 7, 8, 10))
    size = min(size, len(members))
    picked = members[:size]
    if size == 1:
        article = "an" if one[0] in "aeiou" else "a"
        asked = expand(f"[Name|Tell me|Give me|Say|Pick] [{article}|one] {one}", rng)
        return Exchange(asked, f"Here is one {one}: {picked[0]}.")
    told = rng.choice((words(size), words(size), str(size)))
    verb = "[Name|List|Give me|Tell me|Say|Can you name|What are|Write|Give me a list of|Name me]"
    asked = expand(f"{verb} {told} {many}", rng)
    if rng.random() < 0.12:
        tail = expand("[as a numbered list|in a numbered list|as a list with numbers]", rng)
        rows = "\n".join(f"{at}. {member}" for at, member in enumerate(picked, 1))
        return Exchange(f"{asked} {tail}", rows)
    if rng.random() < 0.08:
        tail = expand("[as bullet points|in bullet points|as a bullet list]", rng)
        return Exchange(f"{asked} {tail}", "\n".join(f"- {member}" for member in picked))
    return Exchange(asked, f"Here are {words(size)} {many}: {joined(picked)}.")


def some_question(rng: Random) -> Exchange:
    """Ask for 'some' things without a number; three are given."""
    _, many, members = rng.choice(KINDS)
    asked = expand(f"[Name|List|Give me|Tell me|What are] [some|a few|some nice] {many}", rng)
    size = min(3, len(members))
    return Exchange(asked, f"Here are {words(size)} {many}: {joined(members[:size])}.")
