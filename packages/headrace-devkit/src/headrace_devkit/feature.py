"""What a project begins with: a Kafka on this machine, a demo, and files to start from."""

from headrace.feature import CliCommand, Feature

FEATURE = Feature(
    name="devkit",
    commands={
        "init": CliCommand(
            "headrace_devkit.init_command:init", "Write a small project that runs, and print the next three commands."
        ),
        "demo": CliCommand(
            "headrace_devkit.demo:demo",
            "Show the whole story on this machine, on the 336,776 flights of 2013 from New York.",
            "demo",
        ),
        "plan": CliCommand(
            "headrace_devkit.plan.plan_command:plan_command",
            "Print what the reactive consumers of FILE need at given rates: arithmetic, nothing is contacted.",
        ),
        "dev": CliCommand(
            "headrace_devkit.dev_command:dev",
            "Run a real Kafka and schema registry on this machine, without containers.",
        ),
    },
)
