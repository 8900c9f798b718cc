"""The code of a worker process: loads the handler, calls it for every record, answers per frame."""
