"""How people type: cases, missing punctuation, courtesy and small slips."""

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
    """Add the final mark that fits, or often none, unless the text already has one."""
    if text[-1] in "?!.:\"'" or rng.random() < 0.4:
        return text
    first = text.split(maxsplit=1)[0].lower().strip(",")
    return text + ("?" if first in _QUESTION_WORDS else rng.choice((".", ".", "!")))


def courtesy(text: str, rng: Random) -> str:
    """Sometimes turn a command into a polite request or add a word of greeting."""
    draw = rng.random()
    words = text.split()
    command = words[0].lower() in _COMMANDS
    if command and draw < 0.16:
        asking = rng.choice(_ASKING).format(text[:1].lower() + text[1:])
        return capitalise(asking)
    if len(words) > 2 and 0.16 <= draw < 0.20:
        return rng.choice(("Hi, ", "Hello! ", "Hey, ", "Ok, ", "Please, ")) + text
    if command and 0.20 <= draw < 0.26:
        return text.rstrip(".?!") + ", please"
    return text


def slip(text: str, rng: Random) -> str:
    """Swap, drop or double one letter inside a word."""
    if len(text) < 6:
        return text
    at = rng.randrange(1, len(text) - 2)
    if not text[at : at + 2].isalpha():
        return text
    swapped = text[:at] + text[at + 1] + text[at] + text[at + 2 :]
    dropped = text[:at] + text[at + 1 :]
    doubled = text[:at] + text[at] + text[at:]
    return rng.choice((swapped, dropped, doubled))


def vary(text: str, rng: Random) -> str:
    """Return the text as one of many people would type it."""
    text = punctuate(courtesy(text, rng), rng)
    draw = rng.random()
    if draw < 0.22:
        text = text.lower()
    elif draw < 0.24:
        text = text.upper()
    if rng.random() < 0.03:
        text = slip(text, rng)
    return text
