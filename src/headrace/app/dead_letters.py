"""What a process does with dead letters on request: shows them, and delivers them again."""

from __future__ import annotations

import functools
import socket
from collections.abc import Mapping

from headrace.app.context import ProcessContext
from headrace.control.letter_pages import DeadLetters
from headrace.control.marks import Marks
from headrace.control.redelivery import Redelivery
from headrace.control.running_consumer import RunningConsumer
from headrace.lifecycle import Service
from headrace.web.routes.dead_letters import DeadLetterEndpoints


def dead_letters(
    context: ProcessContext, consumers: Mapping[str, RunningConsumer]
) -> tuple[Service, DeadLetterEndpoints]:
    """Return what delivers dead letters of these consumers again, and the endpoints of dead letters."""
    config, admin, clock = context.config, context.admin, context.clock
    marks_of = functools.partial(Marks, config.kafka, admin)
    produce = context.inner_producer.produce
    redelivery = Redelivery(config.kafka, admin, consumers, produce, marks_of, clock, socket.gethostname())
    letters = DeadLetters(config.kafka, admin, context.codecs, clock, config.reactive_consumers.values())
    return redelivery, DeadLetterEndpoints(letters, redelivery)
