"""artel: from raw text to a trained transformer language model.

The names below are imported when they are first used, so that `import artel` is quick. `__init__.pyi` has their types.
"""

from importlib import import_module

__version__ = "0.1.0"

_MODULE_BY_NAME = {
    "prepare": "artel.api",
    "plan": "artel.api",
    "train": "artel.api",
    "open": "artel.api",
    "push": "artel.api",
    "Run": "artel.api",
    "RunPlan": "artel.api",
    "Model": "artel.api",
    "Answer": "artel.api",
    "Entity": "artel.api",
    "Filled": "artel.api",
    "Ranked": "artel.api",
    "RunConfig": "artel.config",
    "ArtelError": "artel.errors",
    "InputError": "artel.errors",
    "WorkError": "artel.errors",
    "Interrupted": "artel.errors",
}
"""The module that each name of this package comes from."""

__all__ = ["__version__", "config", *_MODULE_BY_NAME]


def __getattr__(name: str) -> object:
    if name in _MODULE_BY_NAME:
        value: object = getattr(import_module(_MODULE_BY_NAME[name]), name)
    elif name == "config":
        value = import_module("artel.config")
    else:
        raise AttributeError(f"module 'artel' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
