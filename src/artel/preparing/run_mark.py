"""The mark of a run's folder. artel replaces and removes files only in marked folders.

RUN/.artel-run.json     {"artel": version, "id": random, "folder": absolute path, "names": [...], "model": [...]}: the
                        names in this folder, and in its model/, that belong to artel; also "weights": digests of the
                        final model's weights, and "former_ids": ids of the runs that this one is a copy of

No file had these names when the mark was written, so every file with such a name is artel's. A folder that has such a
file but no mark is refused: it belongs to the user. A run that was copied without its mark (a hidden file) is
recognized by files that artel wrote: config.yaml with every section, and a ledger or a checkpoint.
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
import xxhash
import yaml

import artel
from artel.config.load import RUN_MARK
from artel.errors import InputError, Problem, WorkError
from artel.storage import check_regular, write_file

MARK, CHECKPOINTS, MODEL = RUN_MARK, "checkpoints", "model"
_LOCKS = (".lock", ".lock-processes")
_FILES = (
    "config.yaml ledger.json rejected.jsonl contaminated.jsonl store.json metrics.jsonl samples.jsonl bad_steps.jsonl "
    "validation.json result.json before-training.safetensors plan.json micro_batches profile hangs starts.jsonl ranks "
    "choice.json teacher.json rollouts engine tensorboard wandb tracker_runs.json .secret"
)
NAMES = (*_FILES.split(), CHECKPOINTS, MODEL, *_LOCKS)
_DIGEST_SAMPLES, _DIGEST_SAMPLE_BYTES = 64, 2**16  # of a weight file; files up to 4 MiB are read in full
_FIX_FOREIGN = "choose another folder (run=…), or move it away"


def check_claim(folder: Path) -> None:
    """Raise InputError if a file in a run's folder has one of artel's names, but is not artel's. Writes nothing."""
    check_regular(*(folder / name for name in (*NAMES, MARK)))
    recorded_names = _recorded_names(folder)
    foreign_names = [name for name in NAMES if name not in recorded_names and not _is_available(folder / name)]
    if foreign_names and set(foreign_names) - set(_LOCKS) and _has_lost_mark(folder):
        # Without a result the run has written no model, so this one is the user's.
        foreign_names = [MODEL] if MODEL in foreign_names and not (folder / "result.json").is_file() else []
    # Read again: another process of the run may have written mark and file in the meantime.
    recorded_names = _recorded_names(folder)
    what = "exists but is not from artel: a run in this folder would overwrite it"
    problems = [Problem(str(folder / name), what, _FIX_FOREIGN) for name in foreign_names if name not in recorded_names]
    for name in ("latest", "best"):
        link = folder / CHECKPOINTS / name
        if link.exists() and not link.is_symlink():
            what = "is a folder or a file, but artel keeps a link to a checkpoint there"
            problems.append(Problem(str(link), what, "move it away: artel creates the link again"))
    if problems:
        raise InputError(problems)


def claim_folder(folder: Path, original: Path | None = None) -> str:
    """Create a run's folder and mark it, unless it is marked. A copied folder becomes a separate run.

    Return a note for the user if it is a copy, else "". `original`: from `find_original`, if config.yaml has been
    rewritten. Raise InputError like `check_claim`.
    """
    recorded_names = _recorded_names(folder)
    real_path = os.path.realpath(folder)
    if recorded_names >= set(NAMES) and _read_mark(folder).get("folder") == real_path:
        return ""
    check_claim(folder)
    original = original or find_original(folder)
    # A new folder has no model from artel yet. If the mark was lost, it is unknown what artel wrote.
    mark = _read_mark(folder) or ({} if _has_lost_mark(folder) else {"model": []})
    run_id = mark.get("id") or _newest_run_id(folder) or _new_id()
    if original is not None:  # checkpoints and model keep their id; tracker runs and hosts belong to the original
        mark["former_ids"] = [*mark.get("former_ids", []), run_id]
        run_id = _new_id()
        for name in ("tracker_runs.json", ".secret"):
            (folder / name).unlink(missing_ok=True)
    names = sorted({*recorded_names, *NAMES})
    _write_mark(folder, mark | {"artel": artel.__version__, "id": run_id, "folder": real_path, "names": names})
    return f"{folder} is a copy of {original}; from now on it is a separate run" if original is not None else ""


