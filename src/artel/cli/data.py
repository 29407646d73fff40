"""`artel data`: inspect or verify a token store, import tokens, select training texts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from artel.cli.common import AsJson, OverrideWords, print_json, print_status
from artel.cli.streams import write_stdout
from artel.launching.quiet_libraries import quiet_libraries
from artel.printable import escape_lines

if TYPE_CHECKING:
    from artel.preparing.sample_text import TextSpan

app = typer.Typer(help="Inspect a token store, or import tokens into one.", no_args_is_help=True)


@app.callback()
def data() -> None:
    """Inspect a token store (the samples of a run, token by token), or import tokens into one."""


@app.command("show", short_help="Print samples as the model reads them.")
def show(
    name: Annotated[
        str, typer.Argument(metavar="RUN", help="A run file, a recipe name, a run folder or a token store.")
    ],
    overrides: OverrideWords = None,
    part: Annotated[Literal["train", "validation"], typer.Option(help="Split to print.")] = "train",
    document: Annotated[int | None, typer.Option(min=0, help="Print only this sample, counted from 0.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Number of samples to print.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Print samples as the model reads them, including special tokens: blocks of text, conversations, questions.

    Trained tokens are green, or between ⟦ and ⟧ if the output is not a terminal. ⟦<mask>→word⟧ is a masked token with
    its target. For a conversation, the number of trained turns is printed, and whether their end tokens are trained.
    For a token store, documents are printed as stored.

    Example: artel data show run.yaml --count 5
    """
    from artel.config import Overrides, load_run
    from artel.errors import InputError
    from artel.preparing import prepare
    from artel.tokens import TokenStore, load_tokenizer

    quiet_libraries()
    is_store = (Path(name) / "manifest.json").is_file()
    config = None if is_store else load_run(name, Overrides.parse(overrides))
    if config is None:
        store = TokenStore(Path(name))
    else:
        prepared = prepare(config)
        config, store = prepared.config, prepared.open()
    from artel.preparing.sample_text import SampleViews, stored_sample_text

    tokenizer = load_tokenizer(str(store.folder / "tokenizer"))
    split = store.train if part == "train" else store.validation
    views = None if config is None else SampleViews(config, store, split, tokenizer)
    num_samples = split.samples if views is None else len(views)
    if document is not None and document >= num_samples:
        fix = f"its samples are 0 to {num_samples - 1}" if num_samples else "it is empty"
        raise InputError.at("--document", f"the {part} split has no sample {document}", fix)
    if num_samples == 0:
        print_status(f"the {part} split has no samples: {split.tokens:,} tokens of {split.documents:,} documents")
    indices = range(min(count, num_samples)) if document is None else [document]
    if views is None:
        samples = [stored_sample_text(split, index, tokenizer) for index in indices]
    else:
        samples = [sample for index in indices for sample in views.views(index)]
    if as_json:
        print_json({"store": str(store.folder), "part": part, "samples": [sample.to_json() for sample in samples]})
        return
    for sample in samples:
        counts = f"{sample.num_tokens:,} tokens" if views is None else sample.describe_learned()
        name_suffix = f" · {sample.name}" if sample.name else ""
        print_status(f"{sample.origin} · sample {sample.index}{name_suffix} · {counts}")
        write_stdout("".join(map(_highlight, sample.spans)) + "\n")


@app.command("verify", short_help="Verify the checksums of a token store.")
def verify(
    name: Annotated[str, typer.Argument(metavar="STORE", help="Folder of a token store, as printed by artel prepare.")],
    as_json: AsJson = False,
) -> None:
    """Read every file of a token store and compare it with its recorded checksum.

    Example: artel data verify ~/.cache/artel/stores/0a1b2c
    """
    from artel.tokens import TokenStore, load_tokenizer

    store = TokenStore(Path(name))
    store.verify(load_tokenizer(str(store.folder / "tokenizer")).vocabulary)
    print_status(f"{name}: complete, {store.train.tokens:,} training and {store.validation.tokens:,} validation tokens")
    if as_json:
        print_json({"store": name, "digest": store.digest, "whole": True})


