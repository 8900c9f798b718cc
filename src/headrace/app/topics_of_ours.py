"""Which topics are Headrace's own, so that no pattern ever takes them for somebody's records."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from headrace.config.consumers import ReactiveConsumerConfig
from headrace.config.model import HeadraceConfig
from headrace.config.topic_patterns import fits_any
from headrace.functions.spec import FunctionSpec, KafkaTrigger

_ORIGIN = "{topic}"


def fits_of(
    reactive: ReactiveConsumerConfig, config: HeadraceConfig, functions: Iterable[FunctionSpec]
) -> Callable[[str], bool] | None:
    """Return whether a reactive consumer's patterns take a topic; None if it has no patterns.

    Dead letter topics, retry topics and topics with notes of this process never fit.
    """
    if not reactive.topic_patterns:
        return None
    fits, ours = fits_any(reactive.topic_patterns), is_ours(config, functions)
    return lambda name: fits(name) and not ours(name)


def is_ours(config: HeadraceConfig, functions: Iterable[FunctionSpec]) -> Callable[[str], bool]:
    """Return whether a topic is a dead letter topic, a retry topic or one with notes of this process."""
    names = {config.audit.topic, config.producer.idempotency.topic, config.control.topic}
    owners: list[ReactiveConsumerConfig | KafkaTrigger] = [*config.reactive_consumers.values()]
    owners += [trigger for function in functions for trigger in function.triggers]
    templates = {owner.dead_letter.topic for owner in owners}
    prefixes = ("_headrace-", *(f"{owner.group}.retry." for owner in owners))
    return lambda name: (
        name in names or name.startswith(prefixes) or any(_made_of(template, name) for template in templates)
    )


def _made_of(template: str, name: str) -> bool:
    before, origin, after = template.partition(_ORIGIN)
    if not origin:
        return name == template
    after = after.rpartition(_ORIGIN)[2]
    return len(name) > len(before + after) and name.startswith(before) and name.endswith(after)
