"""The page of docs/architectures.md, made from the rows of architectures.py."""

from __future__ import annotations

from collections import Counter
from typing import Any

_NAMES = {"causal": "causal", "masked": "masked", "span_qa": "questions"}
_ORDER = ("works", "refused", "differs", "traceback")
IMAGES_TITLE = "## Models that take images"


def images_section(rows: list[dict[str, Any]]) -> str:
    """The part of the page on models that take images."""
    import transformers

    counts = Counter(row["verdict"] for row in rows)
    lines = [
        IMAGES_TITLE,
        "",
        f"Every entry of the mapping of AutoModelForImageTextToText of transformers {transformers.__version__}, saved"
        " tiny; `model.from` trains its [language part](multimodal.md). The whole is opened and",
        "compared as above, and every tensor beside the language part must be the original's to the bit. Made by"
        " `python benchmarks/architectures.py --heads images`.",
        "",
        f"{len(rows)} entries: {', '.join(f'{counts[verdict]} {verdict}' for verdict in (*_ORDER, 'not made'))}."
        " Not made: transformers has no tiny one of the defaults made small here.",
        "",
        "| architecture | artel |",
        "|---|---|",
    ]
    for row in sorted(rows, key=lambda row: row["model_type"]):
        words = f": {_cell(row['words'])}" if row.get("words") else ""
        lines.append(f"| `{row['model_type']}` | {row['verdict']}{words} |")
    return "\n".join([*lines, ""])


def page(rows: list[dict[str, Any]], *, entries: dict[str, int], tolerance: float) -> str:
    """The page of the table, in Markdown. `entries`: how many entries the mapping of each head has."""
    import torch
    import transformers

    images = [row for row in rows if row["objective"] == "images"]
    rows = [row for row in rows if row["objective"] != "images"]
    lines = [
        "# Architectures",
        "",
        f"Every entry of the three mappings of transformers {transformers.__version__} that artel trains, tiny, on a"
        f" processor with PyTorch {torch.__version__.partition('+')[0]}:",
        "three steps by `artel train`'s own loop; saved; opened with transformers, where its logits must be those of"
        f" the model that was trained (to {tolerance:.0e} of the largest);",
        "then the run goes on from its checkpoint of step 2, and must end with the same weights to the bit. Beside it a"
        " plain loop of PyTorch trains the same model (forward with labels, backward, step).",
        "This page is made by `python benchmarks/architectures.py`.",
        "",
        "| head | entries | work | refused in words | differ | tracebacks | a plain loop trains | of these work |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for objective in _NAMES:
        own = [row for row in rows if row["objective"] == objective]
        if own:
            counts = Counter(row["verdict"] for row in own)
            trained = [row for row in own if row["peer"] == "trains"]
            share = sum(row["verdict"] == "works" for row in trained) / max(1, len(trained))
            figures = [len(own), *(counts[verdict] for verdict in _ORDER), len(trained), f"{share:.1%}"]
            lines.append(f"| {_NAMES[objective]} | {' | '.join(map(str, figures))} |")
    left = sum(entries[objective] for objective in _NAMES) - len(rows)
    if left:
        lines += ["", f"{left} further entries were not run: they are not in this table."]
    lines += ["", "## What does not work", ""]
    lines += ["| architecture | head | artel | a plain loop |", "|---|---|---|---|"]
    for row in sorted(rows, key=lambda row: (row["model_type"], row["objective"])):
        if row["verdict"] != "works":
            cells = [f"`{row['model_type']}`", _NAMES[row["objective"]]]
            cells += [f"{row['verdict']}: {_cell(row['words'])}", _cell(row["peer"])]
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "## All", "", "A dash: transformers has no such head. †: a plain loop does not train it.", ""]
    lines += [f"| architecture | {' | '.join(_NAMES.values())} |", "|---|---|---|---|"]
    verdicts = {(row["model_type"], row["objective"]): row for row in rows}
    for model_type in sorted({row["model_type"] for row in rows}):
        found = [verdicts.get((model_type, objective)) for objective in _NAMES]
        cells = ["–" if row is None else row["verdict"] + "†" * (row["peer"] != "trains") for row in found]
        lines.append(f"| `{model_type}` | {' | '.join(cells)} |")
    if images:
        lines += ["", images_section(images).rstrip()]
    return "\n".join([*lines, ""])


def _cell(words: str) -> str:
    """Words of a library within a table: no sign of Markdown among them."""
    return words.replace("|", "/").replace("<", "&lt;").replace("`", "'")[:260]