@app.command("import", short_help="Import tokens of another program into a token store.")
def import_(
    path: Annotated[
        str,
        typer.Argument(metavar="PATH", help="NAME.bin, the prefix of Megatron-LM's files, or a quoted glob."),
    ],
    store: Annotated[Path, typer.Argument(metavar="STORE", help="Folder to write; it must not exist yet.")],
    tokenizer: Annotated[str, typer.Option(help="Tokenizer of the tokens: a folder or a hub id.")],
    validation: Annotated[
        str, typer.Option(help="Fraction of documents to hold out, or the path of validation tokens.")
    ] = "0.05",
    as_json: AsJson = False,
) -> None:
    """Import tokens of Megatron-LM (.bin and .idx), nanoGPT or llm.c (.bin) into a token store.

    Example: artel data import 'fineweb/train_*.bin' stores/fineweb --tokenizer gpt2 --validation fineweb/val_0.bin
    """
    from artel.preparing.import_tokens import import_tokens
    from artel.text import count_drops

    quiet_libraries()
    imported = import_tokens(path, store, tokenizer, _fraction_or_path(validation))
    ledger = imported.ledger
    documents, tokens, changed = ledger["documents"], ledger["tokens"], ledger["changed"]
    rate = sum(tokens.values()) / imported.seconds
    added = f" · an end token was added to {changed['end_added']:,} documents" if changed else ""
    print_status(
        f"{documents['read']:,} documents read, {documents['kept']:,} kept, {count_drops(documents['dropped'])}{added}",
        f"{tokens['train']:,} training and {tokens['validation']:,} validation tokens in "
        f"{imported.seconds:.1f} s, {rate / 1e6:.1f} million tokens/s",
        str(imported.folder),
    )
    if as_json:
        result = {"documents": documents, "tokens": tokens, "bytes": ledger["bytes"], "changed": changed}
        timing = {"seconds": imported.seconds, "tokens_per_second": rate}
        print_json({**result, "store": str(imported.folder), **timing})


@app.command("mine", short_help="Mine hard negatives with an embedding model.")
def mine_negatives(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Embedding model: a run, a model folder or a hub id.")],
    matches: Annotated[str, typer.Argument(metavar="DATA", help="File of matches (data.sources.format: matches).")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="JSON Lines file to write; it must not exist yet.")],
    negatives: Annotated[int, typer.Option(min=1, help="Maximum negatives per query; the nearest are chosen.")] = 4,
    corpus: Annotated[
        str | None, typer.Option(metavar="FILE", help="Additional documents: one text per line, or JSON Lines.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Mine hard negatives: documents that a model ranks near a query, although the data do not list them as positives.

    All documents of DATA and --corpus are candidates. OUT is DATA with these negatives, for another run of objective
    embedding.

    Example: artel data mine runs/embed-ru questions.jsonl questions-hard.jsonl --negatives 4
    """
    from artel.inference import open_model
    from artel.inference.retrieval import mine

    quiet_libraries()
    mined = mine(open_model(model), matches, out, negatives=negatives, corpus=corpus)
    print_status(
        f"{mined.negatives:,} negatives for {mined.queries:,} queries, from {mined.documents:,} documents; "
        f"{mined.without:,} queries have no negatives",
        str(out),
    )
    if as_json:
        print_json({"out": str(out), **asdict(mined)})


@app.command("classifier", short_help="Train a quality classifier on good and bad texts.")
def classifier(
    good: Annotated[
        str, typer.Argument(metavar="GOOD", help="Examples of texts to keep, one per line: a file, folder or glob.")
    ],
    bad: Annotated[str, typer.Argument(metavar="BAD", help="Examples of texts to drop.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write; it must not exist yet.")],
    field: Annotated[str, typer.Option(help="Field with the text in JSON Lines, Parquet or CSV files.")] = "text",
    as_json: AsJson = False,
) -> None:
    """Train a quality classifier for data.clean.classifier: a linear model of words and word pairs.

    Example: artel data classifier good.txt bad.txt classifiers/prose
    """
    from artel.config import DataConfig
    from artel.text import Ledger, read_documents
    from artel.text.classifier import train_classifier

    def read_texts(path: str) -> Iterator[str]:
        source = {"path": [path], "document": "line", "field": field}
        data = DataConfig.model_validate({"sources": [source], "validation": 0.0})
        return (document.record.text for document in read_documents(data, Ledger()))

    trained = train_classifier(read_texts(good), read_texts(bad), folder)
    print_status(f"on held-out texts: accuracy {trained.accuracy:.3f}, AUC {trained.auc:.3f}")
    for row in trained.thresholds:
        print_status(
            f"minimum {row.minimum:g} keeps {row.good:.1%} of the good texts and {row.bad:.1%} of the bad texts"
        )
    print_status(str(folder))
    if as_json:
        print_json(trained.to_json())


def _fraction_or_path(validation: str) -> float | str:
    from artel.errors import InputError

    try:
        fraction = float(validation)
    except ValueError:
        return validation
    if not 0 <= fraction < 1:
        fix = "use e.g. 0.05, or the path of a file of tokens"
        raise InputError.at("--validation", f"{validation} is not a fraction (at least 0, below 1)", fix)
    return fraction


def _highlight(span: TextSpan) -> str:
    text = escape_lines(span.text) + (f"→{escape_lines(span.target)}" if span.target else "")
    if not span.is_learned:
        return text
    return f"\x1b[32m{text}\x1b[0m" if sys.stdout.isatty() else f"⟦{text}⟧"
