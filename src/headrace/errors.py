"""Every error Headrace raises on purpose, and the one catalogue of codes.

    HeadraceError
    |-- ConfigError                    an operator fixes a file; exit code 78
    |-- EnvironmentProblem             the machine lacks something (Java, disk, port, artifact); exit code 1
    |   |-- PortTaken
    |-- RequestError                   the caller changes the request; 4xx
    |   |-- InvalidRequest             |-- ContentTypeMismatch  |-- SchemaViolation
    |   |-- OriginRefused              |-- HeadersTooLarge      |-- AmbiguousRequest
    |   |-- PayloadTooLarge            |-- TooManyRequests      |-- MethodNotAllowed
    |   |-- EncodingRefused            |-- TooManyRecords
    |   |-- IdempotencyKeyReused       |-- IdempotencyKeyBusy
    |   |-- NotFound
    |   |   |-- PathNotFound           |-- TopicNotFound        |-- PartitionNotFound
    |-- Unauthenticated                the caller is not known; it gets a token or a certificate; 401
    |   |-- AuthTokenMissing           |-- AuthTokenInvalid     |-- AuthTokenExpired
    |   |-- ScopeTokenInvalid          |-- ScopeTokenExpired
    |-- Forbidden                      the caller is known, and may not; 403
    |   |-- AuthTokenScopeMismatch     |-- ScopeTokenScopeMismatch
    |-- KeysUnavailable                the keys of the token server were never read; send again
    |-- FormatError                    the producer of the data fixes data or schema
    |   |-- EncodeError                |-- DecodeError          |-- SchemaNotFound
    |   |-- SchemaConflict             |-- SchemaInvalid
    |-- RegistryUnavailable            the schema registry does not answer; send again
    |-- KafkaError                     mapped from the client; keeps Kafka's own name and number
    |   |-- KafkaUnavailable           |-- KafkaTimeout         |-- KafkaUnauthenticated
    |   |-- KafkaUnauthorized          |-- ProducerQueueFull    |-- RecordTooLarge
    |   |-- FatalKafkaError            |-- TransactionAborted
    |-- DeliveryError                  the destination failed; becomes an Outcome
    |   |-- DestinationUnavailable     |-- DestinationRefused   |-- DeadLetterFailed
    |-- FunctionError
    |   |-- FunctionInvalid            |-- WorkerLost
    |-- PipelineError
    |   |-- PipelineInvalid            |-- DriverLost
    |-- ServerBusy                     the connection limit is reached; send again later
    |-- Draining                       this process is going down; send to another one
    |-- ServiceDied                    a service ended by itself; names it

A leaf exists only where somebody acts differently. A message says what failed, where, the probable cause and
the next step; it never carries a secret or a record's value.
"""

from __future__ import annotations

from typing import Any, ClassVar


class HeadraceError(Exception):
    """Headrace could not do what was asked."""

    code: ClassVar[str] = "ERR40000"
    """Stable code of the catalogue: the original's ERR1xxxx where it has one for the case, else ERR40001 and up."""
    message: ClassVar[str] = "HEADRACE_ERROR"
    """Upper-case name of the case, stable like the code."""
    status: ClassVar[int] = 500
    """HTTP status."""
    retriable: ClassVar[bool] = False
    """Whether the same request may succeed when it is sent again unchanged."""
    retry_after_seconds: ClassVar[int | None] = None
    """Value of the `Retry-After` header, where one helps."""

    def __init__(self, description: str = "", **parameters: Any) -> None:
        """Say what happened.

        Args:
            description: One paragraph for people; the class docstring when empty.
            parameters: Typed facts (`topic`, `partition`, `index`, ...) that programs may read.
        """
        self.description = description or (type(self).__doc__ or "").strip()
        self.parameters = parameters
        super().__init__(self.description)

    @property
    def slug(self) -> str:
        """Lower-case name of the case, as in `metadata.reason`."""
        return self.message.lower()

    def body(self) -> dict[str, Any]:
        """Return the one HTTP error body (decisions.md 1)."""
        metadata = {"reason": self.slug, "retriable": self.retriable, **self.parameters}
        return {
            "statusCode": self.status,
            "code": self.code,
            "message": self.message,
            "description": self.description,
            "severity": "ERROR",
            "metadata": metadata,
        }


