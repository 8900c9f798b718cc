"""The delivery core: what is in flight, in which order, what ended, what may be committed. No Kafka, no web."""
