"""Which addresses a backend must not have: those of the machine's own network link and of its cloud's metadata service.

Whoever can write a URL into a file could else have Headrace fetch or change what only the machine itself may ask for.
Source: RFC 3927, RFC 4291, RFC 6052, RFC 3056; the metadata addresses are those the cloud providers document.
"""

from __future__ import annotations

import socket
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

_METADATA = frozenset(
    map(ip_address, ("100.100.100.200", "168.63.129.16", "192.0.0.192", "fd00:ec2::254", "fd20:ce::254"))
)
"""Metadata services that are not link-local."""
_METADATA_NAMES = ("metadata", "metadata.google.internal", "instance-data", "instance-data.ec2.internal")
_NAT64, _COMPATIBLE = ip_network("64:ff9b::/96"), ip_network("::/96")


def forbidden_host(host: str) -> str:
    """Return why a host, as `urlsplit` gives it, must not be a backend, in words; empty when it may be one.

    Numbers in every notation that resolvers take (decimal, octal, hexadecimal, shortened) are read as what they mean.
    Any other name is looked at again when it has become an address: see `forbidden_address`.
    """
    name = host.rstrip(".")
    if name in _METADATA_NAMES:
        return f"{host} is a cloud's metadata service"
    try:
        return forbidden_address(str(IPv4Address(socket.inet_aton(name))))
    except OSError:
        return forbidden_address(name)


def forbidden_address(address: str) -> str:
    """Return why an address must not be connected to, in words; empty when it may be, or is no address."""
    try:
        ip = _meant(address)
    except ValueError:
        return ""
    if ip.is_link_local:
        return f"{ip} is a link-local address, where metadata services are"
    return f"{ip} is a cloud's metadata service" if ip in _METADATA else ""


def is_this_machine(address: str) -> bool:
    """Return whether connections to an IP address end at this machine or at no one in particular."""
    ip = _meant(address)
    return ip.is_loopback or ip.is_unspecified or ip.is_multicast


def _meant(address: str) -> IPv4Address | IPv6Address:
    ip = ip_address(address.partition("%")[0])
    return (_inner(ip) or ip) if isinstance(ip, IPv6Address) and not ip.is_loopback else ip


def _inner(ip: IPv6Address) -> IPv4Address | None:
    """Return the IPv4 address that an IPv6 address stands for."""
    if ip in _NAT64 or ip in _COMPATIBLE:
        return IPv4Address(ip.packed[12:])
    return ip.ipv4_mapped or ip.sixtofour
