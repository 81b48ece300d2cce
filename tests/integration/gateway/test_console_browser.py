"""The console in Chromium: screens on real data, hostile names, forged requests, and accessibility in both themes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlsplit

import msgspec
import pytest
import pytest_asyncio
from tests.support.console_browser import (
    BROWSER_MARKS,
    list_screens,
    load_playwright,
    open_console,
    show_screen,
)
from tests.support.fake_upstream import UpstreamRequest, respond_500, respond_with_tokens
from tests.support.organisations import AdminGateway, run_admin_gateway
from tests.support.stored_rollout import DECLARATION, NEW, POOL, StoredRollout

from argosy.alerting import AlertState, IncidentRecords, ReceiverState
from argosy.deployment import CacheRule, ContentRule, ReplicaRecord
from argosy.lessons import LESSONS
from argosy.policy.alerting import Alert
from argosy.policy.detection import PastChange, RankedChange, Slice
from argosy.policy.incidents import IncidentAlert, RollbackAdvice, open_incident
from argosy.policy.reconciliation import ProblemKind, ReplicaPhase
from argosy.policy.traffic import FeatureFlag
from argosy.protocol import format_event
from argosy.store import FleetDocument, ReplicaLogRun

if TYPE_CHECKING:
    from playwright.async_api import Browser, FilePayload, Locator, Page

AXE = Path(__file__).parents[1] / "js" / "node_modules" / "axe-core" / "axe.min.js"
pytestmark = [*BROWSER_MARKS, pytest.mark.asyncio(loop_scope="module")]
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><b>bold</b>"
REPLICA = "models/big?replica=a"
MAX_TRANSFERRED_BYTES = 200_000
COLOURS_ONLY = {"runOnly": ["color-contrast"]}
FIND_SERIOUS = """options => axe.run(options).then(({ violations }) => violations
  .filter(({ impact }) => impact === "serious" || impact === "critical")
  .map(({ id, nodes }) => [id, nodes.map(({ html }) => html.slice(0, 120))]))"""
FIND_CLIPPED = """() => [...document.querySelectorAll("#app :is(a, button, input, select)")].filter((control) => {
  const middle = (box) => (box.left + box.right) / 2;
  const at = middle(control.getBoundingClientRect());
  for (let outer = control.parentElement; outer; outer = outer.parentElement) {
    const { left, right } = outer.getBoundingClientRect();
    if (getComputedStyle(outer).overflowX === "hidden" && (at < left || at > right)) return true;
  }
  return false;
}).map(({ outerHTML }) => outerHTML.slice(0, 120))"""
"""Controls that no user can scroll to."""
DRAWN_AGAIN = """(canvas, before) => new Promise((done) => {
  const look = () => (canvas.toDataURL() === before ? requestAnimationFrame(look) : done());
  look();
})"""


@pytest_asyncio.fixture(loop_scope="module")
async def admin_gateway(tmp_path: Path) -> AsyncIterator[AdminGateway]:
    """Run a gateway for one test, on the event loop of the browser."""
    async with run_admin_gateway(tmp_path) as running:
        yield running


def save_log(gateway: AdminGateway, log: str) -> None:
    """Record, as the controller does, that the replica `a` has failed."""
    store = gateway.store
    lease = store.fleets.acquire_lease("test", store.fleets.read_lease("demo"))
    assert lease is not None
    run = ReplicaLogRun(
        started_at=1.5, attempt=1, exited_at=2.5, exit_status=1, reason=HOSTILE, read_at=3.0
    )
    store.replica_logs.save(lease, "a", run, log.encode())


def save_alerts(gateway: AdminGateway) -> None:
    """Record, as the controller does, one alert that fires and one that has ended."""
    now = time.time()
    labels = {"alertname": "NoReplica", "severity": "page", "model": "big"}
    fires = Alert(
        labels=labels,
        summary="No replica is ready",
        started_at=now - 90,
        notified={"on-call": now - 60},
        description=HOSTILE,
        runbook="noreplica",
    )
    ended = Alert(
        labels=labels | {"model": HOSTILE},
        summary=HOSTILE,
        started_at=now - 900,
        ended_at=now - 300,
        description=HOSTILE,
        runbook="noreplica",
    )
    state = AlertState(
        alerts={each.fingerprint: each for each in (fires, ended)},
        receivers={"on-call": ReceiverState(failing_since=now, error=HOSTILE)},
        evaluated_at=now,
    )
    document = FleetDocument(1, msgspec.json.encode(state))
    assert gateway.store.fleets.replace_document("demo", "alerting/state", document, after=0)


async def test_alert_is_explained_silenced_and_heard_again(
    browser: Browser, admin_gateway: AdminGateway
) -> None:
    save_alerts(admin_gateway)
    page = await open_console(browser, admin_gateway)
    await show_screen(page, "#/alerts", "Alerts")
    expect = load_playwright().expect
    alert = page.get_by_role("listitem").filter(has_text="No replica is ready")
    await expect(alert).to_contain_text(HOSTILE)
    await expect(alert).to_contain_text("Notified: on-call")
    await expect(alert).to_contain_text("docs/how-to/runbooks.md#noreplica")
    await alert.get_by_role("button", name="Silence").click()
    dialog = page.get_by_role("dialog")
    await dialog.get_by_label("Why, for others").fill("planned work")
    await dialog.get_by_role("button", name="Silence").click()
    await expect(alert).to_contain_text("Silenced by sil_")
    silence = page.get_by_role("listitem").filter(has_text="planned work")
    await expect(silence).to_contain_text("alertname=NoReplica severity=page model=big")
    await silence.get_by_role("button", name="End").click()
    await expect(page.get_by_text("No alert is silenced.")).to_be_visible()
    await page.get_by_role("button", name="Send a test").click()
    await expect(page.get_by_text("A test notice to on-call was ordered.")).to_be_visible()
    actions = [each.action for each in admin_gateway.store.audit_log.list_entries(limit=3)]
    assert actions == ["alert.test", "alert.unsilence", "alert.silence"]


def save_incident(gateway: AdminGateway) -> None:
    """Record, as the controller does, an incident that began with a new version of a pool."""
    now = time.time()
    change = PastChange(at=now - 400, kind="rollout_state", text=f"new version {HOSTILE}")
    found = Slice(
        dimension="version",
        value="new",
        excess_share=0.98,
        request_share=0.5,
        share=0.3,
        share_before=0.01,
        share_elsewhere=0.01,
    )
    alert = IncidentAlert(
        name="ObjectiveBurn",
        severity="page",
        labels={"model": "big"},
        summary="The objective chat is missed",
        description=HOSTILE,
        runbook="noreplica",
        started_at=now - 120,
    )
    opened = open_incident(1, "Chats fail", {"model": "big"}, now - 110, "argosy", onset=now - 300)
    incident = msgspec.structs.replace(
        opened,
        severity="page",
        alerts={"a": alert},
        changes=(RankedChange(change=change, score=0.7),),
        slices=(found,),
        sliced_event="failed",
        healthy=("replica a",),
        requests=4120,
        failed=312,
        missing=("audit log",),
        rollback=RollbackAdvice(
            pool=POOL,
            rollout=f"{POOL}-1",
            candidate="new",
            reasons=("The version changed 5 min before the onset.",),
            obstacles=("Pages fire for other too.",),
        ),
    )
    assert IncidentRecords(gateway.store.fleets, "demo").add(incident)


async def test_incident_leads_from_what_is_wrong_to_the_step_that_ends_it(
    browser: Browser, admin_gateway: AdminGateway
) -> None:
    StoredRollout(admin_gateway.store.fleets)
    save_incident(admin_gateway)
    page = await open_console(browser, admin_gateway)
    await show_screen(page, "#/incidents", "Incidents")
    expect = load_playwright().expect
    await page.get_by_role("link", name="INC-1").click()
    main = page.get_by_role("main")
    await expect(main).to_contain_text("model big")
    await expect(main).to_contain_text("312 of 4\u202f120 requests failed.")
    for step in ("1 Detect", "2 Correlate", "3 Isolate", "4 Root cause", "5 Fix and prevent"):
        await expect(page.get_by_role("heading", name=step)).to_be_visible()
    await expect(page.get_by_role("region", name="Slices")).to_contain_text("98 %")
    await expect(page.get_by_role("region", name="Changes")).to_contain_text(HOSTILE)
    await expect(main).to_contain_text("Not read: audit log.")
    dialog = page.get_by_role("dialog")
    await page.get_by_role("button", name="Confirm the cause").click()
    await dialog.get_by_label("What caused it").fill("bad weights")
    await dialog.get_by_role("button", name="Confirm").click()
    await expect(main).to_contain_text("bad weights")
    page.on("dialog", lambda asked: asked.accept())
    await page.get_by_role("button", name=f"Roll {POOL} back").click()
    await expect(page.get_by_text("All users are sent back to the old version.")).to_be_visible()
    await page.get_by_role("button", name="Close").click()
    await dialog.get_by_role("button", name="Close").click()
    await expect(main).to_contain_text("closed")
    actions = {each.action for each in admin_gateway.store.audit_log.list_entries(limit=9)}
    assert actions >= {"incident.close", "rollout.abort"}


async def test_console_shows_moves_and_streams(
    browser: Browser, admin_gateway: AdminGateway
) -> None:
    page = await open_console(browser, admin_gateway)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "console",
        lambda message: problems.append(message.text) if "Security" in message.text else None,
    )
    canvas = page.get_by_role("img", name="Running and waiting requests").locator("canvas")
    before = await canvas.evaluate("canvas => canvas.toDataURL()")
    await canvas.evaluate(DRAWN_AGAIN, before)
    await page.get_by_role("link", name="Playground", exact=True).click()
    await page.get_by_label("Kind").select_option("completion")

    async def fail_first(request: UpstreamRequest) -> None:
        for upstream in admin_gateway.upstreams:
            upstream.script = respond_with_tokens
        await respond_500(request)

    for upstream in admin_gateway.upstreams:
        upstream.script = fail_first
    await page.get_by_role("button", name="List three").click()
    await page.get_by_text("0 1 2 3").wait_for()
    await page.get_by_role("link", name="Why did it take so long?").click()
    waterfall = page.get_by_role("table", name="Waterfall")
    await waterfall.get_by_text("Attempt 2: ").wait_for()
    assert await waterfall.locator("i.failed").count() == 1
    resources = (
        "performance.getEntriesByType('resource').reduce((sum, one) => sum + one.transferSize, 0)"
    )
    assert 20_000 < await page.evaluate(resources) < MAX_TRANSFERRED_BYTES
    address = page.url
    assert "/#/requests/" in address
    await page.goto("about:blank")
    await page.goto(address)
    await page.get_by_text("Where the time went").wait_for()
    save_log(admin_gateway, "")
    await page.goto(f"{admin_gateway.client.base_url}/#/{REPLICA}")
    await page.get_by_text("The log is empty.").wait_for()
    await page.get_by_label("Lines").select_option("errors")
    await page.get_by_text("The log has no such lines.").wait_for()
    event = '{"event":"crashed","level":"error","timestamp":"2026-11-28T10:00:00Z","ms":5}'
    save_log(admin_gateway, f"first\n{event}\n\tat \x1b[1m{HOSTILE}\x1b[0m\x07")
    lines = page.get_by_role("region", name="Log", exact=True)
    await load_playwright().expect(lines).to_contain_text(f"at {HOSTILE}\\x07")
    assert "2026-11-28 10:00:00.000 [error    ] crashed " in await lines.inner_text()
    await page.get_by_text(f": {HOSTILE}, exit status 1").wait_for()
    assert await page.locator("main img, pre b").count() == 0
    assert problems == []
    await page.get_by_role("button", name="Sign out").click()
    await page.get_by_label("API key").wait_for()


async def call_tools(request: UpstreamRequest) -> None:
    """Call a function twice, and answer once the results are there."""
    if not request.is_chat:
        await respond_with_tokens(request)  # a probe
        return
    has_results = request.body["messages"][-1]["role"] == "tool"
    deltas: list[dict[str, object]] = [{"content": "Warm in both."}]
    if not has_results:
        deltas = [{"reasoning_content": "Two cities, two calls."}]
        for index, city in enumerate(("Oslo", "Lima")):
            name = {"index": index, "id": f"call_{index}", "type": "function"}
            name["function"] = {"name": "get_weather", "arguments": '{"ci'}
            rest = {"index": index, "function": {"arguments": f'ty": "{city}"}}'}}
            deltas += [{"tool_calls": [name]}, {"tool_calls": [rest]}]
    finish = "stop" if has_results else "tool_calls"
    request.start_stream()
    for delta, reason in [*((delta, None) for delta in deltas), ({}, finish)]:
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        request.send_chunk(format_event(json.dumps({"choices": [choice]}).encode()))
    request.end_stream(tokens=3)


async def test_playground_sends_results_of_tools_back(
    browser: Browser, admin_gateway: AdminGateway
) -> None:
    for upstream in admin_gateway.upstreams:
        upstream.script = call_tools
    page = await open_console(browser, admin_gateway)
    await page.goto(f"{admin_gateway.client.base_url}/#/playground?tool_choice=get_weather")
    await page.get_by_role("button", name="Weather", exact=True).click()
    await page.get_by_role("button", name="What is the weather in Oslo and in Lima?").click()
    await page.get_by_text("Two cities, two calls.").wait_for()
    await page.get_by_label('Result of get_weather({"city": "Lima"})').fill("21")
    await page.get_by_role("button", name="Send 2 results").click()
    await page.get_by_text("Warm in both.").wait_for()
    await page.get_by_role("link", name="Why did it take so long?").wait_for()
    received = [one.body for upstream in admin_gateway.upstreams for one in upstream.requests]
    (last,) = [body for body in received if body["messages"][-1]["role"] == "tool"]
    assert [message.get("tool_call_id") for message in last["messages"]] == [
        None,
        None,
        "call_0",
        "call_1",
    ]
    assert last["messages"][-1]["content"] == "21"
    assert last["tools"][0]["function"]["name"] == "get_weather"
    assert last["tool_choice"]["function"]["name"] == "get_weather"
    code = await page.locator("pre", has_text="curl").inner_text()
    assert json.loads(code.partition("-d '")[2].rstrip("'"))["tools"] == last["tools"]


async def test_dragging_over_a_chart_sets_the_range_and_changes_are_marked(
    browser: Browser, admin_gateway: AdminGateway
) -> None:
    for action in ("cordon", "undrain"):
        await admin_gateway.create(f"/admin/replicas/{action}", {"model": "big", "replica": "a"})
    page = await open_console(browser, admin_gateway)
    chart = page.get_by_role("img", name="Running and waiting requests")
    await page.get_by_role("group", name="Changes").first.get_by_role("button").focus()
    await page.get_by_text("a was set to undrain by").first.wait_for()
    await page.get_by_text("2 changes in this time").first.click()
    await page.get_by_text("a was set to cordon by").first.wait_for()
    await page.get_by_role("button", name="Use UTC").click()
    over = chart.locator(".u-over")
    await over.hover(position={"x": 40, "y": 50})
    await page.mouse.down()
    await over.hover(position={"x": 180, "y": 50})
    async with page.expect_request(re.compile(r"admin/audit\?since=\d+&until=\d+")) as marks:
        await page.mouse.up()
    await page.wait_for_url(re.compile(r"from=\d+&to=\d+"))
    shown = dict(parse_qsl(urlsplit(page.url).fragment.partition("?")[2]))
    entered = await page.get_by_label("From (UTC)").input_value()
    begin = datetime.fromisoformat(entered).replace(tzinfo=UTC)
    assert begin.timestamp() == int(shown["from"])
    assert f"since={shown['from']}&until={shown['to']}&" in (await marks.value).url
    await over.dblclick(position={"x": 40, "y": 50})
    await page.wait_for_url(re.compile("#/overview$|/$"))
    async with page.expect_download() as download:
        await chart.locator("xpath=../..").get_by_role("button", name="CSV").click()
    lines = (await (await download.value).path()).read_text().splitlines()
    assert lines[0] == "time,running,waiting"
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ,", lines[-1])


async def test_new_key_is_shown_once_and_works(
    browser: Browser, admin_gateway: AdminGateway
) -> None:
    page = await open_console(browser, admin_gateway)
    await page.goto(f"{admin_gateway.client.base_url}/#/tenants")
    await page.get_by_role("button", name="New").click()
    await page.get_by_label("Project id").fill(admin_gateway.home_project)
    await page.get_by_label("Name", exact=True).fill("fleet")  # as its project
    await page.get_by_role("button", name="Create", exact=True).click()
    plain_key = await page.get_by_role("dialog", name="New key").locator("pre").inner_text()
    await page.get_by_role("button", name="Close").click()
    await page.get_by_role("dialog").wait_for(state="detached")
    await page.get_by_role("cell", name="fleet", exact=True).nth(1).wait_for()  # name and project
    assert plain_key not in await page.content()
    models = await admin_gateway.client.get(
        "/v1/models", headers={"authorization": f"Bearer {plain_key}"}
    )
    assert models.status_code == 200
    found = re.compile(rf"admin/requests\?project={admin_gateway.home_project}&key=key_")
    async with page.expect_request(found):
        await page.goto(f"{admin_gateway.client.base_url}/#/requests?project=fleet&key=fleet")


async def test_rollout_is_watched_and_steered_and_its_pool_scaled(
    browser: Browser, admin_gateway: AdminGateway
) -> None:
    page = await open_console(browser, admin_gateway)
    await page.goto(f"{admin_gateway.client.base_url}/#/models")
    await page.get_by_text("The fleet 'demo' was never applied.").wait_for()
    for digit in "12":
        await page.get_by_role("button", name="Load an adapter").click()
        for label, value in (("Name", HOSTILE), ("Base model", "big")):
            await page.get_by_role("dialog").get_by_label(label).fill(value)
        digest = f"sha256:{digit * 64}"
        await page.get_by_role("dialog").get_by_label("Digest").fill(digest)
        await page.get_by_role("dialog").get_by_role("button", name="Load").click()
        await page.get_by_role("dialog").wait_for(state="detached")
    page.once("dialog", lambda question: question.accept())
    await page.get_by_role("button", name="Promote").click()
    promoted = re.compile("big all sha256:2{12} .*Pin Unload")
    await page.get_by_role("row", name=promoted).wait_for()
    stored = StoredRollout(admin_gateway.store.fleets)
    stored.measure()
    stored.decide_once()
    await admin_gateway.create("/admin/replicas/cordon", {"model": "big", "replica": "a"})
    await page.locator(".steps .now", has_text="copies of 10 %").wait_for()
    evidence = page.get_by_role("region", name="Evidence of the gate")
    await evidence.get_by_role("cell", name="0 of 5 (0 %)").first.wait_for()
    await page.get_by_text("Evidence as e-values").click()
    needed = page.get_by_role("meter", name="Errors: no worse")
    await load_playwright().expect(needed).to_have_attribute("aria-valuetext", "1 of 20")
    dialog = page.get_by_role("dialog")
    await page.get_by_role("button", name="Pause").click()
    await dialog.get_by_label("Why").fill(HOSTILE)
    await dialog.get_by_role("button", name="Pause").click()
    await page.get_by_text("Waits for a controller: pause by key:").wait_for()
    stored.decide_once()
    await page.get_by_text(f"paused: {HOSTILE}").wait_for()
    await page.get_by_role("button", name="Scale").click()
    await dialog.get_by_label("Replicas that serve").fill("3")
    await dialog.get_by_role("button", name="Scale").click()
    await page.locator(".diff .add", has_text="+ pools[chat].replicas: 3").wait_for()
    await page.get_by_text("Revision 2", exact=True).click()
    await page.get_by_role("button", name="Put it in force again").first.click()
    await dialog.get_by_text("~ pools[chat].replicas: 3 -> 2   (1 replica stopped)").wait_for()
    await dialog.get_by_role("button", name="Apply").click()
    await page.get_by_text("Revision 4", exact=True).wait_for()
    await page.get_by_role(
        "row", name=re.compile("decision: ok an operator pool.scale ")
    ).wait_for()
    await apply_declaration(page, stored)
    failed = ReplicaRecord(
        name="chat-2-0",
        pool=POOL,
        generation=2,
        ordinal=0,
        launcher="local",
        phase=ReplicaPhase.FAILED,
        reason="it crashed 3 times",
        problem=ProblemKind.START,
    )
    stored.store.save_records(stored.lease, {"replica/chat-2-0": msgspec.json.encode(failed)})
    await page.get_by_role("cell", name="it crashed 3 times").wait_for()
    await page.get_by_role("link", name="Overview").click()
    await page.get_by_text("Replica chat-2-0: it crashed 3 times.").wait_for()
    await page.get_by_text("waits for a person").wait_for()
    await page.get_by_role("link", name="Open the rollout").wait_for()
    await page.get_by_text("(at least 5)").wait_for()


async def apply_declaration(page: Page, stored: StoredRollout) -> None:
    """Plan and apply a declaration, while another operator applies one meanwhile."""
    await page.get_by_role("button", name="Edit the declaration").click()
    editor = page.get_by_label(re.compile("^Declaration in YAML or JSON"))
    edited = (await editor.input_value()).replace("replicas: 2", "replicas: 5")
    command = json.dumps([HOSTILE, "{port}"])
    await choose_file(page, editor, f"{edited}engines: {{own: {{command: {command}}}}}\n")
    await page.get_by_role("alert").get_by_text("engines: it decides what the machines").wait_for()
    await choose_file(page, editor, edited)
    plan = page.get_by_role("region", name="Plan", exact=True)
    await plan.get_by_text("~ pools[chat].replicas: 2 -> 5   (3 replicas started)").wait_for()
    stored.store.apply("demo", DECLARATION, {POOL: NEW}, author="another operator", after=4)
    await page.get_by_label("Why, for the history").fill("a launch")
    await page.get_by_role("button", name="Apply").click()
    await page.get_by_text("Revision 5 was applied meanwhile.").wait_for()
    await page.get_by_role("button", name="Plan").click()
    await page.get_by_text("Revision 5 was applied since you began with revision 4.").wait_for()
    await page.get_by_role("button", name="Apply").click()
    await page.get_by_text("Revision 6", exact=True).wait_for()


async def choose_file(page: Page, editor: Locator, text: str) -> None:
    """Load a file into the editor of the declaration, and plan it."""
    file: FilePayload = {"name": "fleet.yaml", "mimeType": "text/yaml", "buffer": text.encode()}
    await page.get_by_label("Or a file").set_input_files(file)
    await load_playwright().expect(editor).to_have_value(text)
    await page.get_by_role("button", name="Plan").click()


async def test_routing_screen_previews_a_replica_and_shows_what_is_cached(
    browser: Browser, admin_gateway: AdminGateway
) -> None:
    prompt = f"{HOSTILE} " * 20
    body = {"model": "big", "prompt": prompt, "max_tokens": 1}
    for _ in range(2):
        sent = await admin_gateway.client.post(
            "/v1/completions", json=body, headers=admin_gateway.root_headers
        )
        assert sent.status_code == 200
    page = await open_console(browser, admin_gateway)
    await page.goto(f"{admin_gateway.client.base_url}/#/routing?kind=completion")
    await page.get_by_label(re.compile("^Prompt")).fill(prompt)
    await page.get_by_role("button", name="Preview").click()
    candidates = page.get_by_role("region", name="Candidates")
    await candidates.get_by_role("row").nth(2).wait_for()
    assert await page.get_by_text(re.compile("^[ab] would get it")).count() == 1
    await page.get_by_role("link", name=re.compile("after 0, in 2 requests")).click()
    await page.get_by_text("of its prompts, by estimate").wait_for()
    assert "prefix=" in page.url
    await page.get_by_role("button", name="Copy as JSON").wait_for()
    assert HOSTILE not in await page.get_by_role("region", name="Prefixes", exact=True).inner_text()
    await page.get_by_role("button", name="Examine all for 10 minutes").click()
    await page.get_by_text("all prompts are examined until").wait_for()
    for _ in range(2):
        await admin_gateway.client.post(
            "/v1/completions", json=body, headers=admin_gateway.root_headers
        )
    await page.get_by_text(re.compile("^1 request|^2 requests")).wait_for()


async def test_lesson_runs_with_the_values_of_the_address_and_is_drawn_on_any_width(
    browser: Browser, admin_gateway: AdminGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.nice", lambda _: None)  # the machine of a test may be busy
    page = await open_console(browser, admin_gateway)
    page.set_default_timeout(90_000)
    base = f"{admin_gateway.client.base_url}/#/learn"
    await page.goto(f"{base}/speculation?drafts=6")
    await page.get_by_text("with always 6").first.wait_for()
    await page.get_by_role("img", name="Tokens per second").wait_for()
    lessons = page.get_by_role("navigation", name="Lessons").get_by_role("link")
    assert await lessons.count() == len(LESSONS)
    await page.get_by_role("slider", name=re.compile("^Fixed number")).press("ArrowRight")
    await page.get_by_text("with always 7").first.wait_for()
    assert page.url.endswith("drafts=7")
    await page.goto(f"{base}/speculation?drafts=99")
    await page.get_by_text("Invalid value for 'drafts'").wait_for()
    await page.get_by_role("button", name="Use the defaults").click()
    await page.get_by_text("with always 4").first.wait_for()
    await page.set_viewport_size({"width": 360, "height": 800})
    for lesson in (LESSONS[0], LESSONS[-1]):
        await page.goto(f"{base}/{lesson.id}?scale=0")
        await page.get_by_text(lesson.look).wait_for()
        await page.get_by_role("region", name="Figures").wait_for()
        assert await page.evaluate("document.documentElement.scrollWidth") <= 360, lesson.id


@contextlib.asynccontextmanager
async def serve_page(body: str) -> AsyncIterator[str]:
    """Serve a page on another port of this machine, and yield its address."""

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: {len(body)}\r\n"
        writer.write(f"{head}connection: close\r\n\r\n{body}".encode())
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(respond, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"


async def test_other_pages_neither_send_requests_nor_show_the_console(
    browser: Browser, admin_gateway: AdminGateway
) -> None:
    """A page on another port is of the same site, so the browser sends it with the cookie of the session."""
    base = str(admin_gateway.client.base_url)
    page = await open_console(browser, admin_gateway)
    forged = json.dumps(
        {"method": "POST", "mode": "no-cors", "credentials": "include", "body": '{"name":"forged"}'}
    )
    async with serve_page(f"<iframe src='{base}/'></iframe>") as other:
        await page.goto(other)
        statuses: list[int] = []
        page.on(
            "response",
            lambda answer: statuses.append(answer.status) if "/admin/" in answer.url else None,
        )
        await page.evaluate(f"fetch('{base}/admin/organisations', {forged})")
        framed = page.frames[-1]
        assert framed is not page.main_frame
        assert await framed.locator("#app").count() == 0
    assert statuses == [403]
    assert "forged" not in {one.name for one in admin_gateway.store.accounts.list_organisations()}
    rebound = await page.goto(f"http://attacker.test:{urlsplit(base).port}/")
    assert rebound is not None
    assert rebound.status == 421


async def test_operators_switch_flags_and_move_labels_on_a_phone(
    browser: Browser, tmp_path: Path
) -> None:
    flag = FeatureFlag(variants={"on": True, "off": False}, default_variant="off")
    async with run_admin_gateway(
        tmp_path,
        feature_flags={"pilot": flag, "idle": flag},
        content_rules=[ContentRule(name="strict", flag="pilot", input={"email": "redact"})],
        cache_rules=[CacheRule(name="all", sampled=True)],
    ) as gateway:
        add = partial(gateway.store.prompts.add_version, "greet", organisation=None, actor="test")
        add('{"text": "Hello {{ name }}."}', labels=["production"])
        add('{"text": "Hi {{ name }}."}')
        body = {"model": "big", "prompt": "Hi", "max_tokens": 2}
        for _ in range(2):
            await gateway.client.post("/v1/completions", json=body, headers=gateway.root_headers)
        page = await open_console(browser, gateway)
        await page.set_viewport_size({"width": 360, "height": 740})
        expect = load_playwright().expect
        await show_screen(page, "#/flags", "Flags and caches")
        table = page.get_by_role("region", name="Feature flags")
        row = table.get_by_role("row").filter(has_text="pilot")
        await expect(row).to_contain_text("strict")
        await expect(table.get_by_role("row").filter(has_text="idle")).to_contain_text("nothing")
        await expect(page.get_by_role("region", name="Caches")).to_contain_text("2 miss")
        await row.get_by_role("button", name="Switch").click()
        dialog = page.get_by_role("dialog", name="Switch pilot")
        await dialog.get_by_label("Variant").select_option("on")
        await dialog.get_by_label("Only for organisations").fill("acme, acme/web")
        await dialog.get_by_label("in percent").fill("20")
        await dialog.get_by_label("Reason").fill("trial")
        await dialog.get_by_role("button", name="Switch").click()
        await expect(row).to_contain_text("fractional")
        (switched,) = gateway.store.flags.list_flags()
        assert json.loads(switched.targeting or "") == {
            "if": [
                {"or": [{"in": [{"var": "organisation"}, ["acme"]]},
                        {"in": [{"var": "project"}, ["acme/web"]]}]},
                "on",
                {"fractional": [{"var": "targetingKey"}, ["on", 20], ["off", 80]]},
            ]
        }  # fmt: skip
        assert switched.reason == "trial"
        await row.get_by_role("button", name="Disable").click()
        await expect(row.get_by_role("button", name="Enable")).to_be_visible()
        assert await page.evaluate(FIND_CLIPPED) == []
        await show_screen(page, "#/prompts", "Prompts")
        newest = page.get_by_role("region", name="Prompts").get_by_role("row").nth(1)
        await newest.get_by_role("button", name="Preview").click()
        await page.get_by_text("variables: name").wait_for()
        await page.get_by_label("Variables as JSON").fill('{"name": "Ann"}')
        await page.get_by_role("button", name="Render").click()
        await expect(page.get_by_label("Rendered")).to_have_text("Hi Ann.")
        await newest.get_by_role("button", name="Label").click()
        dialog = page.get_by_role("dialog", name="Label greet@2")
        await dialog.get_by_role("button", name="Save").click()
        await expect(newest).to_contain_text("production")
        labels = {each.version: each.labels for each in gateway.store.prompts.list_prompts()}
        assert labels == {1: (), 2: ("production",)}
        assert await page.evaluate(FIND_CLIPPED) == []
        await expect(page.locator("html")).to_have_js_property("scrollWidth", 360)


@pytest.mark.skipif(
    not AXE.exists(), reason="axe-core is not installed: npm ci in tests/integration/js"
)
async def test_screens_have_no_serious_findings_of_axe_and_fit_a_phone(
    browser: Browser, admin_gateway: AdminGateway
) -> None:
    await admin_gateway.create_customer()
    StoredRollout(admin_gateway.store.fleets).decide_once()
    save_log(admin_gateway, "a line")
    save_alerts(admin_gateway)
    save_incident(admin_gateway)
    page = await open_console(browser, admin_gateway)
    axe = AXE.read_text()
    findings: dict[str, list[object]] = {}
    (run,) = admin_gateway.store.quality.list_runs()
    more = {
        f"#/{REPLICA}": "Models and replicas",
        "#/tenants?tab=limits": "Tenants and keys",
        "#/incidents/1": "Incidents",
        "#/objectives/answers": "Objectives",
        f"#/quality/{run.id}": "Quality",
    }
    screens = await list_screens(page) | more
    for address, title in screens.items():
        await show_screen(page, address, title)
        await page.evaluate(f"{axe}; undefined")
        findings[address] = await page.evaluate(FIND_SERIOUS, {})
        await page.emulate_media(color_scheme="dark")
        findings[f"{address}, dark"] = await page.evaluate(FIND_SERIOUS, COLOURS_ONLY)
        await page.emulate_media(color_scheme="light")
        await page.set_viewport_size({"width": 360, "height": 740})
        expect = load_playwright().expect
        await expect(page.locator("html")).to_have_js_property("scrollWidth", 360)
        bar = page.get_by_role("navigation", name="Screens")
        await expect(bar.locator("[aria-current]")).to_be_in_viewport(ratio=1)
        box = await bar.bounding_box()
        assert box is not None
        assert box["height"] < 80
        findings[f"{address}, narrow"] = await page.evaluate(FIND_CLIPPED)
        await page.set_viewport_size({"width": 1280, "height": 900})
    assert len(findings) >= 16
    assert not {name: found for name, found in findings.items() if found}
