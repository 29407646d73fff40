"""Training side by side: start all contestants, let them take turns, tell what each took."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson
import torch

from artel.diagnostics.bench.figures import Tell
from artel.diagnostics.bench.machine import machine
from artel.diagnostics.bench.training.contestant import Work, function_of
from artel.diagnostics.bench.training.inputs import AUTO_CLASSES, make, read_model
from artel.diagnostics.bench.training.processes import Contestant, Failed, ending
from artel.diagnostics.bench.training.result import Measured
from artel.errors import InputError, Problem, WorkError
from artel.models import pick_precision
from artel.models.flops import device_name, flops_a_token
from artel.storage import cache_folder, disk_errors

OBJECTIVES = tuple(AUTO_CLASSES)
DEVICES = ("auto", "cpu", "cuda")
PRECISIONS = ("auto", "fp32", "bf16", "fp16", "fp8")
OPTIMIZERS = ("adamw", "adamw8bit", "adafactor", "sgd")

_HERE = Path(__file__).parent
CONTESTANTS = {
    "artel": f"{_HERE / 'ours.py'}:train",
    "trainer_default": f"{_HERE / 'trainer.py'}:default",
    "trainer_tuned": f"{_HERE / 'trainer.py'}:tuned",
}
_PRECISION_OF = {"trainer_default": "fp32", "trainer_tuned": "bf16"}

# After the first step: what the optimizer allocates and compilers do late is over by then.
_WARM_UP = 2
_SHORTEST = {"causal": 2, "masked": 8}


@dataclass(frozen=True, slots=True)
class Settings:
    """What is trained, by whom, and for how long."""

    model: str = ""
    """A folder with config.json, a file, or a mapping as YAML; a small model of the objective when empty."""
    objective: str = "causal"
    batch: int = 8
    """Rows in a global batch."""
    length: int = 256
    """Tokens in a row."""
    device: str = "auto"
    precision: str = "auto"
    optimizer: str = "adamw"
    steps: int = 20
    """Of a turn."""
    rounds: int = 3
    peers: tuple[str, ...] = ()
    """Further contestants, `module:function` as contestant.py describes it."""
    only: tuple[str, ...] = ()
    """Some of CONTESTANTS and `peers`; all when empty."""
    time_limit: float = 60.0
    """Seconds of a turn after which no step is begun."""


def measure_train(settings: Settings, tell: Tell) -> Measured:
    """Train in turns and tell what each took. Raises InputError (options), WorkError (artel itself fails).

    Works in a folder of its own below the cache folder, which must have room for the model's weights once and for what
    the peers write, and leaves nothing there. A peer that fails is told, with its last words, and left out.
    """
    device, model = _check(settings)
    precision = _precision(settings, device)
    steps = 1 + _WARM_UP + settings.rounds * (settings.steps + _unmeasured(device))
    place = cache_folder() / "bench"
    with disk_errors(place):
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place) as name:
            work = Work(
                folder=name, objective=settings.objective, batch=settings.batch, length=settings.length,
                device=device, precision=precision, optimizer=settings.optimizer, threads=_threads(),
            )  # fmt: skip
            tell(f"making a model and {steps * work.batch:,} rows of {work.length:,} random tokens")
            made = make(work, model, steps)
            (Path(name) / "work.json").write_bytes(orjson.dumps(asdict(work)))
            contestants = _contestants(settings)
            with ending(contestants):
                _train_in_turns(contestants, settings, work, tell)
    name = device_name(torch.device(device))
    packages = ("artel-lm", "torch", "transformers", "accelerate")
    about = {
        "objective": work.objective, "batch": work.batch, "length": work.length, "device": name,
        "precision": precision, "optimizer": work.optimizer, "steps": settings.steps, "rounds": settings.rounds,
        "time_limit": settings.time_limit, "threads": work.threads,
        "model": {"model_type": made.config.model_type, "parameters": made.parameters},
        "machine": machine(*packages),
    }  # fmt: skip
    return Measured(
        contestants=contestants,
        precisions={each.name: _PRECISION_OF.get(each.name, precision) for each in contestants},
        device=name,
        tokens=work.batch * work.length,
        flops=flops_a_token(made.config, AUTO_CLASSES[work.objective], work.length),
        about=about,
    )


def _check(settings: Settings) -> tuple[str, dict]:
    """The device and the model's configuration. Raises InputError for all that is wrong with the options at once."""
    problems = []
    for option, given, known in (
        ("--objective", settings.objective, OBJECTIVES),
        ("--device", settings.device, DEVICES),
        ("--precision", settings.precision, PRECISIONS),
        ("--optimizer", settings.optimizer, OPTIMIZERS),
    ):
        if given not in known:
            problems.append(Problem(option, f"there is no {given!r}", f"write one of: {', '.join(known)}"))
    if settings.length < (shortest := _SHORTEST.get(settings.objective, 2)):
        problems.append(Problem("--length", f"{settings.length} tokens are too few", f"write {shortest} or more"))
    names = (*CONTESTANTS, *settings.peers)
    if unknown := [name for name in settings.only if name not in names]:
        fix = f"write some of: {', '.join(names)}"
        problems.append(Problem("--only", f"there is no contestant {', '.join(unknown)}", fix))
    for peer in settings.peers:
        problems += _peer_problems(peer)
    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        problems.append(Problem("--device", "PyTorch finds no GPU here", "write auto or cpu"))
    model = {}
    if settings.objective in OBJECTIVES:
        try:
            model = read_model(settings.model, settings.objective)
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(problems)
    return device, model


