"""The group of all commands. It handles run-file keys that are written as options, and Ctrl-C."""

from __future__ import annotations

import os
from typing import Any

import typer
from typer.core import TyperGroup

from artel.errors import InputError, Interrupted
from artel.interrupts import interrupt_is_handled


class Verbs(TyperGroup):
    """The verbs of artel; an unknown option that is a key of the run file is shown how to write it."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        words = [*ctx._protected_args, *ctx.args]
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:  # typer would end with 130 without a word
            interrupt_is_handled()
            if "ARTEL_LED" in os.environ:  # the launcher of this process says how to continue
                raise typer.Exit(Interrupted.exit_code) from None
            raise Interrupted.at("", "interrupted", "; ".join(getattr(interrupt, "__notes__", []))) from None
        except Exception as error:
            if type(error).__name__ == "NoSuchOption" and _takes_keys(getattr(error, "ctx", None)):
                _refuse_key(error.option_name, words)  # type: ignore[attr-defined]
            raise


def _takes_keys(ctx: typer.Context | None) -> bool:
    """Whether a verb takes a run and keys of it."""
    named = {parameter.name: parameter.metavar for parameter in ctx.command.params} if ctx is not None else {}
    return "overrides" in named and named.get("name") == "RUN"


def _refuse_key(option: str, words: list[str]) -> None:
    """Raise InputError where an unknown option names a key of the run file; `words` is the command line."""
    from artel.config import RunConfig, meant_key
    from artel.config.suggest import all_keys, other_unit

    if not option.startswith("--"):
        return
    name = option.lstrip("-")
    dotted = meant_key(tuple(name.split(".")))
    if dotted is None or (name not in all_keys(RunConfig) and "." not in name and _is_far(name, dotted)):
        return
    place = next((at for at, word in enumerate(words) if word.split("=")[0] == option), None)
    written, value = option, "…"
    if place is not None:
        written = words[place]
        after = words[place + 1 : place + 2]
        if "=" in written:
            value = written.split("=", 1)[1]
        elif after and not after[0].startswith("-"):
            written, value = f"{written} {after[0]}", after[0]
    about = other_unit(name)
    advice = f"write {dotted}=…: {about}" if about else f"write {dotted}={value}"
    raise InputError.at(written, "is no option but a key of the run file", advice)


def _is_far(name: str, dotted: str) -> bool:
    """Whether an option without dots is only like a key: a mistaken option is then as likely."""
    from artel.config.other_names import OTHER_NAMES

    plain = name.lower().replace("-", "_")
    return plain not in OTHER_NAMES and dotted.split(".")[-1] != plain
