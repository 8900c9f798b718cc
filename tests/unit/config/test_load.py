import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.config.load import load_config
from headrace.errors import ConfigError
from yaml_table import table

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str) -> Path:
        path = tmp_path / "headrace.yaml"
        path.write_text(text)
        path.chmod(0o600)
        return path

    return write


CONSUMER = "topics: [{topic}], group: {group}, backend: {{url: 'http://localhost/x'}}"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"a: " + b"[" * 1000 + b"]" * 1000, r"headrace\.yaml: is nested too deeply"),
        (b"# " + b"x" * 1_100_000, r"headrace\.yaml: is larger than 1048576 bytes, so it is not a configuration file"),
        (b"log_level: \xff", "not UTF-8"),
        (None, r"headrace\.yaml: cannot be read: No such file"),
    ],
    ids=["depth", "size", "encoding", "missing"],
)
def test_a_file_that_cannot_be_read_is_rejected_at_once(tmp_path: Path, content: bytes | None, says: str) -> None:
    """Deep nesting, megabytes, another encoding and a missing file each give one sentence."""
    if content:
        (tmp_path / "headrace.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=says):
        load_config(tmp_path / "headrace.yaml", {})


class TestReferences:
    def test_values_come_from_environment_files_and_defaults(self, write: Write, tmp_path: Path) -> None:
        """Each kind of reference is replaced, in maps and lists, alone or inside a longer text, and converted."""
        (tmp_path / "pw").write_text("s3cret\n")
        path = write(
            "kafka:\n  bootstrap_servers: ${KAFKA:localhost:9092},${env:HOST}:9094\n"
            "  security: {sasl: {mechanism: PLAIN, password: '${file:pw}', username: '$${x}'}}\n"
            "http: {port: '${PORT:9000}'}\n"
            "reactive_consumers: {a: {topics: ['${T}'], group: g, backend: {url: http://h}, "
            "dead_letter: {topic: '${DLQ:{topic}.dead}'}}}\n"
        )
        config = load_config(path, {"HOST": "b", "T": "orders", "PORT": ""})
        assert config.kafka.bootstrap_servers == "localhost:9092,b:9094"
        assert (sasl := config.kafka.security.sasl)
        assert (sasl.password.get_secret_value(), sasl.username) == ("s3cret", "${x}")
        assert config.http.port == 9000
        assert config.reactive_consumers["a"].topics == ["orders"]
        assert config.reactive_consumers["a"].dead_letter.topic == "{topic}.dead"


class TestOverrides:
    def test_environment_wins_over_the_file(self, write: Write) -> None:
        """A variable replaces the file's value, in any case, and creates sections that the file does not have."""
        environ: dict[str, str] = table(__file__, "overrides")
        text = f"http: {{port: 1}}\nreactive_consumers: {{long-delays: {{{CONSUMER.format(topic='t', group='g')}}}}}"
        config = load_config(write(text), environ)
        assert config.http.port == 9000
        assert config.producer.value_format == "avro"
        assert (sasl := config.kafka.security.sasl)
        assert (sasl.password.get_secret_value(), sasl.username) == ("{1", "1")
        assert (config.kafka.properties, config.producer.properties) == ({"client.rack": "a"}, {"linger.ms": 7})
        assert config.reactive_consumers["long-delays"].topics == ["x", "y"]


class TestSecrets:
    PLAIN = "kafka: {security: {sasl: {mechanism: PLAIN, username: a, password: hunter2}}}"

    @pytest.mark.parametrize("text", table(__file__, "references_only_may_have_any_mode"))
    def test_references_only_may_have_any_mode(self, write: Write, text: str, caplog: pytest.LogCaptureFixture) -> None:
        """A file whose secrets are references, and paths to keys, may be read by anyone."""
        path = write(text)
        path.chmod(0o644)
        load_config(path, {"PW": "x"})
        assert caplog.messages == []

    def test_group_of_ours_is_a_warning(self, write: Write, caplog: pytest.LogCaptureFixture) -> None:
        """Readable by a group of this process is said, not refused."""
        path = write(self.PLAIN)
        path.chmod(0o640)
        with caplog.at_level(logging.WARNING):
            load_config(path, {})
        assert "its group may read it" in caplog.text

    def test_repr_hides_secrets(self, write: Write) -> None:
        """Printing the models shows no secret."""
        assert "hunter2" not in repr(load_config(write(self.PLAIN), {}))


@pytest.mark.parametrize("section", ["schema_registry", "ksqldb"])
def test_the_password_of_a_server_is_read_again_from_its_file(tmp_path: Path, section: str) -> None:
    """A new secret needs no restart; while its file is missing, the first one stays."""
    secret, file = tmp_path / "password", tmp_path / "headrace.yaml"
    secret.write_text("first")
    secret.chmod(0o600)
    file.write_text(f"{section}: {{username: u, password: '${{file:password}}'}}\n")
    server = getattr(load_config(file, {}), section)
    secret.write_text("second")
    assert server.password.get_secret_value() == "second"
    secret.unlink()
    assert server.password.get_secret_value() == "first"
    assert "first" not in server.model_dump_json()
