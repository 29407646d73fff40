"""`artel generate`: write with a model."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any

import typer

from artel.cli.common import AsJson, OverrideWords, echo, print_json
from artel.cli.streams import show
from artel.elapsed import pause, resume
from artel.launching.quiet_libraries import quiet_libraries

if TYPE_CHECKING:
    from artel.inference import OpenedModel
    from artel.inference.batch import Prompt
    from artel.inference.retrieval import Hit
    from artel.objectives import Reply

    Answering = Callable[[Sequence[Prompt], int], Generator[dict[str, Any], None, None]]
    """Opens the model and yields the results of prompts, from a number on."""

_SHOWN_HITS = 10
_PROGRESS_SECONDS = 10.0


def generate(
    name: Annotated[
        str, typer.Argument(metavar="MODEL", help="A run's folder, a model folder, a hub id; or a run file.")
    ],
    overrides: OverrideWords = None,
    prompt: Annotated[str, typer.Option(help="The text to continue; - reads standard input.")] = "",
    context: Annotated[
        str,
        typer.Option(
            help="A text or a file that goes with --prompt: the text to answer a question from, the second text of a "
            "pair, the answer to score, or the file that an embedder or a reranker searches; - reads standard input."
        ),
    ] = "",
    max_new_tokens: Annotated[
        int | None,
        typer.Option(min=1, max=10**8, help="New tokens at most; 100, and for seq2seq the longest output."),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(min=0.0, max=100, help="0 takes the likeliest token; by default 0.8, of seq2seq 0."),
    ] = None,
    top_k: Annotated[int, typer.Option(min=0, max=10**9, help="Choose among the k likeliest; 0 for all.")] = 50,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Choose among the likeliest that sum to p.")] = 1.0,
    beams: Annotated[
        int | None, typer.Option(min=1, max=100, help="seq2seq: beam search with this many beams.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Equal seeds write equal texts.")] = 0,
    prompts: Annotated[
        str, typer.Option(metavar="FILE", help="Many prompts: a text with one a line, or JSON lines. Needs --out.")
    ] = "",
    out: Annotated[
        str, typer.Option(metavar="FILE", help="JSON lines for --prompts; the same command again goes on with them.")
    ] = "",
    best_of: Annotated[int, typer.Option(min=1, max=1000, help="Write this many answers and keep the best.")] = 1,
    reward: Annotated[
        str, typer.Option(metavar="MODEL", help="For --best-of: the model whose score says which one is best.")
    ] = "",
    untrained: Annotated[bool, typer.Option("--untrained", help="A run's model before any training.")] = False,
    as_json: AsJson = False,
) -> None:
    """Continue a text, streamed as it is written; fill its masks, restore its commas, correct or translate it, with a
    model trained for it.

    Example: artel generate runs/tolstoy --prompt "Пьер закашлялся и" --max-new-tokens 150
    """
    is_one_prompt = not (prompts or out or best_of > 1)  # otherwise prompts are checked before the model
    if is_one_prompt:
        echo(f"loading {name}")
    quiet_libraries()
    from artel.config import Overrides, load_run
    from artel.config.model_name import check_model_name
    from artel.errors import InputError

    if overrides and not untrained:
        raise InputError.at(
            "override", f"{overrides[0]} only applies with --untrained", "remove it, or add --untrained"
        )
    _check_best_of(best_of, reward, temperature)
    if beams is not None and temperature:
        raise InputError.at("--beams", "searches for the likeliest text, and a temperature samples", "leave one out")
    if is_one_prompt and not untrained:
        check_model_name(name)
    from artel.inference import open_model, open_untrained
    from artel.inference.batch import Prompt, answers, best_answers, check_reward, weights_checksum
    from artel.inference.retrieval import can_search, search

    given = {"new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    given |= {"beams": beams}

    def opened_model() -> OpenedModel:
        opened = open_untrained(load_run(name, Overrides.parse(overrides))) if untrained else open_model(name)
        if beams is not None and "generate" not in opened.decoding.tasks:
            raise InputError.at("--beams", f"{name} does not search", "remove it: seq2seq models do")
        return opened

    def answers_to(prompts: Sequence[Prompt], start: int) -> Generator[dict[str, Any], None, None]:
        echo(f"loading {name}")
        opened = opened_model()
        sampling = opened.decoding.sampling(**given)
        if best_of == 1:
            return answers(opened, prompts, start, sampling)
        echo(f"loading {reward}")
        judge = open_model(reward)
        check_reward(opened, judge)
        return best_answers(opened, judge, prompts, start, best_of, sampling)

    if prompts or out:
        _check_files(prompts, out, prompt or context)
        settings = {"overrides": overrides or [], "untrained": untrained, **_settings(given)}
        if best_of > 1:
            settings |= {"best_of": best_of, "reward": reward, "reward_weights": weights_checksum(reward)}
        _generate_file(name, answers_to, prompts, out, settings, as_json)
        return
    text = _text_of_flag("--prompt", prompt)
    if best_of > 1:
        one = Prompt("--prompt", {"prompt": text}, text)
        _show_best(next(answers_to([one], 0)), best_of, as_json)
        return
    opened = opened_model()
    decoding, sampling = opened.decoding, opened.decoding.sampling(**given)
    if context and can_search(opened) and (os.path.isfile(context) or not decoding.needs_context):  # noqa: PTH113
        _show_hits(text, context, search(opened, text, _read(context)), as_json)
        return
    context_text = _read(context) if decoding.needs_context or (context and decoding.takes_context) else ""
    _show(opened, text, decoding.reply(opened.model, text, context_text, sampling), as_json)


def _settings(given: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that must match to resume a file of results. The model's own choices stay defaults."""
    from artel.models.generate import Sampling

    chosen = {name: value for name, value in given.items() if value is not None}
    settings = asdict(Sampling(**chosen))
    return settings if "beams" in chosen else {name: value for name, value in settings.items() if name != "beams"}


