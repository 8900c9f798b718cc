"""Runs: the records of a window are delivered again. Replays, redrives, and the jobs that keep them."""
