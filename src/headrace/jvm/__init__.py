"""Java and the jars that run on it: found, fetched by pinned coordinates, verified, cached per user."""

from headrace.jvm.artifacts import Progress, ensure_artifacts
from headrace.jvm.java import Java, find_java

__all__ = ["Java", "Progress", "ensure_artifacts", "find_java"]
