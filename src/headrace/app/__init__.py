"""Makes the services of a process from its configuration, and runs them."""

from headrace.app.process import App, run
