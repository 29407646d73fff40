"""The command line `artel`: its commands, and how errors become messages and exit statuses.

Exit status: 0 success, 1 failure, 2 invalid input, 130 interrupted (the same command resumes). Commands import what
they need when they run, so that `artel --help` does not wait for torch.
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
    prepare,
    push,
    recipes,
    report,
    rewards,
    serve,
    train,
)
from artel.cli.streams import (
    discard_stdout,
    ensure_utf8_mode,
    last_message,
    open_streams,
    print_record,
    print_result,
    write_stderr_lines,
)
from artel.elapsed import hide_elapsed, show_elapsed
from artel.errors import ArtelError, InputError, Interrupted, OutOfMemory, WorkError
from artel.interrupts import answer_interrupts, mark_interrupt_handled
from artel.messages import route_messages
from artel.printable import escape_line


class Commands(TyperGroup):
    """The commands of artel. Handles Ctrl-C and explains options that are keys of the run file."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        arguments = [*ctx._protected_args, *ctx.args]
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:  # typer would exit with 130 silently
            mark_interrupt_handled()
            if "ARTEL_LAUNCHED" in os.environ:  # the launcher prints how to continue
                raise typer.Exit(Interrupted.exit_code) from None
            raise Interrupted.at("", "interrupted", "; ".join(getattr(interrupt, "__notes__", []))) from None
        except Exception as error:
            if type(error).__name__ == "NoSuchOption" and _accepts_keys(getattr(error, "ctx", None)):
                _reject_run_file_key(error.option_name, arguments)  # type: ignore[attr-defined]
            raise


def _accepts_keys(ctx: typer.Context | None) -> bool:
    """True if a command accepts a run and overrides of its keys."""
    metavars = {parameter.name: parameter.metavar for parameter in ctx.command.params} if ctx is not None else {}
    return "overrides" in metavars and metavars.get("name") == "RUN"


def _reject_run_file_key(option: str, arguments: list[str]) -> None:
    """Raise InputError if an unknown option is a key of the run file. `arguments`: the command line."""
    from artel.config import RunConfig, guess_key
    from artel.config.suggest import all_keys, other_unit

    if not option.startswith("--"):
        return
    name = option.lstrip("-")
    dotted = guess_key(tuple(name.split(".")))
    if dotted is None or (name not in all_keys(RunConfig) and "." not in name and _is_weak_match(name, dotted)):
        return
    index = next((index for index, argument in enumerate(arguments) if argument.split("=")[0] == option), None)
    location, value = option, "…"
    if index is not None:
        location = arguments[index]
        next_arguments = arguments[index + 1 : index + 2]
        if "=" in location:
            value = location.split("=", 1)[1]
        elif next_arguments and not next_arguments[0].startswith("-"):
            location, value = f"{location} {next_arguments[0]}", next_arguments[0]
    unit_note = other_unit(name)
    fix = f"write {dotted}=…: {unit_note}" if unit_note else f"write {dotted}={value}"
    raise InputError.at(location, "is a key of the run file, not an option", fix)


def _is_weak_match(name: str, dotted: str) -> bool:
    """True if an option without dots only resembles a key. It may then be a mistyped option."""
    from artel.config.other_names import OTHER_NAMES

    key = name.lower().replace("-", "_")
    return key not in OTHER_NAMES and dotted.split(".")[-1] != key


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


def _print_version(requested: bool) -> None:
    if requested:
        from artel import __version__

        print_result(f"artel {__version__}")
        raise typer.Exit


@app.callback()
def artel(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    local_rank: Annotated[int | None, typer.Option("--local_rank", "--local-rank", hidden=True)] = None,
) -> None:
    """From raw text to a trained transformer language model."""
    if local_rank is not None:  # the deepspeed launcher puts it before the command
        os.environ.setdefault("LOCAL_RANK", str(local_rank))


