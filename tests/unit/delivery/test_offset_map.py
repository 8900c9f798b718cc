"""The offset map: what was written is what is read, it always fits, and nothing else is believed."""

from __future__ import annotations

import base64
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.delivery.offset_map import SPAN_OFFSETS, OffsetMap, Tries, decode, encode

LIMIT_CHARACTERS = 4096
TRIES = st.none() | st.builds(Tries, st.integers(1, 1_000_000), st.floats(0, 3e10))


@settings(max_examples=300, deadline=None)
@given(
    base=st.integers(0, 2**62),
    span=st.integers(1, SPAN_OFFSETS),
    share=st.floats(0, 1),
    seed=st.integers(0, 2**32),
    tries=TRIES,
)
@example(base=2**62, span=SPAN_OFFSETS, share=0.5, seed=1, tries=Tries(1_000_000, 1e9))
@example(base=0, span=1, share=0, seed=1, tries=None)
def test_every_map_comes_back_and_fits(base: int, span: int, share: float, seed: int, tries: Tries | None) -> None:
    """In any pattern the text has at most 4,096 characters, and is read as it was written."""
    chance = random.Random(seed)
    open_offsets = [base + n for n in range(span - 1) if chance.random() < share]
    text = encode(base, base + span, open_offsets, tries)
    assert len(text) <= LIMIT_CHARACTERS
    assert decode(text, base) == OffsetMap(base, base + span, frozenset(open_offsets), tries)


def test_a_map_of_an_earlier_release_is_read() -> None:
    """Its text is still written where no record has failed, so that an earlier release reads it too."""
    text = "SFIBAQAAAAAAAAAHAAAADRQAoK5Nng=="
    assert (encode(7, 20, [7, 9]), decode(text, 7)) == (text, OffsetMap(7, 20, frozenset({7, 9})))
    alone = encode(7, 7, [], Tries(3, 12.5))
    assert decode(alone, 7) == OffsetMap(7, 7, frozenset(), Tries(3, 12.5))
    assert decode(alone, 8) is None


def test_one_stuck_record_costs_a_few_bytes_at_any_span() -> None:
    """The smallest of the three codecs is taken."""
    assert len(encode(10, 10 + SPAN_OFFSETS, [10])) < 40
    assert len(encode(10, 10 + SPAN_OFFSETS, range(10, 10 + SPAN_OFFSETS - 1))) < 100


def test_a_span_that_may_not_fit_is_a_defect() -> None:
    """Nothing is delivered so far ahead, and an empty map is invalid."""
    with pytest.raises(ValueError, match="spans"):
        encode(0, SPAN_OFFSETS + 1, [0])
    with pytest.raises(ValueError, match="spans"):
        encode(5, 5, [])


@pytest.mark.parametrize("text", ["", "somebody else's note", "SFIB", "é", base64.b64encode(b"HR\x01" * 9).decode()])
def test_other_metadata_is_not_a_map(text: str) -> None:
    """Other tools may leave any metadata, and a reset by an administrator may keep that of another offset."""
    assert decode(text, 7) is None
    assert decode(encode(7, 20, [7, 9]), 8) is None


@pytest.mark.parametrize("tries", [(2**32 - 1, 1e9), (3, float("nan")), (3, float("inf")), (3, -1e9), (3, 1e13)])
def test_attempts_of_which_no_dead_letter_could_be_made_are_not_taken(tries: tuple[int, float]) -> None:
    """Whoever may commit for the group could stop a partition with them."""
    assert decode(encode(7, 7, [], Tries(*tries)), 7) is None


@given(place=st.integers(0, 10_000), flip=st.integers(1, 255), codec=st.sampled_from([1, 7, 3000]), tries=TRIES)
def test_a_damaged_map_is_ignored(place: int, flip: int, codec: int, tries: Tries | None) -> None:
    """A changed byte anywhere is found by the checksum."""
    chance = random.Random(codec)
    data = bytearray(base64.b64decode(encode(7, 5000, [7, *sorted(chance.sample(range(8, 4999), codec))], tries)))
    data[place % len(data)] ^= flip
    assert decode(base64.b64encode(data).decode(), 7) is None
