"""The console of a running Headrace in a real browser: each page, and each button once."""

from __future__ import annotations

import base64
import contextlib
import re
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest

from headrace.records import OutgoingRecord
from headrace_console.parts import excerpt, visible
from headrace_devkit.devcluster.ports import free_ports
from headrace_devkit.testing import (
    HeadraceProcess,
    MakeTopic,
    PlannedResponse,
    RecordingBackend,
    Registry,
    StartHeadrace,
)
from headrace_devkit.testing.scenario import Scenario
from tests.active_client import send
from tests.chromium import LIMIT_MS, check_page, chromium, tab
from tests.function_calls import function_file
from tests.raw_server import Authority
from yaml_table import table

PAGES = table(__file__, "pages")
SIZES = [{"width": 1280, "height": 800}, {"width": 390, "height": 844}]
HOSTILE = "<img src=x onerror=alert(1)></script><script>alert(1)</script>"

RUN = "window.__pwned=1"
PAYLOADS = table(__file__, "hostile").replace("RUN", RUN).replace("\n", "|").split("|")
PAYLOADS += ["\x00\x01\x1b[31m\x7f", "\u202egnp.exe\u2066", "\ufeff\u200b\u2028\u2029", "x\u0301" * 50, "<b>" * 40_000]

TOKEN = "a-token-of-ann-on-duty"
ANN = {"token": TOKEN, "scopes": ["admin", "kafka:r", "kafka:w"]}
SECURITY = {"mode": "token", "principals": {"ann": ANN}}


def dead_letter(topic: str, text: str, into: str = "") -> OutgoingRecord:
    """A dead letter of a topic that has this text wherever a backend, a producer or a group can write one."""
    history = {"topic": topic, "partition": "0", "offset": "0", "timestamp": "1", "attempts": "1"}
    history |= dict.fromkeys(("first_failure", "last_failure", "group", "error", "reason", "excerpt"), text[:900])
    headers = [(f"headrace.dlq.{name}", value.encode()) for name, value in history.items()]
    headers += [("StackTrace", text.encode()), (text[:900].replace("\0", "0"), text[:900].encode())]
    return OutgoingRecord(into or f"{topic}.dlq", text.encode(), text.encode(), headers, 0)


