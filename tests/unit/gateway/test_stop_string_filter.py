"""Stop strings that the gateway filters itself, and their cost per token."""

from __future__ import annotations

from collections.abc import Iterator

from argosy.gateway.backends.emitted_choice import StopStringFilter


class CountedStopStrings(tuple[str, ...]):
    """Stop strings that count how often all of them are iterated."""

    __slots__ = ()
    scan_count = 0

    def __iter__(self) -> Iterator[str]:
        type(self).scan_count += 1
        return super().__iter__()


def test_long_stop_string_list_is_not_scanned_for_each_token() -> None:
    """A request may have hundreds of thousands of stop strings."""
    stop_filter = StopStringFilter(CountedStopStrings(["one", "three"]))
    passed = "".join(stop_filter.feed(text) for text in ["zero", " on", "e", " two"])
    assert passed + stop_filter.finish("", None) == "zero one two"
    assert CountedStopStrings.scan_count <= 1
