"""Guard of the semantic cache: whether two questions that an embedding model finds similar may share an answer.

Embeddings place a question beside its opposite, and beside the same question of another number or name. The guard
compares words. It errs towards "no": a paraphrase that it does not recognise costs a computation, a false hit costs
a wrong answer. Both guards refuse if numbers, negations, quotations, words of time, order, amount or condition differ,
or if the words in common have another order.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from functools import cache, lru_cache
from typing import Literal

import msgspec

from argosy.policy.paraphrase import tables

GuardName = Literal["no_substitution", "no_residual"]
"""With `no_residual` both have the same words or synonyms. With `no_substitution` one of them may have more."""
MAX_QUESTION_CHARS = 2000
"""Longest text that the guard compares. It refuses longer ones."""
MAX_QUOTATIONS = 50
"""Most opening quotation marks of a text that the guard compares. Each is searched for its end."""
MAX_WORDS = 100
"""Most words of a text that the guard compares. Longer texts say too much to be compared by words."""
MAX_ADDED_WORDS = 3
"""Most words with a meaning that only one of two questions may have."""
MAX_WORDS_PER_KNOWN_ONE = 4
"""Words of an English text for each one in the tables, at most. What negates another language is not known."""
_VERBATIM = re.compile(
    r"```.*?```|`[^`]+`|\"[^\"]+\"|“[^”]+”|https?://\S+|[^\s@]{1,64}@\S+|\b(?=\w*\d)(?=\w*[^\W\d_])\w+\b",
    re.DOTALL,
)
"""Code, quotations, addresses and identifiers, which must be the same on both sides."""
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:[.,]\d+)*")
_WORD = re.compile(r"[^\W\d_]+(?:['-][^\W\d_]+)*")
_PUNCTUATION = frozenset(" \t\r\n.,;:!?'()[]-_\u2013\u2014\u00bf\u00a1")
_SUFFIXES = (
    ("ies", ("y",)),
    ("es", ("", "e")),
    ("s", ("",)),
    ("ing", ("", "e")),
    ("ed", ("", "e")),
)
_MIN_STEM = 3


class _Question(msgspec.Struct, frozen=True):
    """A text as the guard compares it."""

    facts: tuple[object, ...]
    """Must be equal on both sides."""
    kind: str
    """Whether it asks `how`, `what`, or for a yes or no (`closed`); empty if it is no question."""
    words: list[str]
    """Words with a meaning, in order."""
    is_english: bool


def allows_answer(guard: GuardName, asked: str, kept: str) -> bool:
    """Return whether the answer to `kept` may answer `asked`. Takes time linear in their length."""
    if asked == kept:
        return True
    texts = [unicodedata.normalize("NFKC", each) for each in (asked, kept)]  # may lengthen them
    if any(
        len(each) > MAX_QUESTION_CHARS or each.count("\u201c") > MAX_QUOTATIONS for each in texts
    ):
        return False
    one, two = map(_parse, texts)
    if one.facts != two.facts or not _have_same_kind(one.kind, two.kind):
        return False
    is_english = one.is_english and two.is_english
    max_added = MAX_ADDED_WORDS if guard == "no_substitution" and is_english else 0
    longer, shorter = sorted((one.words, two.words), key=len, reverse=True)
    if len(longer) > MAX_WORDS or len(longer) - len(shorter) > max_added:
        return False
    return _contains(longer, shorter, knows_synonyms=is_english)


def _contains(longer: list[str], shorter: list[str], *, knows_synonyms: bool) -> bool:
    """Return whether a text has all words of another one, which has some, in their order."""
    candidates = iter(longer)
    return bool(shorter or not longer) and all(
        any(_is_same(word, other, knows_synonyms=knows_synonyms) for other in candidates)
        for word in shorter
    )


@cache
def guard_version() -> str:
    """Return the digest of the guard's tables and rules. An evaluation holds for one version."""
    names = sorted(name for name in vars(tables) if name.isupper())
    values = [getattr(tables, name) for name in names]
    content = [sorted(each.items()) if isinstance(each, dict) else sorted(each) for each in values]
    rules = (_VERBATIM.pattern, _NUMBER.pattern, _WORD.pattern, _SUFFIXES, _RULES_VERSION)
    return hashlib.sha256(repr((names, content, rules)).encode()).hexdigest()[:16]


_RULES_VERSION = 1
"""Increased with each change of this module that lets more pairs through."""


@lru_cache(maxsize=16)
def _parse(text: str) -> _Question:
    text = text.replace("\u2019", "'")
    verbatim = Counter(_VERBATIM.findall(text))
    text = _VERBATIM.sub(" ", text)
    numbers = [each.replace(",", "") for each in _NUMBER.findall(text)]
    text = _NUMBER.sub(" ", text)
    words, facts = list[str](), Counter[str]()
    persons = list[str]()
    known = negations = 0
    all_words = _WORD.findall(text.lower())
    for word in all_words:
        if word.endswith("n't") or word in tables.NEGATIONS:
            negations += 1
        if word in tables.NUMBERS:
            numbers.append(tables.NUMBERS[word])
        elif word in tables.FACT_WORDS:
            facts[word] += 1
        elif word in tables.OBLIGATIONS or word in tables.PERMISSIONS:
            facts["must" if word in tables.OBLIGATIONS else "may"] = 1
        elif word in tables.STOP_WORDS:
            if word in tables.FIRST_PERSON:
                persons.append("I")
            elif word in tables.SECOND_PERSON:
                persons.append("you")
        elif not (word.endswith("n't") or word == "not"):
            words.append(word)
            continue
        known += 1
    symbols = [each for each in _WORD.sub("", text) if each not in _PUNCTUATION]
    order = tuple(dict.fromkeys(persons)) if len(set(persons)) > 1 else ()
    # A duty and a permission are different questions. One with neither is read as a permission.
    facts.pop("may", None)
    return _Question(
        (numbers, negations, verbatim, facts, symbols, order),
        _find_kind(all_words),
        words,
        is_english=known * MAX_WORDS_PER_KNOWN_ONE >= len(all_words),
    )


def _find_kind(words: list[str]) -> str:
    if not tables.HOW_WORDS.isdisjoint(words):
        return "how"
    if not tables.WHAT_WORDS.isdisjoint(words):
        return "what"
    return "closed" if words and words[0] in tables.CLOSED_STARTS else ""


def _have_same_kind(one: str, two: str) -> bool:
    return one == two or (not (one and two) and "closed" not in {one, two})


def _is_same(one: str, two: str, *, knows_synonyms: bool) -> bool:
    return one == two or not _forms(one, knows_synonyms).isdisjoint(_forms(two, knows_synonyms))


def _forms(word: str, knows_synonyms: bool) -> set[str]:  # noqa: FBT001 - internal
    """Return the words of which a word may be an inflection, each as the name of its synonyms if it has some."""
    forms = {word}
    for suffix, endings in _SUFFIXES:
        stem = word.removesuffix(suffix)
        if stem != word and len(stem) >= _MIN_STEM:
            forms.update(stem + ending for ending in endings)
            if suffix in {"ing", "ed"} and stem[-1] == stem[-2]:
                forms.add(stem[:-1])
    if knows_synonyms:
        forms.update(tables.SYNONYMS[form] for form in tuple(forms) if form in tables.SYNONYMS)
    return forms
