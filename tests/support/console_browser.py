"""The console in Debian's Chromium: a browser, signed-in pages, and what all screens have in common."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Literal

import pytest

from tests.support.organisations import AdminGateway

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

CHROMIUM = shutil.which("chromium")
BROWSER_MARKS = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: make services"),
]
Scheme = Literal["light", "dark"]


def load_playwright() -> Any:  # noqa: ANN401 - a module
    """Return Playwright's API, or skip the test."""
    return pytest.importorskip("playwright.async_api", reason="playwright is not installed")


script_errors: list[str] = []
"""Errors that scripts of the pages have not handled."""


@contextlib.asynccontextmanager
async def launch_chromium() -> AsyncIterator[Browser]:
    """Run Chromium, in which the name attacker.test has this machine's address.

    Raises:
        AssertionError: A script of a page that `sign_in` opened has failed.
    """
    async with load_playwright().async_playwright() as playwright:
        launched = await playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--host-resolver-rules=MAP attacker.test 127.0.0.1"],
        )
        yield launched
        await close_pages(launched)
        await launched.close()


async def close_pages(browser: Browser) -> None:
    """Close all pages.

    Raises:
        AssertionError: A script of a page that `sign_in` opened has failed.
    """
    for context in browser.contexts:
        await context.close()
    errors = script_errors.copy()
    script_errors.clear()
    assert not errors


async def open_console(
    browser: Browser,
    gateway: AdminGateway,
    *,
    scheme: Scheme = "light",
    headers: dict[str, str] | None = None,
) -> Page:
    """Open the console and sign in with the key in `headers`, by default an administrator's."""
    key = (headers or gateway.root_headers)["authorization"].removeprefix("Bearer ")
    return await sign_in(browser, str(gateway.client.base_url), key, scheme=scheme)


async def sign_in(browser: Browser, url: str, key: str = "", *, scheme: Scheme = "light") -> Page:
    """Open the console at `url`, with a key if it needs one."""
    context = await browser.new_context(
        color_scheme=scheme, viewport={"width": 1280, "height": 900}
    )
    context.on("weberror", lambda found: script_errors.append(str(found.error)))
    page = await context.new_page()
    await page.goto(url)
    if key:
        await page.get_by_label("API key").fill(key)
        await page.get_by_role("button", name="Sign in").click()
    await page.get_by_text(re.compile("Updates live$")).wait_for()
    return page


async def list_screens(page: Page) -> dict[str, str]:
    """Return the title of each screen that the navigation names, by its address."""
    links = page.get_by_role("navigation", name="Screens").get_by_role("link")
    addresses = await links.evaluate_all("links => links.map((link) => link.getAttribute('href'))")
    return dict(zip(addresses[1:], (await links.all_inner_texts())[1:], strict=True))


async def show_screen(page: Page, address: str, title: str) -> None:
    """Show a screen by its address, and wait until its resources are there."""
    await page.evaluate("address => { location.hash = address }", address)
    await page.get_by_role("heading", name=title, level=1, exact=True).wait_for()
    await page.locator("main > :not([aria-busy])").first.wait_for()
    await load_playwright().expect(page.locator("[aria-busy=true]")).to_have_count(0)
