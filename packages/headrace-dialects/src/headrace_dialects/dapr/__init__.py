"""What a Dapr application needs of its sidecar for Kafka: paths to publish, and the meaning of its answers."""