class ConfigError(HeadraceError):
    """The configuration is not usable."""

    code, message = "ERR40001", "CONFIG_INVALID"


class EnvironmentProblem(HeadraceError):
    """This machine lacks something Headrace needs."""

    code, message = "ERR40002", "ENVIRONMENT_PROBLEM"


class PortTaken(EnvironmentProblem):
    """Another program listens on the port; where the port is not asked for, another one is tried."""

    code, message = "ERR40033", "PORT_TAKEN"


class RequestError(HeadraceError):
    """The request cannot be served as it is."""

    code, message, status = "ERR40003", "REQUEST_ERROR", 400


class InvalidRequest(RequestError):
    """The request body or a parameter does not fit."""

    code, message = "ERR11004", "VALIDATOR_SCHEMA"


class ContentTypeMismatch(RequestError):
    """The body is not what its Content-Type says; send JSON with Content-Type application/json."""

    code, message = "ERR10015", "CONTENT_TYPE_MISMATCH"


class RequestBodyMissing(RequestError):
    """This endpoint needs a request body."""

    code, message = "ERR11014", "VALIDATOR_REQUEST_BODY_MISSING"


class PayloadTooLarge(RequestError):
    """The request is larger than this server accepts."""

    code, message, status = "ERR10068", "PAYLOAD_TOO_LARGE", 413


class EncodingRefused(RequestError):
    """The body is compressed in a way that is not taken here; send it as it is, without Content-Encoding."""

    code, message, status = "ERR40040", "CONTENT_ENCODING_REFUSED", 415


class TooManyRecords(RequestError):
    """The request has more records than this server accepts at once; send them in several requests."""

    code, message, status = "ERR40041", "TOO_MANY_RECORDS", 413


class TooManyRequests(RequestError):
    """A limit is reached; wait and send again."""

    code, message, status, retriable, retry_after_seconds = "ERR40004", "TOO_MANY_REQUESTS", 429, True, 1


class MethodNotAllowed(RequestError):
    """The path exists, the method does not."""

    code, message, status = "ERR10008", "METHOD_NOT_ALLOWED", 405


class ProducerNotEnabled(RequestError):
    """Producing is switched off on this server (producer.enabled: false)."""

    code, message = "ERR12216", "PRODUCER_NOT_ENABLED"


class NotFound(RequestError):
    """There is no such thing here."""

    code, message, status = "ERR40005", "NOT_FOUND", 404


class PathNotFound(NotFound):
    """No endpoint has this path."""

    code, message = "ERR10007", "INVALID_REQUEST_PATH"


class TopicNotFound(NotFound):
    """The topic does not exist on the cluster; create it or check its spelling."""

    code, message = "ERR40006", "KAFKA_TOPIC_NOT_FOUND"


class PartitionNotFound(NotFound):
    """The topic has no partition of this number."""

    code, message = "ERR40007", "KAFKA_PARTITION_NOT_FOUND"


class OriginRefused(RequestError):
    """The Host or Origin header names another site; call by a name this server listens on, or add it to its list."""

    code, message, status = "ERR40034", "ORIGIN_REFUSED", 403


class HeadersTooLarge(RequestError):
    """The request has more or longer headers, or a longer path, than this server accepts."""

    code, message, status = "ERR40035", "HEADERS_TOO_LARGE", 431


class AmbiguousRequest(RequestError):
    """Two readers could understand the head of this request differently; the connection ends."""

    code, message = "ERR40039", "AMBIGUOUS_REQUEST"


class IdempotencyKeyReused(RequestError):
    """This Idempotency-Key came with another request before; take a new key for a new request."""

    code, message, status = "ERR40043", "IDEMPOTENCY_KEY_REUSED", 409


class IdempotencyKeyBusy(RequestError):
    """The first request with this Idempotency-Key is not answered yet; send it again after a pause."""

    code, message, status, retriable, retry_after_seconds = "ERR40044", "IDEMPOTENCY_KEY_BUSY", 409, True, 1


class Unauthenticated(HeadraceError):
    """This server wants to know who calls."""

    code, message, status = "ERR40036", "UNAUTHENTICATED", 401


