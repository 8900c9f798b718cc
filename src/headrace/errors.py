"""Every error Headrace raises on purpose, and the one catalogue of codes.

    HeadraceError
    |-- ConfigError            an operator fixes a file; exit code 78
    |-- EnvironmentProblem     the machine lacks something (Java, disk, port, artifact); exit code 1
    |-- RequestError           the caller changes the request; 4xx
    |   |-- NotFound           404
    |-- Unauthenticated        the caller is not known; it gets a token or a certificate; 401
    |-- Forbidden              the caller is known, and is not allowed; 403
    |-- FormatError            the producer of the data fixes data or schema
    |-- KafkaError             mapped from the client; keeps Kafka's own name and number
    |-- DeliveryError          the destination failed; becomes an Outcome
    |-- FunctionError          a function file is wrong, or its worker died
    |-- PipelineError          a pipeline file is wrong, or its driver died
    |-- ...                    this process or a server cannot serve the request now; mostly 503

A leaf exists only where a caller acts differently. A message names what failed, where, the probable cause and
the next step; it never carries a secret or a record's value.
"""

from typing import Any, ClassVar


class HeadraceError(Exception):
    """Headrace could not serve the request."""

    code: ClassVar[str] = "ERR40000"
    """Stable code of the catalogue: that of the light-4j kafka-sidecar where it has one, else ERR40001 and up."""
    message: ClassVar[str] = "HEADRACE_ERROR"
    """Upper-case name of the case, stable like the code."""
    status: ClassVar[int] = 500
    """HTTP status."""
    retriable: ClassVar[bool] = False
    """Whether the same request may succeed when it is sent again unchanged."""
    retry_after_seconds: ClassVar[int | None] = None
    """Value of the `Retry-After` header, where one helps; a case with it is retriable."""

    def __init_subclass__(cls, **facts: Any) -> None:
        """Take the facts of a case (`code`, `message`, `status`, ...) from the head of its class."""
        cls.retriable = cls.retriable or "retry_after_seconds" in facts
        for name, value in facts.items():
            setattr(cls, name, value)

    def __init__(self, description: str = "", **parameters: Any) -> None:
        """Describe what happened.

        Args:
            description: One paragraph for people; the class docstring when empty.
            parameters: Typed facts (`topic`, `partition`, `index`, ...) that programs may read.
        """
        self.description = description or (type(self).__doc__ or "").strip()
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


class PortTaken(EnvironmentProblem, code="ERR40033", message="PORT_TAKEN"):
    """Another program listens on the port; where no port is configured, another one is tried."""


class RequestError(HeadraceError, code="ERR40003", message="REQUEST_ERROR", status=400):
    """The request cannot be served as it is."""


class InvalidRequest(RequestError, code="ERR11004", message="VALIDATOR_SCHEMA"):
    """The request body or a parameter does not fit."""


class ContentTypeMismatch(RequestError, code="ERR10015", message="CONTENT_TYPE_MISMATCH"):
    """The body does not match its Content-Type; send JSON with Content-Type application/json."""


class RequestBodyMissing(RequestError, code="ERR11014", message="VALIDATOR_REQUEST_BODY_MISSING"):
    """This endpoint needs a request body."""


class PayloadTooLarge(RequestError, code="ERR10068", message="PAYLOAD_TOO_LARGE", status=413):
    """The request is larger than this server accepts."""


class EncodingRefused(RequestError, code="ERR40040", message="CONTENT_ENCODING_REFUSED", status=415):
    """The body is compressed in a way that is not accepted here; send it as it is, without Content-Encoding."""


class TooManyRecords(RequestError, code="ERR40041", message="TOO_MANY_RECORDS", status=413):
    """The request has more records than this server accepts at once; send them in several requests."""


class TooManyRequests(RequestError, code="ERR40004", message="TOO_MANY_REQUESTS", status=429, retry_after_seconds=1):
    """A limit is reached; wait and send again."""


class MethodNotAllowed(RequestError, code="ERR10008", message="METHOD_NOT_ALLOWED", status=405):
    """The path exists, the method does not."""


class ProducerNotEnabled(RequestError, code="ERR12216", message="PRODUCER_NOT_ENABLED"):
    """Producing is switched off on this server (producer.enabled: false)."""


class AuditNotTaken(RequestError, code="ERR30004", message="AUDIT_ACTIVE_PROCEDURE_ERROR"):
    """The report of a client is not valid, or there is no audit here; nothing was written to the audit."""


class DeadLetterNotTaken(RequestError, code="ERR30003", message="DLQ_ACTIVE_PROCEDURE_ERROR"):
    """A record that a client reports as failed is not usable; nothing is written."""


