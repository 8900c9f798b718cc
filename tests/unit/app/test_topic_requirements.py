"""What is judged of a cluster: everything that a configuration reads and writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from headrace.app.assembly import Assembly
from headrace.app.context import make_context
from headrace.app.topic_requirements import topic_requirements
from headrace.config.model import HeadraceConfig
from headrace.errors import FunctionInvalid
from headrace.functions.triggers.trigger import Trigger
from headrace.testing import ManualClock


def test_retry_topics_are_judged_as_what_their_group_reads() -> None:
    """The group's own offset passes a record that waits there, so nothing else holds it."""
    reactive = {"topics": ["t"], "group": "g", "backend": {"url": "http://localhost/"}}
    consumers = {"a": {**reactive, "retry": {"topics": [1, 60]}}, "b": {**reactive, "group": "h"}}
    config = HeadraceConfig.model_validate({"reactive_consumers": consumers})
    ((_, required),) = topic_requirements(config, [])
    read = {each.group: ([*each.topics], [*each.retry_topics]) for each in required}
    assert read == {"g": (["t"], ["g.retry.1s", "g.retry.60s"]), "h": (["t"], [])}


def write_functions(folder: Path, *attributes: dict[str, object]) -> dict[str, object]:
    """Write a function file per trigger; return the part of the configuration that names them."""
    files = []
    for number, more in enumerate(attributes):
        file = folder / f"f{number}.yaml"
        file.touch(0o600)
        own = {"topics": ["t"], "consumerGroup": f"g{number}", **more}
        triggers = {"k": {"kind": "kafka", "attributes": own}}
        document = {"metadata": {"name": f"f{number}"}, "spec": {"handler": "m:h", "triggers": triggers}}
        file.write_text(yaml.safe_dump(document))
        files.append(str(file))
    return {"functions": files}


async def test_triggers_with_equal_brokers_and_login_share_the_clients_of_a_cluster(tmp_path: Path) -> None:
    """Another password is another login; without settings of its own a trigger uses the cluster of the file."""
    login = {"enable": True, "user": "u", "password": "p"}
    other = {**login, "password": "q"}
    own: list[dict[str, object]] = [{"brokers": ["other:9092"], "sasl": sasl} for sasl in (login, login, other)]
    files = write_functions(tmp_path, {}, {"brokers": ["localhost:9092"]}, *own)
    config = HeadraceConfig.model_validate(files)
    clock = ManualClock()
    assembly = Assembly(make_context(config, clock), config)
    main, same, first, shared, third = [consumer.admin for consumer in assembly.parts.consumers]
    assert main is same
    assert first is shared
    assert len({main, first, third}) == 3
    names = [service.name for service in assembly.services if service.name.startswith("kafka")]
    assert names == ["kafka other:9092", "kafka other:9092 as f4.k"]
    required = topic_requirements(config, assembly.function_specs)
    assert [[each.group for each in found] for _, found in required] == [["g0", "g1"], ["g2", "g3"], ["g4"]]
    third_security = required[2][0].security
    assert third_security.sasl
    assert third_security.sasl.password.get_secret_value() == "q"


async def test_triggers_whose_passwords_are_in_different_files_share_nothing(tmp_path: Path) -> None:
    """The files hold the same today, and each may change alone."""
    own: list[dict[str, object]] = []
    for name in ("a", "b", "a"):
        (tmp_path / name).write_text("p")
        sasl = {"enable": True, "user": "u", "password": f"${{file:{name}}}"}
        own.append({"brokers": ["other:9092"], "sasl": sasl})
    config = HeadraceConfig.model_validate(write_functions(tmp_path, *own))
    first, second, third = [one.admin for one in Assembly(make_context(config, ManualClock()), config).parts.consumers]
    assert first is third
    assert first is not second


async def test_a_kind_of_trigger_without_a_service_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its function would start, and none of its events would be delivered."""
    config = HeadraceConfig.model_validate(write_functions(tmp_path, {}))
    monkeypatch.setattr("headrace.app.function_services.KafkaTrigger", type("OtherTrigger", (Trigger,), {}))
    with pytest.raises(FunctionInvalid, match=r"f0\.k: no service is made for triggers of this kind"):
        Assembly(make_context(config, ManualClock()), config)
