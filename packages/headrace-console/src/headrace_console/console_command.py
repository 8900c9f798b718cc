"""`headrace console`: the web console of a running Headrace."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from headrace.cli.api import Api, address_of
from headrace.cli.cluster_options import find_settings
from headrace.cli.global_options import HeadraceCommand, uses
from headrace.cli.trust import certificates_of, trust


@click.command(cls=HeadraceCommand)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8090, show_default=True, help="Port to listen on.")
@click.option("--certificate", type=click.Path(exists=True, dir_okay=False), default=None, help="For HTTPS, in PEM.")
@click.option("--key", type=click.Path(exists=True, dir_okay=False), default=None, help="Its private key.")
@click.option("--allowed-host", "hosts", multiple=True, help="Host name that browsers may use; may be repeated.")
@uses("urls", "ca", "config")
def console(
    urls: Sequence[str], config: Path | None, certificate: str | None, key: str | None, ca: Path | None, **given: Any
) -> None:
    """Serve the web console: what runs, what needs a person, and the buttons that help.

    It prints its address when it serves. Ctrl-C ends it. With several --url, it uses the next one if one does not
    respond. A token in HEADRACE_TOKEN is for all who open it; without one, each logs in.

    Example: headrace console --url http://127.0.0.1:8082
    """
    urls = urls or os.environ.get("HEADRACE_URL", "").split()
    settings = None if urls else find_settings(config)
    management = address_of(settings, management=True) if settings else ""
    trusted = trust(ca, certificates_of(settings))
    found = [Api(url).url for url in urls or [address_of(settings)]]
    if bool(certificate) != bool(key):
        raise click.UsageError("--certificate and --key belong together")
    from headrace_console.serve import ConsoleSettings, serve

    given |= {"certificate": certificate or "", "key": key or "", "token": os.environ.get("HEADRACE_TOKEN", "")}
    serve(ConsoleSettings(found, "" if management in found else management, trusted, **given), click.echo)
