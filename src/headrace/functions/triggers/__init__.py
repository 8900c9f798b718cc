"""The kinds of triggers of a function."""
