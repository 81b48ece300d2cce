"""`argosy tenants limits` and `argosy tenants prices`: limits of accounts and prices of models."""

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
from argosy.cli.output import JsonOutput, print_records, print_result
from argosy.cli.quantities import (
    format_dollars,
    format_price,
    format_timestamp,
    parse_dollars,
    parse_future_time,
    parse_price,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from argosy.store import Key, Limit, Organisation, OwnerKind, Project, Store, User

limits_app = typer.Typer(
    help="Limits of organisations, projects, users and keys.", no_args_is_help=True
)
prices_app = typer.Typer(help="Prices of models' tokens.", no_args_is_help=True)

LimitUnitName = Literal[
    "requests", "tokens", "input_tokens", "output_tokens", "concurrency", "dollars", "stored_bytes"
]
LimitWindowName = Literal["second", "minute", "hour", "day", "month"]
WindowOption = Annotated[
    LimitWindowName | None,
    typer.Option(
        help="Window, by default a minute. Limits on concurrency and stored_bytes have none."
    ),
]
UserOption = Annotated[str | None, typer.Option("--user", help="Id or email.")]
KeyOption = Annotated[str | None, typer.Option("--key", help="Id, name or prefix.")]


@limits_app.command("list")
def list_limits(*, store: StoreUrl = None, json: JsonOutput = False) -> None:
    """List limits."""
    with open_existing_store(store) as opened_store:
        found = opened_store.limits_and_prices.list_limits()
        names = account_names(opened_store)
    print_records(
        found,
        ("Owner", "Name", "Unit", "Limit", "Per", "Model", "Id"),
        lambda limit: (
            limit.owner_kind,
            names[limit.owner],
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
    unit: Annotated[LimitUnitName, typer.Argument(help="Unit of the limit.")],
    amount: Annotated[str, typer.Argument(help="Largest amount in a window.")],
    *,
    per: WindowOption = None,
    organisation: OrganisationFilterOption = None,
    project: ProjectName = None,
    user: UserOption = None,
    key: KeyOption = None,
    model: Annotated[
        str | None, typer.Option(help="Apply the limit to this model; by default to all.")
    ] = None,
    store: StoreUrl = None,
    json: JsonOutput = False,
) -> None:
    """Set a limit of an organisation, a project, a user or a key.

    `argosy tenants limits set tokens 100000 --per minute --project acme`
    """
    with open_existing_store(store) as opened_store:
        kind, owner = _resolve_owner(opened_store, organisation, project, user, key)
        limit = opened_store.limits_and_prices.set_limit(
            kind,
            owner,
            "nano_dollars" if unit == "dollars" else unit,
            parse_dollars(amount) if unit == "dollars" else _parse_count(amount),
            window=per or (None if unit in {"concurrency", "stored_bytes"} else "minute"),
            model=model,
            actor=audit_actor(),
        )
    print_result(limit, f"The limit is set ({limit.id}).", json=json)


@limits_app.command("delete")
def delete_limit(
    limit: Annotated[str, typer.Argument(metavar="LIMIT", help="Id of the limit.")],
    *,
    store: StoreUrl = None,
) -> None:
    """Delete a limit."""
    with open_existing_store(store) as opened_store:
        opened_store.limits_and_prices.delete_limit(limit, actor=audit_actor())
    typer.echo(f"{limit} is deleted.")


@prices_app.command("list")
def list_prices(*, store: StoreUrl = None, json: JsonOutput = False) -> None:
    """List prices in dollars for a million tokens, past prices included."""
    with open_existing_store(store) as opened_store:
        found = opened_store.limits_and_prices.list_prices()
    print_records(
        found,
        ("Model", "Tier", "Input", "Cached input", "Output", "Since"),
        lambda price: (
            price.model,
            price.tier or "all",
            format_price(price.input),
            format_price(price.cached_input),
            format_price(price.output),
            format_timestamp(price.since),
        ),
        "There are no prices, so requests cost nothing.",
        json=json,
    )


@prices_app.command("set")
def set_price(
    model: Annotated[str, typer.Argument(help="Public name of the model.")],
    *,
    input_: Annotated[int, typer.Option("--input", parser=parse_price, metavar="DOLLARS")],
    output: Annotated[int, typer.Option(parser=parse_price, metavar="DOLLARS")],
    cached: Annotated[
        int | None,
        typer.Option(
            parser=parse_price,
            metavar="DOLLARS",
            help="Price of cached input tokens; by default that of input tokens.",
        ),
    ] = None,
    tier: Annotated[
        TierName | None, typer.Option(help="Tier of the tenants that pay this price.")
    ] = None,
    since: Annotated[
        float | None,
        typer.Option(
            parser=parse_future_time,
            metavar="WHEN",
            help="Start: a date (UTC), or a duration from now, like 30d; by default now.",
        ),
    ] = None,
    store: StoreUrl = None,
    json: JsonOutput = False,
) -> None:
    """Set the price of a million tokens of a model in dollars, from a point in time on."""
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
        saved = opened_store.limits_and_prices.set_price(price, actor=audit_actor())
    start = "" if since is None else f" from {format_timestamp(saved.since)} on"
    amounts = f"input {format_price(saved.input)}, output {format_price(saved.output)}"
    print_result(saved, f"{saved.model}: {amounts}{start}.", json=json)


def _resolve_owner(
    store: Store,
    organisation: str | None,
    project: str | None,
    user: str | None,
    key: str | None,
) -> tuple[OwnerKind, str]:
    """Return the kind and id of the owner from the given options, of which there must be one."""
    owners: list[
        tuple[OwnerKind, Callable[[Store, str], Organisation | Project | User | Key], str | None]
    ] = [
        ("organisation", find_organisation, organisation),
        ("project", find_project, project),
        ("user", find_user, user),
        ("key", find_key, key),
    ]
    given = [(kind, find(store, name).id) for kind, find, name in owners if name is not None]
    if len(given) != 1:
        raise ValueError("give exactly one of --organisation, --project, --user and --key")
    return given[0]


def _parse_count(text: str) -> int:
    try:
        return int(text.replace(",", ""))
    except ValueError as error:
        raise ValueError(f"{text!r} is not a whole number; write it like 1000") from error


def _format_amount(limit: Limit) -> str:
    return format_dollars(limit.amount) if limit.unit == "nano_dollars" else f"{limit.amount:,}"
