from __future__ import annotations

import socket

import pytest

from headrace.devcluster.ports import free_ports, is_free, require_free
from headrace.errors import PortTaken


def test_free_ports_are_different_and_can_be_listened_on() -> None:
    """All six can be bound at the same time."""
    ports = free_ports(6)
    sockets = [socket.socket() for _ in ports]
    try:
        for one, port in zip(sockets, ports, strict=True):
            one.bind(("127.0.0.1", port))
    finally:
        for one in sockets:
            one.close()
    assert len(set(ports)) == 6


def test_an_excluded_port_is_never_chosen() -> None:
    """With all but one excluded, that one is chosen."""
    (wanted,) = free_ports(1)
    assert free_ports(1, excluded=set(range(70_000)) - {wanted}) == [wanted]


def test_a_taken_port_is_said_with_its_number_and_the_option() -> None:
    """The paragraph names the port, what it is for, and how to choose another."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        assert not is_free(port)
        with pytest.raises(PortTaken, match=f"Port {port} for Kafka is taken .* --port"):
            require_free(port, "Kafka", "--port")
    assert is_free(port)
    require_free(port, "Kafka", "--port")
