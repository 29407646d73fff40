"""The base class of the sections of a run file."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from artel.config.schema.quantities import read_number


class Section(BaseModel):
    """A section refuses unknown keys, converts nothing silently and cannot be changed once read."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, populate_by_name=True)


def free(default: Any, description: str, **more: Any) -> Any:
    """A key that does not change the result of a run."""
    return Field(default=default, description=description, json_schema_extra={"shapes_result": False}, **more)


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


OneOrMore = BeforeValidator(_as_list, json_schema_input_type=str | list[str])
"""A text alone stands for a list of one."""


def _as_text(value: object) -> object:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


ColumnOrField = BeforeValidator(_as_text, json_schema_input_type=str | int)
"""A column by its number, or a field by its name."""


def number_if_it_is_one(value: object) -> object:
    if isinstance(value, str):
        try:
            return read_number(value)
        except ValueError:
            return value
    return value


def number_or_numbers(value: object) -> object:
    """One number, or numbers by name; the names' values are read by their own type."""
    return value if isinstance(value, dict) else read_number(value)


def _on_or_off(value: object) -> object:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


OnOrOff = BeforeValidator(_on_or_off, json_schema_input_type=Literal["auto", "on", "off"] | bool)
"""`on` and `off` as words; YAML 1.1 reads them as booleans."""


def name_fault(name: str) -> str | None:
    """Why no file system can have a file with this name; None where one can."""
    longest = max(len(part.encode("utf-8", "surrogateescape")) for part in name.split("/"))
    if longest > _LONGEST_NAME:
        return f"a name of {longest:,} bytes is longer than the {_LONGEST_NAME} that file systems take"
    if len(name.encode("utf-8", "surrogateescape")) > _LONGEST_PATH:
        return f"a path of {len(name):,} characters is longer than the {_LONGEST_PATH:,} bytes that systems take"
    return "an empty byte stands in it" if "\0" in name else None


_LONGEST_NAME = 255
_LONGEST_PATH = 3800  # of 4,096: artel writes files below it


def _can_be_named(name: str) -> str:
    fault = name_fault(name)
    if fault is not None:
        raise ValueError(f"{fault}; write a shorter one")
    return name


Name = Annotated[str, AfterValidator(_can_be_named)]


def _is_no_blank(name: str) -> str:
    if not name.strip():
        raise ValueError("an empty path names nothing; write a file, a glob or a folder (. is the working folder)")
    return name


Paths = Annotated[list[Annotated[str, AfterValidator(_is_no_blank)]], OneOrMore]
