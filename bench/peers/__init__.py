"""Other products that carry Kafka to people's code, measured with Headrace in one run."""
