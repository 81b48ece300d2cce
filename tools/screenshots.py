"""Makes the screenshots of the documentation: a server with two replicas under load, and its console in Chromium.

    python -m tools.screenshots [--output docs/images/console]

Three tenants send requests to the bundled model, and one of them floods. The ledger also gets usage of the week before,
so that the days have something to show.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import random
import re
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import httpx2
from PIL import Image
from playwright.async_api import Browser, ViewportSize, async_playwright

from argosy.store import Price, Store, UsageRecord, open_store

MODEL = "argosy-mini"
TENANTS = {"web": 1, "search": 1, "batch": 10}
"""Requests that each project keeps running at the same time."""
DAYS, ROWS_PER_DAY = 6, 240
LOAD_S = 60.0
"""Time under load before the first picture, so that charts have lines."""
MAX_BYTES = 150_000
PROMPTS = ("Tell me a story about a fox.", "Write a poem about the sea.", "Explain a KV cache.")
CLOSE_DETAILS = "document.querySelectorAll('details').forEach((each) => { each.open = false })"
"""A declaration contains paths of the machine that takes the pictures."""
SIZE: ViewportSize = {"width": 1280, "height": 860}


@dataclass(frozen=True)
class Shot:
    """A picture of one screen."""

    name: str
    address: str
    ready: str
    """Text that is there when the screen is complete."""
    scheme: Literal["light", "dark"] = "light"


SHOTS = (
    Shot("overview", "#/overview", "Time to first token"),
    Shot("overview-dark", "#/overview", "Time to first token", "dark"),
    Shot("request", "#/requests/{request}", "Where the time went"),
    Shot("usage", "#/usage?by=project&range=7d", "Usage by project"),
    Shot("keys", "#/tenants?tab=keys", "nightly export"),
    Shot("models", "#/models", "What changed"),
    Shot("events", "#/events", "Audit log"),
)


def create_accounts(store: Store) -> tuple[str, dict[str, str]]:
    """Create tenants, prices and the usage of the days before. Returns an administrator's key, and keys by project."""
    accounts = store.accounts
    organisation = accounts.create_organisation("acme", actor="setup").id
    projects = {
        name: accounts.create_project(organisation, name, actor="setup") for name in TENANTS
    }
    names = {"web": "shop", "search": "catalogue", "batch": "nightly export"}
    keys = {
        name: accounts.create_key(project.id, names[name], actor="setup")
        for name, project in projects.items()
    }
    root = accounts.create_key(
        projects["web"].id, "operations", role="admin", scope="gateway", actor="setup"
    )[1]
    price = Price(model=MODEL, input=150, cached_input=75, output=600)
    store.limits_and_prices.set_price(price, actor="setup")
    batch = projects["batch"].id
    store.limits_and_prices.set_limit(
        "project", batch, "nano_dollars", 2_000_000_000, window="day", actor="setup"
    )
    draw = random.Random(1)
    records = []
    for number in range(DAYS * ROWS_PER_DAY):
        name = draw.choice(("web", "web", "search", "batch"))
        at = time.time() - 86_400 * (1 + number / ROWS_PER_DAY)
        inputs, outputs = draw.randrange(200, 4000), draw.randrange(50, 600)
        records.append(
            UsageRecord(
                request=f"earlier-{number}",
                organisation=organisation,
                project=projects[name].id,
                key=keys[name][0].id,
                model=MODEL,
                started_at=at,
                ended_at=at + outputs / 100,
                status="completed",
                input_tokens=inputs,
                cached_tokens=inputs // 2,
                output_tokens=outputs,
                nano_dollars=inputs // 2 * 225 + outputs * 600,
            )
        )
    store.ledger.add_records(records)
    return root, {name: plain for name, (_, plain) in keys.items()}