@contextlib.contextmanager
def console(*urls: str) -> Iterator[str]:
    """Run the command and return its address."""
    command = [sys.executable, "-m", "headrace.cli.main", "console", "--port", "0"]
    command += [word for url in urls for word in ("--url", url)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            yield process.stdout.readline().split()[1]
        finally:
            process.terminate()


def act(page: Any, button: str, event: str = "", **fields: str) -> str:
    """Press a button, fill the dialog, confirm, and return what it says then; of the audit, if that is awaited."""
    page.get_by_role("button", name=button, exact=True).first.click()
    dialog = page.get_by_role("dialog")
    for label, value in fields.items():
        dialog.get_by_label(re.compile(label)).fill(value)
    if (preview := dialog.get_by_role("button", name="Preview")).count():
        preview.click()
    dialog.get_by_role("button", name=button.split()[0], exact=True).click()
    dialog.get_by_role("button", name="Close").wait_for()
    if event:
        dialog.get_by_text(f"Audit: {event}").wait_for()
    said: str = dialog.locator(".hr-result").inner_text()
    dialog.get_by_role("button", name="Close").click()
    dialog.wait_for(state="detached")
    return said


def check_schemas(page: Any, url: str, name: str) -> None:
    """Find the subject of a topic, compare its versions, and go to the topic and back; its text is text."""
    page.goto(f"{url}/schemas")
    page.get_by_label("Text in the subject").fill(name.upper())
    page.get_by_role("button", name="Read", exact=True).press("Enter")
    page.get_by_role("link", name=f"{name}-value").click()
    page.get_by_text(f'-  "doc": "{HOSTILE}"').wait_for()
    page.get_by_label("Compared with version").fill("7")
    page.get_by_role("button", name="Show", exact=True).click()
    page.get_by_text("a version is one of these numbers: 2, 1").wait_for()
    page.get_by_role("link", name=f"Topic {name}").click()
    page.get_by_role("link", name=f"Schema {name}-value").click()
    page.get_by_role("heading", name="Version 2", exact=True).wait_for()


def address_of(process: Any) -> str:
    """The address of the console that a process has started."""
    Scenario.wait_until(lambda: "console http" in process.output, "the console")
    return str(re.search(r"console (https?://[\d.:]+)", process.output)[1])  # type: ignore[index]


def check_other_pages(page: Any, url: str) -> None:
    """Press each button of functions, queries and log levels, and find it in the audit."""
    page.goto(f"{url}/functions")
    assert "Audit:" in act(page, "Reload work")
    page.get_by_text("ValueError").first.wait_for()
    page.goto(f"{url}/queries")
    page.get_by_label("SQL").fill(f"SELECT 7 AS n, '{HOSTILE}' AS t UNION ALL SELECT 8, 'x' ORDER BY n")
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_text(HOSTILE, exact=True).wait_for()
    head = page.get_by_role("columnheader", name="n", exact=True)
    head.get_by_role("button").press("Enter")
    head.get_by_role("button").press("Enter")
    page.locator("th[aria-sort=descending]").wait_for()
    assert page.get_by_role("row").nth(1).inner_text().startswith("8")
    assert "Audit:" in act(page, "Rebuild stock")
    page.goto(f"{url}/log-levels")
    assert "Audit:" in act(page, "Set another area", Area="headrace.kafka", Level="debug")
    page.goto(f"{url}/audit")
    page.get_by_text("headrace.kafka DEBUG").first.wait_for()


@pytest.mark.long  # a browser, and minutes on a busy machine
def test_a_consumer_is_repaired_in_a_browser(
    push: Callable[..., HeadraceProcess], site: Scenario, topic: MakeTopic, schema_registry: Registry, tmp_path: Path
) -> None:
    """Every page is without errors, wide and light or narrow and dark; each button does what the API says."""
    name = topic(2)
    trigger = {"kind": "kafka-cluster", "attributes": {"topics": [name], "consumerGroup": f"{name}-work"}}
    code = f"def handler(context, event):\n    raise ValueError({HOSTILE!r})\n"
    more = {"functions": [function_file(tmp_path, code, {"in": trigger})], "console": {"port": 0}}
    more |= {"schema_registry": {"url": schema_registry.url}}
    for doc, field in ((HOSTILE, ""), ("plain", '{"name":"n","type":"int","default":1}')):
        schema = {"schema": f'{{"type":"record","name":"R","doc":"{doc}","fields":[{field}]}}'}
        assert send("POST", f"{schema_registry.url}/subjects/{name}-value/versions", schema).status == 200
    more |= {"tables": {"stock": {"topic": name, "kind": "log"}}, "audit": {"to": "topic", "topic": f"{name}-audit"}}
    process = push(name, more=more)
    site.write(name, OutgoingRecord(name, b"k", b"text", None, 0))
    site.write(f"{name}.dlq", dead_letter(name, "text"))
    url = address_of(process)
    site.write_json(name, *range(40))
    job = site.ask(f"{process.url}/adm/replays", {"topic": name, "to": {"consumer": name}, "rate": 0.1}).body["id"]
    status = f"{process.url}/adm/reactive-consumers/{name}"
    with chromium() as browser:
        for number, (size, colours) in enumerate(zip(SIZES, ("light", "dark"), strict=True)):
            with tab(browser, viewport=size, color_scheme=colours) as page:
                for path, text in PAGES[number::2]:
                    check_page(page, url + path.format(name=name), text.format(name=name))
        with tab(browser) as page:
            page.goto(f"{url}/consumer?name={name}")
            assert HOSTILE in act(page, "Pause", Reason=HOSTILE)
            assert send("GET", status).body["paused"]["reason"] == HOSTILE
            page.goto(url)
            page.get_by_text(HOSTILE).first.wait_for()
            assert "Audit:" in act(page, f"Resume reactive consumer {name}")
            page.goto(f"{url}/consumer?name={name}")
            assert "Audit:" in act(page, "Limit the rate", Records="50")
            assert send("GET", status).body["settings"]["rateRecords"] == 50
            assert "sought" in act(page, "Seek", Position="earliest", Reason="again")
            assert "Not done: " in act(page, "Skip a record", Partition="7", Offset="0", Reason="no such partition")
            page.goto(f"{url}/group?name={name}-push")
            page.get_by_text(f"{name}-1").first.wait_for()
            assert "active member" in act(page, "Reset offsets", Position="earliest")
            page.goto(f"{url}/jobs")
            for verb in ("Pause", "Resume", "Stop"):
                assert "Audit:" in act(page, f"{verb} {job}")
            check_schemas(page, url, name)
            check_other_pages(page, url)
    process.terminate()
    assert process.exit_code == 0


@pytest.mark.long  # a browser, and minutes on a busy machine
def test_foreign_text_is_text_and_dead_letters_are_repaired(
    push: Callable[..., HeadraceProcess], site: Scenario, topic: MakeTopic
) -> None:
    """Payloads in records, keys, headers, names and errors run no script; the pages redrive, drop, make and delete."""
    name, other = topic(), topic()
    dlq, made = f"{name}.dlq", f"constructor.onerror-{name}"
    process = push(name, more={"console": {"port": 0}})
    broken = OutgoingRecord(other, b"\xff<b>", b"\xff<script>", [("a", b"\xff<b>"), ("a", None)], 0)
    site.write(other, *(dead_letter(name, one, other) for one in PAYLOADS), broken)
    site.write(dlq, *(dead_letter(name, one) for one in PAYLOADS))
    url = address_of(process)
    completed = f"{process.url}/adm/dead-letters/{dlq}/statistics?state=completed"
    with chromium() as browser, tab(browser) as page:
        page.on("dialog", lambda dialog: pytest.fail(dialog.message))

        def shows(path: str, *texts: str) -> None:
            page.goto(url + path)
            page.get_by_role("cell", name="0:0").or_(page.get_by_text("Value (")).first.wait_for()
            found = page.locator("body").text_content()
            assert [one for one in texts if visible(one) not in found] == []
            assert page.evaluate("window.__pwned") is None

        shown = [excerpt(one, 300) for one in PAYLOADS]
        assert len(shown) >= 40
        shows(f"/topic?name={other}", *shown, base64.b64encode(broken.value).decode(), r"a: \xff<b>, a: null")
        shows(f"/dead-letter-topic?name={dlq}", *shown)
        for offset, one in enumerate(PAYLOADS[:2] + PAYLOADS[-1:]):
            shows(f"/dead-letter?topic={dlq}&partition=0&offset={[0, 1, len(PAYLOADS) - 1][offset]}", one[:99_000])
        page.goto(f"{url}/dead-letter-topic?name={dlq}")
        assert "is waiting" in act(page, "Redrive 0:0", per="100")
        page.get_by_role("row", name="redrive").get_by_text("done").wait_for()
        page.goto(f"{url}/dead-letter-topic?{urlencode({'name': dlq, 'error': PAYLOADS[1]})}")
        assert "is waiting" in act(page, "Drop these", Reason="no script")
        page.goto(f"{url}/dead-letter?topic={dlq}&partition=0&offset=3")
        site.wait_until(lambda: "is waiting" in act(page, "Quarantine"), "the end of the drop")
        site.wait_until(lambda: send("GET", completed).body["deadLetters"] == 3, "all three to be completed")
        page.goto(f"{url}/topics")
        assert "partitions: - -> 2" in act(page, "Create a topic", Name=made, Partitions="2")
        page.goto(f"{url}/topic?name={made}")
        page.get_by_role("button", name="Live").click()
        assert "partition 1, offset 0" in act(page, "Produce a record", **{"Key$": "k"}, Value="[1.10]", Partition="1")
        page.get_by_role("cell", name="[1.10]").wait_for()
        assert "retention.ms" in act(page, "Change settings", Settings="retention.ms=7200000")
        assert "partitions: 2 -> 3" in act(page, "Add partitions", Partitions="3")
        assert "Audit:" in act(page, "Delete", Name=made)
        assert send("GET", f"{process.url}/topics/{made}").status == 404


def test_a_console_reaches_https_and_administration(site: Scenario, headrace: StartHeadrace, tmp_path: Path) -> None:
    """`headrace run` gives it the certificates of both listeners, and each page asks the one that has its path."""
    authority, tls = Authority(tmp_path), {}
    for name in ("main", "management"):
        authority.issue(name)
        (tmp_path / f"{name}.key").chmod(0o600)
        tls[name] = {"certificate": str(tmp_path / f"{name}.pem"), "key": str(tmp_path / f"{name}.key")}
    http = {"tls": tls["main"], "management": {"port": free_ports(1)[0], "tls": tls["management"]}}
    process = headrace({**site.config, "http": http, "security": SECURITY, "console": {"port": 0}})
    url, trust = address_of(process), ssl.create_default_context(cafile=authority.file)
    with httpx.Client(base_url=url, verify=trust, follow_redirects=True, headers={"Origin": url}) as client:
        assert "needs a token" in client.get("/").text
        client.post("/login", data={"token": TOKEN})
        for path, text in {"/": "Kafka responds", "/log-levels": "ROOT"}.items():
            site.wait_until(lambda path=path, text=text: text in client.get(path).text, text)


def test_an_outage_is_repaired_in_a_browser(
    push: Callable[..., HeadraceProcess], site: Scenario, topic: MakeTopic, backend: RecordingBackend
) -> None:
    """The overview says why, and its buttons help; bad records are found, redriven and counted; the audit has who."""
    name = topic()
    more = {"security": SECURITY, "audit": {"to": "topic", "topic": f"{name}-audit"}}
    backend.response = PlannedResponse(503)
    process = push(name, more=more)
    values = [{"n": number, "bad": number < 3} for number in range(20)]
    site.write_json(name, *values)
    with console("http://127.0.0.1:9", process.url) as url, chromium() as browser, tab(browser) as page:
        page.goto(url)
        page.get_by_label("Token").fill(TOKEN)
        page.get_by_role("button", name="Log in").click()
        page.get_by_role("row", name=f"reactive consumer {name} the breaker").wait_for()
        assert "reason: mend it" in act(page, f"Pause reactive consumer {name}", "SUCCESS ann pause", Reason="mend it")
        backend.response = PlannedResponse(fails=lambda record: record["value"]["bad"], stacktrace="BadAmount: below 0")
        assert "Audit:" in act(page, f"Resume reactive consumer {name}")
        page.get_by_role("row", name=f"topic {name}.dlq 3 dead letters are left").get_by_role("link").click()
        page.get_by_role("link", name="BadAmount").click()
        page.get_by_label("Text in error").fill("below 0")
        page.get_by_role("button", name="Search").click()
        page.get_by_text("3 found").wait_for()
        backend.response = PlannedResponse()
        page.goto(url)
        said = act(page, f"Redrive topic {name}.dlq", per="50", Consumer=name, Reason="amounts were right")
        assert "is waiting" in said
        left = page.get_by_role("row", name=f"topic {name}.dlq")  # other tests leave dead letters, too
        left.wait_for(state="detached", timeout=3 * LIMIT_MS)
        assert sorted(record["value"]["n"] for record in backend.accepted) == [*range(20)]
        page.goto(f"{url}/audit")
        page.get_by_role("row", name=re.compile("ann.*amounts were right")).first.wait_for()
        page.goto(url)
        page.evaluate("window.__loaded = 1")
        process.terminate()
        banner = page.locator(".hr-banner").get_by_text("Headrace is unreachable")
        banner.wait_for()
        process.start()
        banner.wait_for(state="detached", timeout=3 * LIMIT_MS)
        page.get_by_role("row", name=f"{name} runs").wait_for()
        assert page.evaluate("window.__loaded") == 1, "it recovers without a reload"
