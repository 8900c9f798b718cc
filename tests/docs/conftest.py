"""The broker of the pages' examples."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace_devkit.testing import Cluster


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A broker that nobody else uses: examples have fixed names, and each page begins with no topic."""
    with Cluster(tmp_path_factory.mktemp("kafka"), 1) as cluster:
        yield cluster
