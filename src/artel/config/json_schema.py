"""The JSON schema of a run file, by which editors complete keys, show their help and mark what is wrong."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode
from pydantic_core import CoreSchema

from artel.config.schema.quantities import Interval, Warmup
from artel.config.schema.run import RunConfig

# pydantic leaves its own words where a function stands between a number and its bounds.
_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
_NOT_FOR_EDITORS = ("shapes_result", "title")


def run_file_schema() -> dict[str, Any]:
    """The schema (draft 2020-12). It allows what YAML leaves as text, as 30k and 5e-5, and refuses unknown keys."""
    return RunConfig.model_json_schema(by_alias=True, schema_generator=_RunFileSchema)


class _RunFileSchema(GenerateJsonSchema):
    def generate(self, schema: CoreSchema, mode: JsonSchemaMode = "validation") -> dict[str, Any]:
        made: dict[str, Any] = _for_editors(super().generate(schema, mode))
        return {"$schema": self.schema_dialect, "title": "artel run file", **made}

    def encode_default(self, dft: Any) -> Any:
        """A default as it is written in a run file."""
        if isinstance(dft, Interval):
            return dft.steps if dft.steps is not None else str(dft)
        if isinstance(dft, Warmup):
            return dft.steps if dft.steps is not None else dft.fraction
        return super().encode_default(dft)


def _for_editors(node: Any) -> Any:
    """The schema with the bounds of numbers in JSON schema's words, and without what no editor shows."""
    if isinstance(node, list):
        return [_for_editors(inner) for inner in node]
    if not isinstance(node, dict):
        return node
    kept = {name: value for name, value in node.items() if name not in _NOT_FOR_EDITORS or isinstance(value, dict)}
    return {
        _BOUNDS.get(name, name) if isinstance(value, int | float) else name: _for_editors(value)
        for name, value in kept.items()
    }
