"""The reactive consumer: pushes records to a backend over HTTP."""
