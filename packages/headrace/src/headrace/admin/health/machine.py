"""The preconditions that a machine and its neighbours must meet: judged from what was measured, without I/O."""

from headrace.consumers.preconditions import Finding, State, judged

_MIB, _GIB, _DAY_SECONDS = 1 << 20, 1 << 30, 86_400.0
_LEAST_FREE_BYTES = 256 * _MIB
_LEAST_FREE_PART = 0.1
_SOON_DAYS = 30
_ADVISED_CLOCK_SECONDS, _MOST_CLOCK_SECONDS = 5.0, 60.0
"""A token is accepted a minute before and after its time."""


def judge_memory(needed: int, total: int, free: int) -> Finding:
    """Judge the memory that pipelines and tables may take, in bytes, against that of the machine or container."""
    state: State = "failing" if needed > total else "warning" if needed > free else "ok"
    found = f"{needed / _GIB:.1f} GiB of {total / _GIB:.1f} GiB, {free / _GIB:.1f} GiB free"
    advice = "lower driver.heap_bytes of pipelines or sql.memory_bytes, or run some of them elsewhere"
    return judged("machine", "memory", state, found, advice)


def judge_disk(free: int, total: int, needed: int, setting: str = "state_dir") -> Finding:
    """Judge the disk of a setting, in bytes; what is written there may grow by `needed` bytes."""
    short = free < _LEAST_FREE_PART * total or free < needed
    state: State = "failing" if free < _LEAST_FREE_BYTES else "warning" if short else "ok"
    found = f"{free / _GIB:.1f} GiB of {total / _GIB:.1f} GiB free"
    advice = f"free space, or move {setting} to a larger disk"
    advice += ", or lower max_bytes of tables" if setting == "state_dir" else ": events that do not fit are lost"
    return judged("machine", f"disk of {setting}", state, found, advice)


def judge_open_files(needed: int, limit: int) -> Finding:
    """Judge the limit of open files, by what `http.max_connections` needs."""
    advice = "raise the limit (ulimit -Hn, LimitNOFILE= of systemd) or lower http.max_connections"
    return judged("machine", "open files", "failing" if needed > limit else "ok", f"{needed} of {limit}", advice)


def judge_certificate(setting: str, end: float, now: float) -> Finding:
    """Judge the last moment of a certificate; both are seconds since the epoch."""
    days = (end - now) / _DAY_SECONDS
    state: State = "failing" if days < 0 else "warning" if days < _SOON_DAYS else "ok"
    found = f"valid for {days:.0f} days" if days >= 0 else f"expired {-days:.0f} days ago"
    return judged(setting, "certificate", state, found, "renew it in place: changed files are read without a restart")


def judge_clock(server: str, difference: float) -> Finding:
    """Judge by how many seconds the clock of this machine is ahead of a server that issues tokens."""
    far = abs(difference)
    state: State = "failing" if far > _MOST_CLOCK_SECONDS else "warning" if far > _ADVISED_CLOCK_SECONDS else "ok"
    advice = "synchronise both clocks (chrony, NTP): tokens are refused before and after their time"
    return judged(server, "clock", state, f"{difference:+.0f} s", advice)


def judge_backend(consumer: str, url: str, problem: str) -> Finding:
    """Judge whether a process listens at a backend; `problem` is empty if one does."""
    advice = f"start the backend, or correct its URL ({url}): records wait for it meanwhile"
    return judged(consumer, "backend", "warning" if problem else "ok", problem or "listens", advice)
