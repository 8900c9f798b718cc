from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from headrace.config.load import load_config
from headrace.config.model import HeadraceConfig
from headrace.errors import ConfigError

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str) -> Path:
        path = tmp_path / "headrace.yaml"
        path.write_text(text)
        path.chmod(0o600)
        return path

    return write


def problems(path: Path, environ: Mapping[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        load_config(path, environ or {})
    return [line.replace(f"{path.parent}/", "") for line in raised.value.description.splitlines()]


def test_no_file_gives_the_defaults() -> None:
    """Without a file and overrides, every setting has its default."""
    config = load_config(None, {})
    assert config.http == HeadraceConfig().http
    assert config.state_dir == Path.cwd() / ".headrace/state"


def test_empty_file_and_empty_sections_give_the_defaults(write: Write) -> None:
    """A section whose lines are all commented out counts as absent."""
    assert load_config(write("http:\n  # port: 1\nkafka:\n"), {}).http == HeadraceConfig().http
    assert load_config(write(""), {}).kafka == HeadraceConfig().kafka


def test_missing_file_says_which(tmp_path: Path) -> None:
    """A file that is not there is a configuration error with its name."""
    with pytest.raises(ConfigError, match=r"nope\.yaml: cannot be read: No such file"):
        load_config(tmp_path / "nope.yaml", {})


def test_every_problem_is_told_at_once_with_line_path_and_remedy(write: Write) -> None:
    """Unknown keys, wrong types, missing and doubled keys come in one error, in the order of the file."""
    path = write(
        "kafka: {bootstrap_server: a}\n"
        "http:\n"
        "  port: many\n"
        "  prot: 1\n"
        "reactive_consumers:\n"
        "  orders:\n"
        "    topics: ['a b']\n"
        "    backend: {url: http://localhost/x}\n"
        "    retry: {attempts: yes}\n"
        "drain_seconds: 1\n"
        "drain_seconds: 2\n"
        "log_level: loud\n"
    )
    assert problems(path) == [
        "headrace.yaml:1: kafka.bootstrap_server: unknown key: did you mean bootstrap_servers?",
        "headrace.yaml:3: http.port: should be a valid integer, unable to parse string as an integer: "
        "correct the value (it is 'many')",
        "headrace.yaml:4: http.prot: unknown key: did you mean port?",
        "headrace.yaml:6: reactive_consumers.orders.group: is missing and has no default: add it",
        "headrace.yaml:7: reactive_consumers.orders.topics[0]: has characters or a form that are not allowed here "
        "(allowed: ^[A-Za-z0-9._-]{1,249}$): correct it (it is 'a b')",
        "headrace.yaml:9: reactive_consumers.orders.retry.attempts: should be a number, not true or false",
        "headrace.yaml:11: drain_seconds: is written twice (first at headrace.yaml:10): keep one",
        "headrace.yaml:12: log_level: should be 'debug', 'info', 'warning' or 'error': correct the value "
        "(it is 'loud')",
    ]


def test_a_key_of_javas_producer_is_explained_where_it_stands(write: Write) -> None:
    """By the same table as among the properties, before a name of ours that only looks like it."""
    assert problems(write("producer:\n  max.block.ms: 5\n  buffer.memory: 5\n  maxinflight: 1\n")) == [
        "headrace.yaml:2: producer.max.block.ms: is not taken here: a request over the budget gets 503 at once",
        "headrace.yaml:3: producer.buffer.memory: is not taken here: set producer.max_pending_bytes",
        "headrace.yaml:4: producer.maxinflight: unknown key: did you mean max_in_flight?",
    ]


def test_a_key_of_javas_consumer_is_explained_where_it_stands(write: Write) -> None:
    """By the consumers' table, also for names that mean something else to producers."""
    consumer = "{topics: [a], group: a, backend: {url: http://a/}, %s, consumer: {session.timeout.ms: 1}}"
    text = "valueFormat: json, requestMaxBytes: 1, consumerGroup: b, enable.auto.commit: true"
    assert problems(write("reactive_consumers:\n  a: " + consumer % text + "\n")) == [
        "headrace.yaml:2: reactive_consumers.a.consumer.session.timeout.ms: is not taken here: "
        "set consumer.session_timeout_seconds",
        "headrace.yaml:2: reactive_consumers.a.valueFormat: is not taken here: set value_format",
        "headrace.yaml:2: reactive_consumers.a.requestMaxBytes: is not taken here: set batch.max_bytes",
        "headrace.yaml:2: reactive_consumers.a.consumerGroup: is not taken here: set group; in the trigger as it is",
        "headrace.yaml:2: reactive_consumers.a.enable.auto.commit: is not taken here: "
        "Headrace commits what has ended and only that",
    ]


def test_unknown_key_without_a_near_name_lists_the_known_ones(write: Write) -> None:
    """When nothing is near, the names that go there are listed."""
    assert problems(write("http: {zzz: 1}")) == [
        "headrace.yaml:1: http.zzz: unknown key: "
        "known here are host, port, tls, allowed_hosts, max_body_bytes, max_records, gzip_requests, max_connections, "
        "reader_share"
    ]


CONSUMER = "topics: [{topic}], group: {group}, backend: {{url: 'http://localhost/x'}}"


def test_two_backends_must_not_share_a_group_on_a_topic(write: Write) -> None:
    """Two reactive consumers of one group and topic would each get a part; that is refused."""
    consumer = CONSUMER.format(topic="orders", group="g")
    (problem,) = problems(write(f"reactive_consumers:\n  a: {{{consumer}}}\n  b: {{{consumer}}}"))
    assert "reactive_consumers.b and a read topic orders in the same group g" in problem


def test_dead_letters_must_not_go_round(write: Write) -> None:
    """Two consumers whose dead letters are each other's records are refused: a bad record would never end."""
    first, second = CONSUMER.format(topic="orders", group="g"), CONSUMER.format(topic="orders.dlq", group="h")
    text = f"reactive_consumers:\n  a: {{{first}}}\n  b: {{{second}}}"
    load_config(write(text), {})
    (problem,) = problems(write(text[:-1] + ", dead_letter: {topic: orders}}"))
    assert "in an endless cycle through orders, orders.dlq" in problem


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x,x,x,x,x,x,x,x,x,x]\n"
        + "\n".join(
            f"{b}: &{b} [" + ",".join([f"*{a}"] * 10) + "]" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
        ),
        "a: &a [*a]",
        "a: " + "[" * 1000 + "]" * 1000,
    ],
    ids=["aliases", "itself", "depth"],
)
def test_bombs_are_refused_at_once(write: Write, text: str) -> None:
    """Aliases that multiply, values that hold themselves and endless nesting end in one sentence."""
    assert problems(write(text))[0].startswith("headrace.yaml: is nested too deeply or its aliases repeat too much")


