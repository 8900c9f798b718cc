"""The API document of the endpoints of every feature."""

import functools
from collections.abc import Sequence

import msgspec
import yaml

from headrace.app.document_routes import DocumentEndpoints
from headrace.feature import features, imported
from headrace.http.endpoint import JSON, YAML, Endpoint, endpoints_of
from headrace.http.openapi import Json, document
from headrace.process_context import ProcessContext
from headrace.runtime.feature_parts import NeededParts, Parts


class DocumentParts(Parts):
    """The endpoints of the API document."""

    def __init__(self, context: ProcessContext, needed: NeededParts) -> None:
        self.endpoints = [DocumentEndpoints(written)]


@functools.cache
def every_endpoint() -> Sequence[Endpoint]:
    """Return every endpoint that the installed features declare."""
    return [one for family in _families() for one in endpoints_of(family)]


def whole_document() -> Json:
    """Return the document of every endpoint."""
    tags: dict[str, list[str]] = {}
    for feature in features():
        for tag, begins in feature.tags.items():
            tags.setdefault(tag, []).extend(begins)
    parameters = {name: text for feature in features() for name, text in feature.parameters.items()}
    types = [kind for family in _families() for kind in getattr(family, "described_types", ())]
    return document(every_endpoint(), tags, parameters, types)


@functools.cache
def written(media_type: str) -> bytes:
    """Return the document as JSON or as YAML."""
    if media_type != YAML:
        return msgspec.json.encode(whole_document())
    plain = msgspec.json.decode(written(JSON))  # without shared parts, which YAML would write as references
    return yaml.dump(plain, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper), sort_keys=False).encode()


@functools.cache
def _families() -> Sequence[type]:
    return [imported(where) for feature in features() for where in feature.endpoints]
