"""The kinds of triggers of a function: a file each, and a line in `KINDS` of `functions/spec.py`."""
