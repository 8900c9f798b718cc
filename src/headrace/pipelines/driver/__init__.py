"""The code of the Spark driver process: `python -m headrace.pipelines.driver`, a plan in, events out."""
