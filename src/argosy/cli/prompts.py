"""`argosy prompts`: the registry of prompts, whose versions requests name and whose labels move."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from argosy.cli.account_lookup import (
    OrganisationFilterOption,
    ProjectName,
    StoreUrl,
    account_names,
    audit_actor,
    find_id,
    find_organisation,
    find_project,
    format_owner,
    open_existing_store,
    open_or_create_store,
)
from argosy.cli.output import JsonOutput, print_json, print_records

if TYPE_CHECKING:
    from argosy.policy.prompts import PromptContent
    from argosy.store import Prompt, Store

app = typer.Typer(help="Prompt templates and their versions.", no_args_is_help=True)
MAX_FILE_BYTES = 1 << 18
PromptArgument = Annotated[
    str,
    typer.Argument(
        metavar="PROMPT", help="NAME (its `production`), NAME@LABEL, NAME@NUMBER, or id."
    ),
]
LabelArgument = Annotated[str, typer.Argument(help="Label, such as `production`.")]


@app.command("list")
def list_prompts(
    *,
    organisation: OrganisationFilterOption = None,
    store: StoreUrl = None,
    json: JsonOutput = False,
) -> None:
    """List the versions of all prompts in the registry."""
    with open_existing_store(store) as opened_store:
        owner = find_id(find_organisation, opened_store, organisation)
        found = opened_store.prompts.list_prompts(owner)
        names = account_names(opened_store)
    print_records(
        found,
        ("Prompt", "Version", "Labels", "Owner", "By", "Id"),
        lambda prompt: (
            prompt.name,
            prompt.version,
            ", ".join(prompt.labels),
            format_owner(names, prompt.organisation, prompt.project),
            prompt.created_by,
            prompt.id,
        ),
        "The registry has no prompts. Add one with `argosy prompts create`; a fleet file may have others.",
        json=json,
    )


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="Name that requests use (`prompt_id`).")],
    file: Annotated[
        Path,
        typer.Argument(
            help="YAML or JSON with `text` or `messages`, and `parameters`; any other file is a text.",
            exists=True,
            dir_okay=False,
        ),
    ],
    *,
    label: Annotated[
        list[str] | None,
        typer.Option(help="Label that moves to the version. May be repeated."),
    ] = None,
    organisation: OrganisationFilterOption = None,
    project: ProjectName = None,
    store: StoreUrl = None,
) -> None:
    """Add a version of a prompt. The first one gets the label `production`, and later ones get it by `label`.

    It is for an organisation or a project, and without either for all callers.
    """
    import msgspec

    from argosy.policy.prompts import compile_prompt

    with open_or_create_store(store) as opened_store:
        encoded = msgspec.json.encode(_read_content(file)).decode()
        compiled = compile_prompt(encoded)
        added = opened_store.prompts.add_version(
            name,
            encoded,
            organisation=find_id(find_organisation, opened_store, organisation),
            project=find_id(find_project, opened_store, project),
            labels=label or (),
            actor=audit_actor(),
        )
    for warning in compiled.warnings:
        typer.echo(f"Warning: {warning}", err=True)
    labels = f" is {', '.join(added.labels)}" if added.labels else " has no label"
    variables = ", ".join(sorted(compiled.variables)) or "none"
    typer.echo(f"{added.reference}{labels} ({added.id}). Its variables: {variables}.")


@app.command()
def show(
    prompt: PromptArgument,
    *,
    organisation: OrganisationFilterOption = None,
    store: StoreUrl = None,
) -> None:
    """Print a version of a prompt as JSON."""
    import msgspec

    with open_existing_store(store) as opened_store:
        found = _find_prompt(opened_store, prompt, organisation)
    print_json(msgspec.to_builtins(found) | {"content": msgspec.json.decode(found.content)})


@app.command("label")
def set_label(
    prompt: PromptArgument,
    label: LabelArgument,
    *,
    remove: Annotated[
        bool, typer.Option("--remove", help="Take the label away from the version.")
    ] = False,
    organisation: OrganisationFilterOption = None,
    store: StoreUrl = None,
) -> None:
    """Move a label to a version. Requests that name it get this version within seconds."""
    with open_existing_store(store) as opened_store:
        found = _find_prompt(opened_store, prompt, organisation)
        changed = opened_store.prompts.set_label(
            found.id, label, removes=remove, actor=audit_actor()
        )
    typer.echo(f"{changed.reference} has the labels: {', '.join(changed.labels) or 'none'}.")


@app.command()
def render(
    prompt: PromptArgument,
    *,
    variable: Annotated[
        list[str] | None,
        typer.Option("--variable", "-v", help="NAME=TEXT. May be repeated."),
    ] = None,
    variables: Annotated[
        Path | None,
        typer.Option(help="JSON or YAML file with variables.", exists=True, dir_okay=False),
    ] = None,
    organisation: OrganisationFilterOption = None,
    store: StoreUrl = None,
) -> None:
    """Print a prompt with the values of its variables, without sending it to a model."""
    from argosy.policy.prompts import compile_prompt
    from argosy.settings import SettingsDocument

    with open_existing_store(store) as opened_store:
        compiled = compile_prompt(_find_prompt(opened_store, prompt, organisation).content)
        values: dict[str, Any] = {}
        if variables is not None:
            values = SettingsDocument.read([variables]).decode(dict[str, Any])
        for each in variable or ():
            name, separator, text = each.partition("=")
            if not separator:
                raise ValueError(f"--variable {each!r}: write it as NAME=TEXT")
            values[name] = text
        rendered = compiled.render(values)
    if rendered.text is not None:
        typer.echo(rendered.text)
    else:
        print_json(rendered.messages)


@app.command()
def delete(
    prompt: PromptArgument,
    *,
    organisation: OrganisationFilterOption = None,
    store: StoreUrl = None,
) -> None:
    """Delete a version of a prompt. Its number is not used again."""
    with open_existing_store(store) as opened_store:
        found = _find_prompt(opened_store, prompt, organisation)
        opened_store.prompts.delete(found.id, actor=audit_actor())
    typer.echo(f"{found.reference} is deleted.")


def _read_content(path: Path) -> PromptContent:
    """Return a prompt in a file. Raises ValueError if it is too large or malformed."""
    from argosy.policy.prompts import PromptContent
    from argosy.settings import SettingsDocument

    if path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"{path}: it has more than {MAX_FILE_BYTES:,} bytes")
    if path.suffix in {".yaml", ".yml", ".json"}:
        return SettingsDocument.read([path]).decode(PromptContent)
    return PromptContent(text=path.read_text())


def _find_prompt(store: Store, reference: str, organisation: str | None) -> Prompt:
    """Return the version with this id, or that of the only prompt with this name. Raises ValueError otherwise."""
    from argosy.store import LATEST, PRODUCTION

    owner = find_id(find_organisation, store, organisation)
    known = store.prompts.list_prompts(owner)
    named = [each for each in known if each.id == reference]
    if named:
        return named[0]
    name, _, version = reference.partition("@")
    versions = sorted((each for each in known if each.name == name), key=lambda each: each.version)
    owners = {(each.organisation, each.project) for each in versions}
    if len(owners) > 1:
        raise ValueError(
            f"there is more than one prompt {name!r}; see `argosy prompts list` for ids, or give --organisation"
        )
    wanted = version or PRODUCTION
    if versions and wanted == LATEST:
        return versions[-1]
    found = [each for each in versions if wanted in {*each.labels, str(each.version)}]
    if not found:
        raise ValueError(
            f"there is no prompt {name!r} with the version {wanted!r}; see `argosy prompts list`"
        )
    return found[0]
