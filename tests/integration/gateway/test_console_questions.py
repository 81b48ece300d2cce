"""The walks of docs/how-to/answer-questions.md: each question is answered from the console alone."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.support.console_browser import BROWSER_MARKS, open_console, show_screen
from tests.support.fake_upstream import UpstreamRequest, respond_with_tokens
from tests.support.organisations import AdminGateway, Json, run_admin_gateway

from argosy.store import Price, UsageRecord

if TYPE_CHECKING:
    from playwright.async_api import Browser, Locator, Page

pytestmark = [*BROWSER_MARKS, pytest.mark.asyncio(loop_scope="module")]
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
            nano_dollars=12_340_000_000,
        )
        gateway.store.ledger.add_records([row_of_yesterday])
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

        # What did the last change do?
        await show_screen(page, "#/models", "Models and replicas")
        await page.get_by_role("button", name="Cordon").click()
        await page.get_by_role("region", name="Changes").get_by_text("ready → cordoned").wait_for()
        await show_screen(page, "#/events", "Events and audit")
        last = row(page, "Audit log")
        await last.get_by_text(re.compile("state: .*cordoned")).wait_for()
