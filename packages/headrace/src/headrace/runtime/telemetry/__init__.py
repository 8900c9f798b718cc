"""Logs, metrics, audit, and the id that connects the traces of one request."""
