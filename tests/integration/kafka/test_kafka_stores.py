"""The commands that errors show for Java's stores: run as they are, they make files that Headrace takes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from headrace.config.load import load_config
from headrace.errors import ConfigError
from headrace_devkit.devcluster.certificates import Authority


def test_the_commands_for_stores_make_usable_files(tmp_path: Path) -> None:
    """Java's tool follows the words of the errors."""
    Authority(tmp_path, "ca")
    make = "keytool -genkeypair -alias a -keyalg RSA -dname CN=app -storetype JKS -storepass changeit -keypass changeit"
    subprocess.run([*make.split(), "-keystore", "client jks"], cwd=tmp_path, check=True)
    file = tmp_path / "headrace.yaml"
    file.touch(0o600)
    password = {"ssl.keystore.password": "changeit"}
    for old, new in (
        ({"ssl.ca.location": "client jks"}, {"ssl.ca.location": "client jks.pem"}),
        ({"ssl.keystore.location": "client jks", **password}, {"ssl.keystore.location": "client jks.p12", **password}),
    ):
        file.write_text(yaml.safe_dump({"kafka": {"properties": {"security.protocol": "ssl", **old}}}))
        with pytest.raises(ConfigError) as refused:
            load_config(file, {})
        command = re.search("run: (keytool .*)", refused.value.description.replace(f"{tmp_path}/", ""))
        assert command
        subprocess.run(command[1], shell=True, cwd=tmp_path, input=b"changeit\n" * 3, check=True)
        file.write_text(yaml.safe_dump({"kafka": {"properties": {"security.protocol": "ssl", **new}}}))
        load_config(file, {})
