"""Parsing and formatting of dollar amounts, exact to the nanodollar."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation, Overflow

import typer

NANODOLLARS_PER_DOLLAR = 10**9
MILLION = 10**6
MAX_DOLLARS = (2**63 - 1) // NANODOLLARS_PER_DOLLAR
"""Largest amount. The store holds nanodollars as signed 64-bit integers."""
MAX_PRICE_DOLLARS = MILLION
"""Largest price, in dollars for a million tokens."""


def parse_dollars(text: str) -> int:
    """Return the amount in nanodollars.

    Raises:
        typer.BadParameter: `text` is not an amount, or is too large, or is not a multiple of a nanodollar.
    """
    try:
        nanodollars = (
            Decimal(text.strip().removeprefix("$").replace(",", "")) * NANODOLLARS_PER_DOLLAR
        )
    except (InvalidOperation, Overflow) as error:
        raise typer.BadParameter(f"{text!r} is not an amount; write it like 12.50") from error
    if (
        not nanodollars.is_finite()
        or nanodollars < 0
        or nanodollars != nanodollars.to_integral_value()
    ):
        raise typer.BadParameter(f"{text!r} must be 0 or more, in whole nanodollars")
    if nanodollars > MAX_DOLLARS * NANODOLLARS_PER_DOLLAR:
        raise typer.BadParameter(f"{text!r} is too large; give at most {MAX_DOLLARS:,} dollars")
    return int(nanodollars)


def parse_price(text: str) -> int:
    """Return nano-dollars for a token, from dollars for a million tokens.

    Raises:
        typer.BadParameter: `text` is not an amount, is too large, or is not a multiple of 0.001 dollars.
    """
    nanodollars = parse_dollars(text)
    if nanodollars % MILLION:
        raise typer.BadParameter(f"{text!r} is too fine; give a multiple of 0.001 dollars")
    if nanodollars > MAX_PRICE_DOLLARS * NANODOLLARS_PER_DOLLAR:
        raise typer.BadParameter(
            f"{text!r} is too large; give at most {MAX_PRICE_DOLLARS:,} dollars"
        )
    return nanodollars // MILLION


def format_dollars(nanodollars: int) -> str:
    """Format an amount exactly, with at least two digits after the decimal point."""
    whole, rest = divmod(nanodollars, NANODOLLARS_PER_DOLLAR)
    return f"${whole:,}.{f'{rest:09d}'.rstrip('0').ljust(2, '0')}"


def format_price(nanodollars: int) -> str:
    """Format the price of a token as dollars for a million tokens."""
    return format_dollars(nanodollars * MILLION)
