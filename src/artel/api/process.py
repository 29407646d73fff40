"""Lets calls of artel inside another program leave the process unchanged."""

from __future__ import annotations

import faulthandler
import functools
import logging
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

from artel.errors import ArtelError, Problem
from artel.interrupts import in_main_thread
from artel.messages import logger, route_messages
from artel.notebooks import in_notebook
from artel.printable import escape_line
from artel.secrets import hide_secrets
from artel.storage import bus_error_handler
from artel.storage.unexpected_errors import machine_error

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
_FLAG = re.compile(r"(?<![\w-])--([a-z][a-z-]+)")


def leaves_process_unchanged(
    *, with_torch: bool = False, prints: bool = False
) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Decorate a function to restore the state of the process when it returns or raises.

    Restores the environment, signal handlers, exception hooks, warning filters, log levels, `sys.path`, and PyTorch's
    threads, default dtype and random states. With `with_torch`, PyTorch is imported first. With `prints`, messages are
    printed, unless the program has added a handler to the logger `artel`. Errors of the machine (a full disk) and
    of the user's own code become WorkError.
    """

    def decorate(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        @functools.wraps(function)
        def call(*arguments: _Arguments.args, **keywords: _Arguments.kwargs) -> _Result:
            with ExitStack() as stack:
                if prints and not logger.handlers:
                    stack.enter_context(route_messages(_print_record))
                stack.enter_context(_restored_environment())
                if with_torch:
                    import torch  # noqa: F401
                for restored in _RESTORED_STATES:
                    stack.enter_context(restored())
                try:
                    return function(*arguments, **keywords)
                except ArtelError as error:
                    error.problems = tuple(map(_replace_flags, error.problems))
                    error.args = ("\n".join(map(str, error.problems)),)
                    raise
                except BaseException as error:  # the user's code may call sys.exit
                    artel_error = machine_error(error)
                    if artel_error is None:
                        raise
                    raise artel_error from error

        return call

    return decorate


def _print_record(record: logging.LogRecord) -> None:
    """Print a warning, or a message of rank 0. Messages appear below the cell in a notebook, otherwise on stderr."""
    is_warning = record.levelno >= logging.WARNING
    if is_warning or os.environ.get("RANK", "0") == "0":
        stream = sys.stdout if in_notebook() and not is_warning else sys.stderr
        print(escape_line(hide_secrets(record.getMessage())), file=stream, flush=True)


def _replace_flags(problem: Problem) -> Problem:
    """Replace command-line flags in a problem by the names of arguments, except inside a command."""

    def replace_in(text: str) -> str:
        if "artel " in text:
            return text
        return _FLAG.sub(lambda flag: flag[1].replace("-", "_"), text)

    return replace(problem, where=replace_in(problem.where), what=replace_in(problem.what), fix=replace_in(problem.fix))


@contextmanager
def _restored_environment() -> Iterator[None]:
    saved = dict(os.environ)
    if in_notebook():
        # Jupyter sets it, and processes of a run would then draw bars for a terminal.
        os.environ.pop("FORCE_COLOR", None)
    # PyTorch reads this on import. By default it warns about hosts without names.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        yield
    finally:
        for name in os.environ.keys() - saved.keys():
            del os.environ[name]
        for name, value in saved.items():
            if os.environ.get(name) != value:
                os.environ[name] = value


@contextmanager
def _restored_signals() -> Iterator[None]:
    """Restore signal handlers. Inside the block, Ctrl-C raises KeyboardInterrupt at most and never ends the process."""
    if not in_main_thread():
        yield
        return
    saved = {signal_number: signal.getsignal(signal_number) for signal_number in _SIGNALS}
    if saved[signal.SIGINT] is signal.default_int_handler:
        signal.signal(signal.SIGINT, _raise_keyboard_interrupt)
    try:
        yield
    finally:
        for signal_number, handler in saved.items():
            # None if the handler was not set from Python.
            if handler is not None and signal.getsignal(signal_number) is not handler:
                signal.signal(signal_number, handler)


def _raise_keyboard_interrupt(signal_number: int, frame: object) -> None:
    raise KeyboardInterrupt


@contextmanager
def _restored_faulthandler() -> Iterator[None]:
    was_enabled = faulthandler.is_enabled()
    try:
        yield
    finally:
        if not was_enabled:
            faulthandler.disable()


@contextmanager
def _restored_exception_hooks() -> Iterator[None]:
    """Restore the hooks for uncaught exceptions. Each process group of PyTorch adds its own."""
    saved = sys.excepthook, threading.excepthook
    try:
        yield
    finally:
        sys.excepthook, threading.excepthook = saved


@contextmanager
def _restored_logging() -> Iterator[None]:
    """Restore warning filters and loggers, including those that transformers creates on import."""
    loggers = {
        logger: (logger.level, list(logger.filters))
        for logger in logging.root.manager.loggerDict.values()
        if isinstance(logger, logging.Logger)
    }
    transformers = _transformers_logging()
    saved = (transformers.get_verbosity(), transformers.is_progress_bar_enabled()) if transformers else None
    try:
        with warnings.catch_warnings():
            # tqdm's warning in notebooks. artel has its own progress bar.
            warnings.filterwarnings("ignore", "IProgress not found")
            yield
    finally:
        for logger, (level, filters) in loggers.items():
            logger.setLevel(level)
            logger.filters[:] = filters
        transformers = _transformers_logging()
        if transformers is not None:
            verbosity, has_bars = saved or (logging.WARNING, True)
            transformers.set_verbosity(verbosity)
            (transformers.enable_progress_bar if has_bars else transformers.disable_progress_bar)()


def _transformers_logging() -> Any:
    return sys.modules.get("transformers.utils.logging")


@contextmanager
def _restored_modules() -> Iterator[None]:
    """Restore `sys.path`, and unload `kernels`, which transformers and bitsandbytes must not import for artel."""
    path = list(sys.path)
    has_kernels = "kernels" in sys.modules
    try:
        yield
    finally:
        sys.path[:] = path
        if not has_kernels:
            sys.modules.pop("kernels", None)


@contextmanager
def _restored_torch() -> Iterator[None]:
    """Restore threads, default dtype and random states of PyTorch, if it was imported."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    threads, dtype, states = torch.get_num_threads(), torch.get_default_dtype(), torch.get_rng_state()
    device_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        torch.set_rng_state(states)
        if device_states:
            torch.cuda.set_rng_state_all(device_states)


_RESTORED_STATES = (
    _restored_signals,
    bus_error_handler,
    _restored_faulthandler,
    _restored_exception_hooks,
    _restored_logging,
    _restored_modules,
    _restored_torch,
)
