"""Train with artel and with each peer in turns, and measure each."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson
import torch

from artel.diagnostics.bench.figures import Tell, about_machine
from artel.diagnostics.bench.training.contestant import Work, function_of
from artel.diagnostics.bench.training.inputs import make, read_model
from artel.diagnostics.bench.training.processes import Contestant, Failed, ending
from artel.diagnostics.bench.training.result import Measured
from artel.errors import InputError, Problem, WorkError
from artel.host import usable_cores
from artel.models.device import pick_precision
from artel.models.flops import device_name, flops_a_token
from artel.plugins import guarded
from artel.registry import OBJECTIVES, OPTIMIZERS
from artel.storage import cache_folder, disk_errors

DEVICES = ("auto", "cpu", "cuda")
PRECISIONS = ("auto", "fp32", "bf16", "fp16", "fp8")

_ARTEL = f"{Path(__file__).with_name('artel_loop.py')}:train"
# After the first step: by then optimizers have allocated their state, and compilers have done what they do late.
_WARM_UP = 2


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
    """Other contestants, `module:function` or `FILE.py:function` as contestant.py describes them."""
    only: tuple[str, ...] = ()
    """Some of `artel` and `peers`; all when empty."""
    time_limit: float = 60.0
    """Seconds of a turn after which no step begins."""


def measure_train(settings: Settings, tell: Tell) -> Measured:
    """Train in turns and measure each. Raises InputError (options), WorkError (artel itself fails).

    It works in a temporary folder below the cache folder, which needs room for the model's weights and for what the
    peers write. A peer that fails is reported with its last lines, and left out.
    """
    device, model, contestants = _check(settings)
    precision = _precision(settings, device)
    steps = 1 + _WARM_UP + settings.rounds * (settings.steps + _unmeasured(device))
    place = cache_folder() / "bench"
    with disk_errors(place):
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place) as name:
            work = Work(
                folder=name,
                objective=settings.objective,
                batch=settings.batch,
                length=settings.length,
                device=device,
                precision=precision,
                optimizer=settings.optimizer,
                threads=_threads(),
            )
            tell(f"making a model and {steps * work.batch:,} rows of {work.length:,} random tokens")
            made = make(work, model, steps)
            (Path(name) / "work.json").write_bytes(orjson.dumps(asdict(work)))
            with ending(contestants):
                _train_in_turns(contestants, settings, work, tell)
    name = device_name(torch.device(device))
    same = ("objective", "batch", "length", "precision", "optimizer", "threads")
    about = {
        **{key: getattr(work, key) for key in same},
        "device": name,
        "steps": settings.steps,
        "rounds": settings.rounds,
        "time_limit": settings.time_limit,
        "model": {"model_type": made.config.model_type, "parameters": made.parameters},
        "machine": about_machine("artel-lm", "torch", "transformers", "accelerate"),
    }
    return Measured(
        contestants=contestants,
        precision=precision,
        device=name,
        tokens=work.batch * work.length,
        flops=flops_a_token(made.config, OBJECTIVES[work.objective].auto_class, work.length),
        about=about,
    )


def _check(settings: Settings) -> tuple[str, dict, list[Contestant]]:
    """The device, the model's configuration, the contestants. Raises InputError for all that is wrong together."""
    problems = []
    objectives = [name for name in OBJECTIVES.names if OBJECTIVES[name].packs_text]
    optimizers = [name for name in OPTIMIZERS.names if OPTIMIZERS[name].build_for_matrices is None]
    for option, value, known in (
        ("--objective", settings.objective, objectives),
        ("--device", settings.device, DEVICES),
        ("--precision", settings.precision, PRECISIONS),
        ("--optimizer", settings.optimizer, optimizers),
    ):
        if value not in known:
            problems.append(Problem(option, f"there is no {value!r}", f"write one of: {', '.join(known)}"))
    is_encoder = settings.objective in objectives and OBJECTIVES[settings.objective].encoder
    if settings.length < (shortest := 8 if is_encoder else 2):
        problems.append(Problem("--length", f"{settings.length} tokens are too few", f"write {shortest} or more"))
    contestants = [Contestant("artel", _ARTEL), *(_peer(name, problems) for name in settings.peers)]
    names = [contestant.name for contestant in contestants]
    if unknown := [name for name in settings.only if name not in names]:
        fix = f"write some of: {', '.join(names)}"
        problems.append(Problem("--only", f"there is no contestant {', '.join(unknown)}", fix))
    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        problems.append(Problem("--device", "PyTorch finds no GPU here", "write auto or cpu"))
    model = {}
    if settings.objective in objectives:
        try:
            model = read_model(settings.model, settings.objective)
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(problems)
    return device, model, [each for each in contestants if not settings.only or each.name in settings.only]


