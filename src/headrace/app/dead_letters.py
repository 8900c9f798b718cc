"""What a process does with dead letters on request: shows them, and delivers them again."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from headrace.app.context import ProcessContext
from headrace.control.dead_letter_pages import DeadLetterPages
from headrace.control.redelivery import Redelivery
from headrace.control.running_consumer import RunningConsumer
from headrace.web.routes.dead_letters import DeadLetterEndpoints


def dead_letters(context: ProcessContext, consumers: Mapping[str, RunningConsumer]) -> DeadLetterEndpoints:
    """Return the endpoints of dead letters; those of these consumers can be delivered again."""
    config, admin, clock = context.config, context.admin, context.clock
    produce = context.inner_producer.produce
    redelivery = Redelivery(admin, consumers, produce, clock, socket.gethostname())
    pages = DeadLetterPages(admin, context.codecs, clock, config.reactive_consumers.values())
    return DeadLetterEndpoints(pages, redelivery)
