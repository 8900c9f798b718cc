"""The metrics of several processes as one text, with the label `process` on each series."""

from collections.abc import Iterator, Mapping

_READY = b"headrace_ready"


def joined_metrics(texts: Mapping[int, bytes]) -> bytes:
    """Join texts in Prometheus' format, by the number of the process; an empty one is that of a process that is down.

    Of a process that is down, `headrace_ready` is 0 and everything else is absent.
    """
    heads: dict[bytes, list[bytes]] = {}
    samples: dict[bytes, list[bytes]] = {}
    for number in sorted(texts):
        text = texts[number] or b"# HELP %s .\n%s 0.0\n" % (_READY, _READY)
        for name, line in _lines(text):
            if not line.startswith(b"#"):
                samples.setdefault(name, []).append(_labelled(line, number))
            elif texts[number] and line not in (known := heads.setdefault(name, [])):
                known.append(line)
    found = [line for name, lines in samples.items() for line in (*heads.get(name, ()), *lines)]
    return b"\n".join(found) + b"\n"


def _lines(text: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield each line with the name of its family, which the comment before its samples has."""
    name = b""
    for line in text.splitlines():
        if line.startswith(b"# HELP "):
            name = line.split(b" ", 3)[2]
        if line:
            yield name, line


def _labelled(line: bytes, number: int) -> bytes:
    """Return a sample with the label as its first."""
    at = min(line.find(b" "), line.find(b"{") if b"{" in line else len(line))
    name, rest = line[:at], line[at:]
    label = b'process="%d"' % number
    return name + (b"{" + label + b"," + rest[1:] if rest.startswith(b"{") else b"{" + label + b"}" + rest)
