"""Names are refused before the client sees them."""

from __future__ import annotations

import pytest

from headrace.errors import InvalidRequest
from headrace.kafka.names import check_group, check_topic


@pytest.mark.parametrize("name", ["orders", "a.b-c_D9", "x" * 249])
def test_a_topic_name_passes(name: str) -> None:
    """Letters, digits, dots, underscores and hyphens are a topic name."""
    assert check_topic(name) == name


@pytest.mark.parametrize("name", ["", ".", "..", "^orders", "a b", "a/b", "x" * 250, "ü", "a\n", "a,b"])
def test_no_topic_name(name: str) -> None:
    """Patterns, separators and everything Kafka forbids are refused."""
    with pytest.raises(InvalidRequest, match="no topic name"):
        check_topic(name)


@pytest.mark.parametrize("name", ["billing", "team a/billing:1", "g^"])
def test_a_group_name_passes(name: str) -> None:
    """Printable names are a group name."""
    assert check_group(name) == name


@pytest.mark.parametrize("name", ["", "^g", " g", "g ", "a\x00b", "a\tb", "x" * 256])
def test_no_group_name(name: str) -> None:
    """Patterns, control characters and over-long names are refused."""
    with pytest.raises(InvalidRequest):
        check_group(name)
