"""`artel prepare`: prepare the text of a run."""

from __future__ import annotations

from artel.cli.common import AsJson, OverrideWords, RunName, print_json


def prepare(name: RunName, overrides: OverrideWords = None, as_json: AsJson = False) -> None:
    """Clean, deduplicate, split and tokenize the text of a run, unless its token store already exists.

    Example: artel prepare run.yaml data.block=512
    """
    from artel.config import Overrides, read_run_file
    from artel.launching.prepare_run import prepare_run

    prepared = prepare_run(read_run_file(name), Overrides.parse(overrides))
    if as_json:
        ledger = prepared.ledger()
        result = {name: ledger[name] for name in ("documents", "tokens", "bytes")}
        print_json({**result, "store": str(prepared.folder), "made": prepared.is_new})
