"""The files of `deploy/`: linted, valid by the schemas of Kubernetes, and with configurations that Headrace accepts."""

from __future__ import annotations

import configparser
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from headrace.config.model import HeadraceConfig
from headrace_devkit.devcluster.certificates import Authority
from tests.command_line import headrace

DEPLOY = Path(__file__).parents[3] / "deploy"
sys.path.insert(0, str(DEPLOY))
from render import CHART, HEAD, parts, render  # noqa: E402 a program of the folder

DRAIN_SECONDS = HeadraceConfig().drain_seconds
IMAGES = ["Containerfile", "Containerfile.spark"]
SECRETS = "/run/secrets/headrace"


def manifests(part: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes" / f"{part}.yaml").read_text()))


def pods(part: str) -> Iterator[dict[str, Any]]:
    for manifest in manifests(part):
        if manifest["kind"] in ("Deployment", "StatefulSet"):
            yield manifest["spec"]["template"]["spec"]


@pytest.mark.parametrize("name", IMAGES)
def test_container_files(name: str) -> None:
    """Linted; the last stage runs as a fixed user, without a shell, and knows whether it is ready."""
    done = subprocess.run([Path(sys.executable).with_name("hadolint"), DEPLOY / name], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
    text = re.sub(r"^#.*\n", "", (DEPLOY / name).read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    assert all(
        re.search(r":3\.\d+-slim-\w+", base) or base in ("java",) for base in re.findall(r"^FROM (\S+)", text, re.M)
    )
    last = dict(re.findall(r"^([A-Z]+) +(.*)$", text[text.rindex("\nFROM ") :], re.MULTILINE))
    assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", last["USER"])
    assert (last["STOPSIGNAL"], last["VOLUME"]) == ("SIGTERM", '["/var/lib/headrace", "/tmp"]')
    assert json.loads(last["HEALTHCHECK"].partition("CMD ")[2])[:2] == ["headrace", "ready"]
    assert json.loads(last["ENTRYPOINT"]) + json.loads(last["CMD"])[:1] == ["headrace", "run"]


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_takes_every_package_from_here(name: str) -> None:
    """The guests that `EXTRAS` adds, too: an index may not have this version, or may have another one."""
    (words,) = re.findall(r"pip install ([^&\n]*)", (DEPLOY / name).read_text().replace("\\\n", " "))
    assert re.search(
        r'--find-links wheels "\S+ \./wheels/headrace-\S+\[[\w,]+\$\{EXTRAS:\+,\$\{EXTRAS\}\}\]"', words
    ), words
    assert "--no-deps --wheel-dir wheels ./packages/*" in (DEPLOY / name).read_text()


@pytest.mark.parametrize("part", parts())
def test_the_chart_is_the_manifests(part: str) -> None:
    """The plain manifests are what the chart renders to, by the program of the folder and by Helm if it is here."""
    assert (DEPLOY / "kubernetes" / f"{part}.yaml").read_text() == HEAD + render(part), "run: python deploy/render.py"
    if helm := shutil.which("helm"):
        chosen = ",".join(f"{each}.enabled={str(each == part).lower()}" for each in parts())
        command = [helm, "template", "headrace", str(CHART), "--kube-version", "1.34.0", "--set", chosen]
        found = yaml.safe_load_all(subprocess.run(command, capture_output=True, check=True).stdout)
        order = lambda manifest: (manifest["kind"], manifest["metadata"]["name"])  # noqa: E731
        assert sorted(filter(None, found), key=order) == sorted(manifests(part), key=order)


@pytest.mark.parametrize("part", parts())
def test_manifests_are_valid(part: str) -> None:
    """By the schemas of Kubernetes without unknown fields; the two kinds of KEDA name what is there."""
    found = manifests(part)
    named = {(each["kind"], each["metadata"]["name"]) for each in found}
    for manifest in found:
        if not manifest["apiVersion"].startswith("keda.sh/"):
            kubernetes_validate.validate(manifest, "1.34", strict=True)
        elif manifest["kind"] == "ScaledObject":
            trigger = manifest["spec"]["triggers"][0]
            assert ("Deployment", manifest["spec"]["scaleTargetRef"]["name"]) in named
            assert ("TriggerAuthentication", trigger["authenticationRef"]["name"]) in named
            [text] = [each["data"]["function.yaml"] for each in found if "function.yaml" in each.get("data", ())]
            [of_function] = yaml.safe_load(text)["spec"]["triggers"].values()
            about, attributes = trigger["metadata"], of_function["attributes"]
            assert (about["consumerGroup"], [about["topic"]]) == (attributes["consumerGroup"], attributes["topics"])


@pytest.mark.parametrize("part", parts())
def test_pods_are_confined_and_drain(part: str) -> None:
    """Every container: no root, no write but to volumes, no capability; it may drain before it is killed."""
    for pod in pods(part):
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not pod["automountServiceAccountToken"]
        for container in pod["containers"]:
            safe = container["securityContext"]
            assert (safe["readOnlyRootFilesystem"], safe["allowPrivilegeEscalation"]) == (True, False)
            assert safe["capabilities"] == {"drop": ["ALL"]}
            pause = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
            if container["name"] != "headrace":
                assert DRAIN_SECONDS < pause < pod["terminationGracePeriodSeconds"]
                continue
            assert pause + DRAIN_SECONDS < pod["terminationGracePeriodSeconds"]
            assert container["resources"]["limits"]["memory"]
            assert "/health/liveness" in str(container["livenessProbe"])
            assert "/health/readiness" in str(container["readinessProbe"])
            mounted = {volume["mountPath"] for volume in container["volumeMounts"]}
            assert {"/etc/headrace", "/var/lib/headrace", "/tmp", SECRETS} <= mounted
            assert not [each for each in container.get("env", ()) if "secretKeyRef" in str(each)]


def configurations() -> Iterator[Any]:
    yield pytest.param({"headrace.yaml": (DEPLOY / "compose/headrace.yaml").read_text()}, id="compose")
    for part in parts():
        for manifest in manifests(part):
            if manifest["kind"] == "ConfigMap":
                yield pytest.param(manifest["data"], id=manifest["metadata"]["name"])


@pytest.mark.parametrize("files", list(configurations()))
def test_configurations_are_accepted(
    files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`headrace config check` finds nothing in any of them, with the secrets that they name."""
    monkeypatch.setenv("POD_NAME", "headrace-0")
    issued = Authority(tmp_path / "authority", "authority").issue("localhost", server=True)
    secrets, tls = tmp_path / "headrace", tmp_path / "headrace-tls"
    for folder in (secrets, tls):
        folder.mkdir()
    shutil.copy(issued.certificate, secrets / "ca.crt")
    (secrets / "jwks.json").write_text('{"keys": []}')
    shutil.copy(issued.certificate, tls / "tls.crt")
    shutil.copy(issued.key, tls / "tls.key")
    for name, text in files.items():
        (tmp_path / name).write_text(text.replace("/run/secrets", str(tmp_path)))
        for secret in re.findall(rf"{SECRETS}/(\w+)\}}", text):
            (secrets / secret).write_text(f"{secret:->40}")
            (secrets / secret).chmod(0o600)
    assert headrace("config", "check", "-c", str(tmp_path / "headrace.yaml")) == 0, capsys.readouterr()
    written = yaml.safe_load(files["headrace.yaml"])
    assert (written["state_dir"], written["audit"]["to"]) == ("/var/lib/headrace", "topic"), "else it writes beside it"


def test_there_is_one_version() -> None:
    """Packages, what they need of each other, images, the chart, the notes and the page about versions have it."""
    files = DEPLOY.parent.glob("packages/*/pyproject.toml")
    projects = [tomllib.loads(path.read_text())["project"] for path in files]
    (version,) = {project["version"] for project in projects}
    lists = [each for one in projects for each in (one["dependencies"], *one.get("optional-dependencies", {}).values())]
    own = [need for need in chain(*lists) if need.startswith("headrace")]
    assert len(own) > len(projects)
    assert [need for need in own if not need.endswith(f"=={version}")] == []
    texts = [path.read_text() for path in DEPLOY.rglob("*.yaml")]
    found = {name for text in texts for name in re.findall(r"\bheadrace(?:-spark)?:(\d[\w.]*)", text)}
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert found | {chart["version"], chart["appVersion"]} == {version}
    for name, pattern in (("CHANGELOG.md", r"^## (\S+) \("), ("docs/upgrade.md", r"headrace, version (\S+)")):
        shown = re.search(pattern, (DEPLOY.parent / name).read_text(), re.MULTILINE)
        assert shown and shown[1] == version, name


def test_the_compose_file() -> None:
    """What runs Headrace is confined, has time to drain, and mounts files that are there."""
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    for name in ("headrace", "app"):
        service = services[name]
        assert service["read_only"]
        assert (service["cap_drop"], service["security_opt"]) == (["ALL"], ["no-new-privileges:true"])
        assert int(service["stop_grace_period"].removesuffix("s")) > DRAIN_SECONDS
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            assert not source.startswith(".") or (DEPLOY / source).exists()


def test_the_unit_of_systemd(tmp_path: Path) -> None:
    """`systemd-analyze` has nothing to say; a wrong file is not started again, and the drain has its time."""
    text = (DEPLOY / "headrace.service").read_text()
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read_string(text)
    service = unit["Service"]
    assert (service["Type"], service["RestartPreventExitStatus"]) == ("notify", "2 78")
    assert int(service["TimeoutStopSec"]) > DRAIN_SECONDS
    assert int(service["WatchdogSec"]) >= 10
    if analyze := shutil.which("systemd-analyze"):
        (tmp_path / "headrace.service").write_text(text.replace("/opt/headrace/bin/headrace", sys.executable))
        done = subprocess.run([analyze, "verify", tmp_path / "headrace.service"], capture_output=True, text=True)
        assert done.stdout + done.stderr == ""
