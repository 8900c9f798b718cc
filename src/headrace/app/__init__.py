"""Assembly: a configuration in, running services out. The only room that knows everyone."""

from headrace.app.process import App, run

__all__ = ["App", "run"]
