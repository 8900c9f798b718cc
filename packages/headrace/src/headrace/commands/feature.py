"""Live control of the consumers of this process: pause, seek, skip, changed settings."""

from headrace.feature import CliCommand, Feature

FEATURE = Feature(
    name="commands",
    parts="headrace.commands.command_parts:CommandParts",
    endpoints=["headrace.commands.routes:ControlEndpoints"],
    commands={
        "reactive": CliCommand(
            "headrace.cli.reactive:reactive", "Show and control reactive consumers and functions while they run."
        )
    },
    tags={"Consumer control": ["/adm/reactive-consumers", "/adm/consumers"]},
    parameters={
        "name": "Name of the consumer, function, pipeline or table.",
        "partition": "Number of the partition.",
        "id": "Id of the command.",
    },
    needs=["consumers"],
)
