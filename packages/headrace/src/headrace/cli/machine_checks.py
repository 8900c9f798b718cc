"""What `headrace doctor` measures of the machine, and of the certificates that a file names."""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from headrace.config.kafka_security import FileProblem, KafkaTls, identity_of
from headrace.config.model import HeadraceConfig
from headrace.consumers.feature_checks import feature_checks
from headrace.consumers.preconditions import Finding, State, judged
from headrace.runtime.memory import machine_bytes
from headrace.runtime.tls import first_end

_MEMORY = Path("/proc/meminfo")
_MIB, _GIB, _DAY_SECONDS = 1 << 20, 1 << 30, 86_400.0
_LEAST_FREE_BYTES = 256 * _MIB
_LEAST_FREE_PART = 0.1
_SOON_DAYS = 30


def machine_checks(config: HeadraceConfig) -> list[Finding]:
    """Return the state of memory, disk and certificates that a configuration names.

    Raises:
        PipelineInvalid: A pipeline file is not usable.
    """
    found = [*_certificates(config)]
    if needed := sum(checks.memory_bytes(config) for checks in feature_checks()):
        disk = sum(checks.disk_bytes(config) for checks in feature_checks())
        found += [judge_memory(needed, machine_bytes(), _free_memory_bytes()), _disk(config.state_dir, disk)]
    if config.audit.to == "file":
        found.append(_disk(config.audit.file, 0, "audit.file"))
    return found


def _free_memory_bytes() -> int:
    available = next(line for line in _MEMORY.read_text().splitlines() if line.startswith("MemAvailable:"))
    return min(machine_bytes(), int(available.split()[1]) * 1024)


def _disk(path: Path, needed: int, setting: str = "state_dir") -> Finding:
    present = next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())
    usage = shutil.disk_usage(present)
    return judge_disk(usage.free, usage.total, needed, setting)


def _certificates(config: HeadraceConfig) -> Iterator[Finding]:
    files = {"http.tls.certificate": config.http.tls.certificate, "http.tls.client_ca": config.http.tls.client_ca}
    sections = {
        f"reactive_consumers.{name}.backend": one.backend.tls for name, one in config.reactive_consumers.items()
    }
    for section, tls in {**sections, "schema_registry": config.schema_registry.tls}.items():
        files |= {f"{section}.tls.certificate": tls.certificate, f"{section}.tls.ca": tls.ca}
    ends: dict[str, float] = {}
    for setting, file in files.items():
        if file:
            try:
                ends[setting] = first_end(file.read_bytes())
            except (OSError, ValueError) as cause:
                yield Finding(setting, "certificate", "failing", "cannot be read", f"correct the file: {cause}")
    kafka = config.kafka.security.tls or KafkaTls()
    try:
        identity = identity_of(kafka)
    except FileProblem as problem:
        yield Finding("kafka.security.tls", "certificate", "failing", "cannot be read", f"correct it: {problem}")
    else:
        if identity and identity.cert:
            ends["kafka.security.tls"] = identity.cert.certificate.not_valid_after_utc.timestamp()
    for setting, end in ends.items():
        yield judge_certificate(setting, end, time.time())


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


def judge_certificate(setting: str, end: float, now: float) -> Finding:
    """Judge the last moment of a certificate; both are seconds since the epoch."""
    days = (end - now) / _DAY_SECONDS
    state: State = "failing" if days < 0 else "warning" if days < _SOON_DAYS else "ok"
    found = f"valid for {days:.0f} days" if days >= 0 else f"expired {-days:.0f} days ago"
    return judged(setting, "certificate", state, found, "renew it in place: changed files are read without a restart")