app.command("new")(new.new)
app.command("plan", short_help="Predict memory, disk and time of a run.")(plan.plan)
app.command("prepare", short_help="Clean, deduplicate, split and tokenize the text of a run.")(prepare.prepare)
app.command("train")(train.train)
app.command("evaluate", short_help="Compare models by their metrics.")(evaluate.evaluate)
app.command("generate", short_help="Generate text: continue, fill in, correct or translate.")(generate.generate)
app.command("chat", short_help="Chat with a model.")(chat.chat)
app.command("serve", short_help="Serve a model: OpenAI's API, a chat page, metrics.")(serve.serve)
app.command("export", short_help="Export a model as a Hugging Face folder, GGUF or ONNX.")(export.export)
app.command("push", short_help="Upload a run's model to the Hugging Face hub.")(push.push)
app.command("report", short_help="Show the loss curve of a run, or write an HTML report.")(report.report)
app.command("watch", short_help="Follow a run until it ends.")(report.watch)
app.command("clean", short_help="List artel's files on this machine, or remove them.")(clean.clean)
app.command("doctor", short_help="Check this machine for problems.")(doctor.doctor)
app.command("hardware", short_help="Measure this machine once, for `artel plan`.")(doctor.hardware)
app.add_typer(data.app, name="data", short_help="Inspect a token store, or import tokens into one.")
app.add_typer(rewards.app, name="rewards")
app.add_typer(recipes.app, name="recipes")
app.add_typer(config.app, name="config", short_help="Check, explain or convert run files; print their schema.")
app.add_typer(launch.app, name="launch")


def main() -> None:
    """Run the command line and exit."""
    ensure_utf8_mode()
    open_streams()
    threading.excepthook = _report_thread_error
    answer_interrupts()
    if not {"--help", "--version"}.intersection(sys.argv):  # typer prints these itself
        show_elapsed()
    status = _run()
    try:
        sys.stdout.flush()
    except OSError as error:
        discard_stdout()
        status = status or _print_error(WorkError.at("standard output", f"cannot be written: {error.strerror}"))
    gc.freeze()  # otherwise the final garbage collections take 2 to 3 s after importing torch
    sys.exit(status)


def _run() -> int:
    """Run the command and return the exit status. Every error becomes a message, never a traceback."""
    try:
        with route_messages(print_record):
            return app(standalone_mode=False) or 0
    except SystemExit as end:
        from artel.plugins import user_code_error

        if (user_error := user_code_error(end)) is not None:
            return _print_error(user_error)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except typer.Abort:
        write_stderr_lines(["artel: interrupted"])
        return 130
    except KeyboardInterrupt:
        mark_interrupt_handled()
        write_stderr_lines(["artel: interrupted"])
        return 130
    except BrokenPipeError:  # the reader of the output (head, less) has exited
        discard_stdout()
        return 1
    except BaseException as error:  # panics of Rust libraries are not Exceptions
        if hasattr(error, "format_message"):
            return _print_usage_error(error)
        from artel.storage.unexpected_errors import FAULT_EXIT_STATUS, fault_lines, machine_error

        if (known_error := machine_error(error)) is not None:
            return _print_error(known_error)
        command = " ".join(word for word in sys.argv[1:3] if word.isalpha()) or "start"
        activity = f"{command} (after: {last_message()})" if last_message() else command
        write_stderr_lines([f"artel: {line}" for line in fault_lines(error, activity)])
        if "ARTEL_LAUNCHED" in os.environ:  # exit at once, before the processes that depend on this one end
            os._exit(FAULT_EXIT_STATUS)
        return 1


def _print_usage_error(error: Any) -> int:
    """Print typer's error about the command line, with control characters escaped (from file names of a glob)."""
    if type(error).__name__ != "NoArgsIsHelpError":  # its message is the help text, which has many lines
        error.message = escape_line(error.message)
    with hide_elapsed():
        error.show()
    return int(error.exit_code)


def _report_thread_error(hook_args: threading.ExceptHookArgs) -> None:
    """Report an unexpected exception in a thread like one in the command."""
    from artel.plugins import user_code_error
    from artel.storage.unexpected_errors import fault_lines

    error = hook_args.exc_value
    if error is not None and (user_error := user_code_error(error)) is not None:
        _print_error(user_error)
    elif error is not None and not isinstance(error, SystemExit):  # SystemExit ends only the thread
        name = hook_args.thread.name if hook_args.thread is not None else "a thread"
        write_stderr_lines([f"artel: {line}" for line in fault_lines(error, name)])


def _print_error(error: ArtelError) -> int:
    """Print the problems of an error and return the exit status.

    If a signal stopped all processes of a run, only rank 0 prints.
    """
    leave_to_rank_0 = isinstance(error, Interrupted) and os.environ.get("RANK", "0") != "0"
    for problem in () if leave_to_rank_0 else error.problems:
        first_line, *more_lines = problem.lines
        write_stderr_lines([f"artel: {first_line}", *more_lines])
    from artel.launching.worker import LostPeers

    if isinstance(error, LostPeers | OutOfMemory):
        # At exit, Python would wait for collectives with the lost process, up to the group's timeout of 20 minutes.
        sys.stdout.flush()
        os._exit(error.exit_code)
    return error.exit_code
