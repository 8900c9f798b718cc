"""Checkpoints as Spark writes them: what fits them, what is damage, and whose they are."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from headrace.errors import CheckpointUnusable
from headrace_pipelines.checkpoints import Frozen, check, discard, locked, preview, progressed
from yaml_table import table

FROZEN = Frozen(["topic a"], ["aggregate by k of count(1)"], "update", "topic", 2)


def spark_writes(folder: Path, batches: int, ended: int | None = None) -> Path:
    """Write a checkpoint with this number of micro-batches, all of which have ended by default."""
    checkpoint = folder / "checkpoints/f"
    for below in ("offsets", "commits", "state/0/0"):
        (checkpoint / below).mkdir(parents=True, exist_ok=True)
    (checkpoint / "metadata").write_text('{"id": "1"}')
    for number in range(batches):
        (checkpoint / f"offsets/{number}").write_text('v1\n{"batchWatermarkMs":0}\n{"a":{"0":5}}\n-\n')
    for number in range(batches if ended is None else ended):
        (checkpoint / f"commits/{number}").write_text('v1\n{"nextBatchWatermarkMs":0}')
    (checkpoint / "state/0/0/1.zip").write_text("x")
    return checkpoint


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:9])


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "gone": (shutil.rmtree, "it was deleted"),
    "without metadata": (lambda at: (at / "metadata").unlink(), "its file metadata is missing or cut off"),
    "without offsets": (lambda at: shutil.rmtree(at / "offsets"), "its folder offsets is empty"),
    "offsets cut off": (lambda at: cut(at / "offsets/2"), "offsets/2 is cut off"),
    "last offsets gone": (lambda at: (at / "offsets/2").unlink(), "offsets/2 is missing"),
    "last commits gone": (lambda at: [(at / f"commits/{n}").unlink() for n in (1, 2)], "commits/1 is missing"),
    "of an older backup": (lambda at: (shutil.rmtree(at), spark_writes(at.parents[1], 1)), "ends at micro-batch 0"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_refused(name: str, tmp_path: Path) -> None:
    """The reason names the file and what can be done; a later start is refused for the same reason."""
    check(tmp_path, "f", FROZEN)
    checkpoint = spark_writes(tmp_path, 3)
    progressed(tmp_path, "f", 2)
    hurt, text = DAMAGE[name]
    hurt(checkpoint)
    for _ in range(2):
        with pytest.raises(CheckpointUnusable, match=f"{text}.*restore .* rename .* state FILE f --discard`"):
            check(tmp_path, "f", FROZEN)


def test_a_record_that_was_cut_off_is_named(tmp_path: Path) -> None:
    """After a loss of power it may be empty. Without it, the whole checkpoint is taken up."""
    check(tmp_path, "f", FROZEN)
    spark_writes(tmp_path, 3)
    progressed(tmp_path, "f", 2)
    (record := tmp_path / "plans/f.json").write_bytes(b"")
    with pytest.raises(CheckpointUnusable, match=r"plans/f.json is damaged.*delete this file.*restore .* rename "):
        check(tmp_path, "f", FROZEN)
    record.unlink()
    check(tmp_path, "f", FROZEN)


def test_a_crash_at_any_moment_damages_nothing(tmp_path: Path) -> None:
    """A batch that has not ended, a first start without one, and files that were being written are all taken."""
    check(tmp_path, "f", FROZEN)
    check(tmp_path, "f", FROZEN)
    (tmp_path / "checkpoints/f").mkdir(parents=True)
    for name in (".metadata.1b7e.tmp", "..metadata.1b7e.tmp.crc"):  # drafts, which Spark writes first
        (tmp_path / "checkpoints/f" / name).write_text("{")
        check(tmp_path, "f", FROZEN)
    for begun in range(1, 4):
        checkpoint = spark_writes(tmp_path, begun, begun - 1)
        (checkpoint / f"offsets/.{begun}.0a1b.tmp").write_text("v1")
        check(tmp_path, "f", FROZEN)
        spark_writes(tmp_path, begun)
        check(tmp_path, "f", FROZEN)


@pytest.mark.parametrize(("change", "words"), table(__file__, "another_query_is_refused_with_the_difference"))
def test_another_query_is_refused_with_the_difference(change: dict[str, object], words: str, tmp_path: Path) -> None:
    """The difference comes before the three choices; before a first batch any query is taken."""
    other = msgspec.structs.replace(FROZEN, **change)
    check(tmp_path, "f", other)
    check(tmp_path, "f", FROZEN)
    spark_writes(tmp_path, 1)
    with pytest.raises(CheckpointUnusable, match=f"{words}. Choose: undo .*rename the flow.* state FILE f --discard`"):
        check(tmp_path, "f", other)


def test_a_preview_changes_nothing(tmp_path: Path) -> None:
    """Nothing is recorded, so the start itself decides as before; a folder that is not there is not an error."""
    other = msgspec.structs.replace(FROZEN, output_mode="append")
    assert preview(tmp_path / "none", "f", FROZEN) == ("starts anew", "")
    assert not (tmp_path / "none").exists()
    check(tmp_path, "f", FROZEN)
    assert preview(tmp_path, "f", other) == ("starts anew", "")
    spark_writes(tmp_path, 2)
    what, why = preview(tmp_path, "f", other)
    assert (what, "output mode was update, and now append. Choose: undo" in why) == ("refused", True)
    for frozen in (FROZEN, None):
        assert preview(tmp_path, "f", frozen) == ("continues", "")
    check(tmp_path, "f", FROZEN)


def test_a_folder_in_use_or_without_locks_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal names the process that holds the lock, also after one that is gone; two drivers could write there."""

    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    with locked(tmp_path):
        pass
    with (tmp_path / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(CheckpointUnusable, match=r"process \d+ on .* uses .*: stop the pipeline first"):
            discard(tmp_path, "f")
    discard(tmp_path, "f")
    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(CheckpointUnusable, match=r"No locks available.*put state_dir on a file system with flock"):
        discard(tmp_path, "f")


def test_positions_of_a_topic_that_was_created_again_are_refused(tmp_path: Path) -> None:
    """They would pass over its first records. A topic that is new in the query has none, and a renamed flow neither."""
    check(tmp_path, "f", FROZEN, {"a": "id-1"})
    check(tmp_path, "f", FROZEN, {"a": "id-2"})  # nothing was read by then
    spark_writes(tmp_path, 2)
    progressed(tmp_path, "f", 1)
    check(tmp_path, "f", FROZEN, {"a": "id-2", "b": "id-3"})
    for _ in range(2):
        with pytest.raises(
            CheckpointUnusable, match=r"topic a was deleted and created again.*rename .* state FILE f --discard`"
        ):
            check(tmp_path, "f", FROZEN, {"a": "id-4", "b": "id-3"})
    check(tmp_path, "g", FROZEN, {"a": "id-4"})
    discard(tmp_path, "f")
    assert (tmp_path / "plans/g.json").exists()
    check(tmp_path, "f", FROZEN, {"a": "id-4", "b": "id-3"})
