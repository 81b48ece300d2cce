"""Money as people write it: dollars, exact to the nano-dollar."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation, Overflow

import typer

NANODOLLARS_PER_DOLLAR = 10**9
MILLION = 10**6
MAX_DOLLARS = (2**63 - 1) // NANODOLLARS_PER_DOLLAR
"""Of an amount: a store keeps no more nano-dollars."""
MAX_PRICE_DOLLARS = MILLION
"""Dollars for a million tokens."""


def parse_dollars(text: str) -> int:
    """Nano-dollars. Raises typer.BadParameter for what is no amount, too large, or finer than that."""
    try:
        nano = Decimal(text.strip().removeprefix("$").replace(",", "")) * NANODOLLARS_PER_DOLLAR
    except (InvalidOperation, Overflow) as error:
        raise typer.BadParameter(f"{text!r} is no amount; write it like 12.50") from error
    if not nano.is_finite() or nano < 0 or nano != nano.to_integral_value():
        raise typer.BadParameter(f"{text!r} must be 0 or more, in whole nano-dollars")
    if nano > MAX_DOLLARS * NANODOLLARS_PER_DOLLAR:
        raise typer.BadParameter(f"{text!r} is too much: at most {MAX_DOLLARS:,} dollars are kept")
    return int(nano)


def parse_price(text: str) -> int:
    """Nano-dollars for a token, from dollars for a million tokens. Raises typer.BadParameter."""
    nano = parse_dollars(text)
    if nano % MILLION:
        raise typer.BadParameter(f"{text!r} is too fine: a price is a multiple of 0.001 dollars")
    if nano > MAX_PRICE_DOLLARS * NANODOLLARS_PER_DOLLAR:
        raise typer.BadParameter(
            f"{text!r} is too much: a price is at most {MAX_PRICE_DOLLARS:,} dollars"
        )
    return nano // MILLION


def format_dollars(nanodollars: int) -> str:
    """An amount, exactly, with at least two digits after the point."""
    whole, rest = divmod(nanodollars, NANODOLLARS_PER_DOLLAR)
    return f"${whole:,}.{f'{rest:09d}'.rstrip('0').ljust(2, '0')}"


def format_price(nanodollars: int) -> str:
    """Dollars for a million tokens."""
    return format_dollars(nanodollars * MILLION)
