"""`artel prepare`: text in, a token store out."""

from __future__ import annotations

from artel.cli.common import AsJson, OverrideWords, RunName, print_json, tell


def prepare(name: RunName, overrides: OverrideWords = None, as_json: AsJson = False) -> None:
    """Clean, unique, split and tokenize a run's text, unless that was done before and nothing is missing.

    Example: artel prepare run.yaml data.block=512
    """
    from artel.config import Overrides, read_run_file
    from artel.launching.prepare_run import prepare_run

    prepared = prepare_run(read_run_file(name), Overrides.parse(overrides), tell)
    if as_json:
        ledger = prepared.ledger()
        result = {name: ledger[name] for name in ("documents", "tokens", "bytes")}
        print_json({**result, "store": str(prepared.folder), "made": prepared.made})
