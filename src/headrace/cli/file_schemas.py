"""The JSON Schemas of the files that users write."""

from typing import Any, Final

from headrace.config.explain import document_schema, json_schema

SCHEMA_KINDS: Final = ("config", "function", "pipeline")
"""`headrace.yaml`, a function file, a pipeline file."""


def schema_of(kind: str) -> dict[str, Any]:
    """Return the JSON Schema of a kind of file."""
    if kind == "function":
        from headrace.functions.file_schema import function_schema

        return function_schema()
    if kind == "pipeline":
        from headrace.pipelines.spec import PipelineSpec

        return document_schema("pipeline.yaml", PipelineSpec.model_json_schema())
    return json_schema()
