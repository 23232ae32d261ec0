"""The page in a browser, and what it must not do: fail, call elsewhere, or let text act."""

from __future__ import annotations

import os
import re
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import expect, sync_playwright
from support.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"
UPDATE = bool(os.environ.get("UPDATE"))
WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
_MILLISECONDS = 400 * PATIENCE
"""How long a page may take: less than a test, so that what was awaited is told."""
_REFUSED = re.compile(r"status of (400|401|404|409|503)")
"""What browsers write to the console of refusals that the page shows itself."""


@contextmanager
def chromium():
    """Yield a browser."""
    expect.set_options(timeout=_MILLISECONDS)
    with sync_playwright() as playwright:
        options = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        browser = playwright.chromium.launch(executable_path=os.environ["CHROMIUM"], args=options)
        try:
            yield browser
        finally:
            browser.close()


class Watched:
    """A tab whose errors and requests are kept."""

    def __init__(self, browser, address, viewport, **options):
        self.address = address
        self.context = browser.new_context(viewport=viewport, **options)
        self.context.set_default_timeout(_MILLISECONDS)
        self.page = self.context.new_page()
        self.problems, self.urls = [], []
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", lambda message: message.type == "error" and self.hear(message.text))
        self.page.on("request", lambda request: self.urls.append(request.url))

    def hear(self, text):
        if not _REFUSED.search(text):
            self.problems.append(text)

    def sign_in(self, key):
        self.page.goto(self.address)
        self.page.get_by_label("API key").fill(key)
        self.page.get_by_role("button", name="Show runs").click()
        expect(self.page.locator("#app")).to_be_visible()

    def open(self, tab):
        self.page.get_by_role("tab", name=tab).click()

    def choose(self, run_id):
        details = self.page.locator("#runs-details")
        if not details.evaluate("element => element.open"):
            details.locator("summary").click()
        self.page.locator(f'[data-run-id="{run_id}"]').click()

    def value(self, name, run="first"):
        """The shown value of a curve."""
        return self.page.locator(f'#panel-curves [data-value="{name}"][data-run="{run}"]')

    def picture(self, name):
        """Take a picture for the documentation, if it is asked for."""
        if UPDATE:
            IMAGES.mkdir(exist_ok=True)
            self.page.mouse.move(0, 0)
            self.page.screenshot(path=IMAGES / f"{name}.png")

    def close(self):
        """Close it; fail if it had an error or called elsewhere."""
        self.context.close()
        assert self.problems == []
        own = (f"{self.address}/", "data:", "blob:")
        assert [url for url in self.urls if not f"{url}/".startswith(own)] == []
