"""Patterns of topic names."""

from __future__ import annotations

import pytest

from headrace.config.section import compile_pattern, fits_any


def test_a_pattern_fits_whole_names() -> None:
    """As Java's subscribe does; alternatives too."""
    fits = fits_any([r"metrics\..*", "a|b"])
    assert [name for name in ("metrics.cpu", "xmetrics.cpu", "metrics", "a", "b", "ab") if fits(name)] == [
        "metrics.cpu",
        "a",
        "b",
    ]


@pytest.mark.parametrize(
    "text", ["(", "a)|(b", "(?=a)b", r"(a)\1", "((a{100}){100}){100}", ".{251}", r"\pL", "[z-a]", "*"]
)
def test_what_is_no_pattern_is_refused_with_the_reason(text: str) -> None:
    """Look-around and back-references need an engine that tracks back; a huge pattern needs memory."""
    with pytest.raises(ValueError, match=r"is no pattern: .*Write one such as"):
        compile_pattern(text)


def test_a_pattern_made_to_take_long_does_not() -> None:
    """Row S2: the engine's work grows with the name alone; Python's own would not come to an end here."""
    assert not compile_pattern("(a*)*b|(a+)+c|(.*)*d")("a" * 30_000)
