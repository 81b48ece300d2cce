"""Whole conversations and plain documents, composed from topics, dialogues and system prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from models.corpus import copying, lists, numbers, stories, structured, unknown
from models.corpus.memory import DIALOGUES
from models.corpus.noise import vary
from models.corpus.patterns import Exchange, read_paragraphs, topics
from models.corpus.stories import HEROES, story
from models.corpus.systems import SystemRule, draw_rule

TOPICS = topics()
PROSE = read_paragraphs("prose.txt")
Maker = Callable[[Random], Exchange]
MAKERS: tuple[tuple[Maker, int], ...] = (
    *((topic.draw, topic.weight) for topic in TOPICS),
    (numbers.sum_question, 24),
    (numbers.count_question, 6),
    (numbers.compare_question, 3),
    (lists.list_question, 8),
    (lists.some_question, 2),
    (copying.say_question, 10),
    (copying.repeat_question, 2),
    (copying.summary_question, 2),
    (copying.spell_question, 4),
    (structured.json_question, 6),
    (structured.plain_json_question, 2),
    (structured.json_list_question, 2),
    (stories.story_question, 3),
    (unknown.unknown_question, 5),
)
_MAKERS = tuple(maker for maker, _ in MAKERS)
_WEIGHTS = tuple(weight for _, weight in MAKERS)


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation; role is 'system', 'user' or 'assistant'."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Document:
    """A conversation, or plain prose when `messages` is empty."""

    messages: tuple[Message, ...] = ()
    prose: str = ""


def draw_exchanges(rng: Random) -> list[Exchange]:
    """Return the exchanges of one conversation, mostly one to three."""
    draw = rng.random()
    if draw < 0.09:
        return rng.choice(DIALOGUES)(rng)
    if draw < 0.16:  # a drill: sums are short, and need many examples
        return [numbers.sum_question(rng) for _ in range(rng.randint(3, 8))]
    size = rng.choices((1, 2, 3, 4, 6), (62, 18, 12, 6, 2))[0]
    chosen = [maker(rng) for maker in rng.choices(_MAKERS, _WEIGHTS, k=size)]
    if size > 1 and rng.random() < 0.2:
        dialogue = rng.choice(DIALOGUES)(rng)
        at = rng.randrange(len(chosen))
        chosen[at:at] = dialogue
    return chosen


def conversation(rng: Random) -> Document:
    """Return one conversation, with a system prompt in one of five."""
    exchanges = draw_exchanges(rng)
    rule = draw_rule(rng) if rng.random() < 0.2 else None
    if rule and rule.extra:
        at = rng.randrange(len(exchanges) + 1)
        exchanges.insert(at, rule.extra)
        del exchanges[2:]
    messages = [Message("system", rule.prompt)] if rule else []
    for exchange in exchanges:
        asked = exchange.user if exchange.exact else vary(exchange.user, rng)
        messages.append(Message("user", asked))
        messages.append(Message("assistant", _reply(exchange, rule)))
    return Document(messages=tuple(messages))


def _reply(exchange: Exchange, rule: SystemRule | None) -> str:
    if rule is None or exchange is rule.extra:
        return exchange.reply
    return rule.apply(exchange.reply)


def plain(rng: Random) -> Document:
    """Return plain prose: a story, one paragraph, or two of them."""
    draw = rng.random()
    if draw < 0.45:
        return Document(prose=story(rng, rng.choice(HEROES)))
    if draw < 0.8:
        return Document(prose=rng.choice(PROSE))
    return Document(prose="\n\n".join(rng.sample(PROSE, 2)))


def documents(seed: int) -> Iterator[Document]:
    """Yield an endless, seeded stream of documents: one in twenty is plain prose."""
    rng = Random(seed)
    while True:
        yield plain(rng) if rng.random() < 0.05 else conversation(rng)
