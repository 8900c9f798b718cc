"""The code of a worker process: loads the handler, calls it for every record, and sends a response per frame."""
