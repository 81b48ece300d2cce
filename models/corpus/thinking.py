"""Questions with a short reasoning before the answer."""

from __future__ import annotations

from random import Random

from models.corpus.copying import NAMES
from models.corpus.documents import Document, Message
from models.corpus.lists import KINDS
from models.corpus.noise import vary_typing
from models.corpus.patterns import Exchange, expand

_THINGS = ("apples", "books", "coins", "eggs", "pens", "cards", "stones", "cakes", "balls")


def add_in_steps(a: int, b: int) -> str:
    """Return the steps of a sum, ones and tens apart."""
    tens, ones = b - b % 10, b % 10
    if not tens or not ones:
        return f"{a} + {b} = {a + b}"
    return f"{a} + {tens} = {a + tens}, {a + tens} + {ones} = {a + b}"


def subtract_in_steps(a: int, b: int) -> str:
    """Return the steps of a difference, ones and tens apart."""
    tens, ones = b - b % 10, b % 10
    if not tens or not ones:
        return f"{a} - {b} = {a - b}"
    return f"{a} - {tens} = {a - tens}, {a - tens} - {ones} = {a - b}"


def multiply_in_steps(a: int, b: int) -> str:
    """Return the steps of a product, ones and tens of the first number apart."""
    tens, ones = a - a % 10, a % 10
    if not tens or not ones:
        return f"{a} * {b} = {a * b}"
    return (
        f"{tens} * {b} = {tens * b}, {ones} * {b} = {ones * b}, {tens * b} + {ones * b} = {a * b}"
    )


def think_sum(rng: Random) -> tuple[str, str, str]:
    """Return a sum with its steps, as (question, reasoning, answer)."""
    lead = expand("[What is|What's|Calculate|How much is|Compute|Tell me|]", rng)
    sign = rng.choice("++--*")
    if sign == "*":
        a, b = rng.randint(2, 20), rng.randint(2, 9)
        steps, result = multiply_in_steps(a, b), a * b
    else:
        a, b = sorted((rng.randint(1, 99), rng.randint(1, 99)), reverse=True)
        if sign == "+" and rng.random() < 0.5:
            a, b = b, a
        steps, result = (
            (add_in_steps(a, b), a + b) if sign == "+" else (subtract_in_steps(a, b), a - b)
        )
    word = {"+": "plus", "-": "minus", "*": "times"}[sign]
    shown = rng.choice((sign, sign, word, "x" if sign == "*" else sign))
    gap = " " if shown == word else rng.choice(("", " ", " "))
    return f"{lead} {a}{gap}{shown}{gap}{b}".strip(), f"{steps}.", f"{a} {sign} {b} = {result}"


def think_long_sum(rng: Random) -> tuple[str, str, str]:
    """Return a sum of three or four numbers."""
    numbers = [rng.randint(1, 40) for _ in range(rng.choice((3, 3, 4)))]
    total, steps = numbers[0], []
    for number in numbers[1:]:
        steps.append(f"{total} + {number} = {total + number}")
        total += number
    formula = " + ".join(map(str, numbers))
    lead = expand("[What is|Add up|Calculate|How much is]", rng)
    return f"{lead} {formula}", f"{', '.join(steps)}.", f"{formula} = {total}"


def think_story(rng: Random) -> tuple[str, str, str]:
    """Return a small word problem."""
    name, other = rng.sample(NAMES, 2)
    thing = rng.choice(_THINGS)
    a, b = rng.randint(3, 40), rng.randint(1, 20)
    if rng.random() < 0.5:
        fact = expand(f"[buys|finds|gets|wins] {b} more", rng)
        if rng.random() < 0.3:
            fact = f"{other} gives {name} {b} more"
        steps, total = add_in_steps(a, b), a + b
    else:
        b = min(a, b)
        fact = expand(f"[loses|eats|sells|gives away] {b}", rng)
        steps, total = subtract_in_steps(a, b), a - b
    question = f"{name} has {a} {thing} and {fact}. How many {thing} does {name} have"
    question += rng.choice((" now", "", " in the end"))
    return question, f"{name} starts with {a}. {steps}.", f"{name} has {total} {thing}."


def think_compare(rng: Random) -> tuple[str, str, str]:
    """Return a comparison of two or three numbers."""
    numbers = rng.sample(range(1, 200), rng.choice((2, 2, 3)))
    largest = rng.random() < 0.6
    word = rng.choice(("larger", "bigger", "greater")) if largest else "smaller"
    best = max(numbers) if largest else min(numbers)
    listed = ", ".join(map(str, numbers[:-1])) + f" or {numbers[-1]}"
    ordered = " < ".join(map(str, sorted(numbers)))
    lead = expand("[Which is|What is|Which number is]", rng)
    return f"{lead} {word}, {listed}", f"{ordered}.", f"{best} is {word}."


def think_letters(rng: Random) -> tuple[str, str, str]:
    """Return a question about the number of letters of a word."""
    word = rng.choice(
        [m for _, _, members in KINDS for m in members if m.isalpha() and len(m) < 9]
    ).lower()
    listed = ", ".join(f"{letter} {number}" for number, letter in enumerate(word.upper(), 1))
    request = expand("[How many letters are in|How many letters does|Count the letters in]", rng)
    tail = " have" if request.endswith("does") else ""
    return f"{request} {word}{tail}", f"{listed}.", f"{word} has {len(word)} letters."


PUZZLES = (
    think_sum,
    think_sum,
    think_sum,
    think_long_sum,
    think_story,
    think_story,
    think_compare,
    think_letters,
)


def think_plain(question: str) -> str:
    """Return the reasoning before an answer that needs no steps."""
    if len(question) > 90 or "\n" in question:
        return "I know this. I answer directly."
    return f"The user says: {question.rstrip('?.! ')}. I answer directly."


def draw_thinking(rng: Random, exchange: Exchange) -> Document:
    """Return a conversation whose last answer has a reasoning: a puzzle, or the given exchange."""
    messages: list[Message] = []
    if rng.random() < 0.2:
        question, _, answer = rng.choice(PUZZLES)(rng)
        messages = [Message("user", vary_typing(question, rng)), Message("assistant", answer)]
    if rng.random() < 0.7:
        question, reasoning, answer = rng.choice(PUZZLES)(rng)
    else:
        asked = exchange.user if exchange.exact else vary_typing(exchange.user, rng)
        messages += [
            Message("user", asked),
            Message("assistant", exchange.reply, (), think_plain(asked)),
        ]
        return Document(tuple(messages))
    asked = vary_typing(question, rng)
    messages += [Message("user", asked), Message("assistant", answer, (), reasoning)]
    return Document(tuple(messages))
