"""Backends in the configuration: which URLs are refused, and what the modes ask of the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from headrace.config.backend import ONE_RECORD_MODES, BackendConfig, forbidden_address
from headrace.config.consumers import ReactiveConsumerConfig
from headrace_dialects.light4j.light_sections import AdminConfig

HOSTS = yaml.safe_load(Path(__file__).with_name("hosts.yaml").read_text())


@pytest.mark.parametrize("host", HOSTS["refused"])
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_link_local_and_metadata_addresses_are_refused_in_every_notation(scheme: str, host: str) -> None:
    """The reason is said."""
    url = f"{scheme}://{host}:80/latest/meta-data"
    with pytest.raises(ValidationError, match=r"refused: .* (link-local|metadata service)"):
        BackendConfig(url=url)
    with pytest.raises(ValidationError):
        AdminConfig(pass_through=[url])


@pytest.mark.parametrize("url", HOSTS["taken"])
def test_loopback_private_and_other_addresses_are_taken(url: str) -> None:
    """Sidecars talk to their own machine."""
    assert BackendConfig(url=url).url == url


@pytest.mark.parametrize(("address", "says"), [("169.254.1.1", "link-local"), ("fe80::1%2", "link-local"), ("", "")])
def test_an_address_that_a_name_turned_out_to_have_is_looked_at(address: str, says: str) -> None:
    """A name says nothing of where it leads, so who connects asks again."""
    assert says in forbidden_address(address)
    assert bool(forbidden_address(address)) == bool(says)


def test_a_token_server_is_looked_at_too() -> None:
    """It gets a secret, and is as easily misplaced."""
    oauth = {"token_url": "https://[fe80::1]/token", "client_id": "a", "client_secret": "b"}
    with pytest.raises(ValidationError, match=r"oauth\.token_url is refused"):
        BackendConfig(url="https://localhost/", oauth=oauth)


def consumer(mode: str, batch: Any = None, **backend: Any) -> ReactiveConsumerConfig:
    where = {"url": "http://localhost/", "mode": mode, **backend}
    given = {"topics": ["t"], "group": "g", "backend": where, **({"batch": batch} if batch else {})}
    return ReactiveConsumerConfig.model_validate(given)


@pytest.mark.parametrize("mode", ONE_RECORD_MODES)
def test_modes_of_one_record_make_batches_of_one(mode: str) -> None:
    """What is not set fits by itself; what cannot be is refused with the way out."""
    assert consumer(mode).batch.max_records == 1
    assert consumer(mode, {"max_records": 1, "max_bytes": 7}).batch.max_bytes == 7
    with pytest.raises(ValidationError, match=rf"max_records is 2, but backend\.mode {mode} .*max_in_flight"):
        consumer(mode, {"max_records": 2})
