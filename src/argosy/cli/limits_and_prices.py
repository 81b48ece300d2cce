"""`argosy tenants limits` and `argosy tenants prices`: how much, and for how much."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from argosy.cli.account_lookup import (
    OfOrganisation,
    ProjectName,
    StoreUrl,
    TierName,
    actor,
    find_key,
    find_organisation,
    find_project,
    find_user,
    names,
    opened,
    opened_or_made,
)
from argosy.cli.money import parse_dollars, parse_price, show_dollars, show_price
from argosy.cli.output import AsJson, show, tell
from argosy.cli.timestamps import parse_future, show_moment

if TYPE_CHECKING:
    from argosy.store import Limit, OwnerKind, Store

limits = typer.Typer(help="Limits of organisations, projects, users, keys.", no_args_is_help=True)
prices = typer.Typer(help="What a model's tokens cost.", no_args_is_help=True)

What = Literal["requests", "tokens", "input_tokens", "output_tokens", "concurrency", "dollars"]
Window = Literal["second", "minute", "hour", "day", "month"]
Per = Annotated[
    Window | None, typer.Option(help="Window; concurrency has none, by default a minute.")
]
UserName = Annotated[str | None, typer.Option("--user", help="Id or email.")]
KeyName = Annotated[str | None, typer.Option("--key", help="Id, name or beginning.")]


@limits.command("list")
def list_limits(*, store: StoreUrl = None, json: AsJson = False) -> None:
    """List limits."""
    with opened(store) as opened_store:
        found = opened_store.terms.list_limits()
        known = names(opened_store)
    show(
        found,
        ("Of", "Name", "What", "At most", "Per", "Model", "Id"),
        lambda limit: (
            limit.owner_kind,
            known[limit.owner],
            "dollars" if limit.unit == "nano_dollars" else limit.unit,
            _amount(limit),
            limit.window,
            limit.model or "all",
            limit.id,
        ),
        "There are no limits.",
        json=json,
    )


@limits.command("set")
def set_limit(
    what: Annotated[What, typer.Argument(help="What to limit.")],
    amount: Annotated[str, typer.Argument(help="At most so many.")],
    *,
    per: Per = None,
    organisation: OfOrganisation = None,
    project: ProjectName = None,
    user: UserName = None,
    key: KeyName = None,
    model: Annotated[str | None, typer.Option(help="For this one only; by default all.")] = None,
    store: StoreUrl = None,
    json: AsJson = False,
) -> None:
    """Set a limit of an organisation, a project, a user or a key.

    `argosy tenants limits set tokens 100000 --per minute --project acme`
    """
    with opened(store) as opened_store:
        kind, owner = _owner(opened_store, organisation, project, user, key)
        made = opened_store.terms.set_limit(
            kind,
            owner,
            "nano_dollars" if what == "dollars" else what,
            parse_dollars(amount) if what == "dollars" else _count(amount),
            window=per or (None if what == "concurrency" else "minute"),
            model=model,
            actor=actor(),
        )
    tell(made, f"Set ({made.id}).", json=json)


@limits.command("lift")
def lift(
    limit: Annotated[str, typer.Argument(metavar="LIMIT", help="Its id.")],
    *,
    store: StoreUrl = None,
) -> None:
    """Lift a limit."""
    with opened(store) as opened_store:
        opened_store.terms.delete_limit(limit, actor=actor())
    typer.echo(f"{limit} is lifted.")


@prices.command("list")
def list_prices(*, store: StoreUrl = None, json: AsJson = False) -> None:
    """List prices, those of the past too: dollars for a million tokens."""
    with opened(store) as opened_store:
        found = opened_store.terms.list_prices()
    show(
        found,
        ("Model", "Tier", "Input", "Cached input", "Output", "Since (UTC)"),
        lambda price: (
            price.model,
            price.tier or "all",
            show_price(price.input),
            show_price(price.cached_input),
            show_price(price.output),
            show_moment(price.since),
        ),
        "There are no prices: nothing costs anything.",
        json=json,
    )


@prices.command("set")
def set_price(
    model: Annotated[str, typer.Argument(help="Its public name.")],
    *,
    input_: Annotated[int, typer.Option("--input", parser=parse_price, metavar="DOLLARS")],
    output: Annotated[int, typer.Option(parser=parse_price, metavar="DOLLARS")],
    cached: Annotated[
        int | None,
        typer.Option(
            parser=parse_price, metavar="DOLLARS", help="For cached input; by default the same."
        ),
    ] = None,
    tier: Annotated[TierName | None, typer.Option(help="Only for tenants of this one.")] = None,
    since: Annotated[
        float | None,
        typer.Option(
            parser=parse_future,
            metavar="WHEN",
            help="A date (UTC), or so long from now, like 30d; by default now.",
        ),
    ] = None,
    store: StoreUrl = None,
    json: AsJson = False,
) -> None:
    """Set what a million tokens of a model cost, in dollars, from a moment on."""
    from argosy.store import Price

    with opened_or_made(store) as opened_store:
        price = Price(
            model=model,
            tier=tier,
            input=input_,
            cached_input=input_ if cached is None else cached,
            output=output,
            since=time.time() if since is None else since,
        )
        made = opened_store.terms.set_price(price, actor=actor())
    begins = "" if since is None else f" from {show_moment(made.since)} UTC on"
    amounts = f"input {show_price(made.input)}, output {show_price(made.output)}"
    tell(made, f"{made.model}: {amounts}{begins}.", json=json)


def _owner(
    store: Store,
    organisation: str | None,
    project: str | None,
    user: str | None,
    key: str | None,
) -> tuple[OwnerKind, str]:
    """Kind and id of the one owner that was given. Raises ValueError."""
    given: list[tuple[OwnerKind, str]] = []
    if organisation is not None:
        given.append(("organisation", find_organisation(store, organisation).id))
    if project is not None:
        given.append(("project", find_project(store, project).id))
    if user is not None:
        given.append(("user", find_user(store, user).id))
    if key is not None:
        given.append(("key", find_key(store, key).id))
    if len(given) != 1:
        raise ValueError("give one of --organisation, --project, --user and --key")
    return given[0]


def _count(text: str) -> int:
    try:
        return int(text.replace(",", ""))
    except ValueError as error:
        raise ValueError(f"{text!r} is no whole number") from error


def _amount(limit: Limit) -> str:
    return show_dollars(limit.amount) if limit.unit == "nano_dollars" else f"{limit.amount:,}"
