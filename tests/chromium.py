"""A real Chromium, and what every page of the console has to satisfy in it."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.debian_package import debian_program, library_path

LIMIT_MS = 20_000
_NAME = "chromium-headless-shell"
_INSTALLED = (_NAME, "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_LANGUAGE = "en-US"


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """Open a browser: of this machine, of Playwright, or of Debian's package, which is unpacked without installing it.

    Without one the test is skipped, with the reason; where the variable CI is set, it fails.
    """
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        own = driver.chromium.executable_path
        path, env = next(filter(None, map(shutil.which, (*_INSTALLED, own))), ""), dict(os.environ)
        if not path:
            path, env["LD_LIBRARY_PATH"] = _unpacked()
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"], env=env)
        yield browser
        browser.close()


def _unpacked() -> tuple[str, str]:
    """Return the program of Debian's package, and the folders of its libraries."""
    try:
        program = debian_program(_NAME, _NAME, libraries=True)
    except pytest.skip.Exception as reason:
        if os.environ.get("CI"):
            pytest.fail(f"CI has no browser: {reason}")
        raise
    inner = Path(program).parents[1] / "lib/chromium" / _NAME  # the program in `bin` starts that of this machine
    return str(inner if inner.exists() else program), library_path(program)


@contextlib.contextmanager
def tab(browser: Any, **settings: Any) -> Iterator[Any]:
    """Open a tab with settings of Playwright's `new_context`; errors in its console fail the test."""
    problems: list[str] = []
    context = browser.new_context(locale=_LANGUAGE, **settings)
    context.set_default_timeout(LIMIT_MS)
    page = context.new_page()
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    yield page
    assert problems == [], page.url
    context.close()


def check_page(page: Any, url: str, text: str, picture: Path | None = None) -> None:
    """Open a page: it has the text in time, and no serious violation of the axe rules."""
    from axe_playwright_python.sync_playwright import Axe

    page.goto(url)
    page.get_by_text(text, exact=True).first.wait_for()
    violations = [one for one in Axe().run(page).response["violations"] if one["impact"] in ("serious", "critical")]
    assert [
        f"{one['id']}: {node['html']} {node['failureSummary']}" for one in violations for node in one["nodes"]
    ] == []
    if picture:
        page.screenshot(path=picture)
