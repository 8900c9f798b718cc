"""Every error Headrace raises on purpose, and the one catalogue of codes.

    HeadraceError
    |-- ConfigError            an operator fixes a file; exit code 78
    |-- EnvironmentProblem     the machine lacks something (Java, disk, port, artifact); exit code 1
    |-- RequestError           the caller changes the request; 4xx
    |   |-- NotFound           404
    |-- Unauthenticated        the caller is unknown; it needs a token or a certificate; 401
    |-- Forbidden              the caller is known, but not allowed; 403
    |-- FormatError            the producer of the data fixes data or schema
    |-- KafkaError             mapped from the client; keeps Kafka's own name and number
    |-- DeliveryError          the destination failed; becomes an Outcome
    |-- FunctionError          a function file is wrong, or its worker died
    |-- PipelineError          a pipeline file is wrong, or its driver died
    |-- ServerBusy             this process, or the one that runs statements, cannot serve the request now; 503
    |-- ...                    this process or a server cannot serve the request now; mostly 503

A leaf exists only where a caller acts differently. A message names what failed, where, the probable cause and
the next step; it never carries a secret or a record's value.
"""

from typing import Any, ClassVar


class HeadraceError(Exception):
    """Headrace could not serve the request."""

    code: ClassVar[str] = "ERR10010"
    """Stable code of the catalogue: light-4j kafka-sidecar's where it has one, else ERR40001 and up."""
    message: ClassVar[str] = "RUNTIME_EXCEPTION"
    """Upper-case name of the case, stable like the code."""
    status: ClassVar[int] = 500
    """HTTP status."""
    retriable: ClassVar[bool] = False
    """Whether the same request may succeed when sent again unchanged."""
    retry_after_seconds: int | None = None
    """Value of the `Retry-After` header, if any, of a case or of one error; a case with one is retriable."""
    ends_connection: ClassVar[bool] = False
    """Whether the HTTP connection ends after the response, for example because the request was not read completely."""

    def __init_subclass__(cls, **facts: Any) -> None:
        """Read the attributes of a case (`code`, `message`, `status`, ...) from the head of its class."""
        cls.retriable = cls.retriable or "retry_after_seconds" in facts
        for name, value in facts.items():
            setattr(cls, name, value)

    def __init__(self, description: str = "", *, cause: str = "", **parameters: Any) -> None:
        """Describe what happened.

        Args:
            description: One paragraph for people; by default the class docstring and the cause.
            cause: Why it happened, without what to do; by default the description.
            parameters: Typed facts (`topic`, `partition`, `index`, ...) that programs may read.
        """
        self.description = description or f"{(type(self).__doc__ or '').strip()} {cause}".strip()
        self.cause = cause or description
        """Why it happened; empty if nothing but the class is known."""
        self.parameters = parameters
        super().__init__(self.description)

    def body(self) -> dict[str, Any]:
        """Return the one HTTP error body."""
        metadata = {"reason": self.message.lower(), "retriable": self.retriable, **self.parameters}
        return {
            "statusCode": self.status,
            "code": self.code,
            "message": self.message,
            "description": self.description,
            "severity": "ERROR",
            "metadata": metadata,
        }


class ConfigError(HeadraceError, code="ERR40001", message="CONFIG_INVALID"):
    """The configuration is not usable."""


class EnvironmentProblem(HeadraceError, code="ERR40002", message="ENVIRONMENT_PROBLEM", status=503):
    """This machine lacks something Headrace needs."""


class PortTaken(EnvironmentProblem):
    """Another program already listens on the port; stop it, or configure another port."""


class RequestError(HeadraceError, status=400):
    """The request cannot be served as it is."""


class InvalidRequest(RequestError, code="ERR11004", message="VALIDATOR_SCHEMA"):
    """The request body or a parameter is not valid."""


class ContentTypeMismatch(RequestError, code="ERR10015", message="CONTENT_TYPE_MISMATCH"):
    """The body does not match its Content-Type; send JSON with Content-Type application/json."""


class RequestBodyMissing(RequestError, code="ERR11014", message="VALIDATOR_REQUEST_BODY_MISSING"):
    """This endpoint needs a request body."""


