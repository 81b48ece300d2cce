"""`argosy tenants limits` and `argosy tenants prices`: how much, and for how much."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from argosy.cli.account_lookup import (
    OrganisationFilterOption,
    ProjectName,
    StoreUrl,
    TierName,
    account_names,
    audit_actor,
    find_key,
    find_organisation,
    find_project,
    find_user,
    open_existing_store,
    open_or_create_store,
)
from argosy.cli.money import format_dollars, format_price, parse_dollars, parse_price
from argosy.cli.output import JsonOutput, print_records, print_result
from argosy.cli.timestamps import format_timestamp, parse_future_time

if TYPE_CHECKING:
    from argosy.store import Limit, OwnerKind, Store

limits_app = typer.Typer(
    help="Limits of organisations, projects, users, keys.", no_args_is_help=True
)
prices_app = typer.Typer(help="What a model's tokens cost.", no_args_is_help=True)

LimitUnitName = Literal[
    "requests", "tokens", "input_tokens", "output_tokens", "concurrency", "dollars"
]
LimitWindowName = Literal["second", "minute", "hour", "day", "month"]
WindowOption = Annotated[
    LimitWindowName | None, typer.Option(help="Window; concurrency has none, by default a minute.")
]
UserOption = Annotated[str | None, typer.Option("--user", help="Id or email.")]
KeyOption = Annotated[str | None, typer.Option("--key", help="Id, name or beginning.")]


@limits_app.command("list")
def list_limits(*, store: StoreUrl = None, json: JsonOutput = False) -> None:
    """List limits."""
    with open_existing_store(store) as opened_store:
        found = opened_store.limits_and_prices.list_limits()
        known = account_names(opened_store)
    print_records(
        found,
        ("Of", "Name", "What", "At most", "Per", "Model", "Id"),
        lambda limit: (
            limit.owner_kind,
            known[limit.owner],
            "dollars" if limit.unit == "nano_dollars" else limit.unit,
            _format_amount(limit),
            limit.window,
            limit.model or "all",
            limit.id,
        ),
        "There are no limits.",
        json=json,
    )


@limits_app.command("set")
def set_limit(
    unit: Annotated[LimitUnitName, typer.Argument(help="What to limit.")],
    amount: Annotated[str, typer.Argument(help="At most so many.")],
    *,
    per: WindowOption = None,
    organisation: OrganisationFilterOption = None,
    project: ProjectName = None,
    user: UserOption = None,
    key: KeyOption = None,
    model: Annotated[str | None, typer.Option(help="For this one only; by default all.")] = None,
    store: StoreUrl = None,
    json: JsonOutput = False,
) -> None:
    """Set a limit of an organisation, a project, a user or a key.

    `argosy tenants limits set tokens 100000 --per minute --project acme`
    """
    with open_existing_store(store) as opened_store:
        kind, owner = _resolve_owner(opened_store, organisation, project, user, key)
        made = opened_store.limits_and_prices.set_limit(
            kind,
            owner,
            "nano_dollars" if unit == "dollars" else unit,
            parse_dollars(amount) if unit == "dollars" else _parse_count(amount),
            window=per or (None if unit == "concurrency" else "minute"),
            model=model,
            actor=audit_actor(),
        )
    print_result(made, f"Set ({made.id}).", json=json)


@limits_app.command("delete")
def delete_limit(
    limit: Annotated[str, typer.Argument(metavar="LIMIT", help="Its id.")],
    *,
    store: StoreUrl = None,
) -> None:
    """Lift a limit."""
    with open_existing_store(store) as opened_store:
        opened_store.limits_and_prices.delete_limit(limit, actor=audit_actor())
    typer.echo(f"{limit} is lifted.")


@prices_app.command("list")
def list_prices(*, store: StoreUrl = None, json: JsonOutput = False) -> None:
    """List prices, those of the past too: dollars for a million tokens."""
    with open_existing_store(store) as opened_store:
        found = opened_store.limits_and_prices.list_prices()
    print_records(
        found,
        ("Model", "Tier", "Input", "Cached input", "Output", "Since (UTC)"),
        lambda price: (
            price.model,
            price.tier or "all",
            format_price(price.input),
            format_price(price.cached_input),
            format_price(price.output),
            format_timestamp(price.since),
        ),
        "There are no prices: nothing costs anything.",
        json=json,
    )


@prices_app.command("set")
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
            parser=parse_future_time,
            metavar="WHEN",
            help="A date (UTC), or so long from now, like 30d; by default now.",
        ),
    ] = None,
    store: StoreUrl = None,
    json: JsonOutput = False,
) -> None:
    """Set what a million tokens of a model cost, in dollars, from a moment on."""
    from argosy.store import Price

    with open_or_create_store(store) as opened_store:
        price = Price(
            model=model,
            tier=tier,
            input=input_,
            cached_input=input_ if cached is None else cached,
            output=output,
            since=time.time() if since is None else since,
        )
        made = opened_store.limits_and_prices.set_price(price, actor=audit_actor())
    begins = "" if since is None else f" from {format_timestamp(made.since)} UTC on"
    amounts = f"input {format_price(made.input)}, output {format_price(made.output)}"
    print_result(made, f"{made.model}: {amounts}{begins}.", json=json)


def _resolve_owner(
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


def _parse_count(text: str) -> int:
    try:
        return int(text.replace(",", ""))
    except ValueError as error:
        raise ValueError(f"{text!r} is no whole number") from error


def _format_amount(limit: Limit) -> str:
    return format_dollars(limit.amount) if limit.unit == "nano_dollars" else f"{limit.amount:,}"
