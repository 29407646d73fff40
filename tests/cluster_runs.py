"""Runs that pass through every stage, for each engine."""

from pathlib import Path

from artel.config import dump_run
from stores import run_of
from test_parts import lines_with_repeats


def every_stage(texts: Path, folder: Path, **prepare):
    """Repeated lines, near-duplicates, weights, a budget and a given validation text; `texts` is filled once."""
    files = {"a.jsonl": lines_with_repeats(400, 1), "b.jsonl": lines_with_repeats(60, 2),
             "held.jsonl": lines_with_repeats(20, 1)}  # fmt: skip
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
        "validation": str(texts / "held.jsonl"), "max_bad": 0.1,
        "dedup": {"lines": "line", "near": {"threshold": 0.7}},
    }  # fmt: skip
    return run_of(folder, data=data, tokenizer={"train": {"vocab": 400}}, prepare={"part": 20_000, **prepare})


def killing_itself(folder: Path, **prepare):
    """A run of which one process is ended by SIGKILL, once: as a kernel does it when memory runs out."""
    folder.mkdir(exist_ok=True)
    (folder / "kill_once.py").write_text(
        "import os, signal, pathlib\n"
        "def talk(row):\n"
        "    mark = pathlib.Path(__file__).with_name('killed')\n"
        "    if row['number'] == 90 and not mark.exists():\n"
        "        mark.write_text('')\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return [{'role': 'user', 'content': 'who?'}, {'role': 'assistant', 'content': str(row['number'])}]\n"
    )
    sources = []
    for number in range(4):
        rows = "\n".join(f'{{"number": {number * 30 + row}}}' for row in range(30))
        (folder / f"{number}.jsonl").write_text(rows)
        sources.append({"path": str(folder / f"{number}.jsonl"), "format": "chat", "converter": "kill_once:talk"})
    return run_of(folder, data={"sources": sources}, objective="chat", prepare=prepare)


def written(run, file: Path) -> Path:
    file.write_text(dump_run(run))
    return file
