"""Scenarios of the console: roles, hostile text, long tables, slow and broken connections, operators' questions."""

from __future__ import annotations

import asyncio
import re
import socket
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.support.console_browser import (
    BROWSER_MARKS,
    list_screens,
    open_console,
    show_screen,
    sign_in,
)
from tests.support.fake_upstream import UpstreamRequest, respond_with_tokens
from tests.support.gateway_processes import gateways, open_organisation
from tests.support.organisations import AdminGateway, Json, run_admin_gateway

from argosy.deployment import GatewayConfig, ModelConfig, ReplicaConfig
from argosy.store import HardwareDay, Price, Role, RoleScope, StoreConfig, UsageRecord

if TYPE_CHECKING:
    from playwright.async_api import Browser, Locator, Page

pytestmark = [*BROWSER_MARKS, pytest.mark.asyncio(loop_scope="module")]
REVERSED = "\u202egnp.exe"
MARKUP = "<img src=x onerror=\"document.title='owned'\"><b>bold</b>"
HOSTILE = f"{MARKUP}{REVERSED}x"
ROWS = 5_000
SCROLL_TO_END = """region => {
  region.scrollTop = region.scrollHeight;
  return new Promise((done) => requestAnimationFrame(() => done()));
}"""
SLOW_3G = {
    "offline": False,
    "latency": 150,
    "downloadThroughput": 200_000,
    "uploadThroughput": 93_750,
}
"""1.6 Mbit/s down, 0.75 Mbit/s up."""


def record_refusals(page: Page) -> list[str]:
    """Return a list to which each refused request of the page is added."""
    refused: list[str] = []
    page.on("response", lambda answer: refused.append(answer.url) if answer.status == 403 else None)
    return refused


# --- roles ---------------------------------------------------------------------------------------

OWN = ["Requests", "Usage and cost", "Playground"]
TENANT = ["Requests", "Usage and cost", "Events and audit", "Playground", "Tenants and keys"]
FLEET = ["Overview", *TENANT, "Models and replicas", "Settings and doctor"]
CALLS = {
    "keys": ("GET", "/admin/keys", None),
    "pools": ("GET", "/admin/pools", None),
    "new limit": ("POST", "/admin/limits", {}),
    "drain": ("POST", "/admin/replicas/drain", {"replica": "absent"}),
    "new organisation": ("POST", "/admin/organisations", {}),
}


@pytest.mark.parametrize(
    ("role", "scope", "screens", "refused"),
    [
        ("user", "organisation", OWN, [*CALLS]),
        ("viewer", "organisation", TENANT, ["pools", "new limit", "drain", "new organisation"]),
        ("admin", "organisation", TENANT, ["pools", "drain", "new organisation"]),
        ("viewer", "gateway", FLEET, ["new limit", "drain", "new organisation"]),
        pytest.param(
            "operator", "gateway", FLEET, ["new organisation"], marks=pytest.mark.exhaustive
        ),
        ("admin", "gateway", FLEET, []),
    ],
)
async def test_role_sees_its_screens_and_is_refused_the_rest(
    browser: Browser,
    shared_gateway: AdminGateway,
    role: Role,
    scope: RoleScope,
    screens: list[str],
    refused: list[str],
) -> None:
    """The page shows nothing that the API refuses, and nothing of another organisation."""
    own, foreign = await shared_gateway.create_customer(), await shared_gateway.create_customer()
    headers = await shared_gateway.key_headers(role, scope, own.organisation)
    page = await open_console(browser, shared_gateway, headers=headers)
    refusals = record_refusals(page)
    shown = await list_screens(page)
    assert set(screens) <= set(shown.values())
    assert scope == "gateway" or not {"Overview", "Settings and doctor"} & set(shown.values())
    bodies: list[str] = []
    for address, title in shown.items():
        await show_screen(page, address, title)
        bodies.append(await page.content())
    assert role == "user" or refusals == []
    if scope == "organisation":
        assert role == "user" or any(own.project in body for body in bodies)
        assert not [value for value in asdict(foreign).values() if value in "".join(bodies)]
    if role != "user":
        await show_screen(page, "#/tenants?tab=limits", "Tenants and keys")
        can_create = await page.get_by_role("button", name="New", exact=True).count()
        assert bool(can_create) == ("new limit" not in refused)
    answers = {
        name: await page.evaluate(
            """async ([method, path, body]) => (await fetch(path, {method, body: body && JSON.stringify(body),
              headers: body ? {"content-type": "application/json"} : {}})).status""",
            list(call),
        )
        for name, call in CALLS.items()
    }
    assert [name for name, status in answers.items() if status == 403] == refused