def _show(opened: OpenedModel, prompt: str, reply: Reply, as_json: bool) -> None:
    written = []
    if not as_json and opened.decoding.continues:
        show(prompt, end="")
    for piece in reply.pieces:
        written.append(piece)
        if not as_json:
            show(piece, end="")
    if as_json:
        print_json(reply.to_json or {"prompt": prompt, "text": "".join(written)})
        return
    show("")
    for note in reply.notes:
        echo(note)


def _show_hits(query: str, context: str, hits: list[Hit], as_json: bool) -> None:
    """Print the best hits with their lines; as JSON, all of them."""
    if as_json:
        print_json({"query": query, "context": context, "hits": [asdict(hit) for hit in hits]})
        return
    place = f"{context}:" if os.path.isfile(context) else "line "  # noqa: PTH113
    for hit in hits[:_SHOWN_HITS]:
        show(f"{hit.score:.4f}  {place}{hit.line}  {shorten(hit.text, 100, placeholder=' …')}")
    if len(hits) > _SHOWN_HITS:
        echo(f"the best {_SHOWN_HITS} of {len(hits):,} paragraphs; all of them with --json")


def _show_best(result: dict[str, Any], count: int, as_json: bool) -> None:
    if as_json:
        print_json(result)
        return
    show(result["text"])
    _, *others = sorted((answer["score"] for answer in result["answers"]), reverse=True)
    listed = ", ".join(f"{score:.4f}" for score in others)
    echo(f"score {result['score']:.4f}, the best of {count}; the others: {listed}")


def _check_best_of(best_of: int, reward: str, temperature: float | None) -> None:
    """Raise InputError for --best-of without --reward or vice versa, and if all answers would be equal."""
    from artel.errors import InputError

    if best_of > 1 and not reward:
        raise InputError.at("--reward", "there is nothing to tell which answer is best", "write --reward MODEL")
    if reward and best_of == 1:
        raise InputError.at("--best-of", "needs more than one answer", "write --best-of 4, or leave --reward out")
    if best_of > 1 and temperature == 0:
        raise InputError.at("--temperature", "0 writes the same answer each time", "write --temperature 0.8")


