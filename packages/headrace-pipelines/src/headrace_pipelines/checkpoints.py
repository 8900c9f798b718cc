"""Checkpoints of flows: what is frozen in them, whether they are whole, and who may use them.

A checkpoint of Spark knows sources, stateful operators and keys by position only. Another query on the same checkpoint
may give wrong results without an error. So a record of each flow is kept apart from its checkpoint, in
`plans/<flow>.json`, and compared at each start. It also shows when a checkpoint was deleted.
"""

import contextlib
import fcntl
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Final, Literal

import msgspec

from headrace.errors import CheckpointUnusable

_DISCARD: Final = "run `headrace pipeline state FILE {flow} --discard`, after which it begins at `starting` again"
CHOICES: Final = f"Choose: undo the edit; or rename the flow, which then begins without a checkpoint; or {_DISCARD}"
"""What can be done about an edit that does not fit."""
RESTORE: Final = f"Choose: restore the checkpoint from a backup; or rename the flow; or {_DISCARD}"
"""What can be done about damage."""


class Frozen(msgspec.Struct, frozen=True):
    """What must stay the same as long as a checkpoint is used."""

    sources: list[str]
    """What each source reads, in the order of Spark's plan."""
    operators: list[str]
    """Stateful operators with their keys, in the order of Spark's plan."""
    output_mode: str
    sink: str
    """Kind of the sink."""
    shuffle_partitions: int
    """Parts of the state; 0 without stateful operators."""

    def differences(self, now: "Frozen") -> list[str]:
        """Return what has changed, in words."""
        pairs = [(name, getattr(self, name), getattr(now, name)) for name in self.__struct_fields__]
        return [f"{_words(name, old)}, and now {_words('', new)}" for name, old, new in pairs if old != new]


class FlowRecord(msgspec.Struct):
    """What is known of a flow's checkpoint, stored apart from it."""

    frozen: Frozen | None
    """None if it is not known: a Spark Connect server does not show its plan."""
    batch: int = -1
    """A micro-batch that the checkpoint has; -1 before the first one has completed."""
    topics: dict[str, str] = {}
    """Id of each topic whose positions the checkpoint holds."""


def check(folder: Path, flow: str, frozen: Frozen | None, topics: Mapping[str, str] | None = None) -> None:
    """Check a flow's checkpoint before Spark uses it, and record what is frozen from now on.

    `topics` has the present id of each topic that the flow reads.

    Raises:
        CheckpointUnusable: It is damaged or gone, or belongs to another query.
    """
    _write(_record_file(folder, flow), _examined(folder, flow, frozen, topics or {}))


def preview(
    folder: Path, flow: str, frozen: Frozen | None
) -> tuple[Literal["continues", "starts anew", "refused", "unreadable"], str]:
    """Return what the next start of a flow would do with its checkpoint, and why it is refused. Changes nothing.

    Only a start detects that a topic was deleted and created again.
    """
    try:
        record = _examined(folder, flow, frozen, {})
    except CheckpointUnusable as cause:
        return "refused", cause.description
    except OSError:  # the folder is another user's
        return "unreadable", ""
    return ("continues" if record.batch >= 0 else "starts anew"), ""


def _examined(folder: Path, flow: str, frozen: Frozen | None, topics: Mapping[str, str]) -> FlowRecord:
    """Return the record of a flow for its next start; raises as `check` does."""
    checkpoint = folder / "checkpoints" / flow
    record = _read(_record_file(folder, flow), flow)
    there = any(not each.name.startswith(".") for each in checkpoint.glob("*"))  # drafts are hidden
    if there:
        newest, damage = _newest(checkpoint)
        if damage:  # `preview` may have looked while a driver wrote
            newest, damage = _newest(checkpoint)
    else:
        newest, damage = -1, "it was deleted" if record and record.batch >= 0 else ""
    if record and there and not damage and newest < record.batch:
        damage = f"it ends at micro-batch {newest}, but had reached {record.batch}"
    if damage:
        raise CheckpointUnusable(f"the checkpoint in {checkpoint} is damaged: {damage}. {RESTORE.format(flow=flow)}")
    known = record.topics if record and there else {}
    if recreated := [topic for topic, now in topics.items() if known.get(topic, now) != now]:
        text = f"topic {recreated[0]} was deleted and created again; the checkpoint holds positions of the earlier one"
        raise CheckpointUnusable(f"{text}. Choose: rename the flow; or {_DISCARD.format(flow=flow)}")
    before = record.frozen if record and there else None
    if before and frozen and (changes := before.differences(frozen)):
        raise CheckpointUnusable(
            f"the query does not fit its checkpoint: {'; '.join(changes)}. {CHOICES.format(flow=flow)}"
        )
    return FlowRecord(frozen or before, newest, {**known, **topics})