class AuthTokenMissing(Unauthenticated):
    """This server takes requests with credentials only: send Authorization: Bearer and a token."""

    code, message = "ERR10002", "MISSING_AUTH_TOKEN"


class AuthTokenInvalid(Unauthenticated):
    """The token in the Authorization header is not taken here; get another one."""

    code, message = "ERR10000", "INVALID_AUTH_TOKEN"


class AuthTokenExpired(Unauthenticated):
    """The token in the Authorization header has expired; get another one."""

    code, message = "ERR10001", "AUTH_TOKEN_EXPIRED"


class ScopeTokenInvalid(Unauthenticated):
    """The token in the X-Scope-Token header is not taken here; get another one."""

    code, message = "ERR10003", "INVALID_SCOPE_TOKEN"


class ScopeTokenExpired(Unauthenticated):
    """The token in the X-Scope-Token header has expired; get another one."""

    code, message = "ERR10004", "SCOPE_TOKEN_EXPIRED"


class Forbidden(HeadraceError):
    """The caller may not do this; parameters hold the missing `scope` and nothing else."""

    code, message, status = "ERR40037", "FORBIDDEN", 403


class AuthTokenScopeMismatch(Forbidden):
    """The token in the Authorization header, or the client's certificate, does not carry the scope this needs."""

    code, message = "ERR10005", "AUTH_TOKEN_SCOPE_MISMATCH"


class ScopeTokenScopeMismatch(Forbidden):
    """The token in the X-Scope-Token header does not carry the scope this needs."""

    code, message = "ERR10006", "SCOPE_TOKEN_SCOPE_MISMATCH"


class KeysUnavailable(HeadraceError):
    """The public keys that tokens are checked with could not be read yet; send the request again later."""

    code, message, status, retriable, retry_after_seconds = "ERR40038", "TOKEN_KEYS_UNAVAILABLE", 503, True, 5


class FormatError(HeadraceError):
    """Data and format do not fit together."""

    code, message, status = "ERR40008", "FORMAT_ERROR", 400


class EncodeError(FormatError):
    """A record does not fit its format or schema; nothing of the request was sent."""

    code, message = "ERR12206", "SERIALIZE_SCHEMA_EXCEPTION"


class DecodeError(FormatError):
    """The bytes of a record are not what the format names."""

    code, message = "ERR40009", "DESERIALIZE_EXCEPTION"


class SchemaNotFound(FormatError):
    """The schema registry has no such schema; register it or name another."""

    code, message = "ERR12208", "FAILED_TO_GET_SCHEMA"


class SchemaInvalid(FormatError):
    """The text of a schema is not usable, or the registry refuses it; correct the schema."""

    code, message = "ERR40032", "SCHEMA_INVALID"


class SchemaConflict(FormatError):
    """The request names its schema in two ways that exclude each other."""

    code, message = "ERR12210", "VERSION_WITH_SCHEMA_ID"


class SchemaWithSchemaId(SchemaConflict):
    """Give either the schema text or its id, not both."""

    code, message = "ERR12211", "SCHEMA_WITH_SCHEMA_ID"


class SchemaWithSchemaVersion(SchemaConflict):
    """Give either the schema text or its version, not both."""

    code, message = "ERR12213", "SCHEMA_WITH_SCHEMA_VERSION"


class SchemaWithoutFormat(SchemaConflict):
    """Schema text needs the format it is written in (keyFormat or valueFormat)."""

    code, message = "ERR12214", "RAW_SCHEMA_WITHOUT_FORMAT"


class RegistryUnavailable(HeadraceError):
    """The schema registry does not answer; nothing was sent, send the request again later."""

    code, message, status, retriable, retry_after_seconds = "ERR40010", "SCHEMA_REGISTRY_UNAVAILABLE", 503, True, 2


class KafkaError(HeadraceError):
    """Kafka refused or failed; parameters hold its own `kafka_code` and `kafka_name`."""

    code, message, status = "ERR40011", "KAFKA_ERROR", 502


class KafkaUnavailable(KafkaError):
    """No broker answers; nothing was lost, send again later."""

    code, message, status, retriable, retry_after_seconds = "ERR40012", "KAFKA_UNAVAILABLE", 503, True, 2