class PayloadTooLarge(RequestError, code="ERR10068", message="PAYLOAD_TOO_LARGE", status=413, ends_connection=True):
    """The request is larger than this server accepts."""


class EncodingRefused(RequestError, code="ERR40040", message="CONTENT_ENCODING_REFUSED", status=415):
    """The body is compressed in a way that is not accepted here; send it as it is, without Content-Encoding."""


class TooManyRecords(PayloadTooLarge, message="TOO_MANY_RECORDS", ends_connection=False):
    """The request has more records than this server accepts at once; split it."""


class TooManyRequests(RequestError, code="ERR40004", message="TOO_MANY_REQUESTS", status=429, retry_after_seconds=1):
    """Limit reached; send the request again after a pause."""


class MethodNotAllowed(RequestError, code="ERR10008", message="METHOD_NOT_ALLOWED", status=405):
    """This path does not support the method."""


class ProducerNotEnabled(RequestError, code="ERR12216", message="PRODUCER_NOT_ENABLED"):
    """Producing is switched off on this server (producer.enabled: false)."""


class AuditNotTaken(RequestError, code="ERR30004", message="AUDIT_ACTIVE_PROCEDURE_ERROR"):
    """The client's report is not valid, or the audit is off; nothing was written."""


class DeadLetterNotTaken(RequestError, code="ERR30003", message="DLQ_ACTIVE_PROCEDURE_ERROR"):
    """A record that the client reports as failed is not valid; nothing was written."""


class StatementRejected(RequestError, code="ERR30002", message="KSQL_IMPLEMENTATION_ERROR"):
    """The SQL statement is not valid, or is not run here."""


class NotFound(RequestError, code="ERR40005", message="NOT_FOUND", status=404):
    """Not found."""


class InstanceNotFound(NotFound, code="ERR12200", message="CONSUMER_INSTANCE_NOT_FOUND"):
    """The group has no such instance: it was never created here, was deleted, or was idle for too long."""


class InstanceInvalid(RequestError, code="ERR12201", message="CONSUMER_CONFIG_EXCEPTION"):
    """The settings of the instance are not valid."""


class InstanceExists(RequestError, code="ERR12202", message="CONSUMER_ALREADY_EXISTS", status=409):
    """The group already has an instance of this name; choose another name, or delete that instance."""


class InstanceState(RequestError, code="ERR40066", message="CONSUMER_ILLEGAL_STATE", status=409):
    """The instance's state does not allow this: it has no subscription, or one of another kind."""


class InstanceBusy(RequestError, code="ERR40067", message="CONSUMER_BUSY", status=409, retry_after_seconds=1):
    """Another read of this instance is still waiting; one may at a time."""


class InvalidOffset(RequestError, code="ERR40069", message="INVALID_OFFSET", status=409):
    """The partition has no committed offset and auto.offset.reset is none, or its position is not in the log; seek."""


class TopicRecreated(RequestError, code="ERR40070", message="TOPIC_RECREATED", status=409, retriable=True):
    """The topic was deleted and created again; the next read starts at its beginning."""


class InstanceGone(InstanceNotFound, message="INSTANCE_GONE", status=410):
    """The instance's process has ended; the group's committed offsets are intact. Create the instance again."""


class ForwardRefused(RequestError, code="ERR40081", message="FORWARD_REFUSED", status=403):
    """The request claims to be forwarded by another process, but its signature is not valid."""


class CommitRefused(RequestError, code="ERR12207", message="FAILED_TO_COMMIT_OFFSETS", status=409):
    """The partitions are of another member, the offsets would go back, or the group has active members."""


class PathNotFound(NotFound, code="ERR10007", message="INVALID_REQUEST_PATH"):
    """No endpoint has this path."""


class TopicNotFound(NotFound, code="ERR40006", message="KAFKA_TOPIC_NOT_FOUND"):
    """The topic does not exist on the cluster; create it or check its spelling."""


class PartitionNotFound(NotFound, code="ERR40007", message="KAFKA_PARTITION_NOT_FOUND"):
    """The topic has no partition with this number."""


