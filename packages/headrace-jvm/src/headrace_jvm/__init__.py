"""Java and the jars that run on it: found, fetched by pinned coordinates, verified, cached per user."""

from headrace_jvm.archive import ClassArchive
from headrace_jvm.artifacts import Progress, ensure_artifacts
from headrace_jvm.java import Java, find_java

__all__ = ["ClassArchive", "Java", "Progress", "ensure_artifacts", "find_java"]
