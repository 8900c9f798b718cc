"""Everything that can be set in `headrace.yaml`, declared once; parsing, linting, schema and docs come from here.

Durations are seconds, sizes are bytes or records, as the names say. Every model is frozen and refuses unknown keys.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from headrace.config.secrecy import is_secret_name


def _no_switch(value: object) -> object:
    if isinstance(value, bool):  # YAML's yes, no, on, off; they would pass as 1 and 0
        raise ValueError("should be a number, not true or false")
    return value


def _plain_url(value: str) -> str:
    try:
        parts = urlsplit(value)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ValueError("should be a URL such as http://localhost:8081")
    if "@" in parts.netloc:
        raise ValueError("holds a user or password, which URLs spread into logs: set them apart from the URL")
    return value


Number = BeforeValidator(_no_switch)
FormatName = Literal["binary", "string", "json", "avro", "jsonschema", "protobuf"]
Port = Annotated[int, Field(ge=0, le=65535), Number]
Seconds = Annotated[float, Field(ge=0), Number]
PositiveSeconds = Annotated[float, Field(gt=0), Number]
Count = Annotated[int, Field(ge=1), Number]
Url = Annotated[str, AfterValidator(_plain_url)]
TopicName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,249}$")]
GroupName = Annotated[str, Field(pattern=r"^[^\^\s]([^\r\n]*\S)?$", max_length=255)]


class Section(BaseModel):
    """Base of every model of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class KafkaConfig(Section):
    """How to reach Kafka."""

    bootstrap_servers: Annotated[str, Field(pattern=r"^[^\s,]+(\s*,\s*[^\s,]+)*$")] = "localhost:9092"
    """Brokers to ask first: `host:port`, comma separated."""
    properties: dict[str, str | int | float | bool | SecretStr] = Field(default_factory=dict)
    """Client properties by their librdkafka names, after an allow-list; a secret belongs in a `${file:}` reference."""
    create_topics: bool = True
    """Whether topics of ours (dead letter topics, result topics) are created when missing."""
    request_timeout_seconds: PositiveSeconds = 10.0
    """Longest wait for one answer to an administrative question."""

    @field_validator("properties", mode="before")
    @classmethod
    def _hide_secrets(cls, properties: Any) -> Any:
        if not isinstance(properties, dict):
            return properties
        return {
            name: SecretStr(value) if isinstance(value, str) and is_secret_name(name) else value
            for name, value in properties.items()
        }


class SchemaRegistryConfig(Section):
    """How to reach the schema registry (Confluent's HTTP API)."""

    url: Url = "http://localhost:8081"
    """Base URL; the path of a compatible API may follow the host."""
    username: str = ""
    """User of HTTP basic authentication; empty for none."""
    password: SecretStr = SecretStr("")
    """Password of HTTP basic authentication."""
    timeout_seconds: PositiveSeconds = 5.0
    """Longest wait for one answer."""
    latest_seconds: Seconds = 30.0
    """How long an answer to "latest version of a subject" is reused, and a "not found" remembered."""


class PrincipalConfig(Section):
    """Somebody who may come in, in the modes `token` and `mtls`."""

    token: SecretStr = SecretStr("")
    """Mode `token`: what the principal sends as `Authorization: Bearer ...`; 16 characters at least."""
    scopes: list[Annotated[str, Field(pattern=r"^[\x21-\x7e]+$")]] = Field(default_factory=list)
    """What the principal may do: `kafka:r`, `kafka:w`, `admin`, `metrics`, or patterns such as `produce:orders.*`."""


class JwtConfig(Section):
    """Which tokens of an OAuth 2.0 server are taken (RS256, ES256, EdDSA)."""

    issuer: str = ""
    """What the claim `iss` must be."""
    audience: str = ""
    """What the claim `aud` must be or hold."""
    jwks_url: Url | None = None
    """Where the server shows its public keys."""
    jwks_file: Path | None = None
    """The same keys as a file, relative to this file; instead of `jwks_url`."""
    leeway_seconds: Annotated[float, Field(ge=0, le=300), Number] = 60.0
    """How far the clocks of server and Headrace may be apart."""
    max_lifetime_seconds: PositiveSeconds = 86_400.0
    """Tokens made for longer are refused."""
    refresh_seconds: Annotated[float, Field(ge=30), Number] = 300.0
    """How often keys are asked for again; an unknown key asks at once, at most every 30 seconds."""


