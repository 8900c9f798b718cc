"""Producing over HTTP: records, streams of records, transactions, and requests that are sent again."""
