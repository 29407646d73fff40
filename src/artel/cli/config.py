"""`artel config`: check run files, explain their keys, print their schema, convert other configurations."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from artel.cli.common import AsJson, OverrideWords, RunName, print_json, print_status
from artel.cli.streams import print_result
from artel.launching.quiet_libraries import quiet_libraries

if TYPE_CHECKING:
    from pydantic import BaseModel

app = typer.Typer(
    help="Check run files, explain their keys, print their schema, convert other configurations.",
    no_args_is_help=True,
)


@app.command("check", short_help="Check a run file without training.")
def check(
    name: RunName,
    overrides: OverrideWords = None,
    as_json: AsJson = False,
) -> None:
    """Check a run as `artel train` does before it starts, and report all problems together.

    The first records are read too, or all of them if the texts are on this machine and have at most 2 MB. With --json,
    print every key of the run with its value.

    Example: artel config check run.yaml
    """
    print_status(f"reading {name}")
    from artel.config import InvalidRunFile, Overrides, read_run_file
    from artel.launching.read_run import validate_run_file
    from artel.secrets import hide_secrets

    file, values = read_run_file(name), Overrides.parse(overrides)
    try:
        file.run(values)
        print_status(f"{name}: the keys are valid; now checking the model, the tokenizer and the texts")
    except InvalidRunFile:
        print_status(f"{name}: some keys are invalid; now checking the model and the texts")
    config = validate_run_file(file, values)
    quiet_libraries()
    from artel.planning import Check, check_records, check_run, find_length_notes
    from artel.text import unread_files, unread_notes

    notes = unread_notes(unread_files(config.data))
    check_run(
        config, extra_checks=[Check(("data", "tokenizer", "objective"), lambda: notes.extend(check_records(config)))]
    )
    notes += find_length_notes(config)
    for note in notes:
        print_status(note)
    if as_json:
        print_json(hide_secrets(config.model_dump(mode="json", by_alias=True)))
    print_status(f"{name}: no problems found{' (see the notes above)' if notes else ''}")


Plugins = Annotated[
    list[str] | None,
    typer.Option("--plugin", metavar="MODULE", help="Include the settings of a plugin. Repeatable."),
]


@app.command("explain", short_help="Explain the keys of the run file.")
def explain(
    key: Annotated[str, typer.Argument(help="Key or section, e.g. data.clean (default: all).")] = "",
    plugins: Plugins = None,
) -> None:
    """Print the keys of the run file with their defaults and descriptions.

    Examples: artel config explain train
              artel config explain train --plugin my_optimizers
    """
    from artel.config import RunConfig
    from artel.config.suggest import suggest_key
    from artel.errors import InputError

    _import_plugins(plugins)
    lines = [
        line for name, line in _describe_keys(RunConfig, "") if not key or name == key or name.startswith(f"{key}.")
    ]
    if not lines:
        advice = suggest_key(tuple(key.split(".")))
        raise InputError.at(key, "there is no such key", advice or "artel config explain lists all keys")
    print_result("\n".join(lines))


@app.command("schema", short_help="Print the JSON schema of a run file, for editors.")
def schema(plugins: Plugins = None) -> None:
    """Print the JSON schema of a run file. Editors use it to complete keys, show their help and mark mistakes.

    An editor with yaml-language-server applies it to run files that begin with the line
    # yaml-language-server: $schema=run.schema.json

    Example: artel config schema > run.schema.json
    """
    from artel.config.json_schema import run_file_schema

    _import_plugins(plugins)
    print_result(json.dumps(run_file_schema(), ensure_ascii=False, indent=2))


@app.command("convert", short_help="Print another tool's configuration as a run file.")
def convert(
    file: Annotated[Path, typer.Argument(help="YAML, JSON or .cfg file or shell script to convert; - for stdin.")],
    as_json: AsJson = False,
) -> None:
    """Convert another tool's configuration to a run file. Standard error lists the keys that are not converted.

    Supported are the YAML files of axolotl, LLaMA-Factory and impruver, command lines of transformers'
    run_clm.py and run_mlm.py (in a shell script, or on standard input), the .cfg of the distributed Natural Questions
    recipe and the JSON of the masked-LM script.

    Example: artel config convert axolotl.yaml > run.yaml
    """
    from artel.config import parse_run
    from artel.config.converters.tools import convert
    from artel.config.converters.yaml_text import add_comments
    from artel.config.read import read_file, read_stream

    converted = convert(read_stream(sys.stdin.buffer) if str(file) == "-" else read_file(file), str(file))
    parse_run(converted.run, {}, {(): str(file)})  # check before printing
    for line in converted.not_carried:
        print_status(f"not carried over: {line}")
    for line in converted.differs:
        print_status(f"differs: {line}")
    if converted.same:
        print_status(f"same in artel: {', '.join(converted.same)}")
    if as_json:
        print_json(asdict(converted))
    else:
        print_result(add_comments(converted.run, converted.comments), end="")


def _import_plugins(names: list[str] | None) -> None:
    from artel.plugins import import_user_module

    for name in names or ():
        import_user_module(name, "--plugin", "write package.module")


def _describe_keys(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, str]]:
    from pydantic_core import PydanticUndefined

    from artel.config.schema.registered import section_keys
    from artel.config.suggest import section_type

    schemas = section.model_json_schema()["properties"]
    for name, field in section_keys(section).items():
        key = f"{prefix}{name}"
        inner_section = section_type(field.annotation)
        if inner_section is None:
            default = "" if field.default is PydanticUndefined else f" = {_format_default(field.default)}"
            yield key, f"{key}{default}\n    {field.description}{_describe_names(schemas[name])}"
        else:
            yield key, f"{key}:\n    {field.description}"
            yield from _describe_keys(inner_section, f"{key}.0." if "list[" in str(field.annotation) else f"{key}.")


def _describe_names(schema: dict[str, Any]) -> str:
    """Return a line with the names that a key accepts. Empty if its JSON schema allows other values."""
    for alternative in (schema, *schema.get("anyOf", ())):
        if names := alternative.get("enum") or alternative.get("items", {}).get("enum"):
            quantifier = "Any of" if isinstance(schema.get("default"), list) else "One of"
            descriptions = alternative.get("enumDescriptions") or [""] * len(names)
            entries = [
                f"{name} ({description})" if description else str(name)
                for name, description in zip(names, descriptions, strict=True)
            ]
            return f"\n    {quantifier}: {', '.join(entries)}."
    return ""


def _format_default(value: object) -> str:
    if value is None or isinstance(value, bool | list | str):
        return json.dumps(value, ensure_ascii=False)
    fraction = getattr(value, "fraction", None)
    return str(value) if fraction is None else f"{fraction:g}"
