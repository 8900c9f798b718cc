"""Makes the services of a process from its configuration, and runs them."""