class KafkaTimeout(KafkaError):
    """Kafka did not answer in time; the outcome is unknown."""

    code, message, status, retriable = "ERR40013", "KAFKA_TIMEOUT", 504, True


class KafkaUnauthenticated(KafkaError):
    """Kafka does not accept these credentials."""

    code, message, status = "ERR40014", "KAFKA_UNAUTHENTICATED", 502


class KafkaUnauthorized(KafkaError):
    """Kafka's access rules forbid this to Headrace's principal."""

    code, message, status = "ERR40015", "KAFKA_UNAUTHORIZED", 403


class ProducerQueueFull(KafkaError):
    """The produce byte budget is used up; nothing of the request was sent, send it again after a pause."""

    code, message, status, retriable, retry_after_seconds = "ERR40016", "PRODUCER_QUEUE_FULL", 503, True, 1


class RecordTooLarge(KafkaError):
    """A record is larger than the topic or the client allows."""

    code, message, status = "ERR40017", "RECORD_TOO_LARGE", 413


class FatalKafkaError(KafkaError):
    """The client cannot go on and is replaced; the outcome of what was in flight is unknown."""

    code, message, status, retriable = "ERR40018", "KAFKA_CLIENT_FATAL", 503, True


class TransactionAborted(KafkaError):
    """The transaction was aborted: no record of it will ever be visible; send the request again."""

    code, message, status, retriable, retry_after_seconds = "ERR40042", "TRANSACTION_ABORTED", 503, True, 1


class DeliveryError(HeadraceError):
    """A destination did not take a delivery."""

    code, message, status = "ERR40019", "DELIVERY_ERROR", 502


class DestinationUnavailable(DeliveryError):
    """The destination cannot be reached or is overloaded; deliveries wait and go on by themselves."""

    code, message, retriable = "ERR40020", "DESTINATION_UNAVAILABLE", True


class DestinationRefused(DeliveryError):
    """The destination answered, and not as agreed."""

    code, message = "ERR40021", "DESTINATION_REFUSED"


class DeadLetterFailed(DeliveryError):
    """A dead letter could not be written; its partition is paused and nothing is passed over."""

    code, message, retriable = "ERR40022", "DEAD_LETTER_FAILED", True


class FunctionError(HeadraceError):
    """A function could not run."""

    code, message = "ERR40023", "FUNCTION_ERROR"


class FunctionInvalid(FunctionError):
    """The function file or its handler is not usable."""

    code, message = "ERR40024", "FUNCTION_INVALID"


class WorkerLost(FunctionError):
    """A worker process died; its records are delivered again."""

    code, message, retriable = "ERR40025", "FUNCTION_WORKER_LOST", True


class PipelineError(HeadraceError):
    """A pipeline could not run."""

    code, message = "ERR40026", "PIPELINE_ERROR"


class PipelineInvalid(PipelineError):
    """The pipeline file is not usable."""

    code, message = "ERR40027", "PIPELINE_INVALID"


class DriverLost(PipelineError):
    """The Spark driver process died; the run starts again from its checkpoint."""

    code, message, retriable = "ERR40028", "PIPELINE_DRIVER_LOST", True


class ServerBusy(HeadraceError):
    """Too many connections are open; close some, or send again after a pause."""

    code, message, status, retriable, retry_after_seconds = "ERR40031", "SERVER_BUSY", 503, True, 1


class Draining(HeadraceError):
    """This process is going down and takes no new work; send the request to another one."""

    code, message, status, retriable, retry_after_seconds = "ERR40029", "DRAINING", 503, True, 1


class ServiceDied(HeadraceError):
    """A service of this process ended by itself."""

    code, message, status = "ERR40030", "SERVICE_DIED", 503


class InternalError(HeadraceError):
    """A defect of Headrace; please report it with the correlation id of this answer."""

    code, message, status = "ERR10010", "RUNTIME_EXCEPTION", 500


def catalogue() -> list[type[HeadraceError]]:
    """Return every error class, each once, sorted by code: the source of the codes page."""
    found: list[type[HeadraceError]] = []
    queue: list[type[HeadraceError]] = [HeadraceError]
    while queue:
        error = queue.pop()
        found.append(error)
        queue.extend(error.__subclasses__())
    return sorted(found, key=lambda error: error.code)
