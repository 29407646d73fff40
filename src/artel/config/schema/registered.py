"""The type of a key whose values are the names of a registry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from artel.registry import CALLBACKS, FORMATS, OBJECTIVES, OPTIMIZERS, SCHEDULES, STRATEGIES, TRACKERS, Registry


@dataclass(frozen=True, slots=True)
class _NameOf:
    """Like `Literal[names]`, plus the names registered by plugins."""

    registry: Registry

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._checked)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"type": "string"} | ({"enum": self.registry.names} if self.registry.names else {})

    def _checked(self, value: object) -> str:
        if isinstance(value, str) and value in self.registry:
            return value
        names = [f"'{name}'" for name in self.registry.names] or ["what plugins register"]
        expected = f"{', '.join(names[:-1])} or {names[-1]}" if names[1:] else names[0]
        raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": expected})


CallbackName = Annotated[str, _NameOf(CALLBACKS)]
FormatName = Annotated[str, _NameOf(FORMATS)]
ObjectiveName = Annotated[str, _NameOf(OBJECTIVES)]
OptimizerName = Annotated[str, _NameOf(OPTIMIZERS)]
ScheduleName = Annotated[str, _NameOf(SCHEDULES)]
StrategyName = Annotated[str, _NameOf(STRATEGIES)]
TrackerName = Annotated[str, _NameOf(TRACKERS)]
