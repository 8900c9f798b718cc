"""Formats that are given as a number."""

from __future__ import annotations

from typing import Literal

import pytest

from headrace.errors import InvalidRequest
from headrace.sidecar.produce_request import ProduceRequest, choice_of

SEED = ["binary", "avro", "json", "jsonschema", "protobuf", "string"]
ORIGINAL = ["binary", "json", "avro", "jsonschema", "protobuf", "string"]


@pytest.mark.parametrize(("codes", "names"), [("seed", SEED), ("original", ORIGINAL)])
def test_numbers_mean_what_the_switch_says(codes: Literal["seed", "original"], names: list[str]) -> None:
    """The order of the seed document, or that of the original's code; a name means the same in both."""
    for number, name in enumerate(names):
        request = ProduceRequest(records=[], key_format=number, value_format=name.upper())
        assert choice_of(request, "key", codes).format == name
        assert choice_of(request, "value", codes).format == name.upper()
    with pytest.raises(InvalidRequest, match="format 6 is not served: as a number, 0 to 5 are"):
        choice_of(ProduceRequest(records=[], key_format=6), "key", codes)