class OffsetOutOfRange(RequestError, code="ERR40071", message="KAFKA_OFFSET_OUT_OF_RANGE", status=416):
    """The offset was removed from the log, or is not written yet. `metadata` has the first and the end offset."""


class InvalidTopicName(RequestError, code="ERR30001", message="INVALID_TOPIC_NAME"):
    """No reactive consumer of this process reads the topic."""


class OriginRefused(RequestError, code="ERR40034", message="ORIGIN_REFUSED", status=403):
    """The Host or Origin header names another site; use one of this server, or one of http.allowed_hosts for Host."""


class AmbiguousRequest(RequestError, code="ERR40039", message="AMBIGUOUS_REQUEST", ends_connection=True):
    """The head of this request is ambiguous; closing the connection."""


class HeadersTooLarge(AmbiguousRequest, message="HEADERS_TOO_LARGE", status=431):
    """The headers or the path are larger than this server accepts."""


class TransferCodingUnknown(AmbiguousRequest, message="TRANSFER_CODING_UNKNOWN", status=501):
    """The only supported transfer coding is `chunked`; closing the connection."""


class IdempotencyKeyReused(RequestError, code="ERR40043", message="IDEMPOTENCY_KEY_REUSED", status=409):
    """This Idempotency-Key was used for a different request; use a new key for a new request."""


class IdempotencyKeyBusy(IdempotencyKeyReused, message="IDEMPOTENCY_KEY_BUSY", retry_after_seconds=1):
    """The first request with this Idempotency-Key is still in progress; send it again after a pause."""


class TopicInternal(RequestError, code="ERR40063", message="TOPIC_INTERNAL", status=403):
    """Only Headrace or Kafka may write to this topic; use another topic."""


class LeaseTaken(RequestError, code="ERR40048", message="LEASE_TAKEN", status=409, retry_after_seconds=10):
    """Another process is already doing this work; only one may at a time."""


class OffsetsKeptElsewhere(RequestError, code="ERR40057", message="OFFSETS_KEPT_ELSEWHERE", status=409):
    """The backend keeps the offsets of this group (offsets_path): set another offset in its store, and restart."""


class RegistrationQuota(RequestError, code="ERR40062", message="REGISTRATION_QUOTA_REACHED", status=429):
    """The registration limit is reached, for this owner or in total."""


class ReplayMetadataInvalid(RequestError, code="ERR12218", message="TOPICREPLAY_METADATA_ERROR"):
    """The description of what to replay is not valid."""


class Conflict(RequestError, code="ERR40053", message="CONFLICT", status=409):
    """Such a job is already running or finished, or the name or topic belongs to another registration or the file."""


class Unauthenticated(HeadraceError, code="ERR40036", message="UNAUTHENTICATED", status=401):
    """This server requires authentication."""


class AuthTokenMissing(Unauthenticated, code="ERR10002", message="MISSING_AUTH_TOKEN"):
    """This server requires credentials; send a token as Authorization: Bearer."""


class AuthTokenInvalid(Unauthenticated, code="ERR10000", message="INVALID_AUTH_TOKEN"):
    """The token in the Authorization header is not valid here; get another one."""


class AuthTokenExpired(Unauthenticated, code="ERR10001", message="AUTH_TOKEN_EXPIRED"):
    """The token in the Authorization header has expired; get another one."""


class ScopeTokenInvalid(Unauthenticated, code="ERR10003", message="INVALID_SCOPE_TOKEN"):
    """The token in the X-Scope-Token header is not valid here; get another one."""


class ScopeTokenExpired(Unauthenticated, code="ERR10004", message="SCOPE_TOKEN_EXPIRED"):
    """The token in the X-Scope-Token header has expired; get another one."""


class Forbidden(HeadraceError, code="ERR40037", message="FORBIDDEN", status=403):
    """The caller may not do this."""


class AuthTokenScopeMismatch(Forbidden, code="ERR10005", message="AUTH_TOKEN_SCOPE_MISMATCH"):
    """The token in the Authorization header, or the client certificate, lacks the required scope."""


class ScopeTokenScopeMismatch(Forbidden, code="ERR10006", message="SCOPE_TOKEN_SCOPE_MISMATCH"):
    """The token in the X-Scope-Token header lacks the required scope."""


