"""How fast text becomes a token store on this machine, and how fast the store is read; beside a peer, in turns."""

from __future__ import annotations

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

from artel.diagnostics.bench.command import Finished, run
from artel.diagnostics.bench.components import measure_html, measure_jsonl_zst, measure_read_back
from artel.diagnostics.bench.figures import DEFINITIONS, GIBIBYTE, MEGABYTE, Figure, Tell, about_machine, median, rate
from artel.diagnostics.bench.inputs import Lines, first_of, made_up, taken, tokenizer_folder
from artel.storage import cache_folder

MEASURES = ("end_to_end", "near", "html", "jsonl_zst", "read_back", "memory")

_PACKAGES = ("artel-lm", "tokenizers", "fastokens", "pysimdjson", "orjson", "transformers", "datasets", "numpy")
_START_UP = 200  # documents: enough that some are in the validation split, few enough to take no time


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured, and on which text."""

    size: int
    """Bytes of text; memory is measured on 10 and on 40 times as many."""
    workers: int
    rounds: int
    only: tuple[str, ...]
    """Some of MEASURES."""
    input: str = ""
    """A path of texts; made-up text when empty."""
    tokenizer: str = ""
    """A folder or hub id; trained when empty."""
    peer: Path | None = None
    """A script that does the work of `end_to_end`: `python SCRIPT INPUT.jsonl TOKENIZER CACHE PROCESSES`."""


@dataclass(frozen=True, slots=True)
class Measured:
    """All figures, and what they were measured on."""

    figures: list[Figure]
    peer: Path | None
    about: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        by_name = {figure.name: figure for figure in self.figures}
        names = [name for name in ("end_to_end", "end_to_end_tokenizers") if name in by_name]
        ratios = [by_name[name].more.get("ratio_to_peer") for name in names]
        return {
            **self.about,
            "definitions": DEFINITIONS,
            "ratio_to_peer": next((ratio for ratio in ratios if ratio is not None), None),
            "peer": str(self.peer) if self.peer else None,
            "figures": {name: figure.to_json() for name, figure in by_name.items()},
        }


def measure_prepare(settings: Settings, tell: Tell) -> Measured:
    """Measure what `settings.only` names. Raises InputError (the input), WorkError (a command fails, the disk is full).

    It works in a temporary folder below the cache folder, which needs about three times the size of the largest input.
    """
    place = cache_folder() / "bench"
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place) as name:
        folder = Path(name)
        tell(f"{'reading' if settings.input else 'making up'} {settings.size / MEGABYTE:,.0f} MB of text")
        lines = folder / "text.jsonl"
        text = taken(lines, settings.input, settings.size) if settings.input else made_up(lines, settings.size)
        figures: list[Figure] = []
        source = {"from": settings.input or "made up", "text_bytes": text.text, "documents": text.documents}
        about: dict[str, Any] = {"input": source}
        if {"end_to_end", "near", "memory"} & set(settings.only):
            tell("the tokenizer, which is not measured")
            tokenizer, vocabulary = tokenizer_folder(settings.tokenizer, text, folder / "tokenizer")
            about["tokenizer"] = {"from": settings.tokenizer or "trained", "vocabulary": vocabulary}
            figures += _Commands(settings, folder, tokenizer, text, tell).figures()
        components: dict[str, Callable[[], list[Figure]]] = {
            "html": lambda: measure_html(text, settings.rounds),
            "jsonl_zst": lambda: measure_jsonl_zst(text, folder, settings.rounds),
            "read_back": lambda: measure_read_back(settings.size // 4, folder, settings.rounds),
        }
        for measure in (name for name in components if name in settings.only):
            tell(measure)
            figures += components[measure]()
    about |= {"workers": settings.workers, "rounds": settings.rounds, "machine": about_machine(*_PACKAGES)}
    return Measured(figures, settings.peer, about)


@dataclass(frozen=True, slots=True)
class _Commands:
    """The figures of whole commands: `artel prepare` in its variants, and the peer's script."""

    settings: Settings
    folder: Path
    tokenizer: Path
    text: Lines
    tell: Tell

    def figures(self) -> list[Figure]:
        figures: list[Figure] = []
        if {"end_to_end", "near"} & set(self.settings.only):
            figures += self._rates()
        if "memory" in self.settings.only:
            figures += self._memory()
        return figures

    def _rates(self) -> list[Figure]:
        """Everything that is timed, in turns: each round runs each command once."""
        fast = importlib.util.find_spec("fastokens") is not None
        turns: dict[str, Callable[[Lines], Finished]] = {}
        if "end_to_end" in self.settings.only:
            turns |= {"end_to_end": self._artel} if fast else {}
            turns["end_to_end_tokenizers"] = lambda lines: self._artel(lines, tokenizers_alone=True)
            turns |= {"peer": self._peer} if self.settings.peer else {}
        if "near" in self.settings.only:
            turns["near"] = lambda lines: self._artel(lines, near=True)
        few = first_of(self.text, self.folder / "few.jsonl", _START_UP)
        start_up, rounds = {}, {name: list[Finished]() for name in turns}
        for name, turn in turns.items():
            self.tell(f"{name}: start-up")
            start_up[name] = turn(few)
        for number in range(self.settings.rounds):
            for name, turn in turns.items():
                self.tell(f"{name}: round {number + 1} of {self.settings.rounds}")
                rounds[name].append(turn(self.text))
        timed = {name: _Timed(self.text, few, start_up[name], rounds[name]) for name in turns}
        return self._rate_figures(timed, fast)

    def _rate_figures(self, timed: dict[str, _Timed], fast: bool) -> list[Figure]:
        figures = []
        peer = timed.get("peer")
        work = (
            "from JSON lines to a complete token store (exact duplicates dropped, near-duplicates kept, 5% for "
            "validation)"
        )
        variants = {
            "end_to_end": ("with fastokens", ">= 10"),
            "end_to_end_tokenizers": ("with tokenizers alone", ">= 2"),
        }
        for name, (how, ratio) in variants.items():
            target = f"ratio_to_peer {ratio}"
            definition = f"MB of text over elapsed seconds of `artel prepare` {work}, {how}"
            if name in timed:
                more = {**timed[name].more(), **(timed[name].against(peer) if peer else {})}
                figures.append(Figure(name, timed[name].whole, "MB/s", definition, target if peer else "", more=more))
            elif name == "end_to_end" and "end_to_end_tokenizers" in timed and not fast:
                why = "fastokens is not installed: pip install 'artel-lm[fast]'"
                figures.append(Figure(name, None, "MB/s", definition, target if peer else "", why))
        if peer:
            definition = "MB of text over elapsed seconds of the peer's script, on the same JSON lines, tokenizer and "
            definition += "number of processes"
            figures.append(Figure("peer_end_to_end", peer.whole, "MB/s", definition, more=peer.more()))
        if "near" in timed:
            definition = (
                "MB of text per second of processor time of `artel prepare` without its start-up, from JSON lines to a "
                "complete token store, exact and near-duplicates dropped"
            )
            near = timed["near"]
            figures.append(Figure("near", near.per_core, "MB/s a core", definition, ">= 8", near.why, near.more()))
        return figures

    def _memory(self) -> list[Figure]:
        peaks: dict[int, Finished] = {}
        for times in (10, 40):
            size = times * self.settings.size
            self.tell(f"memory: {size / MEGABYTE:,.0f} MB of made-up text")
            lines = made_up(self.folder / "large.jsonl", size)
            peaks[times] = self._artel(lines, memory=True)
            lines.file.unlink()
        why = "" if all(peak.memory for peak in peaks.values()) else "only Linux has /proc/PID/smaps_rollup"
        figures = []
        for times, peak in peaks.items():
            definition = (
                f"the peak, sampled ten times per second, of PSS summed over `artel prepare` and every process it "
                f"starts, on {times} times --size of made-up text, no near-duplicates; pages of mapped files count"
            )
            resident = peak.resident / GIBIBYTE if peak.resident else None
            more = {"text_bytes": times * self.settings.size, "sum_of_rss": resident}
            value = peak.memory / GIBIBYTE if peak.memory else None
            figures.append(Figure(f"memory_{times}", value, "GiB", definition, "< 2", why, more))
        small, large = peaks[10].memory, peaks[40].memory
        growth = large / small if small and large else None
        definition = "memory_40 over memory_10: 1 is memory that does not grow with the input"
        return [*figures, Figure("memory_growth", growth, "", definition, "1", why)]

    def _artel(
        self, lines: Lines, *, near: bool = False, tokenizers_alone: bool = False, memory: bool = False
    ) -> Finished:
        work = self.folder / "artel"
        work.mkdir()
        data = {
            "sources": [{"path": str(lines.file)}],
            "validation": 0.05,
            "store": str(work / "stores"),
            "dedup": {"exact": True, "near": {} if near else None},
        }
        file = work / "run.yaml"
        tree = {"run": str(work / "run"), "data": data, "tokenizer": {"from": str(self.tokenizer)}}
        file.write_text(yaml.safe_dump(tree, allow_unicode=True), encoding="utf-8")
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
            return run([sys.executable, str(self.settings.peer), *arguments], environment)
        finally:
            shutil.rmtree(work)


