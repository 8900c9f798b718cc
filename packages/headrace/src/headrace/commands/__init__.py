"""Live control: pause, seek, skip, settings, registrations, and the control table that keeps them in Kafka."""
