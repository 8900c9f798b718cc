"""Formats that are given as a number."""

from __future__ import annotations

from typing import Literal

import pytest

from headrace.errors import InvalidRequest
from headrace.sidecar.produce_request import ProduceRequest, choice_of

DOCUMENTED = ["binary", "avro", "json", "jsonschema", "protobuf", "string"]
LIGHT_4J = ["binary", "json", "avro", "jsonschema", "protobuf", "string"]


@pytest.mark.parametrize(("codes", "names"), [("documented", DOCUMENTED), ("light-4j", LIGHT_4J)])
def test_numbers_mean_what_the_switch_says(codes: Literal["documented", "light-4j"], names: list[str]) -> None:
    """The documented order, or that of the light-4j sidecar's code; a name means the same in both."""
    for number, name in enumerate(names):
        request = ProduceRequest(records=[], key_format=number, value_format=name.upper())
        assert choice_of(request, "key", codes).format == name
        assert choice_of(request, "value", codes).format == name.upper()
    with pytest.raises(InvalidRequest, match="format 6 is not served: as a number, 0 to 5 are"):
        choice_of(ProduceRequest(records=[], key_format=6), "key", codes)
