"""What a process does with dead letters when it is asked: shows them, and has them delivered again."""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable, Mapping
from typing import Protocol

from headrace.config.model import HeadraceConfig
from headrace.control.letter_pages import DeadLetters
from headrace.control.marks import Marks
from headrace.formats.codecs import Codecs
from headrace.kafka import Admin, Producer
from headrace.lifecycle import Clock, Service
from headrace.sidecar.reactive.redelivered import LetterConsumer
from headrace.sidecar.reactive.redelivery import Redelivery
from headrace.web.application import Routes
from headrace.web.routes.dead_letters import dead_letter_routes


class Surroundings(Protocol):
    """What the process has made before."""

    config: HeadraceConfig
    clock: Clock
    admin: Admin
    codecs: Codecs
    inner_producer: Producer


def dead_letters(
    process: Surroundings, consumers: Mapping[str, LetterConsumer], note: Callable[[str, str, str, str], None]
) -> tuple[Service, Routes]:
    """Return what delivers letters again, by these consumers and with a note, and the endpoints of letters."""
    config, admin, clock = process.config, process.admin, process.clock
    marks_of = functools.partial(Marks, config.kafka, admin)
    produce = process.inner_producer.produce
    redelivery = Redelivery(config.kafka, admin, consumers, produce, marks_of, clock, socket.gethostname())
    letters = DeadLetters(config.kafka, admin, process.codecs, clock, config.reactive_consumers.values())
    return redelivery, dead_letter_routes(letters, redelivery, config.http, note)
