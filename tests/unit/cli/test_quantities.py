"""Formatting of sizes and counts."""

from argosy.cli.quantities import format_count, format_size


def test_sizes_and_counts_are_formatted() -> None:
    assert [format_size(n) for n in (512, 4096, 3 * 2**30)] == ["512 B", "4 KiB", "3 GiB"]
    assert [format_count(n) for n in (12, 8_130_000, 7e9)] == ["12", "8.13 M", "7 B"]
