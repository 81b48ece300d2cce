"""Money as people write it: dollars, exact to the nano-dollar."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation, Overflow

import typer

NANO = 10**9
MILLION = 10**6
MOST_DOLLARS = (2**63 - 1) // NANO
"""Of an amount: a store keeps no more nano-dollars."""
MOST_PRICE = MILLION
"""Dollars for a million tokens."""


def parse_dollars(text: str) -> int:
    """Nano-dollars. Raises typer.BadParameter for what is no amount, too large, or finer than that."""
    try:
        nano = Decimal(text.strip().removeprefix("$").replace(",", "")) * NANO
    except (InvalidOperation, Overflow) as error:
        raise typer.BadParameter(f"{text!r} is no amount; write it like 12.50") from error
    if not nano.is_finite() or nano < 0 or nano != nano.to_integral_value():
        raise typer.BadParameter(f"{text!r} must be 0 or more, in whole nano-dollars")
    if nano > MOST_DOLLARS * NANO:
        raise typer.BadParameter(f"{text!r} is too much: at most {MOST_DOLLARS:,} dollars are kept")
    return int(nano)


def parse_price(text: str) -> int:
    """Nano-dollars for a token, from dollars for a million tokens. Raises typer.BadParameter."""
    nano = parse_dollars(text)
    if nano % MILLION:
        raise typer.BadParameter(f"{text!r} is too fine: a price is a multiple of 0.001 dollars")
    if nano > MOST_PRICE * NANO:
        raise typer.BadParameter(f"{text!r} is too much: a price is at most {MOST_PRICE:,} dollars")
    return nano // MILLION


def show_dollars(nano: int) -> str:
    """An amount, exactly, with at least two digits after the point."""
    whole, rest = divmod(nano, NANO)
    return f"${whole:,}.{f'{rest:09d}'.rstrip('0').ljust(2, '0')}"


def show_price(nano: int) -> str:
    """Dollars for a million tokens."""
    return show_dollars(nano * MILLION)
