"""`argosy adapters`: the registry of adapters (LoRA) that a fleet serves under names of organisations and projects."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec.structs import asdict

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
    given_changes,
    open_existing_store,
    open_or_create_store,
)
from argosy.cli.output import JsonOutput, print_records, shorten_digests
from argosy.cli.server_client import GatewayApiKey, call_admin_api

if TYPE_CHECKING:
    from argosy.store import Adapter, Store

app = typer.Typer(help="Adapters (LoRA) of base models.", no_args_is_help=True)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
AdapterArgument = Annotated[str, typer.Argument(metavar="ADAPTER", help="Name or id.")]
PinnedOption = Annotated[
    bool | None, typer.Option("--pinned/--not-pinned", help="Whether all replicas keep it loaded.")
]
MinReplicasOption = Annotated[
    int | None,
    typer.Option(
        min=0, max=1000, help="Number of replicas that keep it loaded, also without requests."
    ),
]
ShareOption = Annotated[
    int | None,
    typer.Option(
        "--share", min=0, max=100, help="Percent of the users whom the candidate answers."
    ),
]


@app.command("list")
def list_adapters(
    *,
    organisation: OrganisationFilterOption = None,
    url: Annotated[
        str | None,
        typer.Option(
            help="URL of a gateway, which also knows where adapters are loaded, and those of the fleet file.",
            envvar="ARGOSY_URL",
        ),
    ] = None,
    api_key: GatewayApiKey = None,
    store: StoreUrl = None,
    json: JsonOutput = False,
) -> None:
    """List the adapters of the registry, with `--url` also on how many replicas they are wanted and loaded."""
    found: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    if url is not None:
        parameters = {"organisation": organisation, "limit": "1000"}
        found = call_admin_api(url, api_key, "GET", "/admin/adapters", parameters=parameters)[
            "data"
        ]
    else:
        with open_existing_store(store) as opened_store:
            owner = find_id(find_organisation, opened_store, organisation)
            listed = opened_store.adapters.list_adapters(owner)
            found = describe_adapters(opened_store, listed)
            names = account_names(opened_store)
    if json:
        _print_json(found)
        return
    print_records(
        found,
        (
            *("Adapter", "Base model", "Owner", "Version", "Candidate", "Rollout", "Keep"),
            *(("Wanted", "Loaded", "Bytes") if url is not None else ()),
            "Id",
        ),
        lambda adapter: (
            adapter["name"],
            adapter["base_model"],
            format_owner(names, adapter["organisation"], adapter["project"]),
            shorten_digests(adapter["digest"]),
            shorten_digests(adapter["candidate"] or ""),
            adapter["rollout_status"],
            "all" if adapter["pinned"] else adapter["min_replicas"] or "",
            *(
                (
                    adapter["wanted_replicas"],
                    " ".join(
                        [
                            str(adapter["resident_replicas"]),
                            *(each["replica"] for each in adapter["replicas"] if each["is_loaded"]),
                        ]
                    ),
                    adapter["size_bytes"] or "",
                )
                if url is not None
                else ()
            ),
            adapter["id"],
        ),
        "The registry has no adapters. Add one with `argosy adapters add`; those of a fleet file are shown with --url.",
        json=False,
    )


@app.command()
def show(
    adapter: AdapterArgument,
    *,
    organisation: OrganisationFilterOption = None,
    store: StoreUrl = None,
) -> None:
    """Print an adapter as JSON, with the evidence of the rollout of its candidate."""
    with open_existing_store(store) as opened_store:
        found = _find_adapter(opened_store, adapter, organisation)
        _print_json(describe_adapters(opened_store, [found])[0])


@app.command()
def add(
    name: Annotated[str, typer.Argument(help="Model name of requests.")],
    source: Annotated[
        str,
        typer.Argument(
            help="Digest (sha256:...), stored version (NAME or NAME:STAGE of `argosy models list`), or directory."
        ),
    ],
    *,
    base: Annotated[str, typer.Option(help="Public name of the base model.")],
    organisation: OrganisationFilterOption = None,
    project: ProjectName = None,
    base_digest: Annotated[
        str | None,
        typer.Option(
            help="Digest of the base model that it was made for. Default: any version of the base model."
        ),
    ] = None,
    share: ShareOption = None,
    step: Annotated[
        float | None,
        typer.Option(
            min=1,
            max=86_400,
            help="Shortest time of a step of the rollout in seconds. Default: 120.",
        ),
    ] = None,
    pinned: PinnedOption = None,
    min_replicas: MinReplicasOption = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Let a new version of a known adapter answer at once.")
    ] = False,
    store: StoreUrl = None,
) -> None:
    """Add an adapter, which answers at once, or a candidate version of one that is known.

    Gateways roll a candidate out: they raise its share of the users while it is no worse than the version that
    answers, let it answer all, or roll it back. With `--share` a person sets the share, and they only roll back.

    It is served to an organisation or a project, and without either to all callers. A directory is first copied into
    the model store of this machine, where its replicas find it.
    """
    options: dict[str, Any] = {
        "pinned": pinned,
        "min_replicas": min_replicas,
        "candidate_percent": share,
        "step_s": step,
    }
    with open_or_create_store(store) as opened_store:
        digest = _find_digest(source, name)
        added = opened_store.adapters.add_version(
            name,
            base,
            digest,
            organisation=find_id(find_organisation, opened_store, organisation),
            project=find_id(find_project, opened_store, project),
            base_digest=base_digest,
            replaces=replace,
            actor=audit_actor(),
            **{option: value for option, value in options.items() if value is not None},
        )
    if added.candidate is None:
        typer.echo(f"{added.name} is {added.digest} ({added.id}).")
    else:
        state = (
            f"for {added.candidate_percent} % of the users. `argosy adapters promote {added.name}` lets it answer all."
            if added.step_s is None
            else "and is rolled out while it is no worse than the version that answers. See `argosy adapters list`."
        )
        typer.echo(f"{added.candidate} is the candidate of {added.name}, {state}")


@app.command()
def promote(
    adapter: AdapterArgument,
    *,
    organisation: OrganisationFilterOption = None,
    store: StoreUrl = None,
) -> None:
    """Let the candidate version of an adapter answer all requests."""
    with open_existing_store(store) as opened_store:
        found = _find_adapter(opened_store, adapter, organisation)
        promoted = opened_store.adapters.promote(found.id, actor=audit_actor())
    typer.echo(f"{promoted.name} is {promoted.digest}.")


@app.command()
def pin(
    adapter: AdapterArgument,
    *,
    pinned: PinnedOption = None,
    min_replicas: MinReplicasOption = None,
    share: ShareOption = None,
    organisation: OrganisationFilterOption = None,
    store: StoreUrl = None,
) -> None:
    """Keep an adapter loaded at all replicas, or at some (`--min-replicas`).

    `--share` sets the share of the candidate by hand, which ends its rollout. 0 takes all users away from it.
    """
    if pinned is None and min_replicas is None and share is None:
        pinned = True
    with open_existing_store(store) as opened_store:
        changes = given_changes(pinned=pinned, min_replicas=min_replicas, candidate_percent=share)
        found = _find_adapter(opened_store, adapter, organisation)
        opened_store.adapters.change_adapter(found.id, **changes, actor=audit_actor())
    typer.echo(f"{found.name} is changed.")


@app.command()
def remove(
    adapter: AdapterArgument,
    *,
    organisation: OrganisationFilterOption = None,
    store: StoreUrl = None,
) -> None:
    """Remove an adapter. Running requests end as they began."""
    with open_existing_store(store) as opened_store:
        found = _find_adapter(opened_store, adapter, organisation)
        opened_store.adapters.remove(found.id, actor=audit_actor())
    typer.echo(f"{found.name} is removed.")


def register_modules(modules: Iterable[str], base: str, *, store: str | None) -> None:
    """Register the adapters of `--lora-modules` for all callers. A name that is known gets this version.

    Raises:
        ValueError: One of them cannot be stored, or its name is that of an adapter of another base model.
    """
    from argosy.engine import LoraModule

    parsed = [LoraModule.parse(text) for text in modules]
    with open_or_create_store(store, is_expected=True) as opened_store:
        for module in parsed:
            opened_store.adapters.add_version(
                module.name,
                base,
                _find_digest(module.path, module.name),
                replaces=True,
                actor=audit_actor(),
            )


def _find_digest(source: str, name: str) -> str:
    """Return the digest of a version, and store a directory's files. Raises ValueError if it is missing or unusable."""
    from argosy.model_store import open_model_store, pull_model

    if _DIGEST.fullmatch(source):
        return source
    store, folder = open_model_store(), Path(source).expanduser()
    if folder.is_dir():
        _check_files(folder)
        return pull_model(store, source, name=name).digest
    digest = store.find(source).digest
    _check_files(store.model_folder(digest))
    return digest


