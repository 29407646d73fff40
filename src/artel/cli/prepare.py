"""`artel prepare`: text in, a token store out."""

from __future__ import annotations

from artel.cli.common import AsJson, Overrides, RunName, print_json, tell, tell_of_secrets


def prepare(name: RunName, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Clean, unique, split and tokenise a run's text, unless it was done before and is still whole.

    Example: artel prepare run.yaml data.block=512
    """
    from artel.config import load_run
    from artel.preparing import prepare as prepare_store

    run = load_run(name, overrides or [])
    tell_of_secrets(run)
    prepared = prepare_store(run, tell, verify=True)
    ledger = prepared.ledger()
    documents, tokens = ledger["documents"], ledger["tokens"]
    tell(
        f"{documents['read']:,} documents read, {documents['kept']:,} kept, dropped {documents['dropped'] or 'none'} · "
        f"{tokens['train']:,} training and {tokens['validation']:,} validation tokens"
        f"{'' if prepared.made else ' (made before)'}\n{prepared.folder}"
    )
    if as_json:
        result = {"documents": documents, "tokens": tokens, "bytes": ledger["bytes"], "store": str(prepared.folder)}
        print_json({**result, "made": prepared.made})