class SecurityConfig(Section):
    """Who may do what over HTTP."""

    mode: Literal["none", "token", "jwt", "mtls"] = "none"
    """`none`: everybody who reaches loopback may do everything; `token`: fixed tokens; `jwt`; `mtls`."""
    principals: dict[Annotated[str, Field(pattern=r"^[\x21-\x7e]{1,200}$")], PrincipalConfig] = Field(
        default_factory=dict
    )
    """Principals by name; in mode `mtls` a name is the DNS name, URI or common name of a client certificate."""
    jwt: JwtConfig = JwtConfig()
    """Tokens of mode `jwt`."""
    requests_per_second: Annotated[float, Field(ge=0), Number] = 0.0
    """Requests of one principal at most; above, they are answered 429. 0: no limit."""

    @model_validator(mode="after")
    def _complete(self) -> SecurityConfig:
        jwt = self.jwt
        if self.mode == "jwt" and not (jwt.issuer and jwt.audience and bool(jwt.jwks_url) != bool(jwt.jwks_file)):
            raise ValueError("mode is jwt: set jwt.issuer, jwt.audience, and one of jwt.jwks_url and jwt.jwks_file")
        if self.mode in ("token", "mtls") and not self.principals:
            raise ValueError(f"mode is {self.mode} and principals is empty, so nobody could come in: name one")
        tokens = [principal.token.get_secret_value() for principal in self.principals.values()]
        if self.mode == "token" and (min(map(len, tokens)) < 16 or len(set(tokens)) < len(tokens)):
            raise ValueError("mode is token: every principal needs a token of its own, of 16 characters or more")
        return self


class TlsConfig(Section):
    """TLS of the listener, 1.2 or newer; files are PEM, relative to this file, and read again when they change."""

    certificate: Path | None = None
    """Certificate with its chain; with it, Headrace speaks HTTPS only."""
    key: Path | None = None
    """Private key of the certificate; nobody else may read the file."""
    client_ca: Path | None = None
    """Authorities whose client certificates are taken; with it, every client needs one."""

    @model_validator(mode="after")
    def _complete(self) -> TlsConfig:
        if (self.certificate is None) != (self.key is None) or (self.client_ca and not self.certificate):
            raise ValueError("needs certificate and key together: set both, or nothing of tls")
        return self


class HttpConfig(Section):
    """Where Headrace listens."""

    host: str = "127.0.0.1"
    """Address to listen on; another than loopback needs TLS and authentication."""
    port: Port = 8082
    """Port to listen on; 0 picks a free one, named in the `ready` line."""
    tls: TlsConfig = TlsConfig()
    """HTTPS instead of HTTP."""
    allowed_hosts: list[str] = Field(default_factory=list)
    """Names by which clients may call beside `localhost`, `127.0.0.1`, `::1` and `host`; without a port."""
    max_body_bytes: Count = 10_485_760
    """Largest request body; a larger one is answered 413 and not read to its end."""
    max_connections: Count = 1000
    """Open connections at most; one more is answered 503."""


class ProducerConfig(Section):
    """How records are produced over HTTP."""

    enabled: bool = True
    """Whether `POST /producers/{topic}` is served."""
    key_format: FormatName = "string"
    """Format of keys when a request names none."""
    value_format: FormatName = "json"
    """Format of values when a request names none."""
    format_from_subject: bool = False
    """Whether the newest schema under the subject, if there is one, decides the format when a request names none."""
    subject_strategy: Literal["topic", "record", "topic_record"] = "topic"
    """Subject of a schema: `{topic}-key` and `{topic}-value`, the schema's own full name, or `{topic}-{name}`."""
    auto_register: bool = True
    """Whether schema text in a request is registered when the registry does not have it under the subject."""
    linger_seconds: Seconds = 0.001
    """How long the client waits to fill a batch (Kafka's `linger.ms`)."""
    max_pending_bytes: Count = 67_108_864
    """Bytes accepted and not yet acknowledged; above, requests are answered 503 at once."""
    delivery_timeout_seconds: PositiveSeconds = 30.0
    """Longest wait for an acknowledgement (Kafka's `delivery.timeout.ms`); after it the outcome is unknown."""
    compression: Literal["none", "gzip", "snappy", "lz4", "zstd"] = "none"
    """Compression of batches (Kafka's `compression.type`)."""
    always_200: bool = False
    """Answer 200 whatever the outcome of the records, as the original sidecar."""
    forward_authorization: bool = False
    """Copy the HTTP `Authorization` header into the record headers, as the original sidecar."""
    caller_id: str = ""
    """Written into every record as the header `caller_id`; empty for none."""


class BackendConfig(Section):
    """The HTTP endpoint a reactive consumer delivers to."""

    url: Url
    """Where records are posted."""
    timeout_seconds: PositiveSeconds = 30.0
    """Longest wait for one answer."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Headers of every request."""
    mode: Literal["results", "status"] = "results"
    """`results`: the answer's body has one result per record; `status`: 2xx means all records are done."""


class BatchConfig(Section):
    """How many records travel in one delivery."""

    max_records: Count = 100
    """Records per delivery at most."""
    max_bytes: Count = 102_400
    """Bytes of keys and values per delivery at most; one record always fits."""
    linger_seconds: Seconds = 0.0
    """How long a delivery waits to fill up."""