# --- hostile text --------------------------------------------------------------------------------


async def respond_with_hostile_events(request: UpstreamRequest) -> None:
    """Send markup, events for scripts, and the names through which JSON changes all objects of a page."""
    request.start_stream()
    request.send_chunk(b'event: execute\ndata: {"execute": "document.title = \'owned\'"}\n\n')
    request.send_chunk(b'data: {"choices": [], "__proto__": {"polluted": 1}, "constructor": 1}\n\n')
    request.send_text(f"{HOSTILE}<script>document.title='owned'</script>", "stop")
    request.end_stream(tokens=1)


async def test_hostile_text_is_shown_as_text_on_every_screen(
    browser: Browser, tmp_path: Path
) -> None:
    """Model, replica and tenant names, prompts, reasons and answers with markup and invisible characters."""
    async with run_admin_gateway(
        tmp_path,
        model=MARKUP,
        replica_names=(HOSTILE, "__proto__"),
        script=respond_with_hostile_events,
    ) as hostile:
        for name in (MARKUP, "__proto__", "constructor"):
            organisation = hostile.store.accounts.create_organisation(name, actor="test").id
            project = hostile.store.accounts.create_project(organisation, name, actor="test").id
            hostile.store.accounts.create_key(project, name, actor="test")
        drain = {"replica": "__proto__", "model": MARKUP, "reason": MARKUP}
        await hostile.create("/admin/replicas/drain", drain)
        page = await open_console(browser, hostile)
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        await show_screen(page, "#/playground?mode=completion", "Playground")
        await page.get_by_label("Your message").fill(HOSTILE)
        await page.get_by_role("button", name="Send").click()
        await page.get_by_role("link", name="Why did it take so long?").wait_for()
        turns = await page.get_by_role("log").inner_text()
        assert turns.count(MARKUP) == 2
        await page.get_by_role("link", name="Why did it take so long?").click()
        await page.get_by_text("Where the time went").wait_for()
        addresses = await list_screens(page)
        for tab in ("organisations", "projects", "keys"):
            addresses[f"#/tenants?tab={tab}&__proto__=polluted&constructor=1"] = "Tenants and keys"
        addresses[page.url.partition("/#")[2].join(("#", ""))] = "Requests"
        for address, title in addresses.items():
            await show_screen(page, address, title)
            if title == "Playground":  # shows messages as they are
                continue
            content = await page.content()
            assert REVERSED[0] not in content, title
        assert await page.locator("main img, main b:text-is('bold'), main script").count() == 0
        assert await page.evaluate("[({}).polluted, document.title.includes('owned')]") == [
            None,
            False,
        ]
        assert problems == []


# --- long tables and slow connections ------------------------------------------------------------


def usage_rows(count: int) -> list[UsageRecord]:
    """Return rows of the last hour. Row 4,321 took longest, and each hundredth failed."""
    now = time.time()
    return [
        UsageRecord(
            request=f"row-{number}",
            project="proj_rows",
            model="big",
            replica="a",
            started_at=now - 3600 + number * 0.7,
            ended_at=now - 3600 + number * 0.7 + (99 if number == 4_321 else 0.5),
            status="failed" if number % 100 == 0 else "completed",
            output_tokens=number,
        )
        for number in range(count)
    ]


async def count_heap(page: Page) -> dict[str, float]:
    session = await page.context.new_cdp_session(page)
    await session.send("HeapProfiler.collectGarbage")
    await session.send("Performance.enable")
    metrics = (await session.send("Performance.getMetrics"))["metrics"]
    return {metric["name"]: metric["value"] for metric in metrics}