def find_original(folder: Path) -> Path | None:
    """Return the folder that this run was copied from; None unless both folders exist."""
    mark = _read_mark(folder)
    run_id = mark.get("id") or _newest_run_id(folder)
    recorded = mark.get("folder") or _recorded_run(folder)
    if not run_id or not isinstance(recorded, str) or recorded == os.path.realpath(folder):
        return None
    with suppress(OSError, InputError):
        original = Path(recorded)
        if read_run_id(original) == run_id and not original.samefile(folder):
            return original
    return None


def _recorded_run(folder: Path) -> object:
    """Return the key `run` in config.yaml, for a folder whose mark is missing or has no path."""
    with suppress(OSError, ValueError, yaml.YAMLError):
        line = re.search(r"^run:.*$", (folder / "config.yaml").read_text(encoding="utf-8"), re.MULTILINE)
        return yaml.safe_load(line[0])["run"] if line else None
    return None


def assign_new_id(folder: Path) -> None:
    """Give an emptied folder a new id, so that checkpoints of the earlier run are not used."""
    mark = {key: value for key, value in _read_mark(folder).items() if key not in ("former_ids", "weights")}
    if mark:
        _write_mark(folder, mark | {"id": _new_id()})


def add_former_id(folder: Path, run_id: str) -> None:
    """Accept checkpoints with the id `run_id`, which the same run wrote on another machine."""
    mark = _read_mark(folder)
    if mark and run_id and run_id not in run_ids(folder):
        _write_mark(folder, mark | {"former_ids": [*mark.get("former_ids", []), run_id]})


def run_ids(folder: Path) -> set[str]:
    """Return the ids of the run and of the runs it is a copy of; empty without a mark."""
    mark = _read_mark(folder)
    return {mark["id"], *mark.get("former_ids", [])} if mark else set()


def check_checkpoint_ownership(folder: Path, checkpoints: Iterable[Path]) -> None:
    """Raise InputError for checkpoints that carry the id of another run."""
    ids = run_ids(folder)
    fix = "move it away: this run resumes from its own newest checkpoint"
    problems = [
        Problem(str(path), f"is a checkpoint of another run (id {run_id}, not {read_run_id(folder)})", fix)
        for path in checkpoints
        if ids and (run_id := _checkpoint_run_id(path)) and run_id not in ids
    ]
    if problems:
        raise InputError(problems)


def record_weights(folder: Path) -> None:
    """Record digests of the final model's weights, which artel has just written."""
    mark = _read_mark(folder)
    _write_mark(folder, mark | {"weights": {name: _digest(folder / MODEL / name) for name in _weight_files(folder)}})


def has_weights(folder: Path) -> bool:
    """True if all weights of the final model exist; if the mark was lost, any weight file."""
    recorded = _read_mark(folder).get("weights")
    if recorded:
        return all((folder / MODEL / name).is_file() for name in recorded)
    return any((folder / MODEL).glob("*.safetensors")) or any((folder / MODEL).glob("*.bin"))


def check_weight_ownership(folder: Path) -> None:
    """Raise InputError if the weights in a run's model/ were not written by the run."""
    fix = f"move {folder / MODEL} away and run artel train {folder} to write it again; or use {folder / MODEL} itself"
    what = "was not written by this run: these are the weights of another model"
    problems = [
        Problem(str(folder / MODEL / name), what, fix)
        for name, digest in (_read_mark(folder).get("weights") or {}).items()
        if (folder / MODEL / name).is_file() and _digest(folder / MODEL / name) != digest
    ]
    if problems:
        raise InputError(problems)


def _weight_files(folder: Path) -> list[str]:
    model = folder / MODEL
    recorded_files = _read_mark(folder).get("model") or []
    files = (path.relative_to(model) for path in model.rglob("*.safetensors"))
    return sorted(str(file) for file in files if file.parts[0] in recorded_files)


