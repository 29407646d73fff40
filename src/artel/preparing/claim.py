"""The mark of a run's folder. artel replaces and removes files only in folders that have it.

RUN/.artel-run.json     {"artel": version, "id": random, "names": [...], "model": [...]}: the names in this folder, and
                        in its model/, that belong to artel

No file had these names when the mark was written, so that every file with such a name is artel's. A folder that has one
of them and no mark is refused: it is the user's. Runs that began before there were marks are recognized by files that
artel wrote: config.yaml with every section, and a ledger or a checkpoint.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

import artel
from artel.errors import InputError, Problem, WorkError
from artel.storage import check_regular, write_file

MARK = ".artel-run.json"
CHECKPOINTS, MODEL = "checkpoints", "model"
_LOCKS = (".lock", ".lock-processes")
_FILES = (
    "config.yaml ledger.json rejected.jsonl contaminated.jsonl store.json metrics.jsonl samples.jsonl bad_steps.jsonl "
    "validation.json result.json before-training.safetensors plan.json micro_batches profile hangs starts.jsonl ranks "
    "choice.json teacher.json tensorboard wandb tracker_runs.json .secret"
)
NAMES = (*_FILES.split(), CHECKPOINTS, MODEL, *_LOCKS)
_ELSEWHERE = "choose another folder (run=…), or move it away"


def check_claim(folder: Path) -> None:
    """Raise InputError if a file in a run's folder has a name of artel's and artel did not write it. Writes nothing."""
    check_regular(*(folder / name for name in (*NAMES, MARK)))
    known = _known(folder)
    taken = [name for name in NAMES if name not in known and not _is_free(folder / name)]
    if taken and set(taken) - set(_LOCKS) and _began_before_marks(folder):
        # Without a result the run wrote no model: it is the one that the run began with.
        taken = [MODEL] if MODEL in taken and not (folder / "result.json").is_file() else []
    known = _known(folder)  # read again: another process of the run may just have written mark and file
    what = "is there, and artel did not make it: a run in this folder would write over it"
    problems = [Problem(str(folder / name), what, _ELSEWHERE) for name in taken if name not in known]
    for name in ("latest", "best"):
        link = folder / CHECKPOINTS / name
        if link.exists() and not link.is_symlink():
            what = "is a folder or a file, where artel keeps a link to a checkpoint"
            problems.append(Problem(str(link), what, "move it away: the link is made again"))
    if problems:
        raise InputError(problems)


def claim(folder: Path) -> None:
    """Create a run's folder and mark it, unless it is marked. Raises as `check_claim` and a disk do."""
    known = _known(folder)
    if known >= set(NAMES):
        return
    check_claim(folder)
    # A new folder has no model of artel's yet; of an earlier version's it is not known what artel wrote.
    mark = _read(folder) or ({} if _began_before_marks(folder) else {"model": []})
    names = sorted({*known, *NAMES})
    _write(folder, mark | {"artel": artel.__version__, "id": identity(folder) or secrets.token_hex(8), "names": names})


def note_model(folder: Path, names: Iterable[str]) -> None:
    """Record the files that artel wrote into a run's model/. Raises as a disk does."""
    _write(folder, _read(folder) | {"model": sorted(names)})


def foreign_in_model(folder: Path) -> list[Path]:
    """Files in a run's model/ that artel did not write; none if an earlier version, without this record, wrote it."""
    written = _read(folder).get("model")
    model = folder / MODEL
    if written is None or not model.is_dir():
        return []
    return sorted(path for path in model.iterdir() if path.name not in written)


def check_model_is_artels(folder: Path) -> None:
    """Raise InputError for files in a run's model/ that artel did not write, before it removes or replaces them."""
    what = "is in the run's model, which is about to be removed, and artel did not write it"
    problems = [Problem(str(path), what, "move it away") for path in foreign_in_model(folder)]
    if problems:
        raise InputError(problems)


def identity(folder: Path) -> str:
    """A random id that a run's folder made again in the same place does not have; empty if there is no mark."""
    return str(_read(folder).get("id", ""))


def check_there(folder: Path, expected_identity: str) -> None:
    """Raise WorkError if a run's folder no longer has that identity: it was removed, moved or made again."""
    if identity(folder) == expected_identity:
        return
    what = "the run's folder was removed or moved while the run was at work; nothing more is written there"
    fix = "where it was moved, move it back: the same command resumes from its last checkpoint"
    raise WorkError.at(str(folder), what, fix)


def _write(folder: Path, mark: dict[str, Any]) -> None:
    write_file(folder / MARK, orjson.dumps(mark, option=orjson.OPT_INDENT_2))


def _known(folder: Path) -> set[str]:
    return set(_read(folder).get("names", ()))


def _read(folder: Path) -> dict[str, Any]:
    file = folder / MARK
    try:
        mark = orjson.loads(file.read_bytes())
        if isinstance(mark["id"], str) and _are_names(mark["names"]) and _are_names(mark.get("model", [])):
            return mark
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise InputError.at(str(file), f"cannot be read: {error.strerror}", "check its permissions") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    fix = "remove it if all in this folder is artel's, or choose another folder (run=…)"
    raise InputError.at(str(file), "is not the mark that artel wrote there", fix)


def _are_names(names: object) -> bool:
    return isinstance(names, list) and all(isinstance(name, str) for name in names)


def _is_free(path: Path) -> bool:
    """True if nothing is lost when artel takes that name: it does not exist, or is an empty folder.

    `checkpoints` may be a link to an empty folder on another disk. A lock file of a run that was refused has no data.
    """
    if not os.path.lexists(path):
        return True
    if path.name in _LOCKS:
        with suppress(OSError):
            return not path.is_symlink() and re.fullmatch(rb"(process \d+ on .*\n)*", path.read_bytes()) is not None
        return False
    return path.is_dir() and (path.name == CHECKPOINTS or not path.is_symlink()) and not any(path.iterdir())


def _began_before_marks(folder: Path) -> bool:
    try:
        config = (folder / "config.yaml").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    sections = ("run", "data", "model", "train", "checkpoint")
    if not all(re.search(rf"^{name}:", config, re.MULTILINE) for name in sections):
        return False
    with suppress(OSError, ValueError):
        ledger = orjson.loads((folder / "ledger.json").read_bytes())
        if isinstance(ledger, dict) and {"documents", "tokens"} <= ledger.keys():
            return True
    return any((step / "checksums.json").is_file() for step in (folder / CHECKPOINTS).glob("step-*"))
