"""The web console: a client of the HTTP API, in a process of its own."""

from headrace.feature import CliCommand, Feature

FEATURE = Feature(
    name="console",
    section="headrace_console.console_sections:ConsoleSections",
    parts="headrace_console.console_process:ConsoleParts",
    commands={
        "console": CliCommand(
            "headrace_console.console_command:console",
            "Serve the web console: what runs, what needs a person, and the buttons that help.",
        )
    },
    needs=["listeners"],
)
