"""The control table: the desired state that operators and teams set, kept in Kafka, and the services that apply it."""
