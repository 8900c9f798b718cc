"""Dead letters that Spring, Connect, Kafka Streams, share groups and SmallRye write."""
