"""How fast text becomes a token store here, and how fast its blocks are read back; beside the peer, in turns."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from artel.diagnostics.bench import peer
from artel.diagnostics.bench.figures import DEFINITIONS, GIBIBYTE, MEGABYTE, Figure, Tell, median, rate
from artel.diagnostics.bench.inputs import Lines, first_of, made_up, taken, tokenizer_folder
from artel.diagnostics.bench.machine import machine, versions
from artel.diagnostics.bench.processes import Finished, run
from artel.diagnostics.bench.rooms import measure_html, measure_jsonl_zst, measure_read_back
from artel.storage import cache_folder

MEASURES = ("end_to_end", "near", "html", "jsonl_zst", "read_back", "memory")

_PACKAGES = ("artel-lm", "tokenizers", "fastokens", "pysimdjson", "orjson", "transformers", "datasets", "numpy")
_START_UP = 200  # documents: enough that some fall into the validation part, few enough to cost nothing


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured, and on what."""

    size: int
    """Bytes of text; memory is measured on ten and forty times as many."""
    workers: int
    rounds: int
    peer: bool
    only: tuple[str, ...]
    """Of MEASURES."""
    input: str
    """Where the texts are taken from; made up when empty."""
    tokenizer: str
    """A folder or hub id; trained when empty."""


@dataclass(frozen=True, slots=True)
class Measured:
    """All figures, and what they were measured on."""

    figures: list[Figure]
    peer: dict[str, Any] | None
    why_no_peer: str
    about: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        by_name = {figure.name: figure for figure in self.figures}
        found = [by_name[name].more.get("ratio_to_peer") for name in ("end_to_end", "end_to_end_tokenizers")
                 if name in by_name]  # fmt: skip
        return {
            **self.about,
            "definitions": DEFINITIONS,
            "ratio_to_peer": next((ratio for ratio in found if ratio is not None), None),
            "peer": self.peer,
            **({"why": self.why_no_peer} if self.peer is None else {}),
            "figures": {name: figure.to_json() for name, figure in by_name.items()},
        }


