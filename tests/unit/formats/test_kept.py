"""What is kept has bounds."""

from __future__ import annotations

from headrace.formats.kept import Kept


def test_entries_and_bytes_are_bounded_and_what_was_used_stays() -> None:
    """The one used longest ago goes first, a look does not count, and the newest stays however large it is."""
    kept: Kept[str] = Kept(3, 100)
    for name in "abc":
        kept.put(name, name, 10)
    assert kept.use("a") == "a"
    assert kept.peek("b") == "b"
    kept.put("d", "d", 10)
    assert [kept.peek(name) for name in "abcd"] == ["a", None, "c", "d"]
    kept.put("e", "e", 85)
    assert [kept.peek(name) for name in "acde"] == [None, None, "d", "e"]
    kept.put("f", "f", 1000)
    assert (len(kept), kept.use("f")) == (1, "f")
    kept.put("f", "g", 1)
    kept.drop("x")
    kept.put("h", "h", 99)
    assert (kept.use("f"), kept.use("h"), kept.use("x")) == ("g", "h", None)