def _peer(name: str, problems: list[Problem]) -> Contestant:
    """The contestant of a `--peer`; what is wrong with it is added to `problems`."""
    module, _, function = name.rpartition(":")
    train = None
    if not module or not function:
        problems.append(Problem("--peer", f"{name!r} names no function", "write module:function"))
    else:
        fix = f"the module is looked for in {Path.cwd()} and on PYTHONPATH"
        try:
            with guarded("--peer", f"{name} cannot be imported", fix):
                train = function_of(name)
        except InputError as error:
            problems += error.problems
        else:
            if not callable(train):
                problems.append(Problem("--peer", f"{name} is no function", "write module:function"))
    return Contestant(name, name, getattr(train, "precision", None))


def _precision(settings: Settings, device: str) -> str:
    try:
        return pick_precision(settings.precision, torch.device(device))
    except InputError as error:
        raise InputError([Problem("--precision", each.what, each.fix) for each in error.problems]) from None


def _threads() -> int:
    """As many as artel chooses for itself, unless OMP_NUM_THREADS gives a number."""
    variable = os.environ.get("OMP_NUM_THREADS", "")
    return int(variable) if variable.isdigit() and int(variable) > 0 else usable_cores()


def _unmeasured(device: str) -> int:
    """Steps before each turn that do not count: on a GPU they allocate again the memory that others have used."""
    return 1 if device == "cuda" else 0


def _train_in_turns(contestants: list[Contestant], settings: Settings, work: Work, tell: Tell) -> None:
    # All use the first of several GPUs; Trainer would split a batch over all that it sees.
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] if work.device == "cuda" else ""
    threads = {name: str(work.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    environment = {"CUDA_VISIBLE_DEVICES": gpu, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **threads}
    limit = settings.time_limit
    for contestant in contestants:
        with _left_out_when_it_fails(contestant, tell):
            tell(f"{contestant.name}: its first step")
            contestant.start(Path(work.folder), environment)
            warm = contestant.take_turn(_WARM_UP, limit)
            if len(warm.losses) < _WARM_UP:  # one step took longer than the limit: it is the only measurement
                contestant.turns.append(warm)
    for number in range(settings.rounds):
        for contestant in contestants:
            if contestant.why or contestant.is_slow(limit):
                continue
            tell(f"{contestant.name}: round {number + 1} of {settings.rounds}")
            with _left_out_when_it_fails(contestant, tell):
                if _unmeasured(work.device):
                    contestant.take_turn(_unmeasured(work.device), limit)
                contestant.turns.append(contestant.take_turn(settings.steps, limit))


@contextmanager
def _left_out_when_it_fails(contestant: Contestant, tell: Tell) -> Iterator[None]:
    """A peer that fails takes no further part. Raises WorkError where it is artel itself."""
    try:
        yield
    except Failed as error:
        if contestant.name == "artel":
            raise WorkError.at("artel", f"its training failed: {error}") from None
        contestant.why = str(error)
        contestant.end()
        tell(f"{contestant.name} is left out: {error}")
