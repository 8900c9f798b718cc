"""A folder of light-4j's configuration files, read in place of `headrace.yaml`.

`folder` finds files and values, `placeholders` replaces `${key:default}`, and `translation` writes the same tree that
`headrace.yaml` gives. `keys.csv` has every key: its default there, and the setting that it becomes or why it has none.
"""
