"""Administration of one process: what it is, its log, what it reloads, and its end."""
