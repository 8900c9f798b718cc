"""What light-4j's sidecar has: a folder of its configuration files, read in place of `headrace.yaml`, and endpoints.

`folder` finds files and values, `placeholders` replaces `${key:default}`, and `translation` writes the same tree that
`headrace.yaml` gives. `keys.csv` has every key: its default there, and the setting that it becomes or why it has none.
`light_parts` makes the endpoints.
"""