class KeysUnavailable(
    HeadraceError, code="ERR40038", message="TOKEN_KEYS_UNAVAILABLE", status=503, retry_after_seconds=5
):
    """The public keys for checking tokens are not available yet; send the request again later."""


class FormatError(HeadraceError, status=400):
    """The data does not match its format."""


class EncodeError(FormatError, code="ERR12206", message="SERIALIZE_SCHEMA_EXCEPTION"):
    """A record does not match its format or schema; nothing was sent."""


class DecodeError(FormatError, code="ERR40009", message="DESERIALIZE_EXCEPTION"):
    """The bytes of a record are not valid in its format."""


class SchemaNotFound(FormatError, code="ERR12208", message="FAILED_TO_GET_SCHEMA"):
    """The schema registry has no such schema; register it or name another."""


class SchemaInvalid(FormatError, code="ERR40032", message="SCHEMA_INVALID"):
    """The schema is not valid, or the registry rejected it; correct the schema."""


class SchemaConflict(FormatError, code="ERR12210", message="VERSION_WITH_SCHEMA_ID"):
    """The request names its schema in two conflicting ways."""


class SchemaWithSchemaId(SchemaConflict, code="ERR12211", message="SCHEMA_WITH_SCHEMA_ID"):
    """Give either the schema text or its id, not both."""


class SchemaWithSchemaVersion(SchemaConflict, code="ERR12213", message="SCHEMA_WITH_SCHEMA_VERSION"):
    """Give either the schema text or its version, not both."""


class SchemaWithoutFormat(SchemaConflict, code="ERR12214", message="RAW_SCHEMA_WITHOUT_FORMAT"):
    """Schema text needs the format it is written in (keyFormat or valueFormat)."""


class RegistryUnavailable(
    HeadraceError, code="ERR40010", message="SCHEMA_REGISTRY_UNAVAILABLE", status=503, retry_after_seconds=2
):
    """The schema registry does not respond; nothing was sent, send the request again later."""


class KafkaError(HeadraceError, code="ERR40011", message="KAFKA_ERROR", status=502):
    """Kafka rejected the request, or failed."""


class KafkaUnavailable(KafkaError, code="ERR40012", message="KAFKA_UNAVAILABLE", status=503, retry_after_seconds=2):
    """No broker can serve this now; nothing was lost, send the request again later."""


class KafkaTimeout(KafkaError, code="ERR40013", message="KAFKA_TIMEOUT", status=504, retriable=True):
    """Kafka did not respond in time; the outcome is unknown."""


class KafkaUnauthenticated(KafkaError, code="ERR40014", message="KAFKA_UNAUTHENTICATED", status=502):
    """Kafka rejected these credentials."""


class KafkaUnauthorized(KafkaError, code="ERR40015", message="KAFKA_UNAUTHORIZED", status=403):
    """Kafka's access rules do not allow this for Headrace's principal."""


class ProducerQueueFull(KafkaError, code="ERR40016", message="PRODUCER_QUEUE_FULL", status=503, retry_after_seconds=1):
    """The limit of pending produce bytes is reached; nothing was sent, send the request again after a pause."""


class RecordTooLarge(KafkaError, code="ERR40017", message="RECORD_TOO_LARGE", status=413):
    """A record is larger than the topic or the client allows; send less, or raise the topic's max.message.bytes."""


class RecordRefused(KafkaError, code="ERR40045", message="RECORD_REFUSED", status=400):
    """The topic rejected the record: its timestamp is out of bounds, or a compacted topic requires a key."""


class FatalKafkaError(KafkaError, code="ERR40018", message="KAFKA_CLIENT_FATAL", status=503, retriable=True):
    """The client cannot continue and is replaced; the outcome of records in flight is unknown."""


class TransactionAborted(KafkaError, code="ERR40042", message="TRANSACTION_ABORTED", status=503, retry_after_seconds=1):
    """The transaction was aborted, and none of its records will ever be visible; send the request again."""


