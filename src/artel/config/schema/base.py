"""The base class of the sections of a run file."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from artel.config.schema.quantities import read_number


class Section(BaseModel):
    """Base class of sections. It rejects unknown keys, converts nothing silently and is immutable."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, populate_by_name=True)


class ShortSection(Section):
    """Settings of a registry's entry that may be written as a string, the value of their first key."""

    @model_validator(mode="before")
    @classmethod
    def _read_string(cls, value: object) -> object:
        return {next(iter(cls.model_fields)): value} if isinstance(value, str) else value


def runtime_only(default: Any, description: str, **constraints: Any) -> Any:
    """Return the field of a key that does not change the result of a run."""
    return Field(default=default, description=description, json_schema_extra={"shapes_result": False}, **constraints)


def _list_of_string(value: object) -> object:
    return [value] if isinstance(value, str) else value


OneOrMore = BeforeValidator(_list_of_string, json_schema_input_type=str | list[str])
"""Accepts a string as a list of one."""


def _int_to_string(value: object) -> object:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


ColumnOrField = BeforeValidator(_int_to_string, json_schema_input_type=str | int)
"""Accepts a column by its number, or a field by its name."""


def parse_if_number(value: object) -> object:
    """Convert a string to a number if it is one."""
    if isinstance(value, str):
        try:
            return read_number(value)
        except ValueError:
            return value
    return value


def parse_unless_mapping(value: object) -> object:
    """Read one number. A mapping of numbers is returned unchanged; the type of its values reads them."""
    return value if isinstance(value, dict) else read_number(value)


def _bool_to_word(value: object) -> object:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


OnOrOff = BeforeValidator(_bool_to_word, json_schema_input_type=Literal["auto", "on", "off"] | bool)
"""Accepts `on` and `off`, which YAML 1.1 reads as booleans."""


def name_error(name: str) -> str | None:
    """Return why no file system can have a file with this name, or None if one can."""
    longest = max(len(part.encode("utf-8", "surrogateescape")) for part in name.split("/"))
    if longest > _MAX_NAME_BYTES:
        return f"a name of {longest:,} bytes exceeds the {_MAX_NAME_BYTES} bytes that file systems allow"
    if len(name.encode("utf-8", "surrogateescape")) > _MAX_PATH_BYTES:
        return f"a path of {len(name):,} characters exceeds the {_MAX_PATH_BYTES:,} bytes that systems allow"
    return "it contains a zero byte" if "\0" in name else None


_MAX_NAME_BYTES = 255
_MAX_PATH_BYTES = 3800  # of 4,096: artel writes files below it


def _check_name(name: str) -> str:
    fault = name_error(name)
    if fault is not None:
        raise ValueError(f"{fault}; write another name")
    return name


Name = Annotated[str, AfterValidator(_check_name)]


def _check_not_blank(name: str) -> str:
    if not name.strip():
        raise ValueError("the path is empty; write a file, a glob or a folder (. is the working folder)")
    return name


Paths = Annotated[list[Annotated[str, AfterValidator(_check_not_blank)]], OneOrMore]
