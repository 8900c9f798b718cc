"""The sinks of a pipeline: one file for each, which `sink_kinds` registers."""
