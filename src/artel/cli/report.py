"""`artel report`: what a run has done."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from artel.cli.common import AsJson, print_json, tell
from artel.launching.quiet_libraries import quiet_libraries


def report(
    folder: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run.")],
    compressor: Annotated[
        bool, typer.Option("--compressor", help="Compare bits per byte with xz -9 on the same validation text.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Draw a run's loss as a curve, and say what its newest validation found.

    Example: artel report runs/demo --compressor
    """
    from artel.reports.report import curve, read_metrics
    from artel.training.run_folder import RunFolder

    metrics = read_metrics(RunFolder(Path(folder)).metrics, tell)
    validated = [line for line in metrics if "validation" in line]
    result: dict[str, Any] = {
        "steps": metrics[-1]["step"] if metrics else 0,
        **(validated[-1] if validated else {}),
    }
    tell(*curve(metrics))
    if validated:
        figures = validated[-1]["validation"].items()
        shown = " · ".join(f"{name} {'NaN' if value is None else f'{value:.4f}'}" for name, value in figures)
        tell(f"validation: {shown}")
    if compressor:
        result["compressor"] = _compressor(folder)
        tell(
            f"bits per byte of the same validation text: xz -9 {result['compressor']['xz']:.3f}; "
            f"xz -9 after the training text {result['compressor']['xz_after_training_text']:.3f}"
        )
    if as_json:
        print_json(result)


def _compressor(folder: str) -> dict[str, float]:
    quiet_libraries()
    from artel.config import load_run
    from artel.preparing import prepare
    from artel.reports.report import compression

    prepared = prepare(load_run(folder), tell)
    store = prepared.open()
    return compression(store.train, store.validation, prepared.tokenizer())
