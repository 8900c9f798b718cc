"""Explains rights that are missing in Kafka's access rules (ACLs): operation, resource, principal and fix."""

import contextlib
import shlex
from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple

from headrace.config.kafka import KafkaConfig
from headrace.config.kafka_security import FileProblem, KafkaTls, identity_of
from headrace.kafka.client import library

Kind = Literal["topic", "group", "transactional-id", "cluster"]
KIND_OF: Final[dict[int, Kind]] = {
    library.KafkaError.TOPIC_AUTHORIZATION_FAILED: "topic",
    library.KafkaError.GROUP_AUTHORIZATION_FAILED: "group",
    library.KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: "transactional-id",
    library.KafkaError.CLUSTER_AUTHORIZATION_FAILED: "cluster",
}
"""Kafka's codes for a missing right, and the kind of resource of each; a code says nothing more."""


class Right(NamedTuple):
    """An operation on a resource, by the names of `kafka-acls.sh`."""

    operation: str
    kind: Kind
    name: str = ""

    def __str__(self) -> str:
        return f"{self.operation} on {self.kind.replace('-', ' ')} {self.name}".rstrip()

    @property
    def options(self) -> str:
        """The words of `kafka-acls.sh` for it."""
        return f"--operation {self.operation} --{self.kind} {shlex.quote(self.name) if self.name else ''}".rstrip()


def is_refused(error: Any) -> bool:
    """Return whether an error says that a right is missing."""
    return isinstance(error, library.KafkaError) and error.code() in KIND_OF


def refusal_in(error: library.KafkaError) -> library.KafkaError | None:
    """Return the refusal behind an error that is fatal to the client, which names it only in the text."""
    refusals = [library.KafkaError(code) for code in KIND_OF]
    return next((refusal for refusal in refusals if refusal.str() in error.str()), None)


def missing_right(kind: Kind, kafka: KafkaConfig, needed: Sequence[Right]) -> str:
    """Return which of the `needed` rights is missing, and the command that grants it, as one sentence.

    If none is of this kind, the first one counts: a producer without any topic to write to is refused on the cluster.
    """
    rights = [right for right in needed if right.kind == kind] or list(needed)[:1]
    principal, account = principal_of(kafka)
    commands = [f"kafka-acls.sh --add --allow-principal {shlex.quote(account)} {right.options}" for right in rights]
    if not rights:
        return f"{principal} has no right to do this on a {kind.replace('-', ' ')}"
    return f"{principal} has no right {' or '.join(map(str, rights))}: allow it ({'; '.join(commands)})"


def principal_of(kafka: KafkaConfig) -> tuple[str, str]:
    """Return a client's principal for a sentence and for a command, where `PRINCIPAL` is one the brokers choose."""
    security = kafka.security.in_use
    sasl, tls = security.sasl, security.tls
    if tls and (tls.certificate or tls.keystore) and not sasl:
        return f"the principal of {_certificate(tls)}", "PRINCIPAL"
    if sasl and sasl.oauth:
        return f"the principal in the token of {sasl.oauth.client_id}", "PRINCIPAL"
    name = f"User:{sasl.username if sasl else 'ANONYMOUS'}"
    return name, name


def _certificate(tls: KafkaTls) -> str:
    """Return the certificate with its subject, if that can be read here."""
    with contextlib.suppress(FileProblem):
        if (identity := identity_of(tls)) and identity.cert:
            return f"certificate {identity.cert.certificate.subject.rfc4514_string()}"
    return "the client certificate"
