"""Numbers as people write them: `5e-5`, `1_000`, `30k`, `2G`, `90min`, `1 epoch`.

YAML reads `5e-5` and `30k` as strings; these types turn them into numbers and refuse everything else with a
message that shows what may be written.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, GetCoreSchemaHandler, PlainSerializer
from pydantic_core import CoreSchema, core_schema

_NUMBER = r"[+-]?(?:\d[\d_]*(?:\.[\d_]*)?|\.\d[\d_]*)(?:[eE][+-]?\d+)?"
# Counts are decimal (30k = 30,000 samples or tokens), and so are bytes: 2G = 2,000,000,000, as disks are sold.
_SCALES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}
_BYTE_SCALES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_LARGEST = 1e308  # Python's whole numbers have no end, floats have one
_SECONDS = {"s": 1, "sec": 1, "min": 60, "h": 3600, "d": 86400}


def _split(value: object, example: str) -> tuple[float, str]:
    if isinstance(value, int):
        return read_number(value), ""
    match = re.fullmatch(rf"({_NUMBER})\s*([a-zA-Z]*)", str(value).strip())
    if match is None:
        raise ValueError(f"{value!r} is not a number; write it like {example}")
    return _finite(float(match[1].replace("_", "")), value), match[2]


def _finite(number: float, value: object) -> float:
    """The number, read from `value`. Raises ValueError where a float cannot hold it."""
    if not math.isfinite(number):
        shown = "the number" if isinstance(value, int) else repr(value)  # of a whole one all digits would be shown
        raise ValueError(f"{shown} is too large, or no number; write it like 5e-5")
    return number


def read_number(value: object) -> float:
    """A real number: 5e-5, 0.1, 1_000."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{value!r} is not a number; write it like 5e-5")
    if isinstance(value, int | float):
        return _finite(float(value) if abs(value) < _LARGEST else math.inf, value)
    number, unit = _split(value, "5e-5")
    if unit.lower() not in _SCALES:
        raise ValueError(f"{value!r} is not a number; write it like 5e-5")
    return _finite(number * _SCALES[unit.lower()], value)


def read_count(value: object) -> int:
    """A whole number: 512, 30k, 1_000, 2M, 1e9."""
    number = read_number(value)
    if not number.is_integer():
        raise ValueError(f"{value!r} is not a whole number; write it like 512 or 30k")
    return int(number)


def read_bytes(value: object) -> int:
    """A size in bytes: 100M, 2G, 512Ki, 2GB."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{value!r} is not a size; write it like 100M or 2G")
    number, unit = _split(value, "100M or 2G")
    unit = unit.lower().removesuffix("b")
    if unit not in _BYTE_SCALES:
        raise ValueError(f"{value!r} is not a size; write it like 100M or 2G")
    return int(_finite(number * _BYTE_SCALES[unit], value))


def read_seconds(value: object) -> float:
    """A time in seconds: 90, 90s, 30min, 2h."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{value!r} is not a time; write it like 30min or 2h")
    number, unit = _split(value, "30min or 2h")
    if number <= 0 or (unit and unit.lower() not in _SECONDS):
        raise ValueError(f"{value!r} is not a time; write it like 30min or 2h")
    return _finite(number * _SECONDS[unit.lower() or "s"], value)


@dataclass(frozen=True, slots=True)
class Interval:
    """How often something happens; exactly one field is set. `never` has none set."""

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
        """1500 (steps), `1 epoch`, `0.5 epochs`, `30min`, `2h`, `never`."""
        example = "1500 (steps), 1 epoch, 30min or never"
        if isinstance(value, Interval):
            return value
        if value is None or value == "never":
            return cls()
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError(f"{value!r} is not an interval; write {example}")
        number, unit = _split(value, example)
        unit = unit.lower()
        if number <= 0:
            raise ValueError(f"{value!r} is not above zero; write {example}")
        if unit in ("epoch", "epochs"):
            return cls(epochs=number)
        if unit in _SECONDS:
            return cls(seconds=_finite(number * _SECONDS[unit], value))
        if unit in ("step", "steps"):
            unit = ""
        if unit not in _SCALES or not (number * _SCALES[unit]).is_integer():
            raise ValueError(f"{value!r} is not an interval; write {example}")
        return cls(steps=int(number * _SCALES[unit]))

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
        return cls(fraction=number) if 0 < number < 1 else cls(steps=read_count(number))

    def of(self, total: int) -> int:
        """The number of warmup steps in a run of `total` steps."""
        if self.steps is not None:
            return self.steps
        return round((self.fraction or 0.0) * total)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.read,
            json_schema_input_schema=core_schema.float_schema(),
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda warmup: warmup.steps if warmup.steps is not None else warmup.fraction
            ),
        )


Number = Annotated[float, BeforeValidator(read_number)]
Count = Annotated[int, BeforeValidator(read_count)]
Seconds = Annotated[float, BeforeValidator(read_seconds)]
Bytes = Annotated[int, BeforeValidator(read_bytes), PlainSerializer(int)]
