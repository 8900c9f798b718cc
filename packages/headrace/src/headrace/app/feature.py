"""What every process has: its listeners, the API document, and the commands that run a process."""

from headrace.feature import EVERY_OTHER, CliCommand, Feature

LISTENERS = Feature(name="listeners", parts="headrace.app.listeners:ListenerParts", needs=[EVERY_OTHER])

DOCUMENTS = Feature(
    name="documents",
    parts="headrace.app.documents:DocumentParts",
    endpoints=["headrace.app.document_routes:DocumentEndpoints"],
    commands={
        "run": CliCommand(
            "headrace.cli.run:run",
            "Run everything that the file names, in the foreground; with a PROGRAM after `--`, run that as well.",
        ),
        "config": CliCommand(
            "headrace.cli.configuration:config", "Check and show the configuration; print the schema of the file."
        ),
    },
    tags={"Documents": ["/"]},
)
