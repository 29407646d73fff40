"""Types of keys whose values are names in a registry, and the settings of registry entries."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    create_model,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from artel.config.schema.base import Section, ShortSection
from artel.registry import (
    CALLBACKS,
    FORMATS,
    LAUNCHERS,
    OBJECTIVES,
    OPTIMIZERS,
    REWARDS,
    SCHEDULES,
    STRATEGIES,
    TRACKERS,
    Registry,
)


@dataclass(frozen=True, slots=True)
class _RegistryName:
    """Like `Literal[names]`, plus the names registered by plugins."""

    registry: Registry
    has_summaries: bool = False
    """True if each entry has a `summary`, and is imported without torch to ask for it."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check_name)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        names = self.registry.names
        schema_of_names: dict[str, Any] = {"type": "string"} | ({"enum": names} if names else {})
        if self.has_summaries:  # VS Code shows them beside the names
            schema_of_names["enumDescriptions"] = [getattr(self.registry[name], "summary", "") for name in names]
        return schema_of_names

    def _check_name(self, value: object) -> str:
        if isinstance(value, str) and value in self.registry:
            return value
        names = [f"'{name}'" for name in self.registry.names] or ["the entries of plugins"]
        expected = f"{', '.join(names[:-1])} or {names[-1]}" if names[1:] else names[0]
        raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": expected})


CallbackName = Annotated[str, _RegistryName(CALLBACKS)]
FormatName = Annotated[str, _RegistryName(FORMATS, has_summaries=True)]
LauncherName = Annotated[str, _RegistryName(LAUNCHERS)]
ObjectiveName = Annotated[str, _RegistryName(OBJECTIVES)]
OptimizerName = Annotated[str, _RegistryName(OPTIMIZERS, has_summaries=True)]
RewardName = Annotated[str, _RegistryName(REWARDS)]
ScheduleName = Annotated[str, _RegistryName(SCHEDULES)]
StrategyName = Annotated[str, _RegistryName(STRATEGIES)]
TrackerName = Annotated[str, _RegistryName(TRACKERS)]


Settings = TypeVar("Settings", bound=Section)


class NamingSection(Section):
    """A section with keys that name entries of registries, and with sections for the settings of these entries.

    The settings of an entry are a section with its name: `train: {optimizer: lion}` has them in `train.lion`.
    """

    model_config = ConfigDict(extra="allow")
    registries: ClassVar[dict[str, Registry]] = {}
    """The keys that take names, and the registry of each."""

    def settings(self, kind: type[Settings]) -> Settings:
        """Return the settings of this class, or its defaults if this section has none."""
        matches = (section for section in (self.model_extra or {}).values() if isinstance(section, kind))
        return next(matches, None) or kind()

    def unused_settings(self) -> Iterator[tuple[str, str]]:
        """Yield (section, key) for each section of an unused entry; `key` is the key that could name the entry."""
        used = [name for key in self.registries for name in self._read_names(key)]
        for name in (self.model_extra or {}).keys() - used:
            yield name, next(key for key, registry in self.registries.items() if registry.get_settings(name))

    @classmethod
    def entry_sections(cls) -> dict[str, FieldInfo]:
        """Return the sections of all entries by their names."""
        sections: dict[str, FieldInfo] = {}
        for key, registry in cls.registries.items():
            for name in registry.names_with_settings:
                kind: Any = registry.get_settings(name)
                summary = (kind.__doc__ or "Its settings.").strip().partition("\n")[0]
                sections[name] = Field(description=f"{key} {name}: {summary[0].lower()}{summary[1:]}")
                sections[name].annotation = kind
        return sections

    @model_validator(mode="after")
    def _read_settings(self) -> Self:
        """Read the settings in this section, and the defaults of entries that it names, by their classes."""
        extra = self.__pydantic_extra__ or {}
        kinds: dict[str, type[Section]] = {}
        for key, registry in self.registries.items():
            for name in [*self._read_names(key), *extra]:
                kind = registry.get_settings(name)
                if kind is not None and (name not in kinds or name in self._read_names(key)):
                    kinds[name] = kind
        if conflicts := kinds.keys() & type(self).model_fields.keys():
            raise ValueError(
                f"{conflicts.pop()!r} is a key of this section; register the plugin's entry under another name"
            )
        if kinds or extra:
            fields: dict[str, Any] = {name: (kind, ...) for name, kind in kinds.items()}
            values = {name: extra.get(name, {}) for name in [*kinds, *extra]}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # an entry may be called json, as a method of BaseModel is
                settings = create_model("Settings", __base__=Section, **fields)
            self.__pydantic_extra__ = dict(settings.model_validate(values))
        return self

    def _read_names(self, key: str) -> list[str]:
        """Return the names in the value of a key."""
        value = getattr(self, key)
        return [name for name in (value if isinstance(value, list) else [value]) if isinstance(name, str)]

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        json_schema = handler(schema)
        section = handler.resolve_ref_schema(json_schema)
        section["additionalProperties"] = False
        for name, field in cls.entry_sections().items():
            kind: Any = field.annotation
            inner = handler(kind.__pydantic_core_schema__)
            if issubclass(kind, ShortSection):
                inner["type"] = ["object", "string"]
            section["properties"][name] = {**inner, "description": field.description}
        return json_schema


def section_keys(section: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the keys of a section, and the sections of entries that it may name."""
    keys = {field.alias or name: field for name, field in section.model_fields.items()}
    return keys | section.entry_sections() if issubclass(section, NamingSection) else keys
