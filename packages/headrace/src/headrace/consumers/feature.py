"""The feature that other features keep their consumers in."""

from headrace.feature import Feature

FEATURE = Feature(name="consumers", parts="headrace.consumers.consumers_parts:ConsumersParts")