def test_a_file_of_megabytes_is_refused_unread(write: Write) -> None:
    """A file beyond the size limit is no configuration."""
    assert problems(write("# " + "x" * 1_100_000)) == [
        "headrace.yaml: is larger than 1048576 bytes: this is no configuration file"
    ]


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    """A file in another encoding is told so."""
    path = tmp_path / "headrace.yaml"
    path.write_bytes(b"log_level: \xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(path, {})


def test_aliases_are_followed(write: Write) -> None:
    """An anchor and its alias are plain YAML and work."""
    text = f"reactive_consumers:\n  a: {{{CONSUMER.format(topic='t', group='a')}, retry: &r {{attempts: 2}}}}\n"
    text += f"  b: {{{CONSUMER.format(topic='t', group='b')}, retry: *r}}\n"
    assert load_config(write(text), {}).reactive_consumers["b"].retry.attempts == 2


def test_relative_paths_start_at_the_file(write: Write) -> None:
    """Files named in the file are found from its folder, whatever the working folder is."""
    path = write("functions: [f/function.yaml]\nstate_dir: s")
    (path.parent / "f").mkdir()
    (path.parent / "f/function.yaml").touch()
    config = load_config(path, {})
    assert config.functions == [path.parent / "f/function.yaml"]
    assert config.state_dir == path.parent / "s"


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

    @pytest.mark.parametrize(
        ("reference", "sentence"),
        [
            ("${env:NOPE}", "refers to the environment variable NOPE, which is not set: set it"),
            ("${NOPE}", "refers to the environment variable NOPE, which is not set: set it"),
            ("${file:nope}", "file not found, or not a plain file: nope"),
            ("${file:/dev/zero}", "file not found, or not a plain file: /dev/zero"),
            ("${file:big}", "refers to the file big, which is larger than 65536 bytes"),
            ("${file:bytes}", "refers to the file bytes, which is not UTF-8 text"),
            ("${a b}", "holds a malformed reference"),
            ("${open", "holds a malformed reference"),
            ("${}", "holds a malformed reference"),
        ],
    )
    def test_a_reference_without_a_value_is_named_with_its_line(
        self, write: Write, tmp_path: Path, reference: str, sentence: str
    ) -> None:
        """What a reference names and cannot give is told with the line of the setting, and nothing else about it."""
        (tmp_path / "big").write_text("x" * 70_000)
        (tmp_path / "bytes").write_bytes(b"\xff")
        (problem,) = problems(write(f"http:\n  port: '{reference}'"))
        assert problem.startswith(f"headrace.yaml:2: http.port: {sentence}")
        assert len(problems(write(f"functions: ['{reference}']"))) == 1


class TestOverrides:
    def test_environment_wins_over_the_file(self, write: Write) -> None:
        """A variable replaces the file's value, in any case, and creates sections that the file does not have."""
        environ = {
            "HEADRACE__HTTP__PORT": "9000",
            "headrace__producer__value_format": "avro",
            "HEADRACE__KAFKA__PROPERTIES__SASL_PASSWORD": "{1",
            "HEADRACE__KAFKA__PROPERTIES__SASL_USERNAME": "1",
            "HEADRACE__KAFKA__PROPERTIES__SASL_MECHANISM": "PLAIN",
            "HEADRACE__KAFKA__PROPERTIES__CLIENT_RACK": "a",
            "HEADRACE__REACTIVE_CONSUMERS__LONG_DELAYS__TOPICS": "[x, y]",
            "HEADRACE_OTHER": "ignored",
        }
        text = f"http: {{port: 1}}\nreactive_consumers: {{long-delays: {{{CONSUMER.format(topic='t', group='g')}}}}}"
        config = load_config(write(text), environ)
        assert config.http.port == 9000
        assert config.producer.value_format == "avro"
        assert (sasl := config.kafka.security.sasl)
        assert (sasl.password.get_secret_value(), sasl.username) == ("{1", "1")
        assert config.kafka.properties == {"client.rack": "a"}
        assert config.reactive_consumers["long-delays"].topics == ["x", "y"]

    @pytest.mark.parametrize(
        ("name", "value", "sentence"),
        [
            ("HEADRACE__HTTP__PROT", "1", "HEADRACE__HTTP__PROT: http.prot: unknown key: did you mean port?"),
            ("HEADRACE__HTPP__PORT", "1", "HEADRACE__HTPP__PORT: htpp: unknown key: did you mean http?"),
            ("HEADRACE__HTTP__PORT", "x", "HEADRACE__HTTP__PORT: http.port: should be a valid integer"),
            ("HEADRACE__HTTP__PORT__X", "1", "HEADRACE__HTTP__PORT__X: http.port: should be a valid integer"),
            ("HEADRACE__FUNCTIONS__0", "f", "HEADRACE__FUNCTIONS__0: functions: should be a valid list"),
            ("HEADRACE__", "1", "HEADRACE__: unknown key: known here are kafka"),
        ],
    )
    def test_bad_overrides_are_named_by_their_variable(self, name: str, value: str, sentence: str) -> None:
        """A variable that fits no setting is an error with its own name and the nearest key."""
        with pytest.raises(ConfigError) as raised:
            load_config(None, {name: value})
        assert raised.value.description.startswith(sentence)


class TestSecrets:
    PLAIN = "kafka: {security: {sasl: {mechanism: PLAIN, username: a, password: hunter2}}}"

    def test_plain_secret_needs_a_private_file(self, write: Write) -> None:
        """A file with a secret in plain text that others may read is refused, and the secret is not repeated."""
        path = write(self.PLAIN)
        assert load_config(path, {}).kafka.security.sasl
        path.chmod(0o644)
        (problem,) = problems(path)
        assert problem.startswith(
            "headrace.yaml:1: kafka.security.sasl.password: headrace.yaml holds a secret in plain text and its mode "
            "is 0644"
        )
        assert "chmod 600" in problem
        assert "hunter2" not in problem

    @pytest.mark.parametrize(
        "text",
        [
            "schema_registry: {password: '${PW:hunter2}'}",
            "reactive_consumers: {a: {topics: [t], group: g, backend: {url: 'http://h', headers: {Authorization: x}}}}",
        ],
    )
    def test_a_default_or_a_header_is_plain_text_too(self, write: Write, text: str) -> None:
        """A secret as the default of a reference or as a header value is in the file as well."""
        path = write(text)
        path.chmod(0o604)
        assert any("holds a secret in plain text" in problem for problem in problems(path))

    @pytest.mark.parametrize(
        "text",
        [
            "schema_registry: {username: a, password: '${env:PW}'}",
            "schema_registry: {username: a, password: '${PW:}'}",
            "kafka: {security: {sasl: {mechanism: PLAIN, username: a, password: '${env:PW}'}}}",
            "kafka: {properties: {sasl.mechanism: PLAIN, sasl.username: a, sasl.password: '${env:PW}'}}",
        ],
    )
    def test_references_only_may_have_any_mode(self, write: Write, text: str) -> None:
        """A file whose secrets are references, and paths to keys, may be read by anyone."""
        path = write(text)
        path.chmod(0o644)
        load_config(path, {"PW": "x"})

    def test_group_of_ours_is_a_warning(self, write: Write, caplog: pytest.LogCaptureFixture) -> None:
        """Readable by a group of this process is said, not refused."""
        path = write(self.PLAIN)
        path.chmod(0o640)
        with caplog.at_level(logging.WARNING):
            load_config(path, {})
        assert "its group may read it" in caplog.text

    def test_a_mounted_secret_of_our_group_is_a_warning(
        self, write: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Secret mounts often cannot have strict modes: they are warned of."""
        (tmp_path / "pw").write_text("x")
        (tmp_path / "pw").chmod(0o644)
        load_config(write("schema_registry: {username: a, password: '${file:pw}'}"), {})
        assert "holds a secret and its mode is 0644" in caplog.text

    def test_no_error_repeats_a_secret(self, write: Write) -> None:
        """A wrong value under a secret key is described without the value."""
        assert "hunter2" not in "".join(problems(write("schema_registry: {password: [hunter2]}")))
        assert "12345" not in "".join(problems(write("schema_registry: {password: 12345}")))
        consumer = "{topics: [t], group: g, backend: {url: 'http://h', headers: {X-Custom: 12345}}}"
        assert "12345" not in "".join(problems(write(f"reactive_consumers: {{a: {consumer}}}")))

    def test_no_error_repeats_what_a_reference_gave(self, write: Write) -> None:
        """A value from the environment or a file may be a secret under any name."""
        (problem,) = problems(write("http:\n  port: '${PW}'"), {"PW": "hunter2"})
        assert problem.startswith("headrace.yaml:2: http.port: should be a valid integer")
        assert "hunter2" not in problem

    def test_repr_hides_secrets(self, write: Write) -> None:
        """Printing the models shows no secret."""
        assert "hunter2" not in repr(load_config(write(self.PLAIN), {}))


def test_the_password_of_the_registry_is_read_again_from_its_file(tmp_path: Path) -> None:
    """A new secret needs no restart; while its file is missing, the first one stays."""
    secret, file = tmp_path / "password", tmp_path / "headrace.yaml"
    secret.write_text("first")
    secret.chmod(0o600)
    file.write_text("schema_registry: {username: u, password: '${file:password}'}\n")
    registry = load_config(file, {}).schema_registry
    secret.write_text("second")
    assert registry.password.get_secret_value() == "second"
    secret.unlink()
    assert registry.password.get_secret_value() == "first"
    assert "first" not in registry.model_dump_json()
