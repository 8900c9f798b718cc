"""One request that the client library lacks: settings of a group, by Kafka's own protocol.

Source: Kafka protocol guide, IncrementalAlterConfigs v0; the resource type of a group is 32.
"""

import socket
import struct
from collections.abc import Mapping

_INCREMENTAL_ALTER_CONFIGS, _GROUP, _SET = 44, 32, 0


def set_group_configs(port: int, group: str, configs: Mapping[str, str]) -> None:
    """Set dynamic settings of a group.

    Raises:
        RuntimeError: The broker refuses.
    """
    body = struct.pack(">ib", 1, _GROUP) + _text(group) + struct.pack(">i", len(configs))
    body += b"".join(_text(name) + struct.pack(">b", _SET) + _text(value) for name, value in configs.items())
    body += struct.pack(">?", False)
    request = struct.pack(">hhi", _INCREMENTAL_ALTER_CONFIGS, 0, 1) + _text("calibration") + body
    with socket.create_connection(("127.0.0.1", port), 10) as connection:
        connection.sendall(struct.pack(">i", len(request)) + request)
        answer = connection.recv(65536)
    (code,) = struct.unpack_from(">h", answer, 4 + 4 + 4 + 4)  # size, correlation, throttle time, count
    if code:
        raise RuntimeError(f"the broker refused settings of group {group}: error {code}")


def _text(value: str) -> bytes:
    return struct.pack(">h", len(value)) + value.encode()
