"""The same scripts on the model of Kafka and on a real cluster with the real client, and their traces compared."""