class NotFound(RequestError, code="ERR40005", message="NOT_FOUND", status=404):
    """There is no such thing here."""


class InstanceNotFound(NotFound, code="ERR12200", message="CONSUMER_INSTANCE_NOT_FOUND"):
    """No such instance in the group: it was never created here, was deleted, or was idle for too long."""


class InstanceInvalid(RequestError, code="ERR12201", message="CONSUMER_CONFIG_EXCEPTION"):
    """The settings of the instance are not valid."""


class InstanceExists(RequestError, code="ERR12202", message="CONSUMER_ALREADY_EXISTS", status=409):
    """The group has an instance of this name; choose another name, or delete that one."""


class InstanceState(RequestError, code="ERR40066", message="CONSUMER_ILLEGAL_STATE", status=409):
    """The instance cannot do this in its present state: it reads nothing, or reads in another way."""


class InstanceBusy(RequestError, code="ERR40067", message="CONSUMER_BUSY", status=409, retry_after_seconds=1):
    """Another read of the instance is not answered yet."""


class OffsetNotCommitted(RequestError, code="ERR40068", message="NO_COMMITTED_OFFSET", status=409):
    """The group has committed no offset of the partition, and auto.offset.reset is none; seek to one first."""


class PositionOutOfRange(RequestError, code="ERR40069", message="POSITION_OUT_OF_RANGE", status=409):
    """The position of the partition is not in the log; seek to an offset that is there."""


class TopicRecreated(RequestError, code="ERR40070", message="TOPIC_RECREATED", status=409, retriable=True):
    """The topic was deleted and created again; the next read begins at its start."""


class InstanceGone(RequestError, code="ERR40080", message="INSTANCE_GONE", status=410):
    """The process that had the instance has ended; what its group committed is intact: create an instance again."""


class ForwardRefused(RequestError, code="ERR40081", message="FORWARD_REFUSED", status=403):
    """The request claims to be forwarded by another process, and has no valid signature of this cluster."""


class CommitRefused(RequestError, code="ERR12207", message="FAILED_TO_COMMIT_OFFSETS", status=409):
    """Another member of the group has or had the partitions since, or their offsets would go back; see `refused`."""


class PathNotFound(NotFound, code="ERR10007", message="INVALID_REQUEST_PATH"):
    """No endpoint has this path."""


class TopicNotFound(NotFound, code="ERR40006", message="KAFKA_TOPIC_NOT_FOUND"):
    """The topic does not exist on the cluster; create it or check its spelling."""


class PartitionNotFound(NotFound, code="ERR40007", message="KAFKA_PARTITION_NOT_FOUND"):
    """The topic has no partition of this number."""


class OffsetOutOfRange(RequestError, code="ERR40071", message="KAFKA_OFFSET_OUT_OF_RANGE", status=416):
    """The log does not hold the offset: it was removed, or is not written yet. `metadata` has the first and the end."""


class InvalidTopicName(RequestError, code="ERR30001", message="INVALID_TOPIC_NAME"):
    """No reactive consumer of this process reads the topic."""


class OriginRefused(RequestError, code="ERR40034", message="ORIGIN_REFUSED", status=403):
    """The Host or Origin header names another site; call by a name this server listens on, or add it to its list."""


class HeadersTooLarge(RequestError, code="ERR40035", message="HEADERS_TOO_LARGE", status=431):
    """The request has more or longer headers, or a longer path, than this server accepts."""


class AmbiguousRequest(RequestError, code="ERR40039", message="AMBIGUOUS_REQUEST"):
    """Two readers could understand the head of this request differently; the connection ends."""


class TransferCodingUnknown(RequestError, code="ERR40065", message="TRANSFER_CODING_UNKNOWN", status=501):
    """The body is coded in another way than `chunked`; the connection ends."""


class IdempotencyKeyReused(RequestError, code="ERR40043", message="IDEMPOTENCY_KEY_REUSED", status=409):
    """This Idempotency-Key was used by another request before; use a new key for a new request."""


class IdempotencyKeyBusy(
    RequestError, code="ERR40044", message="IDEMPOTENCY_KEY_BUSY", status=409, retry_after_seconds=1
):
    """The first request with this Idempotency-Key is not answered yet; send it again after a pause."""


class TopicInternal(RequestError, code="ERR40063", message="TOPIC_INTERNAL", status=403):
    """Only Headrace itself, or Kafka, writes to this topic; name another topic."""


class LeaseTaken(RequestError, code="ERR40048", message="LEASE_TAKEN", status=409, retry_after_seconds=10):
    """Another process does this work already, and only one may at a time."""


