"""Numbers and the language of a prompt, by which rules select a model. They are cheap, and no text is kept."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from typing import Literal, NamedTuple

MAX_READ_CHARS = 4096
"""Characters at the end of the user's message that are read."""
_MIN_LANGUAGE_WORDS = 2
"""Function words of a language that a text needs, unless its script decides."""

Language = Literal[
    "ar", "de", "el", "en", "es", "fr", "he", "hi", "it", "ja", "ko", "nl", "pl", "pt", "ru", "th", "tr", "zh"
]  # fmt: skip
"""Languages that are recognised, by their ISO 639-1 codes."""


class PromptSample(NamedTuple):
    """Part of a prompt that rules read."""

    text: str
    """The end of the user's last message."""
    prompt_tokens: int
    """Estimated tokens of the whole prompt, with its tools."""
    messages: int = 1
    opening: str = ""
    """Beginning of the first message that the user sent, which later turns of a conversation repeat."""
    has_system: bool = False
    """Whether the prompt begins with a message of the system or the developer."""


_WORD = re.compile(r"[^\W\d_]+(?:['\u2019][^\W\d_]+)?")
_NUMBER = re.compile(r"[0-9]+")
_FACT_WORDS = frozenset({"what", "what's", "who", "where", "when", "which", "whose"})
_REASON_WORDS = frozenset({"how", "why", "explain", "describe", "compare", "prove", "derive"})
_TASK_WORDS = frozenset(
    {
        *("write", "create", "make", "generate", "turn", "convert", "translate", "summarize"),
        *("summarise", "list", "rewrite", "draft", "implement", "fix", "refactor", "extract"),
    }
)

FEATURES = (
    *("text_length", "prompt_tokens", "messages", "has_system", "words", "word_length"),
    *("long_words", "capitalised_words", "distinct_words", "digits", "numbers", "longest_number"),
    *("operators", "code_marks", "quotes", "commas", "lines", "questions", "asks_fact"),
    *("asks_reason", "asks_task"),
)
"""Names of the features, in their order."""


def measure_features(sample: PromptSample) -> tuple[float, ...]:
    """Return the features of a prompt, as many as `FEATURES`, in the same order.

    Lengths and counts are logarithms to the base 2, and other features are shares of the words or characters. The first
    word of each sentence says what is asked, so that words within a text have no effect.
    """
    text = sample.text[-MAX_READ_CHARS:]
    words = _WORD.findall(text)
    numbers = _NUMBER.findall(text)
    num_chars, num_words = max(1, len(text)), max(1, len(words))
    firsts = {
        found.group().lower()
        for part in re.split(r"[.!?\n]\s*", text)
        if (found := _WORD.search(part)) is not None
    }
    characters = Counter(text)
    return (
        _log2(len(text)),
        _log2(sample.prompt_tokens),
        _log2(sample.messages),
        float(sample.has_system),
        _log2(len(words)),
        sum(map(len, words)) / num_words,
        sum(len(word) >= 8 for word in words) / num_words,
        sum(word[0].isupper() for word in words[1:]) / num_words,
        len({word.lower() for word in words}) / num_words,
        sum(map(len, numbers)) / num_chars,
        _log2(len(numbers)),
        float(min(12, max(map(len, numbers), default=0))),
        _sum_of(characters, "+-*/=<>^%") / num_chars,
        _sum_of(characters, "{}[]();_`\\|#") / num_chars,
        _log2(_sum_of(characters, "\"'\u201c\u201d\u201e\u00ab\u00bb")),
        _log2(_sum_of(characters, ",;:")),
        _log2(characters["\n"]),
        _log2(characters["?"]),
        float(not firsts.isdisjoint(_FACT_WORDS)),
        float(not firsts.isdisjoint(_REASON_WORDS)),
        float(not firsts.isdisjoint(_TASK_WORDS)),
    )


def _sum_of(characters: Counter[str], which: str) -> int:
    return sum(characters[character] for character in which)


def _log2(count: int) -> float:
    """Return about the logarithm of `count + 1` to the base 2, linear between powers of 2 and equal on all machines."""
    bits = (count + 1).bit_length() - 1
    return bits - 1.0 + (count + 1) / (1 << bits)


_SCRIPTS: dict[str, Language] = {
    "CYRILLIC": "ru",
    "GREEK": "el",
    "ARABIC": "ar",
    "HEBREW": "he",
    "DEVANAGARI": "hi",
    "THAI": "th",
    "HANGUL": "ko",
    "HIRAGANA": "ja",
    "KATAKANA": "ja",
    "CJK": "zh",
}
"""Language of a text by the first word of the Unicode names of most of its letters."""
_FUNCTION_WORDS: dict[Language, str] = {
    "en": "the a an is are was what which who how of to in and for with that this you i do does it my please",
    "de": "der die das ein eine ist sind was wie wer und in zu mit von für nicht ich du es auf den dem bitte mir",
    "fr": "le la les un une est sont que quel quelle qui et de des du dans pour avec ne pas je vous il ce en moi",
    "es": "el la los las un una es son qué cuál quién y de del en para con no yo usted se cómo por que lo mi",
    "it": "il lo la gli un una è sono che cosa qual chi e di del della in per con non io si come mi le questo",
    "pt": "o a os as um uma é são que qual quem e de do da em para com não eu você se como por meu isso no na",
    "nl": "de het een is zijn wat welke wie en van in op voor met niet ik je hoe dat dit mijn te aan",
    "pl": "jest są co jaki kto i w z na do nie to się jak dla że czy mi ja ten ta proszę",
    "tr": "bir ve ne bu için ile mi nedir kim çok da de var değil ben bana gibi olan",
}
"""Frequent words of each language in Latin letters."""
_WORD_SETS = {language: frozenset(words.split()) for language, words in _FUNCTION_WORDS.items()}


def detect_language(text: str) -> Language | None:
    """Return the language of a text by its script, or by its most frequent function words; None if neither decides."""
    text = text[-MAX_READ_CHARS:]
    if not text.isascii():
        names = Counter(
            unicodedata.name(character, "").partition(" ")[0].partition("-")[0]
            for character in text
            if character.isalpha()
        )
        if names:
            if names["HIRAGANA"] or names["KATAKANA"]:
                return "ja"
            script, _ = names.most_common(1)[0]
            if script in _SCRIPTS:
                return _SCRIPTS[script]
    counts = Counter(word.lower() for word in _WORD.findall(text))
    found = sorted(
        ((sum(counts[word] for word in words), name) for name, words in _WORD_SETS.items()),
        reverse=True,
    )
    (most, language), (second, _) = found[:2]
    return language if most >= _MIN_LANGUAGE_WORDS and most > second else None
