"""The console of a running Headrace in a real browser: each page, and each button once."""

from __future__ import annotations

import re
from typing import Any

from tests.active_client import send
from tests.chromium import check_page, chromium, tab

PAGES = [
    ("/", "Needs a person now"),
    ("/consumers", "Consumers and functions"),
    ("/consumer?name={name}", "Partitions"),
    ("/groups", "{name}-push"),
    ("/group?name={name}-push", "{name}-1"),
    ("/jobs", "Started by"),
    ("/pipelines", "Lineage"),
    ("/pipeline?name=none", "Lineage"),
]
"""Each page, and a text that it has once it is complete."""
SIZES = [{"width": 1280, "height": 800}, {"width": 390, "height": 844}]
HOSTILE = "<img src=x onerror=alert(1)></script><script>alert(1)</script>"


def act(page: Any, button: str, **fields: str) -> str:
    """Press a button, fill the dialog, confirm, and return what it says then."""
    page.get_by_role("button", name=button, exact=True).first.click()
    dialog = page.get_by_role("dialog")
    for label, value in fields.items():
        dialog.get_by_label(re.compile(label)).fill(value)
    if (preview := dialog.get_by_role("button", name="Preview")).count():
        preview.click()
    dialog.get_by_role("button", name=button.split()[0], exact=True).click()
    dialog.get_by_role("button", name="Close").wait_for()
    said: str = dialog.locator(".hr-result").inner_text()
    dialog.get_by_role("button", name="Close").click()
    dialog.wait_for(state="detached")
    return said


def test_a_consumer_is_repaired_in_a_browser(push: Any, site: Any, topic: Any) -> None:
    """Every page is without errors, wide and narrow, light and dark; each button does what the API says."""
    name = topic(2)
    process = push(name, more={"console": {"port": 0}})
    site.wait_until(lambda: "console http" in process.output, "the console")
    url = re.search(r"console (http://[\d.:]+)", process.output)[1]
    site.write_json(name, *range(100))
    job = site.ask(f"{process.url}/adm/replays", {"topic": name, "to": {"consumer": name}, "rate": 1}).body["id"]
    status = f"{process.url}/adm/reactive-consumers/{name}"
    with chromium() as browser:
        for size, colours in zip(SIZES, ("light", "dark"), strict=True):
            with tab(browser, viewport=size, color_scheme=colours) as page:
                for path, text in PAGES:
                    check_page(page, url + path.format(name=name), text.format(name=name))
        with tab(browser) as page:
            page.goto(f"{url}/consumer?name={name}")
            assert HOSTILE in act(page, "Pause", Reason=HOSTILE)
            assert send("GET", status).body["paused"]["reason"] == HOSTILE
            page.goto(url)
            page.get_by_text(HOSTILE).first.wait_for()
            assert "Audit:" in act(page, f"Resume {name}")
            page.goto(f"{url}/consumer?name={name}")
            assert "Audit:" in act(page, "Limit the rate", Records="50")
            assert send("GET", status).body["settings"]["rateRecords"] == 50
            assert "sought" in act(page, "Seek", Position="begin", Reason="again")
            assert "Not done: " in act(page, "Skip a record", Partition="7", Offset="0", Reason="no such partition")
            page.goto(f"{url}/group?name={name}-push")
            page.get_by_text(f"{name}-1").first.wait_for()
            assert "active member" in act(page, "Reset offsets", Position="earliest")
            page.goto(f"{url}/jobs")
            for verb in ("Pause", "Resume", "Stop"):
                assert "Audit:" in act(page, f"{verb} {job}")
    process.terminate()
    assert process.exit_code == 0
