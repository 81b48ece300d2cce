"""Long conversations: many tools, long instructions with facts to retrieve, and many turns."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from models.corpus.agents import draw_agent_document
from models.corpus.copying import NAMES
from models.corpus.documents import Document, Message
from models.corpus.noise import vary_typing
from models.corpus.patterns import Exchange, capitalise, read_paragraphs
from models.corpus.stories import HEROES, draw_story
from models.corpus.values import VALUES, draw_word

_PARAGRAPHS = read_paragraphs("prose.txt")
_FACTS = (
    ("The code of {0} is {1}.", "What is the code of {0}", "code"),
    ("The secret word of {0} is {1}.", "What is the secret word of {0}", "word"),
    ("The number of {0} is {1}.", "What is the number of {0}", "amount"),
    ("{0} lives in {1}.", "Where does {0} live", "city"),
    ("The email of {0} is {1}.", "What is the email of {0}", "email"),
    ("The meeting of {0} is on {1}.", "When is the meeting of {0}", "date"),
)
_CHARACTERS_PER_TOKEN = 3.4


def draw_facts(rng: Random, count: int) -> list[tuple[str, str, str]]:
    """Return facts about different people, as (statement, question, answer)."""
    drawn = []
    for name in rng.sample(NAMES, min(count, len(NAMES))):
        statement, question, kind = rng.choice(_FACTS)
        subject = name if rng.random() < 0.7 else capitalise(draw_word(rng))
        fact = statement.format(subject, VALUES[kind](rng).json)
        drawn.append((fact, question.format(subject), fact))
    return drawn


def draw_filler(rng: Random) -> str:
    """Return a paragraph that has nothing to do with the facts."""
    return (
        rng.choice(_PARAGRAPHS).replace("\n", " ")
        if rng.random() < 0.7
        else draw_story(rng, rng.choice(HEROES))
    )


def draw_retrieval(rng: Random, tokens: int) -> Document:
    """Return a long text with facts, and questions for some of them."""
    facts = draw_facts(rng, rng.randint(3, 10))
    size = (tokens - 60 * len(facts)) * _CHARACTERS_PER_TOKEN
    parts: list[str] = []
    while sum(map(len, parts)) < size:
        parts.append(draw_filler(rng))
    for fact, _, _ in facts:
        parts.insert(rng.randrange(len(parts) + 1), fact)
    text = rng.choice(("\n\n", "\n", " ")).join(parts)
    in_system = rng.random() < 0.5
    messages = [Message("system", text)] if in_system else []
    for index, (_, question, answer) in enumerate(rng.sample(facts, len(facts))):
        asked = question if question[-1] in "?." else question + rng.choice(("?", "", "?"))
        if index == 0 and not in_system:
            asked = f"{text}\n\n{asked}"
        messages += [Message("user", asked), Message("assistant", answer)]
    return Document(tuple(messages))


def draw_long_chat(rng: Random, tokens: int, chat: Callable[[Random], Exchange]) -> Document:
    """Return a conversation of many turns, that starts with facts and ends with questions for them."""
    facts = draw_facts(rng, 3)
    messages: list[Message] = []
    for fact, _, _ in facts:
        messages += [Message("user", fact), Message("assistant", "I will remember that.")]
    size = 0
    while size < tokens * _CHARACTERS_PER_TOKEN:
        exchange = chat(rng)
        asked = exchange.user if exchange.exact else vary_typing(exchange.user, rng)
        messages += [Message("user", asked), Message("assistant", exchange.reply)]
        size += len(asked) + len(exchange.reply) + 20
    for _, question, answer in facts:
        messages += [Message("user", question + "?"), Message("assistant", answer)]
    return Document(tuple(messages))


def draw_long_document(rng: Random, tokens: int, chat: Callable[[Random], Exchange]) -> Document:
    """Return a document of about as many tokens."""
    draw = rng.random()
    if draw < 0.6:
        return draw_agent_document(
            rng, max(3, int(tokens * 0.8 / 150)), max(4, tokens // 500), chat
        )
    if draw < 0.88:
        return draw_retrieval(rng, tokens)
    return draw_long_chat(rng, tokens - 200, chat)
