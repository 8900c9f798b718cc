"""The page of the planted bugs, made from `mutations.yaml` and from what found each."""

from headrace_devkit.simulation.mutations import MUTATIONS, found_bugs


def planted_bugs_page(made: str) -> str:
    """Return the table of the bugs that are planted to see whether the simulation finds them; `made` says how."""
    found = found_bugs()
    rows = [
        f"| {name} | `{bug.file}` | {bug.scenario} | {found[name].seed} | {found[name].problem} |"
        for name, bug in MUTATIONS.items()
        if name in found
    ]
    missed = ", ".join(f"`{name}`" for name in MUTATIONS if name not in found)
    text = [
        "# Planted bugs\n",
        made,
        "Each bug is planted into the code of Headrace, and a [simulation](../developers/simulation.md) must find it.",
        "`python -m headrace_devkit.simulation SCENARIO SEED --plant BUG` repeats the first find.\n",
        f"Not found when last planted, or newer: {missed}.\n",
        "| Bug | File | Scenario | Seed | Problem |",
        "|---|---|---|---|---|",
        *rows,
    ]
    return "\n".join(text) + "\n"