async def test_five_thousand_requests_scroll_sort_and_filter_over_a_slow_connection(
    browser: Browser, shared_gateway: AdminGateway
) -> None:
    await asyncio.to_thread(shared_gateway.store.ledger.add_records, usage_rows(ROWS))
    page = await open_console(browser, shared_gateway)
    session = await page.context.new_cdp_session(page)
    await session.send("Network.enable")
    await session.send("Network.emulateNetworkConditions", SLOW_3G)
    await session.send("Emulation.setCPUThrottlingRate", {"rate": 4})
    await show_screen(page, "#/requests?project=proj_rows", "Requests")
    region = page.get_by_role("region", name="Requests")
    rows = region.get_by_role("row")
    await region.get_by_role("link", name="row-4999").wait_for()
    await session.send("Emulation.setCPUThrottlingRate", {"rate": 1})
    await session.send(
        "Network.emulateNetworkConditions",
        SLOW_3G | {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1},
    )
    oldest = region.get_by_role("link", name="row-0", exact=True)
    while not await oldest.count():  # each time that the end is in sight, a page is read
        await region.evaluate(SCROLL_TO_END)
    assert await rows.count() < 100
    heap = await count_heap(page)
    assert heap["JSHeapUsedSize"] < 40e6
    assert heap["Nodes"] < 5_000
    await region.get_by_role("button", name="Duration").click()
    await region.evaluate("region => { region.scrollTop = 0 }")
    await region.locator("tr[aria-rowindex='2']").get_by_text("row-4321").wait_for()
    await page.get_by_label("Status").select_option("failed")
    await page.get_by_text(re.compile(f"^{ROWS // 100} rows")).wait_for()


# --- broken connections and failover -------------------------------------------------------------


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


@pytest.mark.exhaustive
async def test_console_recovers_by_itself_when_its_gateway_is_killed_and_started_again(
    browser: Browser, tmp_path: Path
) -> None:
    store_url = f"sqlite:///{tmp_path}/argosy.db"
    replica = ReplicaConfig(url=f"http://127.0.0.1:{free_port()}", name="absent", kind="openai")
    models = [ModelConfig(name="big", replicas=[replica])]
    config = GatewayConfig(port=free_port(), models=models, store=StoreConfig(url=store_url))
    with open_organisation(store_url) as accounts:
        key = accounts.key(accounts.project("ops"), role="admin", scope="gateway")
        async with gateways(config, tmp_path) as (process,):
            page = await sign_in(browser, process.url, key)
            await page.evaluate("window.isSamePage = true")
            await show_screen(page, "#/models", "Models and replicas")
            await page.get_by_role("link", name="absent").first.wait_for()
            await process.kill()
            await page.get_by_text("The connection to the gateway is lost").wait_for()
            await page.get_by_text(re.compile("The last values stay")).first.wait_for()
            assert await page.get_by_role("link", name="absent").count() >= 1
            accounts.project("created meanwhile")
            await process.start()
            await page.get_by_text(re.compile("Updates live$")).wait_for()
            await page.get_by_text("The connection to the gateway is lost").wait_for(
                state="detached"
            )
            await page.get_by_text(re.compile("The last values stay")).first.wait_for(
                state="detached"
            )
            await show_screen(page, "#/tenants?tab=projects", "Tenants and keys")
            await page.get_by_role("cell", name="created meanwhile").wait_for()
            await page.get_by_role("cell", name=re.compile("^0 of .+ bytes$")).first.wait_for()
            assert await page.evaluate("window.isSamePage")


# --- the walks of docs/how-to/answer-questions.md ------------------------------------------------

FLOOD = 12
YESTERDAY = time.time() - 86_400


async def create_tenant(gateway: AdminGateway, project: str, key: str) -> Json:
    """Create a project with a key. Returns headers with the key."""
    organisation = gateway.create_organisation("acme")
    created = gateway.store.accounts.create_project(organisation, project, actor="test")
    body = {"project": created.id, "name": key}
    plain: str = (await gateway.create("/admin/keys", body))["key"]
    return {"authorization": f"Bearer {plain}"}


async def complete(gateway: AdminGateway, headers: Json, prompt: str, **more: str) -> None:
    body = {"model": "big", "prompt": prompt, "max_tokens": 4}
    response = await gateway.client.post("/v1/completions", json=body, headers=headers | more)
    assert response.status_code == 200, response.text


async def wait_queued(gateway: AdminGateway, request: str) -> None:
    while True:
        trace = await gateway.client.get(f"/admin/requests/{request}", headers=gateway.root_headers)
        if trace.status_code == 200 and trace.json()["ms"]["queued"] is not None:
            return
        await asyncio.sleep(0.01)


def row(page: Page, table: str, index: int = 1) -> Locator:
    """Return a row of a table, of which the first is 1."""
    region = page.get_by_role("region", name=table, exact=True)
    return region.locator(f"tr[aria-rowindex='{index + 1}']")


