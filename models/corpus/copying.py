"""Answers that repeat or change the user's words: say, repeat, spell, change case."""

from __future__ import annotations

from random import Random

from models.corpus.lists import KINDS
from models.corpus.numbers import spell_number
from models.corpus.patterns import Exchange, capitalise, expand, read_lines, read_paragraphs

NAMES = read_lines("names.txt")
_PARAGRAPHS = read_paragraphs("prose.txt")
_SENTENCES = tuple(
    sentence.strip()
    for paragraph in _PARAGRAPHS
    for sentence in paragraph.replace("\n", " ").split(". ")
    if len(sentence.split()) < 12
)
_SHORT = (
    "this is a test", "hello", "hello world", "hi", "yes", "no", "I love you", "good morning",
    "this is fine", "it works", "we are ready", "all is well", "thank you", "cheese", "abc",
    "one two three", "goodbye", "happy birthday", "the sky is blue", "cats are great", "ok",
    "I am a robot", "Argosy", "Argosy is great", "ping", "pong", "ready", "done", "test",
)  # fmt: skip
_WORDS = (
    *dict.fromkeys(member for _, _, members in KINDS for member in members if member.isalpha()),
    "hello", "world", "argosy", "test", "friend", "house", "school", "water", "table", "happy",
)  # fmt: skip
_SPELLED = tuple(word.lower() for word in _WORDS if len(word) <= 5)


def draw_phrase(rng: Random) -> str:
    """Return a text to copy: a set phrase, a sentence, or a few random words."""
    draw = rng.random()
    if draw < 0.4:
        return rng.choice(_SHORT)
    if draw < 0.6:
        return rng.choice(_SENTENCES).rstrip(".")
    return " ".join(rng.choice(_WORDS) for _ in range(rng.randint(1, 5)))


def say_question(rng: Random) -> Exchange:
    """Ask to say a phrase word for word."""
    text = draw_phrase(rng)
    text = rng.choice((text, text, text.lower(), capitalise(text)))
    verb = "[Say|Say|Repeat|Please say|Say the words|Write|Echo|Print|Can you say]"
    verb = rng.choice((verb, "[Repeat after me|Say this|Repeat this|Say exactly|Say only]:"))
    request = expand(verb, rng)
    request = rng.choice((request, request, request.lower()))
    if rng.random() < 0.3:
        return Exchange(f'{request} "{text}"', text, exact=True)
    mark = rng.choice(("", "", "!", "."))
    return Exchange(f"{request} {text}{mark}", f"{text}{mark}", exact=True)


def repeat_question(rng: Random) -> Exchange:
    """Ask to say a word several times."""
    word, times = rng.choice((*_WORDS, "hello", "hello", "test")), rng.randint(2, 10)
    count = spell_number(times) if rng.random() < 0.5 else str(times)
    request = expand("[Say|Repeat|Write|Repeat the word|Say the word|Print]", rng)
    return Exchange(f"{request} {word} {count} times", " ".join([word] * times))


def summary_question(rng: Random) -> Exchange:
    """Give a text and ask for a summary. The answer is the first sentence."""
    text = rng.choice(_PARAGRAPHS).replace("\n", " ")
    summary = text.split(". ")[0].rstrip(".") + "."
    request = expand("[Summarise|Summarize|Sum up|Shorten] [this|this text|the text|it]", rng)
    question = rng.choice((f"{request}: {text}", f"{request}:\n\n{text}", f"{text}\n\n{request}."))
    return Exchange(question, summary, exact=True)


def spell_question(rng: Random) -> Exchange:
    """Ask to spell a word, count its letters, name its first or last letter, or change its case."""
    word = rng.choice(_SPELLED)
    letters = word.upper()
    draw = rng.randrange(10)
    if draw < 5:
        request = expand("[Spell|How do you spell|Spell the word|How is it spelled:]", rng)
        return Exchange(f"{request} {word}", "-".join(letters))
    if draw == 5:
        request = expand("[How many letters are in|Count the letters in|Number of letters in]", rng)
        return Exchange(f"{request} {word}", f"{'-'.join(letters)}: {len(letters)} letters.")
    if draw == 6:
        return Exchange(f"What is the first letter of {word}", f"The first letter is {letters[0]}.")
    if draw == 7:
        return Exchange(f"What is the last letter of {word}", f"The last letter is {letters[-1]}.")
    request = expand("[Write|Say|Put|Give me]", rng)
    tail = expand("in [upper case|capital letters|capitals|uppercase]", rng)
    return Exchange(f"{request} {word} {tail}", letters)
