"""Pages of the site that are made from the code: verbs, recipes, errors, Python."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[1] / "src" / "artel"


def verbs_page() -> str:
    """Each verb of the command line with its arguments and options, from the code of typer."""
    from typer.main import get_command

    from artel.cli.main import app

    lines = ["# Verbs", "", "Made by `make docs` from the code. `--help` behind any of them prints the same.", ""]
    for name, command in _commands(get_command(app), "artel"):
        text, *examples = re.split(r"Examples?:", command.help or "")
        lines += [f"## {name}", "", _cell(text), ""]
        if examples:
            commands = [line.strip() for line in "".join(examples).splitlines() if line.strip()]
            lines += ["```sh", *commands, "```", ""]
        rows = [_parameter(parameter) for parameter in command.params if not getattr(parameter, "hidden", False)]
        if rows:
            lines += ["| argument or option | default | what it is |", "|---|---|---|", *rows, ""]
    return "\n".join(lines)


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    for verb, each in command.commands.items():
        if hasattr(each, "commands"):
            yield from _commands(each, f"{name} {verb}")
        else:
            yield f"{name} {verb}", each


def _parameter(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        flag = parameter.metavar or parameter.name.upper()
        flag = flag if parameter.required else f"[{flag}]"
    else:
        flag = ", ".join(parameter.opts)
    default = parameter.default
    default = "" if parameter.required or callable(default) or default in (None, "", False, ()) else str(default)
    return f"| `{flag}` | {f'`{default}`' if default else ''} | {_cell(parameter.help or '')} |"


def recipes_page() -> str:
    """Each recipe, header and all."""
    from artel.config import recipe_names, recipe_text

    lines = ["# Recipes", "", "The run files that artel brings along. `artel recipes cp` makes one a file of your own;",
             "its name works wherever a run file does.", ""]  # fmt: skip
    for name in recipe_names():
        lines += [f"## {name}", "", "```yml", recipe_text(name).rstrip(), "```", ""]
    return "\n".join(lines)


def errors_page() -> str:
    """Each message of an error, by the folder of the code that says it."""
    lines = [
        "# Errors",
        "",
        "Made by `make docs` from the code: what artel says when something is wrong, and what it says to do. `…`",
        "stands for what is filled in. Search for the words of a message that you have.",
        "",
        "An error names its place (a key, a file and line, a flag), what is wrong, and what to write instead. All",
        "problems of a run file are said together, before work starts. The exit status is 2 where the input was wrong,",
        "1 where the work failed, 130 where it was interrupted and the same command resumes.",
        "",
    ]
    by_room: dict[str, set[tuple[str, str, str]]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        for message in _messages(ast.parse(path.read_text(encoding="utf-8"))):
            by_room.setdefault(room, set()).add(message)
    for room, messages in by_room.items():
        lines += [f"## {room}", "", "| place | what is wrong | what to do |", "|---|---|---|"]
        lines += [f"| {_cell(place)} | {_cell(what)} | {_cell(fix)} |" for place, what, fix in sorted(messages)]
        lines.append("")
    return "\n".join(lines)


def _messages(tree: ast.AST) -> Iterator[tuple[str, str, str]]:
    """(place, what is wrong, remedy) of each `InputError.at`, `WorkError.at` and `Problem` with words in it."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if name not in ("InputError.at", "WorkError.at", "Problem"):
            continue
        place, what, fix = [*(_words(argument) for argument in node.args), "", "", ""][:3]
        if re.search(r"\w{3}", what):
            yield place, what, fix


def _words(node: ast.expr) -> str:
    """A text as it stands in the code, with … for what is filled in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_words(value) if isinstance(value, ast.Constant) else "…" for value in node.values)
    return "…"


def _cell(text: str) -> str:
    """On one line, with nothing that Markdown would take for its own."""
    return re.sub(r"[<>*_\[\]]", lambda sign: f"\\{sign[0]}", " ".join(text.split())).replace("|", "\\|")


def python_page() -> str:
    """Each name of `import artel`, with what its docstring says."""
    import artel

    lines = ["# Python", "", "Made by `make docs` from the code: what `import artel` has.", "",
             "[Python](../python.md) shows how it is used.", ""]  # fmt: skip
    for name in artel.__all__:
        thing = getattr(artel, name)
        if inspect.isfunction(thing):
            lines += [f"## artel.{name}", "", *_documented(f"{name}{_signature(thing)}", thing)]
        elif inspect.isclass(thing) and thing.__module__.startswith("artel."):
            lines += [f"## artel.{name}", "", _docstring(thing), ""]
            if dataclasses.is_dataclass(thing):
                fields = (f"`{each.name}: {each.type}`" for each in dataclasses.fields(thing))
                lines += [f"Fields: {', '.join(fields)}.", ""]
            members = {} if hasattr(thing, "model_fields") else vars(thing)  # the keys have a page of their own
            for member, value in members.items():
                if member.startswith("_") or not (callable(value) or isinstance(value, property)):
                    continue
                shown = member if isinstance(value, property) else f"{member}{_signature(value)}"
                lines += [f"### {name}.{member}", "", *_documented(shown, value)]
    return "\n".join(lines)


def _documented(signature: str, thing: Any) -> list[str]:
    return ["```py", signature, "```", "", _docstring(thing), ""]


def _signature(thing: Any) -> str:
    """The arguments and the result of a function, as its code has them."""
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(thing)))).body
    assert isinstance(function, ast.FunctionDef)
    return f"({ast.unparse(function.args)}) -> {ast.unparse(function.returns) if function.returns else 'None'}"


def _docstring(thing: Any) -> str:
    """A docstring as Markdown, its arguments as a list."""
    parts = []
    for part in (inspect.getdoc(thing) or "").split("\n\n"):
        title, _, rest = part.partition("\n")
        if title == "Args:":
            arguments = re.split(r"\n(?=\w)", textwrap.dedent(rest))
            parts += [re.sub(r"^([^:]+): ", r"- `\1`: ", " ".join(argument.split())) for argument in arguments]
        elif title == "Returns:":
            parts.append(f"Returns: {' '.join(rest.split())}")
        else:
            parts.append(part)
    return "\n\n".join(parts)


REFERENCE: dict[str, Callable[[], str]] = {
    "verbs.md": verbs_page,
    "recipes.md": recipes_page,
    "errors.md": errors_page,
    "python.md": python_page,
}