def _peer_problems(peer: str) -> list[Problem]:
    module, _, function = peer.rpartition(":")
    if not module or not function:
        return [Problem("--peer", f"{peer!r} names no function", "write module:function")]
    try:
        found = function_of(peer)
    except (Exception, SystemExit) as error:  # the module is the user's: anything may go wrong in it
        what = f"{peer} cannot be imported: {type(error).__name__}: {error}"
        return [Problem("--peer", what, f"the module is looked for in {Path.cwd()} and on PYTHONPATH")]
    return [] if callable(found) else [Problem("--peer", f"{peer} is no function", "write module:function")]


def _precision(settings: Settings, device: str) -> str:
    try:
        return pick_precision(settings.precision, torch.device(device))
    except InputError as error:
        raise InputError([Problem("--precision", each.what, each.fix) for each in error.problems]) from None


def _threads() -> int:
    """As many as artel takes for itself, unless OMP_NUM_THREADS says how many."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdigit() and int(given) > 0 else len(os.sched_getaffinity(0))


def _unmeasured(device: str) -> int:
    """Steps before each turn that do not count: on a GPU the memory that was lent to others is taken again."""
    return 1 if device == "cuda" else 0


def _contestants(settings: Settings) -> list[Contestant]:
    functions = CONTESTANTS | {peer: peer for peer in settings.peers}
    wanted = [name for name in functions if not settings.only or name in settings.only]
    return [Contestant(name, functions[name]) for name in wanted]


def _train_in_turns(contestants: list[Contestant], settings: Settings, work: Work, tell: Tell) -> None:
    # Of several GPUs all take the first; Trainer would split a batch over all it sees.
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] if work.device == "cuda" else ""
    threads = {name: str(work.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    environment = {"CUDA_VISIBLE_DEVICES": gpu, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **threads}
    limit = settings.time_limit
    for each in contestants:
        with _told_when_it_fails(each, tell):
            if why := _why_not(each):
                raise Failed(why)
            tell(f"{each.name}: its first step")
            each.start(Path(work.folder), environment)
            warm = each.take_turn(_WARM_UP, limit)
            if len(warm.losses) < _WARM_UP:  # it took over the limit for one step: that is all we know of it
                each.turns.append(warm)
    for number in range(settings.rounds):
        for each in contestants:
            if each.why or each.is_slow(limit):
                continue
            tell(f"{each.name}: round {number + 1} of {settings.rounds}")
            with _told_when_it_fails(each, tell):
                if _unmeasured(work.device):
                    each.take_turn(_unmeasured(work.device), limit)
                each.turns.append(each.take_turn(settings.steps, limit))


def _why_not(contestant: Contestant) -> str:
    if contestant.name.startswith("trainer_") and importlib.util.find_spec("accelerate") is None:
        return "Trainer needs accelerate, which is not installed: pip install accelerate"
    return ""


@contextmanager
def _told_when_it_fails(contestant: Contestant, tell: Tell) -> Iterator[None]:
    """A peer that fails takes part no more. Raises WorkError where it is artel itself."""
    try:
        yield
    except Failed as error:
        if contestant.name == "artel":
            raise WorkError.at("artel", f"its training failed: {error}") from None
        contestant.why = str(error)
        contestant.end()
        tell(f"{contestant.name} is left out: {error}")
