"""The code of the Spark driver process: `python -m headrace_pipelines.driver`, a plan in, events out."""
