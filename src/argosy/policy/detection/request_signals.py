"""Signals of a request that hold no content: its language, a fingerprint of its template, and where embeddings are.

Each is a small number, of which gateways count how often it occurs. None can be turned back into text.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

MAX_LANGUAGE_CHARS = 600
"""Characters of a text by which its language is recognised: half from its beginning, half from its end."""
TEMPLATES = 1024
"""Fingerprints of templates. So few share one with many other texts, and counting them takes little memory."""
PROJECTIONS = 8
"""Directions in which embeddings are measured."""
_STEPS = 64
"""Buckets of a direction."""
_STEP = 0.125
"""Width of a bucket. Random vectors of length 1 have a standard deviation of 1 in each direction."""
MAX_DIMENSIONS = 1 << 14

_WORDS = {
    "english": "the and of to is in that for it you what how with are this please can my",
    "german": "der die das und ist nicht ein eine ich wie mit für auf den von zu bitte wir",
    "french": "le la les et est une des pour que dans je vous pas qui avec sur comment du",
    "spanish": "el los las y es una para que en por con como del no mi cómo qué se",
    "portuguese": "o os e é um uma para não com como do da em você por que isso ao",
    "italian": "il lo gli e è un una per che non con come di della sono mi cosa nel",
    "dutch": "de het een en is van niet ik met voor op dat hoe wat zijn aan te naar",
    "polish": "w nie na się jest do że jak co to z i czy dla od ale mi po",
    "turkish": "ve bir bu için ne ile ben mi da çok var olarak gibi daha olan ya",
    "indonesian": "yang dan di untuk dengan apa ini itu saya tidak bagaimana dari ke ada pada bisa",
    "vietnamese": "là và của có không cho một các tôi được trong để này với những như làm thế",
}
_SCRIPTS = (
    (0x0370, "greek"),
    (0x0400, "cyrillic"),
    (0x0530, ""),
    (0x0590, "hebrew"),
    (0x0600, "arabic"),
    (0x0780, ""),
    (0x0900, "devanagari"),
    (0x0980, "other"),
    (0x0E00, "thai"),
    (0x0E80, "other"),
    (0x10A0, ""),
    (0x1100, "korean"),
    (0x1200, ""),
    (0x3040, "japanese"),
    (0x3100, ""),
    (0x3400, "chinese"),
    (0xA000, ""),
    (0xAC00, "korean"),
    (0xD7B0, ""),
)
"""First code point of blocks, and the script of their letters; empty for letters that count as Latin, or are none."""
_STARTS = [start for start, _ in _SCRIPTS]
LANGUAGES = ("none", "latin", *_WORDS, *sorted({name for _, name in _SCRIPTS} - {""}))
"""Names of the buckets of `find_language`. Their positions identify them, so that new ones are appended."""
_LANGUAGES_BY_WORD: dict[str, list[str]] = {}
for _language, _words in _WORDS.items():
    for _word in _words.split():
        _LANGUAGES_BY_WORD.setdefault(_word, []).append(_language)


class RequestSignals(NamedTuple):
    """Signals of one request. None where there is nothing to recognise."""

    language: int | None = None
    template: int | None = None
    embedding: Sequence[int] = ()
    """Bucket in each direction."""
    has_valid_calls: bool | None = None
    """Whether the tool calls of the answer can be read and fit their schemas."""


def find_language(text: str) -> int:
    """Return the position in `LANGUAGES` of the language or the script of a text.

    Scripts are recognised by their blocks, and languages in Latin letters by their most frequent words.
    """
    half = MAX_LANGUAGE_CHARS // 2
    if len(text) > MAX_LANGUAGE_CHARS:
        text = f"{text[:half]} {text[-half:]}"
    scripts = Counter[str]()
    if not text.isascii():
        for char in text:
            if char >= "\u0370":
                scripts[_SCRIPTS[bisect_right(_STARTS, ord(char)) - 1][1]] += 1
        del scripts[""]
    foreign = scripts.total()
    if 3 * foreign > sum(map(str.isalpha, text)):
        # Japanese has Chinese characters as well.
        name = "japanese" if 10 * scripts["japanese"] > foreign else scripts.most_common(1)[0][0]
        return LANGUAGES.index(name)
    words = Counter[str]()
    for word in text.lower().split():
        words.update(_LANGUAGES_BY_WORD.get(word.strip(".,;:!?\"'()"), ()))
    if words:
        return LANGUAGES.index(words.most_common(1)[0][0])
    return int(any(map(str.isalpha, text)))


def fingerprint_template(masked: bytes) -> int:
    """Return the fingerprint of a template, in whose text values such as dates are masked."""
    digest = hashlib.blake2b(masked, digest_size=4).digest()
    return int.from_bytes(digest, "little") % TEMPLATES


def project_embedding(vector: npt.NDArray[np.floating]) -> list[int]:
    """Return the buckets of a vector in fixed random directions; none if it has no length.

    Args:
        vector: Embedding, shape [dimensions].
    """
    values = vector.astype(np.float64)
    length = float(np.sqrt(np.dot(values, values)))
    if not 0.0 < length < np.inf or len(values) > MAX_DIMENSIONS:
        return []
    positions = np.floor(_signs(len(values)) @ values / (length * _STEP)) + _STEPS // 2
    buckets = np.clip(positions, 0, _STEPS - 1).astype(int)
    return [index * _STEPS + int(bucket) for index, bucket in enumerate(buckets)]


@lru_cache(maxsize=16)
def _signs(dimensions: int) -> npt.NDArray[np.float32]:
    """Return the signs of the directions, shape [`PROJECTIONS`, dimensions], equal on all platforms."""
    seed = hashlib.shake_128(b"directions").digest(dimensions)
    bits = np.unpackbits(np.frombuffer(seed, np.uint8)).reshape(dimensions, PROJECTIONS)
    return (2.0 * bits.T - 1.0).astype(np.float32)