async def send_requests(client: httpx2.AsyncClient, key: str, slowest: dict[str, float]) -> None:
    """Send one request after the other, and note how long each took."""
    draw = random.Random(key)
    while True:
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": draw.choice(PROMPTS)}],
            "max_tokens": draw.randrange(40, 200),
            "stream": True,
        }
        began = time.monotonic()
        headers = {"authorization": f"Bearer {key}"}
        path = "/v1/chat/completions"
        async with client.stream("POST", path, json=body, headers=headers) as response:
            await response.aread()
        slowest[response.headers["x-request-id"]] = time.monotonic() - began


async def take_shot(browser: Browser, url: str, key: str, shot: Shot, output: Path) -> None:
    """Sign in, show a screen, and write its picture."""
    context = await browser.new_context(viewport=SIZE, color_scheme=shot.scheme)
    page = await context.new_page()
    await page.goto(url)
    await page.get_by_label("API key").fill(key)
    await page.get_by_role("button", name="Sign in").click()
    await page.get_by_text(re.compile("Updates live$")).wait_for()
    await page.evaluate("address => { location.hash = address }", shot.address)
    await page.get_by_text(shot.ready).first.wait_for()
    await page.locator("[aria-busy=true]").first.wait_for(state="detached")
    await page.wait_for_timeout(1500)  # charts draw in the frame after their data
    await page.evaluate(CLOSE_DETAILS)
    picture = Image.open(io.BytesIO(await page.screenshot())).convert("RGB")
    picture = picture.quantize(256, dither=Image.Dither.NONE)
    path = output / f"{shot.name}.png"
    picture.save(path, optimize=True)
    if path.stat().st_size > MAX_BYTES:
        raise SystemExit(f"{path} has {path.stat().st_size} bytes. Reduce what it shows.")
    await context.close()


async def run(output: Path) -> None:
    """Start the server and the load, and take all pictures."""
    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("Chromium is not installed: make services")
    with tempfile.TemporaryDirectory() as folder:
        store_url = f"sqlite:///{folder}/argosy.db"
        store = open_store(store_url)
        store.migrate()
        root, keys = create_accounts(store)
        store.close()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "argosy.cli", "serve", "--port", "0", "--replicas", "2"),
            *("--threads", "1", "--kv-memory", "64MiB", "--max-seqs", "4", "--store", store_url),
            env=os.environ | {"XDG_STATE_HOME": folder},
            stderr=asyncio.subprocess.PIPE,
        )
        stderr = process.stderr or asyncio.StreamReader()
        try:
            url = await read_url(stderr)
            log = asyncio.create_task(stderr.read())  # a full pipe would stop the server
            await take_pictures(url, root, keys, chromium, output)
            log.cancel()
        finally:
            process.terminate()
            await process.wait()


async def read_url(stderr: asyncio.StreamReader) -> str:
    """Wait until the server listens, and return its address."""
    async for line in stderr:
        if match := re.search(r"http://127\.0\.0\.1:\d+", line.decode()):
            return match.group()
    raise SystemExit("The server ended before it was ready.")


async def take_pictures(
    url: str, root: str, keys: dict[str, str], chromium: str, output: Path
) -> None:
    """Run the load and take the pictures while it runs."""
    slowest: dict[str, float] = {}
    async with (
        httpx2.AsyncClient(base_url=url, timeout=120) as client,
        async_playwright() as playwright,
        asyncio.TaskGroup() as tasks,
    ):
        while (await client.get("/ready")).status_code != 200:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.2)
        load = [
            tasks.create_task(send_requests(client, keys[name], slowest))
            for name, count in TENANTS.items()
            for _ in range(count)
        ]
        await asyncio.sleep(LOAD_S)
        browser = await playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        request = max(slowest, key=slowest.__getitem__)
        for shot in SHOTS:
            named = Shot(shot.name, shot.address.format(request=request), shot.ready, shot.scheme)
            await take_shot(browser, url, root, named, output)
        await browser.close()
        for task in load:
            task.cancel()


def main() -> None:
    """Parse the command line and make the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, default=Path("docs/images/console"))
    output: Path = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    asyncio.run(run(output))


if __name__ == "__main__":
    main()
