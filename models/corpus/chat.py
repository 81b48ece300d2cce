"""Conversations and plain documents, composed from topics, dialogues and system prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

from models.corpus import copying, lists, numbers, stories, structured, unknown
from models.corpus.agents import draw_agent_document
from models.corpus.documents import Document, Message
from models.corpus.drills import draw_drill
from models.corpus.long_documents import draw_long_document
from models.corpus.memory import DIALOGUES
from models.corpus.noise import vary_typing
from models.corpus.patterns import Exchange, read_paragraphs, read_topics
from models.corpus.schemas import draw_schema_document
from models.corpus.stories import HEROES, draw_story
from models.corpus.systems import SystemRule, draw_rule
from models.corpus.thinking import draw_thinking

TOPICS = read_topics()
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
SHORT_TOKENS = 512
LONG_TOKENS = 1024
_MAKERS = tuple(maker for maker, _ in MAKERS)
_WEIGHTS = tuple(weight for _, weight in MAKERS)


def draw_exchanges(rng: Random) -> list[Exchange]:
    """Return the exchanges of a conversation, usually one to three."""
    draw = rng.random()
    if draw < 0.09:
        return rng.choice(DIALOGUES)(rng)
    if draw < 0.16:  # a drill, because sums are short and need many examples
        return [numbers.sum_question(rng) for _ in range(rng.randint(3, 8))]
    size = rng.choices((1, 2, 3, 4, 6), (62, 18, 12, 6, 2))[0]
    chosen = [maker(rng) for maker in rng.choices(_MAKERS, _WEIGHTS, k=size)]
    if size > 1 and rng.random() < 0.2:
        dialogue = rng.choice(DIALOGUES)(rng)
        index = rng.randrange(len(chosen))
        chosen[index:index] = dialogue
    return chosen


def draw_conversation(rng: Random) -> Document:
    """Return a conversation. A fifth of them have a system prompt."""
    exchanges = draw_exchanges(rng)
    rule = draw_rule(rng) if rng.random() < 0.2 else None
    if rule and rule.extra:
        index = rng.randrange(len(exchanges) + 1)
        exchanges.insert(index, rule.extra)
        del exchanges[2:]
    messages = [Message("system", rule.prompt)] if rule else []
    for exchange in exchanges:
        question = exchange.user if exchange.exact else vary_typing(exchange.user, rng)
        messages.append(Message("user", question))
        messages.append(Message("assistant", _reply(exchange, rule)))
    return Document(messages=tuple(messages))


def _reply(exchange: Exchange, rule: SystemRule | None) -> str:
    if rule is None or exchange is rule.extra:
        return exchange.reply
    return rule.apply(exchange.reply)


def draw_prose(rng: Random) -> Document:
    """Return plain prose: a story, a paragraph or two paragraphs."""
    draw = rng.random()
    if draw < 0.45:
        return Document(prose=draw_story(rng, rng.choice(HEROES)))
    if draw < 0.8:
        return Document(prose=rng.choice(PROSE))
    return Document(prose="\n\n".join(rng.sample(PROSE, 2)))


def draw_chat_exchange(rng: Random) -> Exchange:
    """Return a question of any topic with its answer."""
    (maker,) = rng.choices(_MAKERS, _WEIGHTS)
    return maker(rng)


def draw_document(rng: Random, tokens: int) -> Document:
    """Return a document for a sequence of `tokens` tokens. Short documents fit several times."""
    draw = rng.random()
    if tokens > LONG_TOKENS:
        return draw_long_document(
            rng, rng.randint(tokens // 2, tokens * 9 // 10), draw_chat_exchange
        )
    if draw < 0.33:
        return draw_conversation(rng)
    if draw < 0.35:
        return draw_prose(rng)
    if draw < 0.44:
        return draw_thinking(rng, draw_chat_exchange(rng))
    if draw < 0.58:
        return draw_schema_document(rng, rng.choice((1, 1, 2)))
    if draw < 0.76:
        return draw_drill(rng)
    if tokens <= SHORT_TOKENS:
        count, turns = rng.choice((1, 2, 2, 2, 3)), rng.randint(4, 7)
        return draw_agent_document(rng, count, turns, draw_chat_exchange)
    if draw < 0.80:
        size = rng.randint(tokens // 3, tokens * 9 // 10)
        return draw_long_document(rng, size, draw_chat_exchange)
    count, turns = rng.choice((1, 2, 3, 3, 4, 5)), rng.randint(3, 6)
    return draw_agent_document(rng, count, turns, draw_chat_exchange)


def generate_documents(seed: int, tokens: int = 512) -> Iterator[Document]:
    """Yield an endless, seeded stream of documents for sequences of `tokens` tokens."""
    rng = Random(seed * 100_003 + tokens)
    while True:
        yield draw_document(rng, tokens)
