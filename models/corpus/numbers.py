"""Questions about sums, counting and other properties of numbers."""

from __future__ import annotations

from random import Random

from models.corpus.patterns import Exchange, expand

_ONES = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen",
    "nineteen",
)  # fmt: skip
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def spell_number(number: int) -> str:
    """Return the English words of a number from 0 to 100."""
    if number < 20:
        return _ONES[number]
    if number == 100:
        return "one hundred"
    tens, ones = divmod(number, 10)
    return _TENS[tens - 2] + (f"-{_ONES[ones]}" if ones else "")


def _operands(rng: Random) -> tuple[int, str, int, int]:
    """Return the operands a and b, the sign and the result of an exact sum, as (a, sign, b, result)."""
    sign = rng.choice("++++---***/")
    top = rng.choice((5, 10, 10, 10, 10, 10, 20, 20, 50, 100))
    if sign == "*":
        a, b = rng.randint(0, 10), rng.randint(0, 10)
        return a, sign, b, a * b
    if sign == "/":
        b, result = rng.randint(1, 10), rng.randint(1, 10)
        return b * result, sign, b, result
    a, b = rng.randint(0, top), rng.randint(0, top)
    if sign == "-":
        a, b = max(a, b), min(a, b)
        return a, sign, b, a - b
    return a, sign, b, a + b


def sum_question(rng: Random) -> Exchange:
    """Ask for a sum in digits or in words. The answer is always the whole equation."""
    a, sign, b, result = _operands(rng)
    spoken = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}[sign]
    left, right = str(a), str(b)
    if rng.random() < 0.15 and max(a, b) <= 20:
        left, right = spell_number(a), spell_number(b)
        formula = f"{left} {spoken} {right}"
    elif rng.random() < 0.25:
        formula = f"{left} {spoken} {right}"
    else:
        symbol = rng.choice("x**") if sign == "*" else sign
        gap = rng.choice(("", " ", " "))
        formula = f"{left}{gap}{symbol}{gap}{right}"
    question = expand(
        "[What is|What is|What's|Calculate|How much is|Compute|Tell me|Solve|What does|] ", rng
    )
    tail = " make" if question == "What does" else rng.choice(("", "", "", " =", "?"))
    return Exchange(f"{question} {formula}{tail}".strip(), f"{a} {sign} {b} = {result}")


def count_question(rng: Random) -> Exchange:
    """Ask to count up or down between two small numbers."""
    draw = rng.random()
    if draw < 0.5:
        top = rng.choice((3, 4, 5, 5, 6, 7, 8, 9, 10, 10, 10, 12, 15, 20, 20, 25, 30, 40, 50, 100))
        last_word = spell_number(top) if rng.random() < 0.4 else str(top)
        request = expand(
            "[Count|Count up|Please count|Can you count] [to|from 1 to|from one to] ", rng
        )
        numbers = list(range(1, top + 1))
    elif draw < 0.75:
        start = rng.randint(0, 40)
        top = start + rng.randint(3, 15)
        last_word = str(top)
        request = f"Count from {start} to"
        numbers = list(range(start, top + 1))
    else:
        start = rng.choice((3, 5, 10, 10, 10, 12, 20))
        last_word = spell_number(start) if rng.random() < 0.3 else str(start)
        request = expand("[Count down|Count backwards|Count down slowly] from", rng)
        numbers = list(range(start, 0, -1))
    return Exchange(f"{request.strip()} {last_word}", ", ".join(map(str, numbers)))


def compare_question(rng: Random) -> Exchange:
    """Ask to compare two numbers, for even or odd, for the next number, or for a number in words."""
    a, b = rng.sample(range(100), 2)
    draw = rng.randrange(5)
    if draw == 0:
        request = expand("[Which is|What is|Which number is] [bigger|larger|greater]", rng)
        return Exchange(f"{request}, {a} or {b}", f"{max(a, b)} is larger than {min(a, b)}.")
    if draw == 1:
        request = expand("[Which is|What is|Which number is] smaller", rng)
        return Exchange(f"{request}, {a} or {b}", f"{min(a, b)} is smaller than {max(a, b)}.")
    if draw == 2:
        kind = "odd" if a % 2 else "even"
        return Exchange(f"Is {a} {rng.choice(('even or odd', 'odd or even'))}", f"{a} is {kind}.")
    if draw == 3:
        request = expand("[What|Which number] comes [after|right after]", rng)
        return Exchange(f"{request} {a}", f"{a + 1} comes after {a}.")
    request = expand("[How do you write|Write] ", rng)
    return Exchange(f"{request} {a} in words", f"{a} in words is {spell_number(a)}.")
