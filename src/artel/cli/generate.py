"""`artel generate`: generate text with a model."""

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

from artel.cli.common import AsJson, OverrideWords, print_json, print_status
from artel.cli.streams import print_result
from artel.elapsed import pause_elapsed, resume_elapsed
from artel.launching.quiet_libraries import quiet_libraries

if TYPE_CHECKING:
    from artel.inference import OpenedModel
    from artel.inference.batch import Prompt
    from artel.inference.retrieval import Hit
    from artel.objectives import Reply

    AnswerPrompts = Callable[[Sequence[Prompt], int], Generator[dict[str, Any], None, None]]
    """Opens the model and yields the results of prompts, starting at an index."""

_MAX_HITS = 10
_PROGRESS_SECONDS = 10.0


def generate(
    name: Annotated[str, typer.Argument(metavar="MODEL", help="A run folder, a model folder, a hub id or a run file.")],
    overrides: OverrideWords = None,
    prompt: Annotated[str, typer.Option(help="Prompt; - for stdin.")] = "",
    context: Annotated[
        str,
        typer.Option(
            help="Text or file used with --prompt: the text to answer a question from, the second text of a pair, the "
            "answer to score, or the file to search with an embedding model or reranker; - for stdin."
        ),
    ] = "",
    max_new_tokens: Annotated[
        int | None,
        typer.Option(min=1, max=10**8, help="Maximum new tokens (default: 100; for seq2seq, its maximum output)."),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(min=0.0, max=100, help="Sampling temperature; 0 is greedy (default: 0.8; for seq2seq 0)."),
    ] = None,
    top_k: Annotated[int, typer.Option(min=0, max=10**9, help="Sample from the k most likely tokens; 0 for all.")] = 50,
    top_p: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Nucleus sampling: total probability to keep."),
    ] = 1.0,
    beams: Annotated[int | None, typer.Option(min=1, max=100, help="Beam width (seq2seq).")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Random seed; equal seeds give equal texts.")] = 0,
    prompts: Annotated[
        str, typer.Option(metavar="FILE", help="File of prompts: one per line, or JSON Lines. Requires --out.")
    ] = "",
    out: Annotated[
        str,
        typer.Option(metavar="FILE", help="JSON Lines results of --prompts; repeat the command to resume."),
    ] = "",
    best_of: Annotated[int, typer.Option(min=1, max=1000, help="Generate this many answers and keep the best.")] = 1,
    reward: Annotated[
        str, typer.Option(metavar="MODEL", help="Reward model that scores the answers of --best-of.")
    ] = "",
    untrained: Annotated[bool, typer.Option("--untrained", help="Use the model of a run before training.")] = False,
    as_json: AsJson = False,
) -> None:
    """Generate text, streamed: continue it, fill its masks, restore its commas, correct or translate it, as the model
    was trained to.

    Example: artel generate runs/tolstoy --prompt "Пьер закашлялся и" --max-new-tokens 150
    """
    is_one_prompt = not (prompts or out or best_of > 1)  # otherwise prompts are checked before the model
    if is_one_prompt:
        print_status(f"loading {name}")
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
        raise InputError.at(
            "--beams", "cannot be combined with --temperature", "remove one: beam search does not sample"
        )
    if is_one_prompt and not untrained:
        check_model_name(name)
    from artel.inference import open_model, open_untrained
    from artel.inference.batch import Prompt, best_answers, check_reward, generate_answers, weights_checksum
    from artel.inference.retrieval import can_search, search

    options = {"new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    options |= {"beams": beams}

    def load_model() -> OpenedModel:
        opened = open_untrained(load_run(name, Overrides.parse(overrides))) if untrained else open_model(name)
        if beams is not None and "generate" not in opened.decoding.tasks:
            raise InputError.at("--beams", f"is for seq2seq models, but {name} is not one", "remove it")
        return opened

    def open_and_answer(prompts: Sequence[Prompt], start: int) -> Generator[dict[str, Any], None, None]:
        print_status(f"loading {name}")
        opened = load_model()
        sampling = opened.decoding.sampling(**options)
        if best_of == 1:
            return generate_answers(opened, prompts, start, sampling)
        print_status(f"loading {reward}")
        judge = open_model(reward)
        check_reward(opened, judge)
        return best_answers(opened, judge, prompts, start, best_of, sampling)

    if prompts or out:
        _check_files(prompts, out, prompt or context)
        settings = {"overrides": overrides or [], "untrained": untrained, **_settings_to_match(options)}
        if best_of > 1:
            settings |= {"best_of": best_of, "reward": reward, "reward_weights": weights_checksum(reward)}
        _generate_file(name, open_and_answer, prompts, out, settings, as_json)
        return
    text = _read_option("--prompt", prompt)
    if best_of > 1:
        single_prompt = Prompt("--prompt", {"prompt": text}, text)
        _show_best_answer(next(open_and_answer([single_prompt], 0)), best_of, as_json)
        return
    opened = load_model()
    decoding, sampling = opened.decoding, opened.decoding.sampling(**options)
    if context and can_search(opened) and (os.path.isfile(context) or not decoding.needs_context):  # noqa: PTH113
        _show_hits(text, context, search(opened, text, _read_text_or_file(context)), as_json)
        return
    context_text = _read_text_or_file(context) if decoding.needs_context or (context and decoding.takes_context) else ""
    _print_reply(opened, text, decoding.reply(opened.model, text, context_text, sampling), as_json)


def _settings_to_match(options: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that must match to resume a file of results. The model's own choices stay defaults."""
    from artel.generation.generate import Sampling

    chosen = {name: value for name, value in options.items() if value is not None}
    settings = asdict(Sampling(**chosen))
    return settings if "beams" in chosen else {name: value for name, value in settings.items() if name != "beams"}


def _print_reply(opened: OpenedModel, prompt: str, reply: Reply, as_json: bool) -> None:
    chunks = []
    if not as_json and opened.decoding.continues:
        print_result(prompt, end="")
    for chunk in reply.pieces:
        chunks.append(chunk)
        if not as_json:
            print_result(chunk, end="")
    if as_json:
        print_json(reply.to_json or {"prompt": prompt, "text": "".join(chunks)})
        return
    print_result("")
    for note in reply.notes:
        print_status(note)


def _show_hits(query: str, context: str, hits: list[Hit], as_json: bool) -> None:
    """Print the best hits with their line numbers, or all hits as JSON."""
    if as_json:
        print_json({"query": query, "context": context, "hits": [asdict(hit) for hit in hits]})
        return
    prefix = f"{context}:" if os.path.isfile(context) else "line "  # noqa: PTH113
    for hit in hits[:_MAX_HITS]:
        print_result(f"{hit.score:.4f}  {prefix}{hit.line}  {shorten(hit.text, 100, placeholder=' …')}")
    if len(hits) > _MAX_HITS:
        print_status(f"the best {_MAX_HITS} of {len(hits):,} paragraphs (--json prints all)")


def _show_best_answer(result: dict[str, Any], answer_count: int, as_json: bool) -> None:
    if as_json:
        print_json(result)
        return
    print_result(result["text"])
    _, *other_scores = sorted((answer["score"] for answer in result["answers"]), reverse=True)
    listed = ", ".join(f"{score:.4f}" for score in other_scores)
    print_status(f"score {result['score']:.4f}, the best of {answer_count}; the others: {listed}")


def _check_best_of(best_of: int, reward: str, temperature: float | None) -> None:
    """Raise InputError for --best-of without --reward or vice versa, and if all answers would be equal."""
    from artel.errors import InputError

    if best_of > 1 and not reward:
        raise InputError.at("--reward", "--best-of needs a reward model to choose by", "add --reward MODEL")
    if reward and best_of == 1:
        raise InputError.at("--best-of", "must be at least 2 with --reward", "use e.g. --best-of 4, or remove --reward")
    if best_of > 1 and temperature == 0:
        raise InputError.at("--temperature", "0 makes all answers of --best-of equal", "use e.g. --temperature 0.8")


def _check_files(prompts: str, out: str, prompt: str) -> None:
    """Raise InputError for --prompts without --out, or with --prompt."""
    from artel.errors import InputError

    if not prompts:
        raise InputError.at("--out", "requires --prompts", "add --prompts FILE")
    if not out:
        raise InputError.at("--prompts", "requires a file for the results", "add --out FILE")
    if prompt:
        raise InputError.at("--prompt", "cannot be combined with --prompts", "move the prompt to the file")


def _read_option(flag: str, value: str) -> str:
    """Return the value of a flag, or standard input for `-`. Raise InputError if it is not text."""
    from artel.errors import InputError

    try:
        text = sys.stdin.read() if value == "-" else value
        text.encode()
    except UnicodeError as error:
        location = (
            f"byte {error.start}" if isinstance(error, UnicodeDecodeError) else "unpaired surrogate or invalid byte"
        )
        raise InputError.at(flag, f"is not UTF-8 ({location})", "write it in UTF-8") from None
    return text


def _read_text_or_file(text_or_file: str) -> str:
    from artel.errors import InputError
    from artel.storage import check_regular

    if not text_or_file:
        message = "missing: this model needs a text to answer from, a document or an answer to score"
        raise InputError.at("--context", message, "add --context with a text or a file")
    try:
        check_regular(Path(text_or_file))
        return Path(text_or_file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        message = f"{text_or_file} is not UTF-8 (byte {error.start})"
        raise InputError.at("--context", message, "save it as UTF-8") from None
    except (OSError, ValueError):  # not a file, so it is the text itself
        return _read_option("--context", text_or_file)


def _generate_file(
    name: str,
    answer_prompts: AnswerPrompts,
    prompts_file: str,
    out: str,
    settings: dict[str, Any],
    as_json: bool,
) -> None:
    """Answer the unanswered prompts of a file, with progress. Raise InputError if a file cannot be used."""
    from artel.inference.batch import Results, read_prompts, weights_checksum

    prompts = read_prompts(prompts_file)
    with Results.open(out, prompts, {"model": name, "weights": weights_checksum(name)} | settings) as results:
        answered_before = results.result_count
        if answered_before:
            print_status(f"{answered_before:,} of {len(prompts):,} prompts are already answered in {out}")
        token_count = 0
        started = time.monotonic()
        if answered_before < len(prompts):
            new_results = answer_prompts(prompts, answered_before)
            started = time.monotonic()
            with _Progress(answered_before, len(prompts)) as progress, closing(new_results):
                for result in new_results:
                    results.add(result)
                    token_count += result.get("tokens", 0)
                    progress.show(results.result_count, token_count)
        seconds = time.monotonic() - started
    if as_json:
        counts = {
            "prompts": len(prompts),
            "answered": len(prompts) - answered_before,
            "answered_before": answered_before,
        }
        print_json({"out": out, **counts, "tokens": token_count, "seconds": round(seconds, 3)})
        return
    rate = f", {token_count / seconds:,.0f} tokens/s" if token_count else ""
    print_status(f"{len(prompts) - answered_before:,} prompts answered in {seconds:.1f} s{rate}: {shlex.quote(out)}")


class _Progress:
    """Progress on standard error: a bar on a terminal, otherwise a line every ten seconds."""

    def __init__(self, answered: int, prompt_count: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(file=sys.stderr, soft_wrap=True, highlight=False)
        columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
        self._bar = Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=prompt_count, completed=answered, rate="")
        self._prompt_count = prompt_count
        self._started = self._printed = time.monotonic()

    def __enter__(self) -> _Progress:
        pause_elapsed()
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()
        resume_elapsed()

    def show(self, answered: int, token_count: int) -> None:
        now = time.monotonic()
        rate = f"{token_count / max(now - self._started, 1e-9):,.0f} tokens/s" if token_count else ""
        self._bar.update(self._task, completed=answered, rate=rate)
        if self._bar.disable and now - self._printed >= _PROGRESS_SECONDS:
            self._printed = now
            print_status(f"{answered:,} of {self._prompt_count:,} prompts{f', {rate}' if rate else ''}")
