"""System prompts and their effect on the answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from models.corpus.copying import NAMES, draw_phrase
from models.corpus.patterns import Exchange, capitalise, expand, read_paragraphs

_BACKGROUND = read_paragraphs("prose.txt")


@dataclass(frozen=True, slots=True)
class SystemRule:
    """System prompt, its effect on a reply, and an optional exchange that it adds."""

    prompt: str
    apply: Callable[[str], str]
    extra: Exchange | None = None


def first_sentence(text: str) -> str:
    """Return the text up to its first full stop, exclamation mark or question mark."""
    line = text.split("\n", maxsplit=1)[0]
    ends = [line.find(mark) for mark in (". ", "! ", "? ") if mark in line]
    return line[: min(ends) + 1] if ends else line


def plain_rule(rng: Random) -> SystemRule:
    """Return a usual system prompt without an effect."""
    prompt = expand(
        "[You are a helpful assistant.|You are a helpful assistant|You are a friendly assistant."
        "|You are Argosy Mini, a small and helpful model.|Answer the questions of the user."
        "|You are a helpful, honest and friendly assistant.|Be helpful.|You are an AI assistant."
        "|You are a chat assistant. Be polite and clear.|You are a helpful AI assistant.]",
        rng,
    )
    if rng.random() < 0.25:
        prompt += " " + rng.choice(_BACKGROUND)
    return SystemRule(prompt, str)


def short_rule(rng: Random) -> SystemRule:
    """Return a rule that keeps only the first sentence."""
    prompt = expand(
        "[Be brief.|Answer in one sentence.|Keep your answers short.|Be concise."
        "|Answer briefly.|You are a concise assistant.|Reply in one short sentence.]",
        rng,
    )
    return SystemRule(prompt, first_sentence)


def upper_rule(rng: Random) -> SystemRule:
    """Return a rule that writes answers in upper case."""
    prompt = expand(
        "[Answer in capital letters.|Always answer in upper case.|Use only capital letters."
        "|Reply in uppercase.|Write everything in upper case.]",
        rng,
    )
    return SystemRule(prompt, lambda reply: first_sentence(reply).upper())


def lower_rule(rng: Random) -> SystemRule:
    """Return a rule that writes answers in lower case."""
    prompt = expand("[Answer in lower case.|Use only small letters.|Reply in lowercase.]", rng)
    return SystemRule(prompt, str.lower)


def ending_rule(rng: Random) -> SystemRule:
    """Return a rule that ends every answer with given words."""
    words = capitalise(draw_phrase(rng).rstrip(".!?")) + rng.choice((".", "!"))
    lead = expand("[Always end|End every answer|End each answer|Finish every answer|End] with", rng)
    return SystemRule(f"{lead}{rng.choice((':', ''))} {words}", lambda reply: f"{reply} {words}")


def opening_rule(rng: Random) -> SystemRule:
    """Return a rule that starts every answer with given words."""
    words = capitalise(draw_phrase(rng).rstrip(".!?")) + rng.choice((".", "!"))
    lead = expand(
        "[Always start|Start every answer|Begin each answer|Begin every answer] with", rng
    )
    return SystemRule(f"{lead}{rng.choice((':', ''))} {words}", lambda reply: f"{words} {reply}")


def pirate_rule(rng: Random) -> SystemRule:
    """Return a rule that adds words of a pirate before and after every answer."""
    prompt = expand(
        "[You are a pirate.|Talk like a pirate.|Speak like a pirate|You are a friendly pirate.]",
        rng,
    )
    extra = Exchange("Who are you", "Arr! I am a pirate of the seven seas, matey!")
    return SystemRule(prompt, lambda reply: f"Arr! {reply} Ahoy, matey!", extra)


def name_rule(rng: Random) -> SystemRule:
    """Return a rule that gives the assistant a name."""
    name = rng.choice(NAMES)
    job = expand(
        "[helpful assistant|friendly robot|teacher|cook|librarian|guide|shop assistant]", rng
    )
    form = rng.randrange(3)
    prompt = (
        f"Your name is {name}.",
        f"You are {name}, a {job}.",
        f"You are a {job} named {name}.",
    )
    tail = "." if form == 0 else f", a {job}."
    question = expand("[What is your name|Who are you|What's your name|Tell me your name]", rng)
    reply = f"My name is {name}." if "name" in question else f"I am {name}{tail}"
    return SystemRule(prompt[form], str, Exchange(question, reply))


RULES = (
    plain_rule, plain_rule, plain_rule, plain_rule, short_rule, upper_rule, lower_rule,
    ending_rule, opening_rule, pirate_rule, name_rule, name_rule,
)  # fmt: skip


def draw_rule(rng: Random) -> SystemRule:
    """Return a random system prompt with its effect."""
    return rng.choice(RULES)(rng)
