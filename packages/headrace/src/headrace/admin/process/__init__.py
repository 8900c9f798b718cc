"""Administration of one process: what it is, its log, what it reloads, its end, and assaults."""