async def test_questions_are_answered_from_the_console_alone(
    browser: Browser, tmp_path: Path
) -> None:
    started, is_released = asyncio.Event(), asyncio.Event()

    async def respond(request: UpstreamRequest) -> None:
        if request.body["prompt"] == "hold":
            started.set()
            await is_released.wait()
        await respond_with_tokens(request)

    async with run_admin_gateway(
        tmp_path,
        replica_names=("a",),
        script=respond,
        replica_settings={"max_requests": 1},
    ) as gateway:
        price = Price(model="big", input=0, cached_input=0, output=1000)
        gateway.store.limits_and_prices.set_price(price, actor="test")
        row_of_yesterday = UsageRecord(
            request="yesterday",
            model="big",
            started_at=YESTERDAY,
            ended_at=YESTERDAY,
            status="completed",
            input_tokens=1,
            nano_dollars=12_340_000_000,
        )
        gateway.store.ledger.add_records([row_of_yesterday])
        lease = gateway.store.fleets.acquire_lease("test", gateway.store.fleets.read_lease("demo"))
        assert lease is not None
        hardware = {"replica_ms": 4, "busy_ms": 1, "nano_dollars": 10**9}
        use = HardwareDay(day=int(YESTERDAY // 86_400), pool="big", model="big", **hardware)
        gateway.store.hardware_costs.add(lease, [use])
        web = await create_tenant(gateway, "web", "shop")
        batch = await create_tenant(gateway, "batch", "leaked key")
        holding = asyncio.create_task(complete(gateway, batch, "hold"))
        await started.wait()
        slow = asyncio.create_task(
            complete(gateway, web, "Hello", **{"x-request-id": "slow-request"})
        )
        await wait_queued(gateway, "slow-request")
        await asyncio.sleep(0.5)  # so that waiting takes longer than all the rest
        is_released.set()
        await asyncio.gather(holding, slow)
        await asyncio.gather(*(complete(gateway, batch, "more") for _ in range(FLOOD)))
        page = await open_console(browser, gateway)

        # Why was request X slow?
        await show_screen(page, "#/requests", "Requests")
        await page.get_by_label("Request or response id").fill("slow-request")
        await page.get_by_role("button", name="Explain").click()
        await page.get_by_text(re.compile(r"It spent \d+ % waiting in the queue")).wait_for()
        await page.get_by_text(re.compile("Without waiting and failures")).wait_for()
        await page.get_by_role("table", name="Waterfall").get_by_text("Queue").wait_for()

        # Which tenant floods?
        await show_screen(page, "#/usage?by=project&range=1d", "Usage and cost")
        await row(page, "Usage by project").get_by_text("batch").wait_for()
        await row(page, "Usage by project").get_by_text(str(FLOOD + 1), exact=True).first.wait_for()

        # Which key should be revoked?
        await page.get_by_role("button", name="key", exact=True).click()
        await row(page, "Usage by key").get_by_text("leaked key").wait_for()
        await show_screen(page, "#/tenants?tab=keys", "Tenants and keys")
        page.on("dialog", lambda dialog: dialog.accept())
        key = page.get_by_role("row").filter(has_text="leaked key")
        await key.get_by_role("button", name="Revoke").click()
        await key.get_by_text("revoked").wait_for()
        refused = await gateway.client.get("/v1/models", headers=batch)
        assert refused.status_code == 401

        # What did yesterday cost?
        await show_screen(page, "#/usage?range=7d", "Usage and cost")
        day = time.strftime("%Y-%m-%d", time.gmtime(YESTERDAY))
        yesterday = page.get_by_role("row").filter(has_text=day)
        await yesterday.get_by_text("$12.34").wait_for()

        # What did the hardware cost without requests?
        await (
            row(page, "Billed and caused").filter(has_text="(idle)").get_by_text("$0.75").wait_for()
        )

        # What did the last change do?
        await show_screen(page, "#/models", "Models and replicas")
        await page.get_by_role("button", name="Cordon").click()
        await page.get_by_role("region", name="Changes").get_by_text("ready → cordoned").wait_for()
        await show_screen(page, "#/events", "Events and audit")
        last = row(page, "Audit log")
        await last.get_by_text(re.compile("state: .*cordoned")).wait_for()
