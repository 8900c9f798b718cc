"""`headrace demo`: real flights through HTTP, a function, Spark and back to a backend, counted at every step."""

from headrace_devkit.demo.story import demo

__all__ = ["demo"]
