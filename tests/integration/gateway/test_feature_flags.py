"""Feature flags in a gateway: readers of every kind, operators who switch them, explanations and wrong settings."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.fake_upstream import repeat_prompt
from tests.support.gateway_client import ONE_MODEL, check_settings_error
from tests.support.organisations import AdminGateway, Json, run_admin_gateway
from typer.testing import CliRunner

from argosy.cli.app import app
from argosy.deployment import (
    ContentRule,
    PromptConfig,
    PromptRule,
    RouteConfig,
    check_files,
)
from argosy.policy.traffic import FeatureFlag

SWITCH = {"variants": {"on": True, "off": False}, "defaultVariant": "off"}
LEVELS = {"variants": {"low": 1, "high": 2}, "defaultVariant": "low"}
LEVEL = f"feature_flags: {{f: {json.dumps(LEVELS)}}}\nroutes: [{{target_model: big, "
PROMPTS = [
    PromptConfig(name="p", text="Old jo@example.com"),
    PromptConfig(name="p", version=2, text="New jo@example.com", labels=("new",)),
]
SETTINGS: dict[str, Any] = {
    "feature_flags": {
        "label": msgspec.convert(SWITCH, FeatureFlag),
        "level": msgspec.convert(LEVELS, FeatureFlag),
        "unread": msgspec.convert(SWITCH, FeatureFlag),
    },
    "prompts": PROMPTS,
    "prompt_rules": [
        PromptRule(name="new", prompt="p", label="new", only_named=True, flag="label")
    ],
    "content_rules": [ContentRule(input={"email": "redact"}, flag="level=high")],
    "routes": [RouteConfig(name="r", target_model="big", flag="label", flags=("beta",))],
}


async def use(gateway: AdminGateway, headers: Json, user: str = "u") -> tuple[str, Json]:
    """Return the text of an answer, and the variants of the flags by the explanation."""
    body = {"model": "big", "prompt_id": "p", "user": user}
    answer = await gateway.client.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    path = f"/admin/requests/{answer.headers['x-argosy-request']}"
    flags = (await gateway.client.get(path, headers=gateway.root_headers)).json()["flags"]
    return answer.json()["choices"][0]["text"], {each["flag"]: each["variant"] for each in flags}


async def test_operators_switch_what_rules_read(tmp_path: Path) -> None:
    async with run_admin_gateway(tmp_path, script=repeat_prompt, **SETTINGS) as gateway:
        client, root = gateway.client, gateway.root_headers
        organisation, key, _ = await gateway.add_tenant()
        assert await use(gateway, key) == (
            "Old jo@example.com",
            {"label": "off", "level": "low", "unread": "off"},
        )
        (name,) = [
            each.name
            for each in gateway.store.accounts.list_organisations()
            if each.id == organisation
        ]

        async def run(*arguments: str, status: int = 0) -> str:
            options = ["--url", str(client.base_url), "--api-key", root["authorization"][7:]]
            result = await asyncio.to_thread(
                CliRunner().invoke, app, ["flags", *arguments, *options]
            )
            assert result.exit_code == status, result.output
            return result.output

        await run("switch", "label", "on", "--tenant", f"{name}/web", "--reason", "trial")

        async def expect(text: str, **variants: str) -> None:
            async def is_there() -> bool:
                found, flags = await use(gateway, key)
                return found == text and flags.items() >= variants.items()

            for _ in range(100):
                if await is_there():
                    return
                await asyncio.sleep(0.02)
            raise AssertionError(await use(gateway, key))

        await expect("New jo@example.com", label="on")
        assert (await use(gateway, root))[1]["label"] == "off"
        await run("switch", "level", "high")
        await expect("New [email]", level="high")
        await run("switch", "label", "--disable")
        await expect("Old [email]", label="off")
        await run("switch", "label", "on", "--percent", "30", "--enable")
        assert "nothing" in await run("list")
        views = (await client.get("/admin/flags", headers=root)).json()["data"]
        listed = {each["id"]: each for each in views}
        assert listed["label"]["flag"]["targeting"] == {
            "fractional": [{"var": "targetingKey"}, ["on", 30.0], ["off", 70.0]]
        }
        assert sorted(listed["label"]["read_by"]) == ["new", "r"]
        assert listed["unread"]["read_by"] == []
        assert "as declared" in await run("reset", "label")
        await expect("Old [email]", label="off")
        for path, fields, status, message in (
            ("other", {"state": "DISABLED"}, 404, "No feature flag"),
            ("label", {"defaultVariant": "blue"}, 400, "no variant 'blue'"),
            ("label", {"targeting": {"loop": 1}}, 400, "'loop' is unknown"),
        ):
            answer = await client.patch(f"/admin/flags/{path}", json=fields, headers=root)
            assert (answer.status_code, message in answer.text) == (status, True), answer.text
        assert (await client.get("/admin/flags", headers=key)).status_code == 403
        entries = gateway.store.audit_log.list_entries(subject="label")
        assert [each.action for each in entries][::-1] == [*["flag.switch"] * 3, "flag.delete"]
        assert entries[-1].details["reason"] == "trial"
        assert "nothing to change" in await run("switch", "label", status=2)
        assert "need the VARIANT" in await run("switch", "label", "--user", "x", status=2)
        await run("switch", "label", "on")
        narrowed = await run("switch", "label", "on", "--tenant", "acme", "--percent", "20")
        assert "ENABLED, off for others, rules: {" in narrowed
        assert '["on",20.0],["off",80.0]' in narrowed
        same = await run("switch", "label", "off", "--user", "x", status=2)
        assert "all others get 'off' too" in same
        project = {"organisation": organisation, "name": "flagged"}
        for flags, unread in ((["beta", "keep-alive"], []), (["betta"], ["betta"])):
            body = project | {"name": f"p{len(flags)}", "flags": flags}
            created = await client.post("/admin/projects", json=body, headers=root)
            assert created.json()["unread_flags"] == unread
        body = project | {"flags": ["no-speculations"]}
        refused = await client.post("/admin/projects", json=body, headers=root)
        assert "Did you mean 'no-speculation'?" in refused.json()["error"]["message"]
        rules = tmp_path / "rules.json"
        rules.write_text('["on"]')
        file = ["--targeting", str(rules)]
        assert "no JSON object with rules" in await run("switch", "label", *file, status=2)
        assert "without VARIANT" in await run("switch", "label", "on", *file, status=2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("routes: [{target_model: big, flag: f}]", "no feature flag has the name 'f'"),
        (f"{LEVEL}flag: f}}]", "are not true and false. Write f=VARIANT"),
        (f"{LEVEL}flag: f=x}}]", "has no variant 'x'. Use one of low, high"),
        (
            "feature_flags: {f: {variants: {a: 1}, defaultVariant: b}}",
            "feature flag 'f': there is no variant 'b'",
        ),
    ],
)
def test_invalid_settings_say_what_to_change(settings: str, message: str, tmp_path: Path) -> None:
    check_settings_error(tmp_path, settings, message)


def test_flags_that_nothing_reads_are_named(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    flags = json.dumps({"read": SWITCH, "idle": SWITCH})
    path.write_text(
        f"{ONE_MODEL}feature_flags: {flags}\nroutes: [{{target_model: big, flag: read}}]\n"
    )
    (warning,) = check_files([path]).warnings
    assert "feature_flags.idle" in warning
    assert "no rule reads it" in warning
