"""The API document keeps its contract: paths, operation ids, parameters, fields, statuses and codes.

Titles, descriptions and schema names may change. `python tests/unit/http/test_api_contract.py` writes the file anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.app.documents import whole_document

CONTRACT = Path(__file__).with_name("api_contract.json")
_TEXT = {"description", "title", "properties", "items", "anyOf", "allOf", "prefixItems", "required", "example"}


class ApiDocument:
    """The document of the API, and the fields of its schemas without their names."""

    def __init__(self) -> None:
        self.made = whole_document()
        self.errors = sorted(self.fields({"$ref": "#/components/schemas/Status"}))

    def fields(self, schema: Any, path: str = "", seen: tuple[int, ...] = ()) -> Iterator[str]:
        """Yield the path and the kind of each field of a schema."""
        schema = self._resolved(schema)
        if id(schema) in seen:
            yield f"{path} again"
            return
        seen = *seen, id(schema)
        kind = {name: value for name, value in sorted(schema.items()) if name not in _TEXT}
        if isinstance(deeper := kind.get("additionalProperties"), dict):
            del kind["additionalProperties"]
            yield from self.fields(deeper, f"{path}.*", seen)
        yield f"{path} {json.dumps(kind)}"
        for name, part in schema.get("properties", {}).items():
            needed = "!" if name in schema.get("required", ()) else ""
            yield from self.fields(part, f"{path}.{name}{needed}", seen)
        for name in ("items", "prefixItems", "anyOf", "allOf"):
            parts = schema.get(name, ())
            for part in [parts] if isinstance(parts, dict) else parts or ():
                yield from self.fields(part, path + {"items": "[]", "prefixItems": "[]"}.get(name, "|"), seen)

    def body(self, content: Any) -> Any:
        """Return the fields of a body by media type."""
        found = {}
        for media, kind in content.items():
            schema = kind["schema"]
            if len(parts := schema.get("allOf", ())) == 2:  # an error: the fields of all errors, and its own
                assert sorted(self.fields(parts[0])) == self.errors
                schema = parts[1]
            found[media] = sorted(self.fields(schema))
        return found

    def _resolved(self, schema: Any) -> Any:
        while ref := schema.get("$ref"):
            schema = self.made
            for part in ref.removeprefix("#/").split("/"):
                schema = schema[part]
        return schema


def contract() -> Any:
    """Return what clients rely on, without texts and without the names of schemas."""
    document = ApiDocument()
    operations = {}
    for path, methods in document.made["paths"].items():
        for method, operation in methods.items():
            request = operation.get("requestBody", {})
            operations[f"{method.upper()} {path}"] = {
                "id": operation["operationId"],
                "parameters": sorted(
                    f"{one['in']} {one['name']}{'!' if one['required'] else ''} {kind}"
                    for one in [{"required": False, **given} for given in operation["parameters"]]
                    for kind in document.fields(one["schema"])
                ),
                "request": {"required": request.get("required"), **document.body(request.get("content", {}))},
                "responses": {
                    status: {"headers": sorted(response["headers"]), **document.body(response["content"])}
                    for status, response in operation["responses"].items()
                },
                "security": operation["security"],
            }
    schemes = {
        name: [one["type"], one["flows"]] for name, one in document.made["components"]["securitySchemes"].items()
    }
    return {"errors": document.errors, "operations": operations, "security": json.dumps(schemes)}


def test_the_contract_of_the_api_is_kept() -> None:
    """A client made from an earlier document still works."""
    kept, now = json.loads(CONTRACT.read_text()), json.loads(json.dumps(contract()))
    assert (now["errors"], now["security"]) == (kept["errors"], kept["security"])
    assert now["operations"].keys() == kept["operations"].keys()
    for name, operation in kept["operations"].items():
        assert now["operations"][name] == operation, name


if __name__ == "__main__":
    CONTRACT.write_text(json.dumps(contract(), indent=1, sort_keys=True) + "\n")