def _digest(file: Path) -> str:
    """Return a digest of a file's size and _DIGEST_SAMPLES samples of its bytes, fast even for a large model."""
    file_bytes = file.stat().st_size
    digest = xxhash.xxh3_128(b"%d" % file_bytes)
    with file.open("rb") as stream:
        for index in range(_DIGEST_SAMPLES):
            stream.seek(max(0, file_bytes - _DIGEST_SAMPLE_BYTES) * index // (_DIGEST_SAMPLES - 1))
            digest.update(stream.read(_DIGEST_SAMPLE_BYTES))
    return digest.hexdigest()


def _checkpoint_run_id(checkpoint: Path) -> str:
    """Return the id of the run that wrote a checkpoint; empty if it is damaged."""
    with suppress(OSError, ValueError, AttributeError, InputError):
        check_regular(checkpoint / "state.json")
        return str(orjson.loads((checkpoint / "state.json").read_bytes()).get("run", ""))
    return ""


def _newest_run_id(folder: Path) -> str:
    """Return the id in the newest checkpoint, for a folder that was copied without its mark."""
    return next(filter(None, map(_checkpoint_run_id, sorted((folder / CHECKPOINTS).glob("step-*"), reverse=True))), "")


def _new_id() -> str:
    return secrets.token_hex(8)


def record_model_files(folder: Path, names: Iterable[str]) -> None:
    """Record the files that artel wrote into a run's model/."""
    _write_mark(folder, _read_mark(folder) | {"model": sorted(names)})


def foreign_model_files(folder: Path) -> list[Path]:
    """Return files in a run's model/ that artel did not write; [] if the mark was lost."""
    recorded_files = _read_mark(folder).get("model")
    model = folder / MODEL
    if recorded_files is None or not model.is_dir():
        return []
    return sorted(path for path in model.iterdir() if path.name not in recorded_files)


def check_model_ownership(folder: Path) -> None:
    """Raise InputError for files in a run's model/ that artel did not write, before the folder is replaced."""
    what = "is in the run's model, which is about to be removed, but it is not from artel"
    problems = [Problem(str(path), what, "move it away") for path in foreign_model_files(folder)]
    if problems:
        raise InputError(problems)


def read_run_id(folder: Path) -> str:
    """Return the random id of a run's folder; empty without a mark. A folder that is created again has a new id."""
    return str(_read_mark(folder).get("id", ""))


def check_not_moved(folder: Path, expected_id: str) -> None:
    """Raise WorkError if a run's folder no longer has `expected_id`: it was removed, moved or created again."""
    if read_run_id(folder) == expected_id:
        return
    what = "the run's folder was removed or moved during the run; nothing more is written to it"
    fix = "if it was moved, move it back: the same command resumes from its last checkpoint"
    raise WorkError.at(str(folder), what, fix)


def _write_mark(folder: Path, mark: dict[str, Any]) -> None:
    write_file(folder / MARK, orjson.dumps(mark, option=orjson.OPT_INDENT_2))


def _recorded_names(folder: Path) -> set[str]:
    return set(_read_mark(folder).get("names", ()))


def _read_mark(folder: Path) -> dict[str, Any]:
    file = folder / MARK
    try:
        mark = orjson.loads(file.read_bytes())
        name_lists = (mark["names"], mark.get("model", []), mark.get("former_ids", []), list(mark.get("weights", {})))
        if isinstance(mark["id"], str) and all(map(_are_names, name_lists)):
            return mark
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise InputError.at(str(file), f"cannot be read: {error.strerror}", "check its permissions") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    fix = "remove it if every file in this folder is from artel, or choose another folder (run=…)"
    raise InputError.at(str(file), "is not the mark that artel wrote there", fix)


def _are_names(names: object) -> bool:
    return isinstance(names, list) and all(isinstance(name, str) for name in names)


def _is_available(path: Path) -> bool:
    """True if the path does not exist, is an empty folder, or the lock file of a refused run.

    `checkpoints` may be a link to an empty folder on another disk.
    """
    if not os.path.lexists(path):
        return True
    if path.name in _LOCKS:
        with suppress(OSError):
            return not path.is_symlink() and re.fullmatch(rb"(process \d+ on .*\n)*", path.read_bytes()) is not None
        return False
    return path.is_dir() and (path.name == CHECKPOINTS or not path.is_symlink()) and not any(path.iterdir())


def _has_lost_mark(folder: Path) -> bool:
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
