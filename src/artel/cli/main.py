"""The command line `artel`: its commands, and how errors become messages and exit statuses.

0 done, 1 the work failed, 2 the input was wrong, 130 interrupted (the same command resumes). Commands import what they
need when they run, so that `artel --help` does not wait for torch.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from artel.cli import (
    chat,
    clean,
    config,
    data,
    doctor,
    evaluate,
    export,
    generate,
    launch,
    new,
    plan,
    push,
    recipes,
    report,
    serve,
    train,
)
from artel.cli.streams import be_utf8, last_message, leave_out, open_streams, print_record, show, write_lines
from artel.elapsed import paused, show_elapsed
from artel.errors import ArtelError, InputError, Interrupted, OutOfMemory, WorkError
from artel.interrupts import answer_at_once, interrupt_is_handled
from artel.messages import printed_by
from artel.printable import in_a_line


class Commands(TyperGroup):
    """The commands of artel. Handles Ctrl-C, and explains options that are keys of the run file."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        words = [*ctx._protected_args, *ctx.args]
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:  # typer would exit with 130 silently
            interrupt_is_handled()
            if "ARTEL_LED" in os.environ:  # the launcher prints how to continue
                raise typer.Exit(Interrupted.exit_code) from None
            raise Interrupted.at("", "interrupted", "; ".join(getattr(interrupt, "__notes__", []))) from None
        except Exception as error:
            if type(error).__name__ == "NoSuchOption" and _takes_keys(getattr(error, "ctx", None)):
                _refuse_key(error.option_name, words)  # type: ignore[attr-defined]
            raise


def _takes_keys(ctx: typer.Context | None) -> bool:
    """True if a command takes a run and keys of it."""
    named = {parameter.name: parameter.metavar for parameter in ctx.command.params} if ctx is not None else {}
    return "overrides" in named and named.get("name") == "RUN"


def _refuse_key(option: str, words: list[str]) -> None:
    """Raise InputError if an unknown option is a key of the run file. `words`: the command line."""
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
    raise InputError.at(written, "is a key of the run file, not an option", advice)


def _is_far(name: str, dotted: str) -> bool:
    """True if an option without dots only resembles a key, so that it may as well be a mistyped option."""
    from artel.config.other_names import OTHER_NAMES

    plain = name.lower().replace("-", "_")
    return plain not in OTHER_NAMES and dotted.split(".")[-1] != plain


