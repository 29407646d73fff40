"""What several verbs share: telling people on standard error, results as JSON on standard output."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from typing import TYPE_CHECKING, Annotated, Any

import typer

from artel.cli.streams import tell, write_out
from artel.errors import ArtelError
from artel.printable import json_text

if TYPE_CHECKING:
    from artel.config import RunConfig

RunName = Annotated[
    str, typer.Argument(metavar="RUN", help="A run file, a recipe's name, or the folder of an earlier run.")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, as train.learning_rate=3e-4.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]


__all__ = ["AsJson", "Overrides", "RunName", "print_json", "quiet_libraries", "tell", "tell_error", "tell_of_secrets"]


def tell_error(error: ArtelError, place: str = "") -> None:
    """Say what went wrong where the work goes on, each problem on its lines, after the `place` it came from."""
    for problem in error.problems:
        first, *rest = problem.lines
        tell(f"{place}{first}", *rest)


def read_run(name: str, overrides: list[str] | None = None, *, here: bool = True) -> RunConfig:
    """The run of a verb's arguments, trained `here` or elsewhere.

    Raises InputError with all that is wrong with the run, not with its file alone.
    """
    from artel.config import WrongRunFile, load_run
    from artel.errors import InputError

    try:
        return load_run(name, overrides or [])
    except WrongRunFile as error:
        quiet_libraries()
        from artel.planning import Start, further_problems

        raise InputError(dict.fromkeys([*error.problems, *further_problems(error, Start(here=here))])) from None


def tell_of_secrets(run: RunConfig) -> None:
    """Say so where addresses in a run file hold secrets, which are not written into the run's folder."""
    from artel.config import dump_run

    if dump_run(run) != dump_run(run, secrets=True):
        tell(
            "the run file holds secrets in its addresses: they are written down as *** and wanted again at each start; "
            "write ${NAME} in their place, and set NAME in the environment"
        )


def print_json(result: dict[str, Any]) -> None:
    """For programs: one JSON document on standard output, from the first process only. Raises WorkError."""
    if os.environ.get("RANK", "0") == "0":
        is_utf8 = sys.stdout.encoding.lower().replace("-", "") == "utf8"
        write_out(json_text(result, ascii_only=not is_utf8) + "\n")


def quiet_libraries() -> None:
    """transformers' progress bars and advice are about its own command lines, not about this one."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    # Views of outputs are safe with who does not write into them; and reading pieces alone is what is meant.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
    logging.getLogger("DeepSpeed").addFilter(_to_standard_error)
    # bitsandbytes and transformers download code with the package `kernels` and run it, where it is installed: as if
    # it were not. peft imports bitsandbytes also where nothing is quantized; it then says that it lacks that package.
    sys.modules.setdefault("kernels", None)  # type: ignore[arg-type]
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()


def _to_standard_error(record: logging.LogRecord) -> bool:
    """A filter that lets all through: DeepSpeed, which accelerate imports, would warn on standard output."""
    for handler in logging.getLogger(record.name).handlers:
        if type(handler) is logging.StreamHandler:  # one that writes files, or keeps what is logged, stays as it is
            handler.setStream(sys.stderr)
    return True