def measure_prepare(settings: Settings, tell: Tell) -> Measured:
    """Measure what `settings.only` names. Raises InputError (the input), WorkError (a command fails, the disk is full).

    Works in a folder of its own below the cache folder, which must have room for some three times the largest input,
    and leaves nothing there.
    """
    why_no_peer = _why_no_peer(settings)
    place = cache_folder() / "bench"
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place) as name:
        folder = Path(name)
        tell(f"{'reading' if settings.input else 'making up'} {settings.size / MEGABYTE:,.0f} MB of text")
        lines = folder / "text.jsonl"
        text = taken(lines, settings.input, settings.size) if settings.input else made_up(lines, settings.size)
        figures: list[Figure] = []
        about: dict[str, Any] = {"input": {"from": settings.input or "made up", "text_bytes": text.text,
                                           "documents": text.documents}}  # fmt: skip
        if {"end_to_end", "near", "memory"} & set(settings.only):
            tell("the tokenizer, which is not measured")
            tokenizer, vocabulary = tokenizer_folder(settings.tokenizer, text, folder / "tokenizer")
            about["tokenizer"] = {"from": settings.tokenizer or "trained", "vocabulary": vocabulary}
            commands = _Commands(settings, folder, tokenizer, text, tell)
            figures += commands.figures(with_peer=not why_no_peer)
        rooms: dict[str, Callable[[], list[Figure]]] = {
            "html": lambda: measure_html(text, settings.rounds),
            "jsonl_zst": lambda: measure_jsonl_zst(text, folder, settings.rounds),
            "read_back": lambda: measure_read_back(settings.size // 4, folder, settings.rounds),
        }
        for measure in (name for name in rooms if name in settings.only):
            tell(measure)
            figures += rooms[measure]()
    about |= {"workers": settings.workers, "rounds": settings.rounds, "machine": machine(*_PACKAGES)}
    asked = None if why_no_peer else {"name": "datasets", "as": "transformers' run_clm.py", **versions("datasets")}
    return Measured(figures, asked, why_no_peer, about)


def _why_no_peer(settings: Settings) -> str:
    if "end_to_end" not in settings.only:
        return "end_to_end is not among what was asked for"
    if not settings.peer:
        return "left out by --no-peer"
    return "" if importlib.util.find_spec("datasets") else "datasets is not installed: pip install datasets"


@dataclass(frozen=True, slots=True)
class _Commands:
    """The figures that whole commands give: `artel prepare` in its variants, and the peer's script."""

    settings: Settings
    folder: Path
    tokenizer: Path
    text: Lines
    tell: Tell

    def figures(self, *, with_peer: bool) -> list[Figure]:
        figures: list[Figure] = []
        only = self.settings.only
        if "end_to_end" in only or "near" in only:
            figures += self._rates(with_peer=with_peer)
        if "memory" in only:
            figures += self._memory()
        return figures

    def _rates(self, *, with_peer: bool) -> list[Figure]:
        """Everything that is timed, in turns: a round has each command once."""
        fast = importlib.util.find_spec("fastokens") is not None
        turns: dict[str, Callable[[Lines], Finished]] = {}
        if "end_to_end" in self.settings.only:
            turns |= {"end_to_end": self._artel} if fast else {}
            turns["end_to_end_tokenizers"] = lambda lines: self._artel(lines, tokenizers_alone=True)
            turns |= {"peer": self._peer} if with_peer else {}
        if "near" in self.settings.only:
            turns["near"] = lambda lines: self._artel(lines, near=True)
        few = first_of(self.text, self.folder / "few.jsonl", _START_UP)
        start_up, took = {}, {name: list[Finished]() for name in turns}
        for name, turn in turns.items():
            self.tell(f"{name}: start-up")
            start_up[name] = turn(few)
        for number in range(self.settings.rounds):
            for name, turn in turns.items():
                self.tell(f"{name}: round {number + 1} of {self.settings.rounds}")
                took[name].append(turn(self.text))
        timed = {name: _Timed(self.text, few, start_up[name], took[name]) for name in turns}
        return self._told(timed, fast)

    def _told(self, timed: dict[str, _Timed], fast: bool) -> list[Figure]:
        figures = []
        other = timed.get("peer")
        work = (
            "from JSON lines to a whole token store (exact duplicates dropped, 5% for validation, no near-duplicates)"
        )
        variants = {
            "end_to_end": ("with fastokens", ">= 10"),
            "end_to_end_tokenizers": ("with tokenizers alone", ">= 2"),
        }
        for name, (how, wanted) in variants.items():
            wanted = f"ratio_to_peer {wanted}"
            definition = f"MB of text over elapsed seconds of `artel prepare` {work}, {how}"
            if name in timed:
                more = {**timed[name].more(), **(timed[name].against(other) if other else {})}
                figures.append(Figure(name, timed[name].whole, "MB/s", definition, wanted, more=more))
            elif name == "end_to_end" and "end_to_end_tokenizers" in timed and not fast:
                why = "fastokens is not installed: pip install 'artel-lm[fast]'"
                figures.append(Figure(name, None, "MB/s", definition, wanted, why))
        if other:
            definition = (
                "MB of text over elapsed seconds of the peer's script, from the same JSON lines to Arrow files of "
                "blocks of 1024: load_dataset, map(tokenise), map(group_texts), as many processes"
            )
            figures.append(Figure("peer_end_to_end", other.whole, "MB/s", definition, more=other.more()))
        if "near" in timed:
            definition = (
                "MB of text a second of processor time of `artel prepare` beyond that of its start-up, from JSON lines "
                "to a whole token store, exact and near-duplicates dropped"
            )
            near = timed["near"]
            figures.append(Figure("near", near.a_core, "MB/s a core", definition, ">= 8", near.why, near.more()))
        return figures

    def _memory(self) -> list[Figure]:
        peaks: dict[int, Finished] = {}
        for times in (10, 40):
            size = times * self.settings.size
            self.tell(f"memory: {size / MEGABYTE:,.0f} MB of made-up text")
            lines = made_up(self.folder / "large.jsonl", size)
            peaks[times] = self._artel(lines, memory=True)
            lines.file.unlink()
        why = "" if all(each.memory for each in peaks.values()) else "only Linux tells (/proc/PID/smaps_rollup)"
        figures = [
            Figure(
                f"memory_{times}", each.memory / GIBIBYTE if each.memory else None, "GiB",
                f"the peak, looked at ten times a second, of PSS summed over `artel prepare` and every process it "
                f"starts, on {times} times --size of made-up text, no near-duplicates; pages of mapped files count",
                "< 2", why,
                {"text_bytes": times * self.settings.size,
                 "sum_of_rss": each.resident / GIBIBYTE if each.resident else None},
            )
            for times, each in peaks.items()
        ]  # fmt: skip
        small, large = peaks[10].memory, peaks[40].memory
        grown = large / small if small and large else None
        definition = "memory_40 over memory_10: 1 is memory that does not grow with the input"
        return [*figures, Figure("memory_growth", grown, "", definition, "1", why)]

    def _artel(
        self, lines: Lines, *, near: bool = False, tokenizers_alone: bool = False, memory: bool = False
    ) -> Finished:
        work = self.folder / "artel"
        work.mkdir()
        described = {
            "run": str(work / "run"),
            "data": {"sources": [{"path": str(lines.file)}], "validation": 0.05, "store": str(work / "stores"),
                     "dedup": {"exact": True, "near": {} if near else None}},
            "tokenizer": {"from": str(self.tokenizer)},
        }  # fmt: skip
        file = work / "run.yaml"
        file.write_text(yaml.safe_dump(described, allow_unicode=True), encoding="utf-8")
        command = [sys.executable, "-m", "artel", "prepare", str(file), f"prepare.workers={self.settings.workers}"]
        environment = {"ARTEL_CACHE": str(work / "cache")}
        if tokenizers_alone:
            environment |= _without_fastokens(work / "without_fastokens")
        try:
            return run(command, environment, memory=memory)
        finally:
            shutil.rmtree(work)

    def _peer(self, lines: Lines) -> Finished:
        work = self.folder / "peer"
        work.mkdir()
        arguments = [str(lines.file), str(self.tokenizer), str(work / "cache"), str(self.settings.workers)]
        environment = {"HF_HOME": str(work / "home"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
        try:
            return run([sys.executable, peer.__file__, *arguments], environment)
        finally:
            shutil.rmtree(work)


@dataclass(frozen=True, slots=True)
class _Timed:
    """A command's rounds, and what it takes on almost nothing."""

    text: Lines
    few: Lines
    start_up: Finished
    rounds: list[Finished]

    @property
    def elapsed(self) -> float:
        return median([each.elapsed for each in self.rounds])

    @property
    def processor(self) -> float:
        return median([each.processor for each in self.rounds])

    @property
    def whole(self) -> float | None:
        return rate(self.text.text / MEGABYTE, self.elapsed)

    @property
    def beyond(self) -> float | None:
        """Elapsed seconds for a MB beyond the start-up."""
        seconds = self.elapsed - self.start_up.elapsed
        amount = (self.text.text - self.few.text) / MEGABYTE
        return seconds / amount if seconds > 0 and amount > 0 else None

    @property
    def a_core(self) -> float | None:
        """MB a second of processor time beyond the start-up."""
        return rate((self.text.text - self.few.text) / MEGABYTE, self.processor - self.start_up.processor)

    @property
    def why(self) -> str:
        return "" if self.a_core is not None else "the input is so small that the start-up is all; raise --size"

    def more(self) -> dict[str, Any]:
        return {
            "elapsed": [each.elapsed for each in self.rounds],
            "processor": [each.processor for each in self.rounds],
            "start_up": {"elapsed": self.start_up.elapsed, "processor": self.start_up.processor},
            "a_core": self.a_core,
            "a_core_with_start_up": rate(self.text.text / MEGABYTE, self.processor),
        }

    def against(self, other: _Timed) -> dict[str, Any]:
        """How many times as fast as the other: whole commands by the clock, and the same beyond their start-ups."""
        both = self.beyond is not None and other.beyond is not None
        return {
            "ratio_to_peer": other.elapsed / self.elapsed,
            "ratio_to_peer_beyond_start_up": (other.beyond or 0) / (self.beyond or 1) if both else None,
        }


def _without_fastokens(folder: Path) -> dict[str, str]:
    """The environment in which no Python process finds fastokens, in whatever way it was started."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("import sys\nsys.modules['fastokens'] = None\n", encoding="utf-8")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}
