"""The JSON schema of a run file. Editors use it to complete keys, show help and mark mistakes."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode
from pydantic_core import CoreSchema

from artel.config.schema.quantities import Interval, Warmup
from artel.config.schema.run import RunConfig

# pydantic keeps its own names of bounds if a validator precedes them.
_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
_OMITTED_KEYS = ("shapes_result", "title")


def run_file_schema() -> dict[str, Any]:
    """Return the schema (draft 2020-12). It allows numbers that YAML reads as strings (30k), but no unknown keys."""
    return RunConfig.model_json_schema(by_alias=True, schema_generator=_RunFileSchema)


class _RunFileSchema(GenerateJsonSchema):
    def generate(self, schema: CoreSchema, mode: JsonSchemaMode = "validation") -> dict[str, Any]:
        json_schema: dict[str, Any] = _adapt_for_editors(super().generate(schema, mode))
        return {"$schema": self.schema_dialect, "title": "artel run file", **json_schema}

    def encode_default(self, dft: Any) -> Any:
        """Return a default as it is written in a run file."""
        if isinstance(dft, Interval):
            return dft.steps if dft.steps is not None else str(dft)
        if isinstance(dft, Warmup):
            return dft.steps if dft.steps is not None else dft.fraction
        return super().encode_default(dft)


def _adapt_for_editors(node: Any) -> Any:
    """Return the schema with JSON schema's names of bounds, without keys that editors do not show."""
    if isinstance(node, list):
        return [_adapt_for_editors(inner) for inner in node]
    if not isinstance(node, dict):
        return node
    items = {name: value for name, value in node.items() if name not in _OMITTED_KEYS or isinstance(value, dict)}
    return {
        _BOUNDS.get(name, name) if isinstance(value, int | float) else name: _adapt_for_editors(value)
        for name, value in items.items()
    }