class OffsetsKeptElsewhere(RequestError, code="ERR40057", message="OFFSETS_KEPT_ELSEWHERE", status=409):
    """The backend keeps the offsets of this group (offsets_path): set another offset in its store, and restart."""


class RegistrationConflict(RequestError, code="ERR40061", message="REGISTRATION_CONFLICT", status=409):
    """The name, or a topic in a group, belongs to another registration or to the file."""


class RegistrationQuota(RequestError, code="ERR40062", message="REGISTRATION_QUOTA_REACHED", status=429):
    """There are as many registrations as may be: of this owner, or in all."""


class ReplayMetadataInvalid(RequestError, code="ERR12218", message="TOPICREPLAY_METADATA_ERROR"):
    """The description of what to replay is not valid."""


class JobConflict(RequestError, code="ERR40053", message="JOB_CONFLICT", status=409):
    """A job does that already, or has ended already."""


class Unauthenticated(HeadraceError, code="ERR40036", message="UNAUTHENTICATED", status=401):
    """This server requires authentication."""


class AuthTokenMissing(Unauthenticated, code="ERR10002", message="MISSING_AUTH_TOKEN"):
    """This server accepts requests with credentials only: send Authorization: Bearer and a token."""


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
    """The token in the Authorization header, or the client's certificate, does not carry the scope this needs."""


class ScopeTokenScopeMismatch(Forbidden, code="ERR10006", message="SCOPE_TOKEN_SCOPE_MISMATCH"):
    """The token in the X-Scope-Token header does not carry the scope this needs."""


class KeysUnavailable(
    HeadraceError, code="ERR40038", message="TOKEN_KEYS_UNAVAILABLE", status=503, retry_after_seconds=5
):
    """The public keys that tokens are checked with could not be read yet; send the request again later."""


class FormatError(HeadraceError, code="ERR40008", message="FORMAT_ERROR", status=400):
    """Data and format do not fit together."""


class EncodeError(FormatError, code="ERR12206", message="SERIALIZE_SCHEMA_EXCEPTION"):
    """A record does not fit its format or schema; nothing of the request was sent."""


class DecodeError(FormatError, code="ERR40009", message="DESERIALIZE_EXCEPTION"):
    """The bytes of a record are not what the format names."""


class SchemaNotFound(FormatError, code="ERR12208", message="FAILED_TO_GET_SCHEMA"):
    """The schema registry has no such schema; register it or name another."""


class SchemaInvalid(FormatError, code="ERR40032", message="SCHEMA_INVALID"):
    """The text of a schema is not usable, or the registry refuses it; correct the schema."""


class SchemaConflict(FormatError, code="ERR12210", message="VERSION_WITH_SCHEMA_ID"):
    """The request names its schema in two ways that exclude each other."""


class SchemaWithSchemaId(SchemaConflict, code="ERR12211", message="SCHEMA_WITH_SCHEMA_ID"):
    """Give either the schema text or its id, not both."""


class SchemaWithSchemaVersion(SchemaConflict, code="ERR12213", message="SCHEMA_WITH_SCHEMA_VERSION"):
    """Give either the schema text or its version, not both."""


class SchemaWithoutFormat(SchemaConflict, code="ERR12214", message="RAW_SCHEMA_WITHOUT_FORMAT"):
    """Schema text needs the format it is written in (keyFormat or valueFormat)."""


class RegistryUnavailable(
    HeadraceError, code="ERR40010", message="SCHEMA_REGISTRY_UNAVAILABLE", status=503, retry_after_seconds=2
):
    """The schema registry does not answer; nothing was sent, send the request again later."""


class KafkaError(HeadraceError, code="ERR40011", message="KAFKA_ERROR", status=502):
    """Kafka refused the request, or failed."""


class KafkaUnavailable(KafkaError, code="ERR40012", message="KAFKA_UNAVAILABLE", status=503, retry_after_seconds=2):
    """No broker can serve this at present; nothing was lost, send again later."""


class KafkaTimeout(KafkaError, code="ERR40013", message="KAFKA_TIMEOUT", status=504, retriable=True):
    """Kafka did not answer in time; the outcome is unknown."""


class KafkaUnauthenticated(KafkaError, code="ERR40014", message="KAFKA_UNAUTHENTICATED", status=502):
    """Kafka does not accept these credentials."""


class KafkaUnauthorized(KafkaError, code="ERR40015", message="KAFKA_UNAUTHORIZED", status=403):
    """Kafka's access rules forbid this to Headrace's principal."""


class ProducerQueueFull(KafkaError, code="ERR40016", message="PRODUCER_QUEUE_FULL", status=503, retry_after_seconds=1):
    """The produce byte budget is used up; nothing of the request was sent, send it again after a pause."""


