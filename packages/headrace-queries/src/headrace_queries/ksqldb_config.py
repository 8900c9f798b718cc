"""How to reach a ksqlDB server."""

from typing import ClassVar

from headrace.config.backend import ClientTls
from headrace.config.remote_server import RemoteServer
from headrace.config.section import Url


class KsqldbTls(ClientTls):
    """TLS to a ksqlDB server, 1.2 or newer. Its name and certificate are always checked. The file is PEM, with a path
    relative to this file, and is reloaded when it changes."""

    internal: ClassVar = frozenset(("certificate", "key"))


class KsqldbConfig(RemoteServer):
    """How to reach a ksqlDB server. A response begins within 5 seconds; a push query has no end."""

    section: ClassVar[str] = "ksqldb"

    url: Url = "http://localhost:8088"
    """Base URL."""
    tls: KsqldbTls = KsqldbTls()
    """Its authority, if the URL begins with `https`."""