def progressed(folder: Path, flow: str, batch: int) -> None:
    """Record that a micro-batch of a flow has completed."""
    file = _record_file(folder, flow)
    record = _read(file, flow) or FlowRecord(None)
    _write(file, msgspec.structs.replace(record, batch=batch))


def discard(folder: Path, flow: str) -> None:
    """Delete a flow's checkpoint and its record.

    Raises:
        CheckpointUnusable: A driver uses the folder.
    """
    with locked(folder):
        shutil.rmtree(folder / "checkpoints" / flow, ignore_errors=True)
        _record_file(folder, flow).unlink(missing_ok=True)


@contextlib.contextmanager
def locked(folder: Path, on_wait: Callable[[str], None] | None = None) -> Iterator[IO[str]]:
    """Hold the lock on a pipeline's folder. With `on_wait`, which gets the name of the lock's owner, wait for it.

    Raises:
        CheckpointUnusable: Another process holds the lock, or the file system has none.
    """
    with (folder / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip() or "another process"
            if not on_wait:
                raise CheckpointUnusable(f"{owner} uses {folder}: stop the pipeline first") from None
            on_wait(owner)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as cause:
            text = f"{folder} cannot be locked ({cause.strerror}): put state_dir on a file system with flock"
            raise CheckpointUnusable(text) from cause
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield file


def _words(name: str, value: list[str] | str | int) -> str:
    text = ", ".join(value) or "none" if isinstance(value, list) else str(value)
    return f"{name.replace('_', ' ')} {'were' if name.endswith('s') else 'was'} {text}" if name else text


def _newest(checkpoint: Path) -> tuple[int, str]:
    """Return the newest micro-batch that was begun, and what is wrong with the checkpoint; empty if nothing is."""
    begun = _batches(checkpoint / "offsets")
    completed = _batches(checkpoint / "commits")
    state = checkpoint / "state"
    if not _is_whole(checkpoint / "metadata", ""):
        return -1, "its file metadata is missing or cut off"
    if not begun and (completed or (state.is_dir() and any(state.iterdir()))):
        return -1, "its folder offsets is empty"
    if not begun:
        return -1, ""
    if completed and completed[-1] > begun[-1]:
        return begun[-1], f"offsets/{completed[-1]} is missing"
    if begun[-1] > 0 and (not completed or completed[-1] < begun[-1] - 1):
        return begun[-1], f"commits/{begun[-1] - 1} is missing"
    newest = [checkpoint / "offsets" / str(begun[-1]), *(checkpoint / "commits" / str(last) for last in completed[-1:])]
    cut = next((file for file in newest if not _is_whole(file, "v")), None)
    return begun[-1], f"{cut.parent.name}/{cut.name} is cut off" if cut else ""


def _batches(folder: Path) -> list[int]:
    return sorted(int(file.name) for file in folder.iterdir() if file.name.isdecimal()) if folder.is_dir() else []


def _is_whole(file: Path, version: str) -> bool:
    """Return whether a file has one JSON document per line, after a line with its version if it has one."""
    try:
        lines = file.read_text().splitlines()
        for line in lines[1:] if version else lines:
            if line != "-":  # a source without offsets
                json.loads(line)
        return len(lines) > bool(version) and lines[0].startswith(version)
    except (OSError, ValueError):
        return False


def _record_file(folder: Path, flow: str) -> Path:
    return folder / "plans" / f"{flow}.json"


def _read(file: Path, flow: str) -> FlowRecord | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=FlowRecord)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as cause:
        text = f"{file} is damaged: {cause}. If the flow was not edited since it ran, delete this file. Otherwise"
        raise CheckpointUnusable(f"{text} {RESTORE[0].lower()}{RESTORE[1:].format(flow=flow)}") from cause


def _write(file: Path, record: FlowRecord) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_suffix(".draft")
    draft.write_bytes(msgspec.json.encode(record))
    draft.replace(file)