def _check_files(folder: Path) -> None:
    """Check the files of an adapter, if an engine is installed here. Raises ValueError if none could load them."""
    if find_spec("torch") is None:
        return
    from argosy.engine import read_adapter

    try:
        read_adapter(folder, ())
    except ValueError as error:
        raise ValueError(f"the adapter {folder} cannot be used: {error}") from error


def _find_adapter(store: Store, reference: str, organisation: str | None) -> Adapter:
    """Return the adapter with this id, or the only one with this name. Raises ValueError otherwise."""
    owner = find_id(find_organisation, store, organisation)
    adapters = store.adapters.list_adapters(owner)
    found = [each for each in adapters if each.id == reference] or [
        each for each in adapters if each.name == reference
    ]
    if len(found) == 1:
        return found[0]
    problem = "there is more than one" if found else "there is no"
    raise ValueError(
        f"{problem} adapter {reference!r}; see `argosy adapters list` for ids, or give --organisation"
    )


def describe_adapters(store: Store, adapters: Sequence[Adapter]) -> list[dict[str, Any]]:
    """Return the fields of adapters, with the states and the evidence of their rollouts."""
    from argosy.gateway import describe_rollout, read_verdict

    compared = [each.id for each in adapters if each.candidate is not None]
    documents = store.adapters.read_evidence(compared)
    described = []
    for adapter in adapters:
        verdict = read_verdict(adapter, documents.get(adapter.id), time.time())
        fields = {
            "rollout_status": describe_rollout(adapter, verdict),
            "evidence": [] if verdict is None else verdict.metrics,
        }
        described.append(asdict(adapter) | fields)
    return described


def _print_json(value: object) -> None:
    """Print JSON. Unlike keys of clients, adapters show their digests."""
    import msgspec

    typer.echo(msgspec.json.format(msgspec.json.encode(value)).decode())