class RecordTooLarge(KafkaError, code="ERR40017", message="RECORD_TOO_LARGE", status=413):
    """A record is larger than the topic or the client allows; send less, or raise max.message.bytes of the topic."""


class RecordRefused(KafkaError, code="ERR40045", message="RECORD_REFUSED", status=400):
    """The topic does not accept such a record: its timestamp is out of bounds, or a compacted topic requires a key."""


class FatalKafkaError(KafkaError, code="ERR40018", message="KAFKA_CLIENT_FATAL", status=503, retriable=True):
    """The client cannot continue and is replaced; the outcome of records in flight is unknown."""


class TransactionAborted(KafkaError, code="ERR40042", message="TRANSACTION_ABORTED", status=503, retry_after_seconds=1):
    """The transaction was aborted: no record of it will ever be visible; send the request again."""


class DeliveryError(HeadraceError, code="ERR40019", message="DELIVERY_ERROR", status=502):
    """A destination did not take a delivery."""

    def __init__(
        self, description: str = "", *, wait_seconds: float | None = None, broken_off: bool = False, **parameters: Any
    ) -> None:
        """Describe what happened.

        Args:
            wait_seconds: The pause that the destination requests (`Retry-After`).
            broken_off: Whether the destination began with the delivery and closed the connection.
            parameters: Facts by name.
        """
        super().__init__(description, **parameters)
        self.wait_seconds, self.broken_off = wait_seconds, broken_off
        self.is_alive = False
        """Whether the destination had answered something else right before."""


class DestinationUnavailable(DeliveryError, code="ERR40020", message="DESTINATION_UNAVAILABLE", retriable=True):
    """The destination cannot be reached or is overloaded; deliveries wait and continue by themselves."""


class DestinationRefused(DeliveryError, code="ERR40021", message="DESTINATION_REFUSED"):
    """The destination answered, but not as documented."""


class DeadLetterFailed(DeliveryError, code="ERR40022", message="DEAD_LETTER_FAILED", retriable=True):
    """A dead letter could not be written; its partition is paused and no record is passed over."""


class Fenced(DeliveryError, code="ERR40047", message="ASSIGNMENT_FENCED", status=503):
    """A delivery belongs to an assignment that is over; a later one writes to the same store."""


class FunctionError(HeadraceError, code="ERR40023", message="FUNCTION_ERROR"):
    """A function could not run."""


class FunctionInvalid(FunctionError, code="ERR40024", message="FUNCTION_INVALID"):
    """The function file or its handler is not usable."""


class WorkerLost(FunctionError, code="ERR40025", message="FUNCTION_WORKER_LOST"):
    """A worker process died; its records are delivered again."""


class PipelineError(HeadraceError, code="ERR40026", message="PIPELINE_ERROR"):
    """A pipeline could not run."""


class PipelineInvalid(PipelineError, code="ERR40027", message="PIPELINE_INVALID"):
    """The pipeline file is not usable."""


class CheckpointUnusable(PipelineInvalid, code="ERR40083", message="CHECKPOINT_UNUSABLE"):
    """The checkpoint of a flow is damaged, in use, or belongs to another query."""


class SinkUnavailable(PipelineError, code="ERR40084", message="PIPELINE_SINK_UNAVAILABLE", retriable=True):
    """The server of a sink does not take a batch now; it is written again."""


class DriverLost(PipelineError, code="ERR40028", message="PIPELINE_DRIVER_LOST", retriable=True):
    """The Spark driver process died; the run starts again from its checkpoint."""


class ReadFailed(
    HeadraceError, code="ERR12205", message="UNEXPECTED_CONSUMER_READ_EXCEPTION", status=503, retry_after_seconds=2
):
    """Kafka or the backend does not answer: the remaining dead letters stay; send the request again later."""


class LeaseLost(HeadraceError, code="ERR40049", message="LEASE_LOST", status=503, retriable=True):
    """Another process may do this work now, so this one has stopped."""


class OwnerUnavailable(HeadraceError, code="ERR40082", message="OWNER_UNAVAILABLE", status=503, retry_after_seconds=2):
    """The process that has the instance does not answer now."""


class ServerBusy(HeadraceError, code="ERR40031", message="SERVER_BUSY", status=503, retry_after_seconds=1):
    """Too many connections are open; close some, or send again after a pause."""


class Draining(HeadraceError, code="ERR40029", message="DRAINING", status=503, retry_after_seconds=1):
    """This process is stopping and accepts no new work; send the request to another one."""


class ServiceDied(HeadraceError, code="ERR40030", message="SERVICE_DIED", status=503):
    """A service of this process ended by itself."""


class InternalError(HeadraceError, code="ERR10010", message="RUNTIME_EXCEPTION", status=500):
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
