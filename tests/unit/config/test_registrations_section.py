"""Registered consumers in the configuration: which backends a list lets in, and what else a team may not ask for."""

from __future__ import annotations

import contextlib
import string
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from headrace.config.explain import mask
from headrace.config.registered import read_registration
from headrace.config.registrations import RegisteredBackend, RegistrationsConfig
from headrace.errors import InvalidRequest

LIST = RegistrationsConfig(
    backends=[
        "http://localhost:8444/kafka/",
        "https://*.example.com/hooks",
        "https://api.example.org",
        "https://10.1.2.3:9000/",
        "https://[2001:db8::1]:99/in",
    ]
)
TABLE = yaml.safe_load(Path(__file__).with_name("registrations.yaml").read_text())
GOOD = {"topics": ["orders"], "group": "billing", "backend": {"url": "http://localhost:8444/kafka/records"}}


def with_(**changes: Any) -> dict[str, Any]:
    backend = {**GOOD["backend"], **changes.pop("backend", {})}  # type: ignore[dict-item]
    return {**GOOD, "backend": backend, **changes}


def problem_of(settings: Any, allowed: RegistrationsConfig = LIST) -> str:
    with pytest.raises(InvalidRequest) as caught:
        read_registration(settings, allowed, {})
    return caught.value.description


@pytest.mark.parametrize("url", TABLE["taken"])
def test_urls_on_the_list_are_taken(url: str) -> None:
    """A path prefix is taken part by part, a star stands for one name or several, case of the host does not count."""
    assert read_registration(with_(backend={"url": url}), LIST, {}).backend.url == url


@pytest.mark.parametrize("url", TABLE["refused"])
def test_urls_that_only_look_so_are_refused_wherever_they_stand(url: str) -> None:
    """As the place of records, and as the place of tokens."""
    assert LIST.refusal(url)
    assert "url" in problem_of(with_(backend={"url": url}))
    oauth = {"token_url": url, "client_id": "c", "client_secret": "s"}
    assert "token_url" in problem_of(with_(backend={"oauth": oauth}))


@pytest.mark.parametrize("url", TABLE["not URLs"])
def test_what_two_readers_could_read_differently_is_not_a_url(url: str) -> None:
    """The section's own kind of URL refuses it before the list is asked."""
    assert problem_of(with_(backend={"url": url})).startswith("backend.url: ")


@pytest.mark.parametrize("name", ["health", "offsets_path"])
def test_paths_beside_the_url_are_held_against_the_list_too(name: str) -> None:
    """They are asked on the same host, where the list may end at a prefix."""
    small = {"batch": {"max_records": 1}}
    for path, taken in (("/kafka/health", True), ("/admin", False), ("//evil.org/", False), ("/kafka/..", False)):
        settings = with_(backend={name: {"path": path} if name == "health" else path}, **small)
        if taken:
            read_registration(settings, LIST, {})
        else:
            assert name in problem_of(settings)


HOSTS = st.text(string.ascii_letters + string.digits + ".-_%@:[]\\/?#;,~", max_size=40)


@given(HOSTS, st.text(string.ascii_letters + "./%;?#\\2e", max_size=20))
def test_whatever_is_taken_leads_where_the_list_says(host: str, path: str) -> None:
    """As the client that connects reads it: scheme, host, port, and a path that nobody can shorten."""
    url = f"https://{host}/hooks{path}"
    try:
        backend = RegisteredBackend.model_validate({"url": url}, context={"registrations": LIST})
    except ValidationError:
        return
    parts = urlsplit(backend.url)
    assert parts.scheme == "https"
    if parts.hostname and parts.hostname.endswith(".example.com"):
        assert parts.port in (None, 443)
        assert parts.path == "/hooks" or parts.path.startswith("/hooks/")
    else:
        assert parts.hostname == "api.example.org" or parts.netloc in ("10.1.2.3:9000", "[2001:db8::1]:99")
    assert not {".", "..", "%"} & {*parts.path.split("/"), *parts.path}


@pytest.mark.parametrize(("pattern", "why"), TABLE["lists"])
def test_a_list_that_says_too_much_is_refused(pattern: str, why: str) -> None:
    """At load, with the reason."""
    with pytest.raises(ValidationError, match=why):
        RegistrationsConfig(backends=[pattern])


@pytest.mark.parametrize(("url", "address", "refused"), TABLE["addresses"])
def test_a_name_must_not_turn_out_to_be_somewhere_else(url: str, address: str, refused: bool) -> None:
    """Whoever owns a name below the list's decides what it stands for; asked before every connection."""
    backend = RegisteredBackend.model_validate({"url": url}, context={"registrations": LIST})
    assert bool(backend.refuses(url, address)) is refused


@pytest.mark.parametrize(
    ("changes", "said"), [*TABLE["settings"], [{"retry": {"errors": {"x" * 70_000: "skip"}}}, "bytes"]]
)
def test_what_reaches_further_than_a_team_may_is_refused_by_name(changes: Any, said: str) -> None:
    """The sentence names the setting and what is allowed."""
    assert said in problem_of(with_(**changes) if isinstance(changes, dict) else changes)


def test_responses_show_no_secret() -> None:
    """No value of a header, whatever its name, no client secret, no query of a URL; what is shown is not taken back."""
    oauth = {"token_url": "https://api.example.org/t?key=hush", "client_id": "c", "client_secret": "hush"}
    settings = with_(backend={"url": "https://api.example.org/?code=hush", "headers": {"X-A": "hush"}, "oauth": oauth})
    read_registration(settings, LIST, {})
    assert "hush" not in str(mask(settings))
    assert mask(settings)["group"] == "billing"
    assert "instead of a secret" in problem_of(mask(settings))


def worst_registrations() -> dict[str, Any]:
    """Return settings of about 65,000 bytes that cost much to check."""
    base = {"group": "g", "backend": {"url": "http://localhost:8444/kafka/x"}}
    return {
        "names": {**base, "topics": [f"t{number}" for number in range(8000)]},
        "wide patterns": {**base, "topic_patterns": [r"[\pL\pN]{40}" + str(number) for number in range(3000)]},
        "allowed patterns": {**base, "topic_patterns": [rf"(.{{250}}){number}|" + r"\w" * 60 for number in range(20)]},
        "a long URL": {**base, "topics": ["t"], "backend": {"url": "http://localhost:8444/" + "a/" * 30_000}},
        "client properties": {
            **base,
            "topics": ["t"],
            "consumer": {"client": dict.fromkeys(map(str, range(6000)), "x")},
        },
    }


@pytest.mark.parametrize("case", worst_registrations())
def test_no_registration_takes_long_to_check(case: str) -> None:
    """Whatever stands in 64 KiB; one of 200 KB took 24 s, and nothing else ran meanwhile."""
    settings = worst_registrations()[case]
    seconds = []
    for _ in range(5):  # a collection of what other tests left may fall into one of them
        began_at = time.thread_time()
        with contextlib.suppress(InvalidRequest):
            read_registration(settings, LIST, {})
        seconds.append(time.thread_time() - began_at)
    assert min(seconds) < 0.25, "generous: the aim is 0.05"
