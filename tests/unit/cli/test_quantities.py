"""Sizes and counts: how options take them, and how commands print them."""

import pytest
import typer

from argosy.cli.quantities import format_count, format_size, parse_size


def test_sizes_and_counts_are_formatted() -> None:
    assert [format_size(n) for n in (512, 4096, 3 * 2**30)] == ["512 B", "4 KiB", "3 GiB"]
    assert [format_count(n) for n in (12, 8_130_000, 7e9)] == ["12", "8.13 M", "7 B"]


def test_sizes_are_parsed() -> None:
    sizes = [parse_size(text) for text in ("1024", "1KiB", "1.5GB", "2g")]
    assert sizes == [1024, 1024, 1_500_000_000, 2 * 10**9]
    with pytest.raises(typer.BadParameter, match="8GiB"):
        parse_size("lots")
