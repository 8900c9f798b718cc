"""The control table: what operators and teams want, kept in Kafka, and the services that work towards it."""
