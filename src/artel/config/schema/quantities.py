"""Types of numbers as people write them: `5e-5`, `1_000`, `30k`, `2G`, `90min`, `1 epoch`.

YAML reads `5e-5` and `30k` as strings. These types convert them to numbers and reject everything else with a
message that shows an example.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, PlainSerializer
from pydantic_core import CoreSchema, core_schema

_NUMBER = r"[+-]?(?:\d[\d_]*(?:\.[\d_]*)?|\.\d[\d_]*)(?:[eE][+-]?\d+)?"
# Counts are decimal (30k = 30,000 samples or tokens), and so are bytes: 2G = 2,000,000,000, as disks are sold.
_SCALES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}
_BYTE_SCALES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_MAX_FLOAT = 1e308  # Python's integers are unbounded, floats are not
_MAX_INTERVAL = 10**9  # in seconds over 30 years; system clocks overflow after 292
_SECONDS = {"s": 1, "sec": 1, "min": 60, "h": 3600, "d": 86400}


def _split_unit(value: object, example: str) -> tuple[float, str]:
    if isinstance(value, int):
        return read_number(value), ""
    match = re.fullmatch(rf"({_NUMBER})\s*([a-zA-Z]*)", str(value).strip())
    if match is None:
        raise ValueError(f"{value!r} is not a number; write, for example, {example}")
    return _check_finite(float(match[1].replace("_", "")), value), match[2]


def _check_finite(number: float, value: object) -> float:
    """Return the number. Raise ValueError if a float cannot represent it. `value`: the input, for the message."""
    if not math.isfinite(number):
        name = "the number" if isinstance(value, int) else repr(value)  # repr would print all digits of an integer
        raise ValueError(f"{name} is too large or not a number; write, for example, 5e-5")
    return number


def read_number(value: object, example: str = "5e-5") -> float:
    """Read a real number: 5e-5, 0.1, 1_000. Raise ValueError, with `example`, if it is not one."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{value!r} is not a number; write, for example, {example}")
    if isinstance(value, int | float):
        return _check_finite(float(value) if abs(value) < _MAX_FLOAT else math.inf, value)
    number, unit = _split_unit(value, example)
    if unit.lower() not in _SCALES:
        raise ValueError(f"{value!r} is not a number; write, for example, {example}")
    return _check_finite(number * _SCALES[unit.lower()], value)


def read_count(value: object) -> int:
    """Read an integer: 512, 30k, 1_000, 2M, 1e9. Raise ValueError if it is not one."""
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d{1,40}", value.strip()):
        value = int(value)
    number = read_number(value, "512 or 30k")
    if isinstance(value, int):
        return value  # a float has 53 bits
    if not number.is_integer():
        raise ValueError(f"{value!r} is not a whole number; write, for example, 512 or 30k")
    return int(number)


def read_bytes(value: object) -> int:
    """Read a size in bytes: 100M, 2G, 512Ki, 2GB. Raise ValueError if it is not one."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{value!r} is not a size; write, for example, 100M or 2G")
    number, unit = _split_unit(value, "100M or 2G")
    unit = unit.lower().removesuffix("b")
    if unit not in _BYTE_SCALES:
        raise ValueError(f"{value!r} is not a size; write, for example, 100M or 2G")
    return int(_check_finite(number * _BYTE_SCALES[unit], value))


def read_seconds(value: object) -> float:
    """Read a time in seconds: 90, 90s, 30min, 2h. Raise ValueError if it is not one."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{value!r} is not a time; write, for example, 30min or 2h")
    number, unit = _split_unit(value, "30min or 2h")
    if number <= 0 or (unit and unit.lower() not in _SECONDS):
        raise ValueError(f"{value!r} is not a time; write, for example, 30min or 2h")
    return _check_finite(number * _SECONDS[unit.lower() or "s"], value)


def format_duration(seconds: float) -> str:
    """Format seconds as in a run file: 90s, 200s, 30min, 1.5h."""
    if seconds < 1:
        return f"{seconds:.1g}s"
    unit = "s" if seconds < 120 else "min" if seconds < 7200 else "h"
    in_unit = f"{seconds / _SECONDS[unit]:.4g}{unit}"
    in_seconds = f"{seconds:.4g}s"
    return in_seconds if len(in_seconds) < len(in_unit) else in_unit


def _check_interval(number: float, value: object) -> float:
    if number > _MAX_INTERVAL:
        raise OverLimitError(f"{value!r} is never due; write never, or at most {_MAX_INTERVAL:,} (steps, epochs, s)")
    return number