def _check_files(prompts: str, out: str, single: str) -> None:
    """Raise InputError for --prompts without --out, or with --prompt."""
    from artel.errors import InputError

    if not prompts:
        raise InputError.at("--out", "goes with --prompts", "write --prompts FILE")
    if not out:
        raise InputError.at("--prompts", "needs a file for the results", "write --out FILE")
    if single:
        raise InputError.at("--prompt", "goes without --prompts", "put it into the file")


def _text_of_flag(flag: str, value: str) -> str:
    """Return the value of a flag, or standard input for `-`. Raise InputError if it is not text."""
    from artel.errors import InputError

    try:
        text = sys.stdin.read() if value == "-" else value
        text.encode()
    except UnicodeError as error:
        place = f"byte {error.start}" if isinstance(error, UnicodeDecodeError) else "half a character, or a broken byte"
        raise InputError.at(flag, f"is not UTF-8 ({place})", "write it in UTF-8") from None
    return text


def _read(text_or_file: str) -> str:
    from artel.errors import InputError
    from artel.storage import check_regular

    if not text_or_file:
        what = "a question needs a text to be answered from, a query a document, a reward model an answer"
        raise InputError.at("--context", what, "give a text or a file")
    try:
        check_regular(Path(text_or_file))
        return Path(text_or_file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        what = f"{text_or_file} is not UTF-8 (byte {error.start})"
        raise InputError.at("--context", what, "save it as UTF-8") from None
    except (OSError, ValueError):  # not a file, so it is the text itself
        return _text_of_flag("--context", text_or_file)


def _generate_file(
    name: str,
    answer: Answering,
    prompts_file: str,
    out: str,
    settings: dict[str, Any],
    as_json: bool,
) -> None:
    """Answer the prompts of a file that have no answer yet, with progress. Raise InputError."""
    from artel.inference.batch import Results, read_prompts, weights_checksum

    prompts = read_prompts(prompts_file)
    with Results.open(out, prompts, {"model": name, "weights": weights_checksum(name)} | settings) as results:
        before = results.done
        if before:
            echo(f"{before:,} of {len(prompts):,} prompts are answered in {out}")
        tokens, began = 0, time.monotonic()
        if before < len(prompts):
            made = answer(prompts, before)
            began = time.monotonic()
            with _Progress(before, len(prompts)) as progress, closing(made):
                for result in made:
                    results.add(result)
                    tokens += result.get("tokens", 0)
                    progress.show(results.done, tokens)
        seconds = time.monotonic() - began
    if as_json:
        counts = {"prompts": len(prompts), "answered": len(prompts) - before, "answered_before": before}
        print_json({"out": out, **counts, "tokens": tokens, "seconds": round(seconds, 3)})
        return
    rate = f", {tokens / seconds:,.0f} tokens/s" if tokens else ""
    echo(f"{len(prompts) - before:,} prompts answered in {seconds:.1f} s{rate}: {shlex.quote(out)}")


class _Progress:
    """Progress on standard error: a bar on a terminal, else a line every ten seconds."""

    def __init__(self, done: int, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(file=sys.stderr, soft_wrap=True, highlight=False)
        columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
        self._bar = Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=total, completed=done, rate="")
        self._total = total
        self._began = self._printed = time.monotonic()

    def __enter__(self) -> _Progress:
        pause()
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()
        resume()

    def show(self, done: int, tokens: int) -> None:
        now = time.monotonic()
        rate = f"{tokens / max(now - self._began, 1e-9):,.0f} tokens/s" if tokens else ""
        self._bar.update(self._task, completed=done, rate=rate)
        if self._bar.disable and now - self._printed >= _PROGRESS_SECONDS:
            self._printed = now
            echo(f"{done:,} of {self._total:,} prompts{f', {rate}' if rate else ''}")
