"""`argosy flags`: the feature flags of running gateways, and how operators switch them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from argosy.cli.failure import fail
from argosy.cli.output import JsonOutput, print_records
from argosy.cli.quantities import format_timestamp
from argosy.cli.server_client import DEFAULT_URL, GatewayApiKey, GatewayUrl, call_admin_api

app = typer.Typer(help="Feature flags that rules for requests read.", no_args_is_help=True)
FlagArgument = Annotated[
    str, typer.Argument(metavar="FLAG", help="Name, as `argosy flags list` prints it.")
]
PercentOption = Annotated[
    float | None,
    typer.Option(
        min=0, max=100, help="Part of the users that get it. A larger part contains a smaller one."
    ),
]
ByOption = Annotated[
    str, typer.Option(help="What `--percent` divides: targetingKey (users), project_id, key.")
]
TenantOption = Annotated[
    list[str] | None,
    typer.Option(help="Organisation or ORGANISATION/PROJECT that gets it. May be repeated."),
]
UserOption = Annotated[list[str] | None, typer.Option(help="User that gets it. May be repeated.")]
TargetingOption = Annotated[
    Path | None,
    typer.Option(
        help="JSON file with rules in JsonLogic, in place of the other options.",
        exists=True,
        dir_okay=False,
    ),
]


@app.command("list")
def list_flags(
    *,
    url: GatewayUrl = DEFAULT_URL,
    api_key: GatewayApiKey = None,
    json: JsonOutput = False,
) -> None:
    """List the flags with the variant for others, the rules, and who switched them."""
    flags = call_admin_api(url, api_key, "GET", "/admin/flags")["data"]
    print_records(
        flags,
        ("Flag", "State", "Variants", "Default", "Rules", "Read by", "Switched by", "At", "Reason"),
        lambda view: (
            view["id"],
            view["flag"]["state"],
            ", ".join(view["flag"]["variants"]),
            view["flag"]["defaultVariant"],
            view["problem"] or _describe_rules(view["flag"]["targeting"]),
            ", ".join(view["read_by"]) or "nothing",
            view["changed_by"],
            "" if view["changed_at"] is None else format_timestamp(view["changed_at"], "seconds"),
            view["reason"],
        ),
        "The settings have no feature flags. Add them as `feature_flags`.",
        json=json,
    )


@app.command()
def switch(
    flag: FlagArgument,
    variant: Annotated[
        str | None,
        typer.Argument(help="Variant for all requests, or for those that the options select."),
    ] = None,
    *,
    percent: PercentOption = None,
    by: ByOption = "targetingKey",
    tenant: TenantOption = None,
    user: UserOption = None,
    targeting: TargetingOption = None,
    enabled: Annotated[
        bool | None,
        typer.Option("--enable/--disable", help="Whether its rules apply."),
    ] = None,
    reason: Annotated[str, typer.Option(help="Why, for the audit log.")] = "",
    url: GatewayUrl = DEFAULT_URL,
    api_key: GatewayApiKey = None,
) -> None:
    """Switch a flag for all requests, some tenants or users, or a share. All gateways follow within seconds."""
    body: dict[str, Any] = {"reason": reason}
    if enabled is not None:
        body["state"] = "ENABLED" if enabled else "DISABLED"
    conditions = _build_conditions(tenant or [], user or [])
    is_part = bool(conditions) or percent is not None
    if targeting is not None:
        if is_part or variant is not None:
            fail(
                "--targeting has all rules; give it without VARIANT, --percent, --tenant and --user"
            )
        body["targeting"] = _read_rules(targeting)
    elif is_part:
        if variant is None:
            fail("--percent, --tenant and --user need the VARIANT that they select")
        views = call_admin_api(url, api_key, "GET", "/admin/flags")["data"]
        view = next((each for each in views if each["id"] == flag), None)
        others = "" if view is None else view["flag"]["defaultVariant"]
        if view is not None and others == variant:
            # It was switched for all, so that rules would select nothing: others get what is declared.
            others, body["defaultVariant"] = view["declared"]["defaultVariant"], None
            if others == variant:
                fail(f"all others get {variant!r} too; switch {flag} to another variant first")
        share: list[dict[str, Any]] = []
        if percent is not None:
            share = [{"fractional": [{"var": by}, [variant, percent], [others, 100 - percent]]}]
        body["targeting"] = (
            {"if": [{"or": conditions}, variant, *share]} if conditions else share[0]
        )
    elif variant is not None:
        body |= {"targeting": {}, "defaultVariant": variant}
    if body.keys() == {"reason"}:
        fail("nothing to change; give a variant, --targeting, --enable or --disable")
    path = f"/admin/flags/{quote(flag, safe='')}"
    view = call_admin_api(url, api_key, "PATCH", path, body=body)
    typer.echo(
        f"{flag}: {view['flag']['state']}, {view['flag']['defaultVariant']} for others, "
        f"rules: {_describe_rules(view['flag']['targeting'])}"
    )


@app.command()
def reset(
    flag: FlagArgument,
    *,
    url: GatewayUrl = DEFAULT_URL,
    api_key: GatewayApiKey = None,
) -> None:
    """Leave a flag to its declaration again."""
    call_admin_api(url, api_key, "DELETE", f"/admin/flags/{quote(flag, safe='')}")
    typer.echo(f"{flag} is as declared.")


def _build_conditions(tenants: list[str], users: list[str]) -> list[dict[str, Any]]:
    """Return the conditions in JsonLogic that hold for tenants and users."""
    return [
        {"in": [{"var": name}, values]}
        for name, values in (
            ("organisation", [each for each in tenants if "/" not in each]),
            ("project", [each for each in tenants if "/" in each]),
            ("user", users),
        )
        if values
    ]


def _read_rules(path: Path) -> dict[str, Any]:
    import msgspec

    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        fail(f"{path} is no JSON object with rules: {error}")


def _describe_rules(rules: dict[str, Any]) -> str:
    import msgspec

    return msgspec.json.encode(rules).decode() if rules else "none"
