"""Runs: records of a window are delivered again. Replays, redrives of dead letters, and the jobs that keep them."""

from headrace.feature import CliCommand, Feature

FEATURE = Feature(
    name="runs",
    parts="headrace.runs.run_parts:RunParts",
    endpoints=["headrace.runs.routes:JobEndpoints", "headrace.runs.dead_letters.routes:DeadLetterEndpoints"],
    commands={
        "dlq": CliCommand("headrace.cli.dlq:dlq", "Count, show, redrive, quarantine and drop dead letters."),
        "replay": CliCommand(
            "headrace.cli.replay_jobs:replay", "Deliver a range of a topic again; no group's offsets change."
        ),
        "jobs": CliCommand(
            "headrace.cli.replay_jobs:jobs",
            "Jobs: replays, and redrives, drops and quarantines of dead letters over HTTP.",
        ),
    },
    tags={"Dead letters": ["/adm/dead-letters"], "Jobs and replays": ["/adm/jobs", "/adm/replays"]},
    parameters={"job": "Id of the job.", "action": "`pause`, `resume` or `stop`."},
    # Jobs start after every service that delivers records.
    needs=["consumers", "commands", "reactive", "functions"],
)
