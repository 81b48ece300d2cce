"""Variations in how users type: case, missing punctuation, courtesy and typing errors."""

from __future__ import annotations

from random import Random

from models.corpus.patterns import capitalise

_QUESTION_WORDS = {
    "what", "who", "why", "how", "where", "when", "which", "is", "are", "do", "does", "can",
    "could", "what's", "how's", "will", "did", "at", "in", "on", "may", "so",
}  # fmt: skip
_COMMANDS = {
    "tell", "give", "list", "name", "write", "say", "explain", "describe", "translate", "spell",
    "count", "repeat", "make", "show", "define", "add", "calculate", "compute", "compose", "create",
    "return", "introduce", "teach", "recite", "generate", "pick", "choose", "flip", "roll", "sing",
}  # fmt: skip
_ASKING = ("please {}", "can you {}", "could you {}", "could you please {}", "i want you to {}")


def punctuate(text: str, rng: Random) -> str:
    """Add a fitting final mark in most cases, unless the text already has one."""
    if text[-1] in "?!.:\"'" or rng.random() < 0.4:
        return text
    first = text.split(maxsplit=1)[0].lower().strip(",")
    return text + ("?" if first in _QUESTION_WORDS else rng.choice((".", ".", "!")))


def add_courtesy(text: str, rng: Random) -> str:
    """Sometimes turn a command into a polite request, or add a greeting."""
    draw = rng.random()
    words = text.split()
    is_command = words[0].lower() in _COMMANDS
    if is_command and draw < 0.16:
        request = rng.choice(_ASKING).format(text[:1].lower() + text[1:])
        return capitalise(request)
    if len(words) > 2 and 0.16 <= draw < 0.20:
        return rng.choice(("Hi, ", "Hello! ", "Hey, ", "Ok, ", "Please, ")) + text
    if is_command and 0.20 <= draw < 0.26:
        return text.rstrip(".?!") + ", please"
    return text


def add_typo(text: str, rng: Random) -> str:
    """Return the text with two letters swapped, or one letter dropped or doubled."""
    if len(text) < 6:
        return text
    index = rng.randrange(1, len(text) - 2)
    if not text[index : index + 2].isalpha():
        return text
    swapped = text[:index] + text[index + 1] + text[index] + text[index + 2 :]
    dropped = text[:index] + text[index + 1 :]
    doubled = text[:index] + text[index] + text[index:]
    return rng.choice((swapped, dropped, doubled))


def vary_typing(text: str, rng: Random) -> str:
    """Return the text in one of many ways of typing it."""
    text = punctuate(add_courtesy(text, rng), rng)
    draw = rng.random()
    if draw < 0.22:
        text = text.lower()
    elif draw < 0.24:
        text = text.upper()
    if rng.random() < 0.03:
        text = add_typo(text, rng)
    return text