class DeliveryError(HeadraceError, code="ERR40019", message="DELIVERY_ERROR", status=502):
    """A destination did not accept a delivery."""

    def __init__(
        self, description: str = "", *, wait_seconds: float | None = None, broken_off: bool = False, **parameters: Any
    ) -> None:
        """Describe what happened.

        Args:
            wait_seconds: The pause that the destination requests (`Retry-After`).
            broken_off: Whether the destination started the delivery and then closed the connection.
            parameters: Facts by name.
        """
        super().__init__(description, **parameters)
        self.wait_seconds, self.broken_off = wait_seconds, broken_off
        self.is_alive = False
        """Whether the destination responded to something else right before."""
        self.advice = ""
        """What an operator can do if every attempt ends like this."""


class DestinationUnavailable(DeliveryError, code="ERR40020", message="DESTINATION_UNAVAILABLE", retriable=True):
    """The destination is unreachable or overloaded; deliveries wait, and resume automatically."""


class KsqldbUnavailable(DestinationUnavailable):
    """The ksqlDB server does not answer, or not as one."""


class DestinationRefused(DeliveryError):
    """The destination's response is not valid."""


class DeadLetterFailed(DeliveryError, code="ERR40022", message="DEAD_LETTER_FAILED", retriable=True):
    """A dead letter could not be written; its partition is paused, and no record is skipped."""


class Fenced(DeliveryError):
    """The delivery belongs to an earlier assignment; a later one writes to the same store."""


class FunctionError(HeadraceError, code="ERR40023", message="FUNCTION_ERROR"):
    """A function could not run."""


class FunctionInvalid(FunctionError):
    """The function file or its handler is not usable."""


class WorkerLost(FunctionError, message="FUNCTION_WORKER_LOST"):
    """A worker process died; its records are delivered again."""


class PipelineError(HeadraceError, code="ERR40026", message="PIPELINE_ERROR"):
    """A pipeline could not run."""


class PipelineInvalid(PipelineError):
    """The pipeline file is not usable."""


class CheckpointUnusable(PipelineInvalid, message="CHECKPOINT_UNUSABLE"):
    """The checkpoint of a flow is damaged, in use, or belongs to another query."""


class SinkUnavailable(PipelineError, message="PIPELINE_SINK_UNAVAILABLE", retriable=True):
    """The sink's server cannot take a batch now; it will be written again."""


class DriverLost(PipelineError, retriable=True):
    """The Spark driver process died; the pipeline restarts from its checkpoint."""


class ReadFailed(
    HeadraceError, code="ERR12205", message="UNEXPECTED_CONSUMER_READ_EXCEPTION", status=503, retry_after_seconds=2
):
    """Kafka or the backend does not respond; the remaining dead letters stay, send the request again later."""


class LeaseLost(HeadraceError, code="ERR40049", message="LEASE_LOST", status=503, retriable=True):
    """This process lost its lease and stopped: another process may do this work now."""


class ServerBusy(
    HeadraceError, code="ERR40031", message="SERVER_BUSY", status=503, retry_after_seconds=1, ends_connection=True
):
    """Too many connections are open; close some, or send again after a pause."""


class OwnerUnavailable(ServerBusy, message="OWNER_UNAVAILABLE", retry_after_seconds=2, ends_connection=False):
    """The process that has the instance, or the idempotency key, does not respond now."""


class QueriesUnavailable(ServerBusy, ends_connection=False):
    """The process that runs statements is starting or restarting; send the request again after a pause."""


class Draining(
    HeadraceError, code="ERR40029", message="DRAINING", status=503, retry_after_seconds=1, ends_connection=True
):
    """This process is stopping and accepts no new work; send the request to another process."""


class ServiceDied(HeadraceError):
    """A service of this process stopped unexpectedly."""


class InternalError(HeadraceError):
    """A defect of Headrace; please report it with the correlation id of this response."""


def catalogue() -> list[type[HeadraceError]]:
    """Return the class of each code, sorted by code: the source of the codes page."""
    found: list[type[HeadraceError]] = []
    queue: list[type[HeadraceError]] = [HeadraceError]
    while queue:
        error = queue.pop()
        found += [error] if "code" in vars(error) else []  # others are cases of their parent's code
        queue.extend(error.__subclasses__())
    return sorted(found, key=lambda error: error.code)
