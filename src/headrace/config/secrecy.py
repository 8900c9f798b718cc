"""Which settings are secrets, and which files may hold them (decisions.md 16)."""

from __future__ import annotations

import logging
import os
import re
import stat
from pathlib import Path

log = logging.getLogger(__name__)

_SECRET_NAME = re.compile(
    r"(password|passphrase|secret|token|(api|access|auth|subscription|functions)[-_.]?key|x-auth|key\.pem|"
    r"jaas\.config|oauthbearer\.config|authorization|cookie)$",
    re.IGNORECASE,
)


def is_secret_name(name: str) -> bool:
    """Return whether a key of this name holds a secret: `sasl.password`, but not `ssl.key.location`."""
    return _SECRET_NAME.search(name) is not None


def too_open(path: Path, *, mounted: bool) -> str:
    """Return why a file must not hold a secret, or an empty text.

    One that is `mounted` holds nothing but the secret (`${file:}`). Secret mounts often cannot have strict modes, so
    one that belongs to root or to a group of ours is only warned of.
    """
    found = path.stat()
    others, group = found.st_mode & stat.S_IROTH, found.st_mode & stat.S_IRGRP
    our_group = found.st_gid in {os.getegid(), *os.getgroups()}
    foreign = found.st_uid not in (0, os.geteuid())
    mode = f"{stat.S_IMODE(found.st_mode):04o}"
    if mounted and (others or group or foreign) and (found.st_uid == 0 or our_group):
        log.warning("%s holds a secret and its mode is %s: others on this machine may read it", path, mode)
        return ""
    if foreign:
        return f"{path} holds a secret and belongs to another user: give it to the user who runs Headrace"
    if others or (group and not our_group):
        return (
            f"{path} holds a secret in plain text and its mode is {mode}, so others can read it: chmod 600 {path}, "
            "or write ${env:NAME} or ${file:/path} instead of the secret"
        )
    if group:
        log.warning("%s holds a secret and its group may read it (mode %s)", path, mode)
    return ""
