"""`argosy audit`: list the changes of accounts, and verify that the audit log was not altered."""

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
            organisation_id = find_organisation_id(opened_store, organisation)
            entries = opened_store.audit_log.for_organisation(organisation_id).list_entries(
                subject=subject, limit=limit or DEFAULT_LIMIT
            )
    if action == "verify":
        _print_verification(verification, json=json)
    else:
        _print_entries(entries, json=json)


def _print_entries(entries: list[AuditEntry], *, json: bool) -> None:
    print_records(
        entries,
        ("Entry", "When (UTC)", "Who", "Action", "Subject", "Details"),
        lambda entry: (
            entry.entry,
            format_timestamp(entry.at),
            entry.actor,
            entry.action,
            entry.subject,
            _format_details(entry),
        ),
        "The audit log has no entries.",
        json=json,
    )


def _format_details(entry: AuditEntry) -> str:
    """Return the fields of a new or deleted record, or each changed field's old and new value."""
    if entry.action.endswith((".create", ".delete")):
        fields = {
            name: value for name, value in entry.details.items() if value not in (None, [], "")
        }
        return ", ".join(f"{name} {_format_value(value)}" for name, value in fields.items())
    return ", ".join(f"{name} {_format_change(change)}" for name, change in entry.details.items())


def _format_change(change: object) -> str:
    """Return the old and the new value. An altered entry may contain anything, which is formatted as one value."""
    match change:
        case [old, new]:
            return f"{_format_value(old)} -> {_format_value(new)}"
        case _:
            return _format_value(change)


def _format_value(value: object) -> str:
    return value if isinstance(value, str) else jsonlib.dumps(value, ensure_ascii=False)


def _print_verification(verification: AuditVerification, *, json: bool) -> None:
    if json:
        print_json(verification)
    if verification.broken is not None:
        fail(f"entry {verification.broken} of the audit log: {verification.problem}", EXIT_FAILURE)
    if not json:
        typer.echo(f"All {verification.entries} entries are unaltered.")
