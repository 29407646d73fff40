"""`artel data`: look into a token store, verify one, or make one from existing tokens."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from artel.cli.common import AsJson, OverrideWords, echo, print_json
from artel.cli.streams import write_out
from artel.launching.quiet_libraries import quiet_libraries
from artel.printable import in_lines

if TYPE_CHECKING:
    from artel.preparing.show import TextPiece

app = typer.Typer(help="Look into a token store, or make one of another program's tokens.", no_args_is_help=True)


@app.callback()
def data() -> None:
    """Look into a token store (what a run reads, token for token), or make one of another program's tokens."""


@app.command("show", short_help="Print samples as the model reads them.")
def show(
    name: Annotated[
        str, typer.Argument(metavar="RUN", help="A run file, a recipe's name, a run's folder; or a store.")
    ],
    overrides: OverrideWords = None,
    part: Annotated[Literal["train", "validation"], typer.Option(help="Which part.")] = "train",
    document: Annotated[int | None, typer.Option(min=0, help="The sample of this number alone, from 0.")] = None,
    count: Annotated[int, typer.Option(min=1, help="How many samples, from the first.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Print samples as the model reads them, special tokens and all: blocks of text, conversations, questions.

    What is learned is green, or stands between ⟦ and ⟧ where the output is no terminal; ⟦<mask>→word⟧ is a token that
    is hidden, and what it hides. Of a conversation it is said how many turns are learned, and whether with their ends.
    Of a store that is given itself, the documents are shown as they lie there.

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
    from artel.preparing.show import SampleViews, show_stored

    tokenizer = load_tokenizer(str(store.folder / "tokenizer"))
    chosen = store.train if part == "train" else store.validation
    read = None if config is None else SampleViews(config, store, chosen, tokenizer)
    there = chosen.samples if read is None else len(read)
    if document is not None and document >= there:
        fix = f"its samples are 0 to {there - 1}" if there else "it is empty"
        raise InputError.at("--document", f"the {part} part has no sample {document}", fix)
    if there == 0:
        echo(f"the {part} part has no sample: {chosen.tokens:,} tokens of {chosen.documents:,} documents")
    numbers = range(min(count, there)) if document is None else [document]
    if read is None:
        samples = [show_stored(chosen, number, tokenizer) for number in numbers]
    else:
        samples = [shown for number in numbers for shown in read.views(number)]
    if as_json:
        print_json({"store": str(store.folder), "part": part, "samples": [sample.to_json() for sample in samples]})
        return
    for sample in samples:
        counts = f"{sample.tokens:,} tokens" if read is None else sample.describe_learned()
        named = f" · {sample.name}" if sample.name else ""
        echo(f"{sample.origin} · sample {sample.number}{named} · {counts}")
        write_out("".join(map(_painted, sample.pieces)) + "\n")


@app.command("verify", short_help="Compare every file of a store with its checksum.")
def verify(
    name: Annotated[str, typer.Argument(metavar="STORE", help="A store's folder, as artel prepare prints it.")],
    as_json: AsJson = False,
) -> None:
    """Read every file of a store and compare its checksum with the one it was written with.

    Example: artel data verify ~/.cache/artel/stores/0a1b2c
    """
    from artel.tokens import TokenStore, load_tokenizer

    store = TokenStore(Path(name))
    store.verify(load_tokenizer(str(store.folder / "tokenizer")).vocabulary)
    echo(f"{name}: whole, {store.train.tokens:,} training and {store.validation.tokens:,} validation tokens")
    if as_json:
        print_json({"store": name, "digest": store.digest, "whole": True})


@app.command("import", short_help="Write tokens of another program as a store.")
def import_(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="NAME.bin, Megatron-LM's prefix of .bin and .idx, or a quoted glob.")
    ],
    store: Annotated[Path, typer.Argument(metavar="STORE", help="The folder to write; it is not there yet.")],
    tokenizer: Annotated[str, typer.Option(help="The tokenizer that made the tokens: a folder or a hub id.")],
    validation: Annotated[
        str, typer.Option(help="Share of the documents held out, or PATH of those that are for validation.")
    ] = "0.05",
    as_json: AsJson = False,
) -> None:
    """Write tokens of Megatron-LM (.bin and .idx), nanoGPT or llm.c (.bin) as a token store.

    Example: artel data import 'fineweb/train_*.bin' stores/fineweb --tokenizer gpt2 --validation fineweb/val_0.bin
    """
    from artel.preparing.import_tokens import import_tokens
    from artel.text import count_drops

    quiet_libraries()
    imported = import_tokens(path, store, tokenizer, _share_or_path(validation))
    ledger = imported.ledger
    documents, tokens, changed = ledger["documents"], ledger["tokens"], ledger["changed"]
    rate = sum(tokens.values()) / imported.seconds
    added = f" · an end token was added to {changed['end_added']:,} of them" if changed else ""
    echo(
        f"{documents['read']:,} documents read, {documents['kept']:,} kept, {count_drops(documents['dropped'])}{added}",
        f"{tokens['train']:,} training and {tokens['validation']:,} validation tokens in "
        f"{imported.seconds:.1f} s, {rate / 1e6:.1f} million a second",
        str(imported.folder),
    )
    if as_json:
        result = {"documents": documents, "tokens": tokens, "bytes": ledger["bytes"], "changed": changed}
        timing = {"seconds": imported.seconds, "tokens_per_second": rate}
        print_json({**result, "store": str(imported.folder), **timing})


@app.command("mine", short_help="Find hard negatives by a model.")
def mine_negatives(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A run, a model folder or a hub id that embeds texts.")],
    matches: Annotated[str, typer.Argument(metavar="DATA", help="A file of matches (data.sources.format: matches).")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The file of JSON lines to write; it is not there yet.")],
    negatives: Annotated[int, typer.Option(min=1, help="At most so many for each query, the nearest ones.")] = 4,
    margin: Annotated[
        float, typer.Option(min=0.0, help="A negative's cosine is at least so much below that of a positive.")
    ] = 0.05,
    corpus: Annotated[
        str | None, typer.Option(metavar="FILE", help="More documents: a text a line, or JSON lines.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find hard negatives: documents that a model takes for answers to a query, though the data name others.

    All documents of DATA are looked through, and those of --corpus. OUT is DATA with them, for another run of objective
    embedding.

    Example: artel data mine runs/embed-ru questions.jsonl questions-hard.jsonl --negatives 4
    """
    from artel.inference import open_model
    from artel.inference.retrieval import mine

    quiet_libraries()
    mined = mine(open_model(model), matches, out, negatives=negatives, margin=margin, corpus=corpus)
    echo(
        f"{mined.negatives:,} negatives for {mined.queries:,} queries, from {mined.documents:,} documents; "
        f"{mined.without:,} queries have none",
        str(out),
    )
    if as_json:
        print_json({"out": str(out), **asdict(mined)})


@app.command("classifier", short_help="Train a quality classifier on good and bad texts.")
def classifier(
    good: Annotated[str, typer.Argument(metavar="GOOD", help="Texts like those to keep: a file, folder or glob.")],
    bad: Annotated[str, typer.Argument(metavar="BAD", help="Texts like those to drop.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write; it is not there yet.")],
    document: Annotated[
        Literal["line", "paragraph", "file"], typer.Option(help="What a text of a .txt file is.")
    ] = "line",
    field: Annotated[str, typer.Option(help="The field of JSON lines, Parquet or csv that holds a text.")] = "text",
    as_json: AsJson = False,
) -> None:
    """Train a quality classifier on good and bad texts, for data.clean.classifier: a linear model of words and pairs.

    Example: artel data classifier good.txt bad.txt classifiers/prose
    """
    from dataclasses import asdict

    from artel.config import DataConfig
    from artel.text import Ledger, read_documents
    from artel.text.classifier import train_classifier

    def texts(path: str) -> Iterator[str]:
        source = {"path": [path], "document": document, "field": field}
        data = DataConfig.model_validate({"sources": [source], "validation": 0.0})
        return (read.record.text for read in read_documents(data, Ledger()))

    trained = train_classifier(texts(good), texts(bad), folder)
    echo(f"on held-out texts: accuracy {trained.accuracy:.3f}, AUC {trained.auc:.3f}")
    for kept in trained.kept:
        echo(f"minimum {kept.minimum:g} keeps {kept.good:.1%} of the good texts and {kept.bad:.1%} of the bad ones")
    echo(str(folder))
    if as_json:
        print_json(asdict(trained))


def _share_or_path(validation: str) -> float | str:
    from artel.errors import InputError

    try:
        share = float(validation)
    except ValueError:
        return validation
    if not 0 <= share < 1:
        fix = "write 0.05, or the path of a file of tokens"
        raise InputError.at("--validation", f"{validation} is not a fraction from 0 to below 1", fix)
    return share


def _painted(piece: TextPiece) -> str:
    text = in_lines(piece.text) + (f"→{in_lines(piece.target)}" if piece.target else "")
    if not piece.learned:
        return text
    return f"\x1b[32m{text}\x1b[0m" if sys.stdout.isatty() else f"⟦{text}⟧"
