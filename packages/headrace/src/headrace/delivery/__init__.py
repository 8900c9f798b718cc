"""The delivery core: what is in flight, in which order, what is completed, what may be committed. No Kafka, no web."""