@dataclass(frozen=True, slots=True)
class Interval:
    """An interval. Exactly one field is set; for `never`, none."""

    steps: int | None = None
    epochs: float | None = None
    seconds: float | None = None

    def __str__(self) -> str:
        if self.steps is not None:
            return str(self.steps)
        if self.epochs is not None:
            return f"{self.epochs:g} epoch"
        if self.seconds is not None:
            return f"{self.seconds:g}s"
        return "never"

    @classmethod
    def read(cls, value: object) -> Interval:
        """Read 1500 (steps), `1 epoch`, `0.5 epochs`, `30min`, `2h` or `never`. Raise ValueError for other values."""
        example = "1500 (steps), 1 epoch, 30min or never"
        if isinstance(value, Interval):
            return value
        if value is None or value == "never":
            return cls()
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError(f"{value!r} is not an interval; write {example}")
        number, unit = _split_unit(value, example)
        unit = unit.lower()
        if number <= 0:
            raise ValueError(f"{value!r} is not above zero; write {example}")
        if unit in ("epoch", "epochs"):
            return cls(epochs=_check_interval(number, value))
        if unit in _SECONDS:
            return cls(seconds=_check_interval(number * _SECONDS[unit], value))
        if unit in ("step", "steps"):
            unit = ""
        if unit not in _SCALES or not (number * _SCALES[unit]).is_integer():
            raise ValueError(f"{value!r} is not an interval; write {example}")
        return cls(steps=int(_check_interval(number * _SCALES[unit], value)))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.read,
            json_schema_input_schema=core_schema.union_schema([core_schema.int_schema(), core_schema.str_schema()]),
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda interval: interval.steps if interval.steps is not None else str(interval)
            ),
        )


@dataclass(frozen=True, slots=True)
class Warmup:
    """Warmup as a number of steps, or as a fraction of the run when written below 1."""

    steps: int | None = None
    fraction: float | None = None

    @classmethod
    def read(cls, value: object) -> Warmup:
        if isinstance(value, Warmup):
            return value
        number = read_number(value)
        if number < 0:
            raise ValueError(f"{value!r} is below zero; write steps (200) or a fraction of the run (0.01)")
        if number > _MAX_INTERVAL:
            what = f"{value!r} is over {_MAX_INTERVAL:,}, longer than any run"
            raise OverLimitError(f"{what}; write steps, or a fraction of the run")
        return cls(fraction=number) if 0 < number < 1 else cls(steps=read_count(number))

    def of(self, total_steps: int) -> int:
        """Return the number of warmup steps in a run of `total_steps` steps."""
        if self.steps is not None:
            return self.steps
        return round((self.fraction or 0.0) * total_steps)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.read,
            json_schema_input_schema=core_schema.union_schema([core_schema.float_schema(), core_schema.str_schema()]),
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda warmup: warmup.steps if warmup.steps is not None else warmup.fraction
            ),
        )


class OverLimitError(ValueError):
    """A number that is too large to make sense for its key."""


def at_most(limit: float, reason: str) -> AfterValidator:
    """Return a validator that rejects numbers above `limit`. `reason` is part of its message."""

    def check(value: float) -> float:
        if value > limit:
            raise OverLimitError(f"{value:,} is over {limit:,}: {reason}; write {limit:,} or less")
        return value

    return AfterValidator(check)


@dataclass(frozen=True, slots=True)
class _NumberOrString:
    """In the JSON schema: a number, or a string of this pattern that YAML does not read as a number (30k, 5e-5)."""

    pattern: str

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [handler(schema), {"type": "string", "pattern": self.pattern}]}


_DIGITS = r"^\s*[+-]?[0-9._]+([eE][+-]?[0-9]+)?\s*"
_number = _NumberOrString(f"{_DIGITS}[kKmMgGbBtT]?$")
_bytes = _NumberOrString(f"{_DIGITS}([kKmMgGtT]i?)?[bB]?$")
_seconds = _NumberOrString(f"{_DIGITS}(s|sec|min|h|d)?$")

_WholeNumber = Annotated[int, BeforeValidator(read_count), _number]

Number = Annotated[float, BeforeValidator(read_number), _number, at_most(1e9, "no setting has such values")]
Rate = Annotated[float, BeforeValidator(read_number), _number, at_most(1000, "no model learns at such a rate")]
Count = Annotated[_WholeNumber, at_most(10**15, "no run is so long")]
Seconds = Annotated[float, BeforeValidator(read_seconds), _seconds, at_most(_MAX_INTERVAL, "more than 30 years")]
Bytes = Annotated[
    int, BeforeValidator(read_bytes), _bytes, at_most(10**18, "no disk is so large"), PlainSerializer(int)
]
Samples = Annotated[_WholeNumber, at_most(10**7, "one step would have to process them all"), Field(ge=1)]
Length = Annotated[_WholeNumber, at_most(10**8, "no model reads so many tokens at once"), Field(ge=1)]
Vocabulary = Annotated[_WholeNumber, at_most(4_000_000, "the largest vocabularies have a tenth of that")]
Seed = Annotated[_WholeNumber, at_most(2**63 - 1, "a seed has 63 bits"), Field(ge=0)]
ProcessCount = Annotated[_WholeNumber, at_most(10**6, "no cluster runs so many processes"), Field(ge=1)]
Threads = Annotated[_WholeNumber, at_most(4096, "no machine has so many cores"), Field(ge=1)]
Rank = Annotated[_WholeNumber, at_most(65_536, "no layer is so wide"), Field(ge=1)]
