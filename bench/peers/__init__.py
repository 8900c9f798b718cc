"""Other products that carry Kafka to people's code, measured beside Headrace in one run."""
