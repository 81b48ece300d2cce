"""What all who follow a replica's KV blocks have in common: texts of a pool, what is wrong, and when to ask again."""

from __future__ import annotations

from weakref import WeakValueDictionary

import msgspec

from argosy.policy import Texts
from argosy.protocol import KvReading

AGAIN_S = 0.25
LATER_S = 30.0
"""When a server that does not tell, or too much, is asked again."""

TextsOf = WeakValueDictionary[KvReading, Texts]
"""The texts of a pool, by how its replicas read; forgotten when nobody reads so any more."""


class TooMuchError(Exception):
    """The replica holds more blocks than can be followed."""


WRONG = (ValueError, OverflowError, RecursionError, msgspec.DecodeError, TooMuchError)
"""What comes of events that cannot be followed."""


def texts_of(reading: KvReading, known: TextsOf) -> Texts:
    """The texts of the replicas that read like this."""
    texts = known.get(reading)
    if texts is None:
        texts = known[reading] = Texts()
    return texts
