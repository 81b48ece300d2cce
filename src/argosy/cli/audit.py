"""`argosy audit`: who changed what, and whether the log is whole."""

from __future__ import annotations

import json as jsonlib
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from argosy.cli.account_lookup import OfOrganisation, StoreUrl, id_of_organisation, opened
from argosy.cli.failure import BROKEN, fail
from argosy.cli.output import AsJson, show, show_json
from argosy.cli.timestamps import show_moment

if TYPE_CHECKING:
    from argosy.store import AuditEntry, Verdict

LISTED = 50


def audit(
    what: Annotated[
        Literal["list", "verify"],
        typer.Argument(help="List the newest changes, or check that none was altered."),
    ] = "list",
    *,
    subject: Annotated[str | None, typer.Option(help="Id of what was changed.")] = None,
    organisation: OfOrganisation = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, max=10**6, help="Most entries to list.", show_default=str(LISTED)),
    ] = None,
    store: StoreUrl = None,
    json: AsJson = False,
) -> None:
    """Show who changed accounts, or `verify` the log: it exits with 1 if an entry was altered."""
    if what == "verify" and (subject, organisation, limit) != (None, None, None):
        fail(
            "each entry seals all before it, whosever they are: the log is verified as a whole;"
            " leave out --subject, --organisation and --limit"
        )
    with opened(store) as opened_store:
        if what == "verify":
            verdict = opened_store.audit.verify()
        else:
            of = id_of_organisation(opened_store, organisation)
            entries = opened_store.audit.within(of).entries(subject=subject, limit=limit or LISTED)
    if what == "verify":
        _tell(verdict, json=json)
    else:
        _list(entries, json=json)


def _list(entries: list[AuditEntry], *, json: bool) -> None:
    show(
        entries,
        ("Entry", "When (UTC)", "Who", "What", "Of", "Details"),
        lambda entry: (
            entry.entry,
            show_moment(entry.at),
            entry.actor,
            entry.action,
            entry.subject,
            _details(entry),
        ),
        "Nothing was changed yet.",
        json=json,
    )


def _details(entry: AuditEntry) -> str:
    """Of something new what was given, of a change each field's old and new value."""
    if entry.action.endswith((".create", ".delete")):
        told = {name: value for name, value in entry.details.items() if value not in (None, [], "")}
        return ", ".join(f"{name} {_text(value)}" for name, value in told.items())
    return ", ".join(f"{name} {_change(change)}" for name, change in entry.details.items())


def _change(change: object) -> str:
    """The old value and the new one; what it is where somebody has altered it."""
    match change:
        case [old, new]:
            return f"{_text(old)} -> {_text(new)}"
        case _:
            return _text(change)


def _text(value: object) -> str:
    return value if isinstance(value, str) else jsonlib.dumps(value, ensure_ascii=False)


def _tell(verdict: Verdict, *, json: bool) -> None:
    if json:
        show_json(verdict)
    if verdict.broken is not None:
        fail(f"entry {verdict.broken} of the audit log: {verdict.problem}", BROKEN)
    if not json:
        typer.echo(f"All {verdict.entries} entries are as they were written.")
