"""Producer and administrator of a run: their scripts give the same trace for the same seed."""

from __future__ import annotations

import pytest

from headrace_devkit.simulation.calibration.client_scripts import CLIENT_SCRIPTS
from headrace_devkit.simulation.calibration.client_stages import ModelClients
from headrace_devkit.simulation.coordinator_requests import GroupMemberId


@pytest.mark.parametrize("name", CLIENT_SCRIPTS)
def test_a_seed_gives_one_trace(name: str) -> None:
    """What they must be is compared with a broker in `tests/conformance/simulation`."""
    runs = [ModelClients(seed=3) for _ in range(2)]
    for run in runs:
        run.unique = "u"
        run.run(CLIENT_SCRIPTS[name])
    assert runs[0].trace == runs[1].trace
    assert runs[0].world.digest == runs[1].world.digest


@pytest.mark.parametrize("member", [GroupMemberId("g", "m", 3, None), GroupMemberId("g", "", -1, "i")])
def test_a_member_is_read_from_the_clients_metadata(member: GroupMemberId) -> None:
    assert GroupMemberId.of(member.metadata) == member
