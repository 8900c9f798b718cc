"""Dead letters of other products on a real broker, with the bytes that each writes: read, counted and redriven."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from headrace.records import Header, OutgoingRecord, Record
from headrace_devkit.testing import MakeTopic, StartHeadrace
from headrace_devkit.testing.scenario import Scenario
from tests.foreign_dead_letters import WRITERS, written_by

OWN: list[Header] = [("trace", b"\x00\xff"), ("kind", None)]
UNREAD = "1 dead letter: no reader reads them"


@pytest.fixture
def letters(site: Scenario, topic: MakeTopic, tmp_path: Path) -> list[Record]:
    """A topic whose `.DLT`, named in the file, has one of each writer, and one with a wrong offset."""
    name = topic(3)
    site.write(name, *(OutgoingRecord(name, f"k{n}".encode(), f"v{n}".encode(), OWN) for n in range(7)))
    records = sorted(site.records(name), key=lambda record: record.value or b"")
    asyncio.run(site.admin.ensure_topic_like(f"{name}.DLT", name))
    for record, writer in zip(records, [*WRITERS, "spring"], strict=True):
        added = written_by(writer, name, record.partition, record.offset)
        if record is records[-1]:
            added = [(title, b"\0" * 7 if title.endswith("-offset") else data) for title, data in added]
        copied = (record.key, record.value) if writer != "share" else (None, None)
        own = OWN if writer not in ("streams", "share") else []
        site.write(f"{name}.DLT", OutgoingRecord(f"{name}.DLT", *copied, [*own, *added]))
    config = {**site.config, "dead_letters": {"foreign": {f"{name}.DLT": name}}}
    (tmp_path / "headrace.yaml").write_text(json.dumps(config))
    return records


def test_letters_of_every_writer_are_listed_searched_and_counted(
    site: Scenario, letters: list[Record], headrace: StartHeadrace, tmp_path: Path
) -> None:
    """By the command line and over HTTP."""
    dlt = f"{letters[0].topic}.DLT"

    def said(*words: str) -> Any:
        return json.loads(site.cli("dlq", *words, "--output", "json").stdout)

    assert [(one["topic"], one["left"]) for one in said("list") if one["topic"] == dlt] == [(dlt, 7)]
    page = said("show", dlt)
    assert page["foreign"] == 1
    found = [(one["writer"], str(one["value"]), one["group"], one["attempts"]) for one in page["deadLetters"]]
    assert sorted(found) == [
        ("connect", "v2", "connect-lake", 0),
        ("share", "None", "work", 5),
        ("smallrye", "v5", "", 0),
        ("spring", "v0", "billing", 0),
        ("spring", "v1", "billing", 0),
        ("streams", "v3", "", 0),
    ]
    for text, value in (("card 7", 2), ("NO STOCK", 1), ("threshold", 1)):
        assert len(said("show", dlt, "--text", text)["deadLetters"]) == value
    assert said("stats", dlt)["writers"] == {"spring": 2, "connect": 1, "streams": 1, "share": 1, "smallrye": 1}
    assert "writer           connect" in site.cli("dlq", "show", dlt, "--error", "DataException").stdout

    url = headrace(json.loads((tmp_path / "headrace.yaml").read_text())).url
    listed = site.ask(f"{url}/adm/dead-letters").body["topics"]
    assert [one["left"] for one in listed if one["topic"] == dlt] == [7]
    counted = site.ask(f"{url}/adm/dead-letters/{dlt}/statistics?text=card").body
    assert (counted["deadLetters"], counted["errors"]) == (2, {"CardDeclined": 2})
    dry = site.ask(f"{url}/adm/dead-letters/{dlt}/redrive", {"dryRun": True}).body
    assert (dry["records"], sum(dry["unproved"].values())) == (4, 3)


def test_a_spring_team_redrives_its_letters(site: Scenario, letters: list[Record], tmp_path: Path) -> None:
    """To their partitions, as they were; what was not copied is left, then read at the origin."""
    name = letters[0].topic
    dlt = f"{name}.DLT"
    file = tmp_path / "headrace.yaml"
    file.rename(tmp_path / "other.yaml")
    assert "which is not known here" in site.cli("dlq", "redrive", dlt, code=1).stderr
    (tmp_path / "other.yaml").rename(file)
    done = site.cli("dlq", "redrive", dlt, "--rate", "100/s", "--stop-at-failures", "1%", code=1)
    assert f"4 dead letters of {dlt} back and acknowledged: 4 to {name}" in done.stdout
    assert "share copied no headers" in done.stderr
    assert "streams copied no headers" in done.stderr
    assert UNREAD in done.stderr
    done = site.cli("dlq", "redrive", dlt, "--from-origin", code=1)
    assert f"2 dead letters of {dlt} back and acknowledged" in done.stdout
    assert done.stderr.count("not sent") == 1

    records = site.records(name)
    first = {(one.partition, one.offset) for one in letters}
    again = sorted(
        (one for one in records if (one.partition, one.offset) not in first), key=lambda one: one.value or b""
    )
    assert [(one.key, one.value, one.partition) for one in again] == [
        (one.key, one.value, one.partition) for one in letters[:6]
    ]
    for one, was in zip(again, letters, strict=False):
        of = ("headrace.redrive.of", f"{name}:{was.partition}:{was.offset}".encode())
        assert one.headers == [*OWN, ("headrace.redrive.count", b"1"), of]
