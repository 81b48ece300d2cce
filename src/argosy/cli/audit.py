"""`argosy audit`: who changed what, and whether the log is whole."""

from __future__ import annotations

import json as jsonlib
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from argosy.cli.account_lookup import (
    OrganisationFilterOption,
    StoreUrl,
    find_organisation_id,
    open_existing_store,
)
from argosy.cli.failure import EXIT_FAILURE, fail
from argosy.cli.output import JsonOutput, print_json, print_records
from argosy.cli.timestamps import format_timestamp

if TYPE_CHECKING:
    from argosy.store import AuditEntry, AuditVerification

DEFAULT_LIMIT = 50


def audit(
    action: Annotated[
        Literal["list", "verify"],
        typer.Argument(help="List the newest changes, or check that none was altered."),
    ] = "list",
    *,
    subject: Annotated[str | None, typer.Option(help="Id of what was changed.")] = None,
    organisation: OrganisationFilterOption = None,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1, max=10**6, help="Most entries to list.", show_default=str(DEFAULT_LIMIT)
        ),
    ] = None,
    store: StoreUrl = None,
    json: JsonOutput = False,
) -> None:
    """Show who changed accounts, or `verify` the log: it exits with 1 if an entry was altered."""
    if action == "verify" and (subject, organisation, limit) != (None, None, None):
        fail(
            "each entry seals all before it, whosever they are: the log is verified as a whole;"
            " leave out --subject, --organisation and --limit"
        )
    with open_existing_store(store) as opened_store:
        if action == "verify":
            verdict = opened_store.audit_log.verify()
        else:
            of = find_organisation_id(opened_store, organisation)
            entries = opened_store.audit_log.for_organisation(of).list_entries(
                subject=subject, limit=limit or DEFAULT_LIMIT
            )
    if action == "verify":
        _print_verdict(verdict, json=json)
    else:
        _print_entries(entries, json=json)


def _print_entries(entries: list[AuditEntry], *, json: bool) -> None:
    print_records(
        entries,
        ("Entry", "When (UTC)", "Who", "What", "Of", "Details"),
        lambda entry: (
            entry.entry,
            format_timestamp(entry.at),
            entry.actor,
            entry.action,
            entry.subject,
            _format_details(entry),
        ),
        "Nothing was changed yet.",
        json=json,
    )


def _format_details(entry: AuditEntry) -> str:
    """Of something new what was given, of a change each field's old and new value."""
    if entry.action.endswith((".create", ".delete")):
        told = {name: value for name, value in entry.details.items() if value not in (None, [], "")}
        return ", ".join(f"{name} {_format_value(value)}" for name, value in told.items())
    return ", ".join(f"{name} {_format_change(change)}" for name, change in entry.details.items())


def _format_change(change: object) -> str:
    """The old value and the new one; what it is where somebody has altered it."""
    match change:
        case [old, new]:
            return f"{_format_value(old)} -> {_format_value(new)}"
        case _:
            return _format_value(change)


def _format_value(value: object) -> str:
    return value if isinstance(value, str) else jsonlib.dumps(value, ensure_ascii=False)


def _print_verdict(verdict: AuditVerification, *, json: bool) -> None:
    if json:
        print_json(verdict)
    if verdict.broken is not None:
        fail(f"entry {verdict.broken} of the audit log: {verdict.problem}", EXIT_FAILURE)
    if not json:
        typer.echo(f"All {verdict.entries} entries are as they were written.")
