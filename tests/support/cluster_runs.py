"""Runs that pass through every stage, for each engine."""

from pathlib import Path

from artel.config import dump_run
from support.stores import lines_with_repeats, run_of


def every_stage(texts: Path, folder: Path, **prepare):
    """Repeated lines, near-duplicates, weights, a budget and a given validation text; `texts` is filled once."""
    files = {
        "a.jsonl": lines_with_repeats(400, 1),
        "b.jsonl": lines_with_repeats(60, 2),
        "held.jsonl": lines_with_repeats(20, 1),
    }
    texts.mkdir(exist_ok=True)
    for name, content in files.items():
        if not (texts / name).exists():
            (texts / name).write_text(content)
    fields = {"set_field": "set", "field": "text"}
    data = {
        "sources": [
            {"path": str(texts / "a.jsonl"), **fields, "weight": {"set 0": 2.5, "set 1": 0.5}},
            {"path": str(texts / "b.jsonl"), **fields, "budget_bytes": "10k"},
        ],
        "validation": str(texts / "held.jsonl"),
        "max_bad": 0.1,
        "dedup": {"lines": "line", "near": {"threshold": 0.7}},
    }
    return run_of(folder, data=data, tokenizer={"train": {"vocab": 400}}, prepare={"part": 20_000, **prepare})


KILLED_ONCE = """
import os, signal, pathlib
def talk(row):
    mark = pathlib.Path(__file__).with_name('killed')
    if row['number'] == 90 and not mark.exists():
        mark.write_text('')
        os.kill(os.getpid(), signal.SIGKILL)
    return [{'role': 'user', 'content': 'who?'}, {'role': 'assistant', 'content': str(row['number'])}]
"""
SLOW_IN_JOBS = """
import os, time
def talk(row):
    if 'SLURM_JOB_ID' in os.environ and row['number'] % 30 == 0:
        time.sleep(0.5)
    return [{'role': 'user', 'content': 'who?'}, {'role': 'assistant', 'content': str(row['number'])}]
"""


def converted(folder: Path, converter: str, files: int, store: str, **prepare):
    """A run of so many parts, whose rows pass through a converter of the user's own."""
    folder.mkdir(exist_ok=True)
    sources = []
    for number in range(files):
        file = folder / f"{number}.jsonl"
        if not file.exists():
            file.write_text("\n".join(f'{{"number": {number * 30 + row}}}' for row in range(30)))
        sources.append({"path": str(file), "format": "chat", "converter": "talking:talk"})
    if not (folder / "talking.py").exists():
        (folder / "talking.py").write_text(converter)
    data = {"sources": sources, "store": str(folder / store)}
    return run_of(folder, data=data, objective="chat", prepare=prepare)


def written(run, file: Path) -> Path:
    file.write_text(dump_run(run))
    return file