class RetryConfig(Section):
    """What happens to a record that failed."""

    attempts: Count = 5
    """Deliveries of one record in all; after the last it becomes a dead letter."""
    first_delay_seconds: Seconds = 0.2
    """Pause before the second attempt; doubles from there, with full jitter."""
    max_delay_seconds: Seconds = 30.0
    """Longest pause."""

    @model_validator(mode="after")
    def _growing(self) -> RetryConfig:
        if self.first_delay_seconds > self.max_delay_seconds:
            raise ValueError("first_delay_seconds is greater than max_delay_seconds: lower it or raise the other")
        return self


class DeadLetterConfig(Section):
    """Where records go that cannot be delivered."""

    enabled: bool = True
    """When false, a record that has used up its attempts stops its partition and says so."""
    topic: Annotated[str, Field(pattern=r"^([A-Za-z0-9._-]|\{topic\})+$")] = "{topic}.dlq"
    """Name of the dead letter topic; `{topic}` is the origin's name."""


class FlowControl(Section):
    """How much a consumer holds that has not ended."""

    max_records: Count = 20_000
    """Records taken from Kafka and not ended; above, partitions are paused."""
    max_bytes: Count = 33_554_432
    """Bytes of the same."""


class ReactiveConsumerConfig(Section):
    """One consumer that pushes records to a backend."""

    topics: Annotated[list[TopicName], Field(min_length=1)]
    """Topics to consume."""
    group: GroupName
    """Consumer group."""
    backend: BackendConfig
    """Where records are delivered."""
    key_format: FormatName = "string"
    """How keys are written into the delivery."""
    value_format: FormatName = "json"
    """How values are written into the delivery."""
    ordering: Literal["partition"] = "partition"
    """Unit of order: records of a partition are delivered one batch after another."""
    batch: BatchConfig = BatchConfig()
    """Size of a delivery."""
    retry: RetryConfig = RetryConfig()
    """Retries of a failed record."""
    dead_letter: DeadLetterConfig = DeadLetterConfig()
    """Where undeliverable records go."""
    flow: FlowControl = FlowControl()
    """Bounds of what is held in memory."""
    auto_offset_reset: Literal["earliest", "latest"] = "earliest"
    """Where a group without committed offsets begins."""

    @model_validator(mode="after")
    def _consistent(self) -> ReactiveConsumerConfig:
        for topic in self.topics:
            letters = self.dead_letter.topic.replace("{topic}", topic)
            if self.dead_letter.enabled and letters in self.topics:
                raise ValueError(f"dead_letter.topic is {letters}, which is consumed here too: name another topic")
        if self.batch.max_records > self.flow.max_records or self.batch.max_bytes > self.flow.max_bytes:
            raise ValueError("batch is larger than flow, which bounds memory: lower batch or raise flow")
        return self


class HeadraceConfig(Section):
    """The whole file."""

    kafka: KafkaConfig = KafkaConfig()
    """How to reach Kafka."""
    schema_registry: SchemaRegistryConfig = SchemaRegistryConfig()
    """How to reach the schema registry."""
    security: SecurityConfig = SecurityConfig()
    """Who may do what over HTTP."""
    http: HttpConfig = HttpConfig()
    """Where Headrace listens."""
    producer: ProducerConfig = ProducerConfig()
    """Producing over HTTP."""
    reactive_consumers: dict[str, ReactiveConsumerConfig] = Field(default_factory=dict)
    """Reactive consumers by name."""
    functions: list[Path] = Field(default_factory=list)
    """Function files (Nuclio's `function.yaml`), relative to this file."""
    pipelines: list[Path] = Field(default_factory=list)
    """Pipeline files, relative to this file."""
    state_dir: Path = Path(".headrace/state")
    """Folder for checkpoints of pipelines, relative to this file."""
    drain_seconds: PositiveSeconds = 30.0
    """How long SIGTERM waits for work in flight."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severity that is logged."""

    @field_validator("http")
    @classmethod
    def _safe_to_listen(cls, http: HttpConfig, info: ValidationInfo) -> HttpConfig:
        mode = info.data["security"].mode if "security" in info.data else "none"
        if http.host not in ("127.0.0.1", "localhost", "::1") and (mode == "none" or not http.tls.certificate):
            raise ValueError(
                f"host is {http.host}, and TLS and authentication are not both on: set http.tls and security.mode, "
                "or listen on 127.0.0.1 and let other machines in through a proxy that authenticates them"
            )
        if mode == "mtls" and not http.tls.client_ca:
            raise ValueError("security.mode is mtls, and who signs client certificates is not said: set tls.client_ca")
        return http

    @model_validator(mode="after")
    def _groups_apart(self) -> HeadraceConfig:
        owner: dict[tuple[str, str], str] = {}
        for name, consumer in self.reactive_consumers.items():
            for topic in consumer.topics:
                other = owner.setdefault((consumer.group, topic), name)
                if other != name:
                    raise ValueError(
                        f"reactive_consumers.{name} and {other} read topic {topic} in the same group "
                        f"{consumer.group}, so each backend would get only a part: give them two groups"
                    )
        return self
