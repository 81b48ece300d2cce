"""Requests for lists: three fruits, five animals with numbers, one colour."""

from __future__ import annotations

from random import Random

from models.corpus.numbers import spell_number
from models.corpus.patterns import Exchange, expand, read_lines


def read_kinds() -> tuple[tuple[str, str, tuple[str, ...]], ...]:
    """Return (singular, plural, members) for each kind of thing that can be listed."""
    kinds_of_things = []
    for line in read_lines("lists.txt"):
        head, _, tail = line.partition(":")
        singular, plural = head.split("|")
        kinds_of_things.append(
            (singular, plural, tuple(member.strip() for member in tail.split(",")))
        )
    return tuple(kinds_of_things)


KINDS = read_kinds()


def join_members(members: tuple[str, ...]) -> str:
    """Return the members as 'a, b and c'."""
    if len(members) == 1:
        return members[0]
    return ", ".join(members[:-1]) + " and " + members[-1]


def list_question(rng: Random) -> Exchange:
    """Ask for a number of things of a kind. The answer has the first members, so that it is stable."""
    singular, plural, members = rng.choice(KINDS)
    size = rng.choice((1, 2, 2, 3, 3, 3, 3, 4, 5, 5, 6, 7, 8, 10))
    size = min(size, len(members))
    picked = members[:size]
    if size == 1:
        article = "an" if singular[0] in "aeiou" else "a"
        request = expand(f"[Name|Tell me|Give me|Say|Pick] [{article}|one] {singular}", rng)
        return Exchange(request, f"Here is one {singular}: {picked[0]}.")
    count = rng.choice((spell_number(size), spell_number(size), str(size)))
    verb = "[Name|List|Give me|Tell me|Say|Can you name|What are|Write|Give me a list of|Name me]"
    request = expand(f"{verb} {count} {plural}", rng)
    if rng.random() < 0.12:
        tail = expand("[as a numbered list|in a numbered list|as a list with numbers]", rng)
        rows = "\n".join(f"{number}. {member}" for number, member in enumerate(picked, 1))
        return Exchange(f"{request} {tail}", rows)
    if rng.random() < 0.08:
        tail = expand("[as bullet points|in bullet points|as a bullet list]", rng)
        return Exchange(f"{request} {tail}", "\n".join(f"- {member}" for member in picked))
    return Exchange(request, f"Here are {spell_number(size)} {plural}: {join_members(picked)}.")


def some_question(rng: Random) -> Exchange:
    """Ask for 'some' things without a number. The answer has three."""
    _, plural, members = rng.choice(KINDS)
    request = expand(f"[Name|List|Give me|Tell me|What are] [some|a few|some nice] {plural}", rng)
    size = min(3, len(members))
    return Exchange(
        request, f"Here are {spell_number(size)} {plural}: {join_members(members[:size])}."
    )
