"""The kinds of triggers of a function: a file each, which `trigger_kinds` registers."""
