"""`argosy audit`: list the changes of accounts, and verify that the audit log was not altered."""

from __future__ import annotations

import json as jsonlib
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from argosy.cli.account_lookup import (
    OrganisationFilterOption,
    StoreUrl,
    find_id,
    find_organisation,
    open_existing_store,
)
from argosy.cli.failure import EXIT_FAILURE, fail
from argosy.cli.output import JsonOutput, print_json, print_records
from argosy.cli.quantities import format_dollars, format_price, format_timestamp

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from argosy.store import AuditEntry, AuditVerification, Limit

DEFAULT_LIMIT = 50
DOLLAR_UNIT = "nano_dollars"
"""Unit of limits in dollars, in the store and in JSON."""


def audit(
    action: Annotated[
        Literal["list", "verify"],
        typer.Argument(help="List the newest changes, or verify that no entry was altered."),
    ] = "list",
    *,
    subject: Annotated[str | None, typer.Option(help="Id of the changed record.")] = None,
    organisation: OrganisationFilterOption = None,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=10**6,
            help="Maximum number of entries to list.",
            show_default=str(DEFAULT_LIMIT),
        ),
    ] = None,
    store: StoreUrl = None,
    json: JsonOutput = False,
) -> None:
    """List the changes of accounts, or `verify` the log: exit with 1 if an entry was altered."""
    if action == "verify" and (subject, organisation, limit) != (None, None, None):
        fail(
            "each entry contains a hash of all entries before it, so only the whole log can be verified;"
            " leave out --subject, --organisation and --limit"
        )
    with open_existing_store(store) as opened_store:
        if action == "verify":
            verification = opened_store.audit_log.verify()
        else:
            organisation_id = find_id(find_organisation, opened_store, organisation)
            entries = opened_store.audit_log.for_organisation(organisation_id).list_entries(
                subject=subject, limit=limit or DEFAULT_LIMIT
            )
            limits = opened_store.limits_and_prices.list_limits()
            names = opened_store.accounts.find_names(
                {*chain(*(each.mentioned for each in entries))}
            )
    if action == "verify":
        _print_verification(verification, json=json)
    else:
        _print_entries(entries, limits, names, json=json)


def _print_entries(
    entries: list[AuditEntry], limits: list[Limit], names: Mapping[str, str], *, json: bool
) -> None:
    """Print entries as JSON, with ids, or as a table with names in place of the ids of those that have one."""
    # The entry of a changed limit has only the amounts.
    dollar_limits = {limit.id for limit in limits if limit.unit == DOLLAR_UNIT}
    dollar_limits |= {
        entry.subject for entry in entries if entry.details.get("unit") == DOLLAR_UNIT
    }
    print_records(
        entries,
        ("Entry", "When", "Who", "Action", "Subject", "Details"),
        lambda entry: (
            entry.entry,
            format_timestamp(entry.at),
            _name_actor(entry.actor, names),
            entry.action,
            names.get(entry.subject, entry.subject),
            _format_details(entry, names, is_dollar_limit=entry.subject in dollar_limits),
        ),
        "The audit log has no entries.",
        json=json,
    )


def _name_actor(actor: str, names: Mapping[str, str]) -> str:
    """Return an actor such as `key:ID` with the name of the key."""
    kind, separator, record = actor.partition(":")
    return f"{kind}{separator}{names.get(record, record)}"


def _format_details(entry: AuditEntry, names: Mapping[str, str], *, is_dollar_limit: bool) -> str:
    """Return the fields of a new or deleted record, or each changed field's old and new value."""
    is_whole_record = entry.action.endswith((".create", ".delete"))
    parts = []
    for name, value in entry.details.items():
        format_value = _field_format(entry, name, names, is_dollar_limit=is_dollar_limit)
        match value:
            case None | [] | "" if is_whole_record:
                continue
            case [old, new] if not is_whole_record:
                parts.append(f"{name} {format_value(old)} -> {format_value(new)}")
            case _:  # also what an altered entry contains
                parts.append(f"{name} {format_value(value)}")
    return ", ".join(parts)


def _field_format(
    entry: AuditEntry, name: str, names: Mapping[str, str], *, is_dollar_limit: bool
) -> Callable[[object], str]:
    """Return the function that formats the values of a field: money in dollars, times as local times."""
    noun = entry.action.partition(".")[0]
    if name == "since" or name.endswith("_at"):
        return _format_time
    if noun == "price" and name in {"input", "cached_input", "output"}:
        return lambda value: format_price(value) if isinstance(value, int) else _format_value(value)
    if noun == "limit" and is_dollar_limit and name == "amount":
        return lambda value: (
            format_dollars(value) if isinstance(value, int) else _format_value(value)
        )
    if noun == "limit" and name == "unit":
        return lambda value: "dollars" if value == DOLLAR_UNIT else _format_value(value)
    return lambda value: names.get(str(value)) or _format_value(value)


def _format_time(value: object) -> str:
    if not isinstance(value, int | float):
        return _format_value(value)
    try:
        return format_timestamp(value)
    except (OverflowError, ValueError, OSError):  # an altered entry
        return _format_value(value)


def _format_value(value: object) -> str:
    return value if isinstance(value, str) else jsonlib.dumps(value, ensure_ascii=False)


def _print_verification(verification: AuditVerification, *, json: bool) -> None:
    if json:
        print_json(verification)
    if verification.broken is not None:
        fail(f"entry {verification.broken} of the audit log: {verification.problem}", EXIT_FAILURE)
    if not json:
        typer.echo(f"All {verification.entries} entries are unaltered.")
