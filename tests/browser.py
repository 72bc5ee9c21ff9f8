"""A real Chromium for tests of pages: the one on PATH, without the internet, and with every complaint that it has.

`watched` fails a test whose page logs an error, breaks its content security policy, or requests something from another
host.
"""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
TIMEOUT_MS = 20_000
"""How long a page may take to show what a test expects."""


def chromium() -> str | None:
    """The program; None if there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@pytest.fixture(scope="session")
def browser() -> Iterator["Browser"]:
    """One browser per test process."""
    program = chromium()
    if program is None:
        pytest.skip("tests in a browser need Chromium: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=program, args=list(FLAGS))
        yield running
        running.close()


@contextmanager
def watched(browser: "Browser", *, allowed: str = "", **context: Any) -> Iterator["Page"]:
    """A page in a context of its own. `allowed`: a pattern for complaints that the test provokes; `context`: options
    of the context, such as `viewport` or `color_scheme`."""
    made = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **context})
    made.set_default_timeout(TIMEOUT_MS)
    try:
        page, complaints = made.new_page(), list[str]()
        listen(made, page, complaints)
        yield page
        found = page.evaluate("window.violations || []") if page.url.startswith("http") else []
        unexpected = [one for one in [*complaints, *found] if not (allowed and re.search(allowed, one))]
        assert unexpected == []
    finally:
        made.close()


def listen(context: "BrowserContext", page: "Page", complaints: list[str]) -> None:
    """Collect what the page complains about."""
    context.add_init_script(
        "window.violations = []; document.addEventListener('securitypolicyviolation', "
        "event => window.violations.push(`${event.violatedDirective} ${event.blockedURI}`))"
    )
    page.on("pageerror", lambda error: complaints.append(f"uncaught: {error}"))
    page.on("console", lambda told: complaints.append(f"{told.type}: {told.text}") if told.type == "error" else None)
    page.on("request", lambda request: complaints.append(f"asks {request.url}") if _is_elsewhere(request.url) else None)


def _is_elsewhere(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme not in ("data", "blob", "file", "about") and parts.hostname not in ("127.0.0.1", "localhost")
