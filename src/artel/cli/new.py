"""`artel new`: create a run file by asking four questions."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from artel.cli.common import AsJson, print_json, print_status
from artel.elapsed import hide_elapsed
from artel.launching.quiet_libraries import quiet_libraries


def new(
    file: Annotated[Path, typer.Argument(help="Run file to write.")] = Path("run.yaml"),
    text: Annotated[
        list[str] | None, typer.Option(help="Text to learn from: a file, a folder or a quoted glob. Repeatable.")
    ] = None,
    learn: Annotated[
        str | None,
        typer.Option(
            help="What to learn: write, fill-in, answer, chat, prefer, score, rank, label, embed, tag, rewrite."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--from", help="scratch, or the folder or hub id of a pretrained model."),
    ] = None,
    time: Annotated[str | None, typer.Option(help="Time budget, e.g. 30min.")] = None,
    hardware: Annotated[
        str | None, typer.Option(help="Hardware to plan for, e.g. h100-80gb:8 (default: this machine).")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    as_json: AsJson = False,
) -> None:
    """Create a run file interactively. Options answer the questions. The file is checked before it is written.

    Examples: artel new
              artel new run.yaml --text novel.txt --learn write --from scratch --time 30min
    """
    from artel.config.yaml_lines import parse
    from artel.storage import check_new_file, write_output

    if not force:
        check_new_file(file, fix="choose another name, or use --force")
    if text:
        print_status(f"looking at {', '.join(text)}")
    quiet_libraries()
    from artel.config import parse_run
    from artel.planning import Check, check_records, check_run
    from artel.planning.new import PresetAnswers, answer_questions, format_run_file

    answers = answer_questions(PresetAnswers(text, learn, model, time, hardware), _ask if sys.stdin.isatty() else None)
    content = format_run_file(answers, str(file))
    tree, lines = parse(content, str(file))
    run = parse_run(tree, {}, lines)
    if not answers.hardware:
        run = run.model_copy(update={"run": f"runs/{file.stem}"})
        notes: list[str] = []
        records = Check(("data", "tokenizer", "objective"), lambda: notes.extend(check_records(run)))
        check_run(run, extra_checks=[records])
        for note in notes:
            print_status(note)
    write_output(file, content)
    print_status(f"wrote {file}. Next:", f"    artel plan {file}", f"    artel train {file}")
    if as_json:
        print_json({"file": str(file), "run": tree})


def _ask(question: str, default: str) -> str:
    with hide_elapsed():
        answer: str = typer.prompt(question, default=default or None, err=True)
    return answer
