"""Stop strings that the gateway keeps, and what they cost each token."""

from __future__ import annotations

from collections.abc import Iterator

from argosy.gateway.backends.stop_string_filter import StopStringFilter


class Counted(tuple[str, ...]):
    """Stop strings, and how often all of them were looked at."""

    __slots__ = ()
    looked = 0

    def __iter__(self) -> Iterator[str]:
        type(self).looked += 1
        return super().__iter__()


def test_not_all_stop_strings_are_looked_at_for_each_token() -> None:
    """A request may have hundreds of thousands."""
    gate = StopStringFilter(Counted(["one", "three"]))
    told = "".join(gate.feed(text) for text in ["zero", " on", "e", " two"])
    assert told + gate.finish("", None) == "zero one two"
    assert Counted.looked <= 1
