"""Transactions: of requests, of a group with its offsets, and of numbered batches."""
