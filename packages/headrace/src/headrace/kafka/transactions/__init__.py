"""Transactions of requests, and of a group with its offsets."""
