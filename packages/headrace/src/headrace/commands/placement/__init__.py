"""Which process runs which consumers."""