@dataclass(frozen=True, slots=True)
class _Timed:
    """The rounds of a command, and its start-up: the same command on almost nothing."""

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
        """MB per second by the clock, start-up included."""
        return rate(self.text.text / MEGABYTE, self.elapsed)

    @property
    def seconds_per_megabyte(self) -> float | None:
        """By the clock, without the start-up."""
        seconds = self.elapsed - self.start_up.elapsed
        amount = (self.text.text - self.few.text) / MEGABYTE
        return seconds / amount if seconds > 0 and amount > 0 else None

    @property
    def per_core(self) -> float | None:
        """MB per second of processor time, without the start-up."""
        return rate((self.text.text - self.few.text) / MEGABYTE, self.processor - self.start_up.processor)

    @property
    def why(self) -> str:
        return "" if self.per_core is not None else "the input is too small: nothing but the start-up; raise --size"

    def more(self) -> dict[str, Any]:
        return {
            "elapsed": [each.elapsed for each in self.rounds],
            "processor": [each.processor for each in self.rounds],
            "start_up": {"elapsed": self.start_up.elapsed, "processor": self.start_up.processor},
            "a_core": self.per_core,
            "a_core_with_start_up": rate(self.text.text / MEGABYTE, self.processor),
        }

    def against(self, peer: _Timed) -> dict[str, Any]:
        """How many times as fast as the peer: whole commands by the clock, and the same without their start-ups."""
        ours, theirs = self.seconds_per_megabyte, peer.seconds_per_megabyte
        return {
            "ratio_to_peer": peer.elapsed / self.elapsed,
            "ratio_to_peer_beyond_start_up": theirs / ours if ours and theirs else None,
        }


def _without_fastokens(folder: Path) -> dict[str, str]:
    """The environment in which no Python process finds fastokens, in whatever way it was started."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("import sys\nsys.modules['fastokens'] = None\n", encoding="utf-8")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}
