"""What a project begins and is tested with: a Kafka on this machine, fixtures, a demo, files to start from."""