app = typer.Typer(
    name="artel",
    cls=Commands,
    help="From raw text to a trained transformer language model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _tell_version(requested: bool) -> None:
    if requested:
        from artel import __version__

        show(f"artel {__version__}")
        raise typer.Exit


@app.callback()
def artel(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    local_rank: Annotated[int | None, typer.Option("--local_rank", "--local-rank", hidden=True)] = None,
) -> None:
    """From raw text to a trained transformer language model."""
    if local_rank is not None:  # the launcher of deepspeed writes it before the command
        os.environ.setdefault("LOCAL_RANK", str(local_rank))


app.command("new")(new.new)
app.command("plan", short_help="Say before a run what it needs, and whether it fits.")(plan.plan)
app.command("prepare", short_help="Clean, deduplicate, split and tokenize the text of a run.")(train.prepare)
app.command("train")(train.train)
app.command("evaluate", short_help="Measure models by the metrics of their objective.")(evaluate.evaluate)
app.command("generate", short_help="Continue a text, fill its masks, correct or translate it.")(generate.generate)
app.command("chat", short_help="Talk to a model.")(chat.chat)
app.command("serve", short_help="Serve a model: OpenAI's API, a chat page, metrics.")(serve.serve)
app.command("export", short_help="Write a model as a Hugging Face folder, GGUF or ONNX.")(export.export)
app.command("push", short_help="Upload a run's model to the Hugging Face hub.")(push.push)
app.command("report", short_help="Draw a run's loss, or write a report for the browser.")(report.report)
app.command("watch", short_help="Follow a run until it ends.")(report.watch)
app.command("clean", short_help="List what artel keeps on this machine, and remove it.")(clean.clean)
app.command("doctor", short_help="Check this machine, and what keeps artel from using it well.")(doctor.doctor)
app.command("hardware", short_help="Measure this machine once, for `artel plan`.")(doctor.hardware)
app.add_typer(data.app, name="data", short_help="Look into a token store, or make one of other tokens.")
app.add_typer(recipes.app, name="recipes")
app.add_typer(config.app, name="config", short_help="A run file: check, explain, print its schema, convert.")
app.add_typer(launch.app, name="launch")


def main() -> None:
    """Run the command line and exit."""
    be_utf8()
    open_streams()
    threading.excepthook = _thread_failed
    answer_at_once()
    if not {"--help", "--version"}.intersection(sys.argv):  # typer prints these itself
        show_elapsed()
    status = _run()
    try:
        sys.stdout.flush()
    except OSError as error:
        leave_out()
        status = status or _end(WorkError.at("standard output", f"cannot be written: {error.strerror}"))
    gc.freeze()  # else the last garbage collections take 2 to 3 s after importing torch
    sys.exit(status)


def _run() -> int:
    """Run the command and return the exit status. Every error becomes a message, never a traceback."""
    try:
        with printed_by(print_record):
            return app(standalone_mode=False) or 0
    except SystemExit as end:
        from artel.plugins import own_code_error

        if (own := own_code_error(end)) is not None:
            return _end(own)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except typer.Abort:
        write_lines(["artel: interrupted"])
        return 130
    except KeyboardInterrupt:
        interrupt_is_handled()
        write_lines(["artel: interrupted"])
        return 130
    except BrokenPipeError:  # the reader of our output (head, less) went away
        leave_out()
        return 1
    except BaseException as error:  # panics of Rust libraries are not Exceptions
        if hasattr(error, "format_message"):
            return _refuse(error)
        from artel.storage.unexpected_errors import FAULT, fault_lines, machine_error

        known = machine_error(error)
        if known is not None:
            return _end(known)
        command = " ".join(word for word in sys.argv[1:3] if word.isalpha()) or "start"
        doing = f"{command} (after: {last_message()})" if last_message() else command
        write_lines([f"artel: {line}" for line in fault_lines(error, doing)])
        if "ARTEL_LED" in os.environ:  # at once, before the processes that lost this one end
            os._exit(FAULT)
        return 1


def _refuse(error: Any) -> int:
    """Print typer's error about the command line, with control characters escaped (from file names of a glob)."""
    if type(error).__name__ != "NoArgsIsHelpError":  # whose message is the help, many lines of our own
        error.message = in_a_line(error.message)
    with paused():
        error.show()
    return int(error.exit_code)


def _thread_failed(failed: threading.ExceptHookArgs) -> None:
    """Report an unexpected exception of a thread like one of the command."""
    from artel.plugins import own_code_error
    from artel.storage.unexpected_errors import fault_lines

    error = failed.exc_value
    if error is not None and (known := own_code_error(error)) is not None:
        _end(known)
    elif error is not None and not isinstance(error, SystemExit):  # which ends only the thread
        name = failed.thread.name if failed.thread is not None else "a thread"
        write_lines([f"artel: {line}" for line in fault_lines(error, name)])


def _end(error: ArtelError) -> int:
    """Print the problems of an error and return the exit status.

    If a signal stopped all processes of a run, only rank 0 prints.
    """
    printed_by_first = isinstance(error, Interrupted) and os.environ.get("RANK", "0") != "0"
    for problem in () if printed_by_first else error.problems:
        first, *rest = problem.lines
        write_lines([f"artel: {first}", *rest])
    from artel.launching.worker import LostPeers

    if isinstance(error, LostPeers | OutOfMemory):
        # At exit, Python would wait for collectives with the lost process, up to the group's timeout of 20 minutes.
        sys.stdout.flush()
        os._exit(error.exit_code)
    return error.exit_code
