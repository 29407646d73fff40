"""Every architecture of transformers, tiny, trained by artel's own loop: writes docs/architectures.md.

    python benchmarks/architectures.py [--out docs/architectures.md] [--only NAME ...] [--heads causal ...]

Each entry of transformers' mappings for causal and masked language models and for questions is built tiny
(tiny_configs.py), trained for three steps as `artel train` trains it, saved, opened with transformers, and its logits
are held against those of the model that was trained. Then the run resumes from its checkpoint of step 2, and its
weights must be the same to the bit. Beside that a plain loop of PyTorch trains the model as transformers has it:
forward with labels, backward, step.

Each entry of the mapping for models that take images is saved tiny as a folder, and `model.from` trains its language
part: then it is the whole that is opened and compared, and what is no part of the language must be the same to the bit.
`--heads images` makes that part of the page alone.

Models are trained one after another, with one thread, each in a fork of a process that has imported everything once,
and with a limit of processor time. What is done is kept in build/architectures.jsonl until the table is written, so a
run that was cut goes on. `--only` writes no table unless --out is given.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from architectures_page import IMAGES_TITLE, images_section, page

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
ROOT = Path(__file__).parents[1]
KEPT = ROOT / "build/architectures.jsonl"
HEADS = {
    "causal": ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    "masked": ("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
    "span_qa": ("AutoModelForQuestionAnswering", "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES"),
    "images": ("AutoModelForImageTextToText", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"),
}
BLOCK, ROWS, STEPS = 64, 4, 3
TOLERANCE = 1e-4  # of the largest logit
MOST = 10**8  # parameters

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    "artel.api artel.launching.start_run artel.training.loop artel.planning artel.api.runs torch._dynamo".split()
)


def entries() -> Iterator[tuple[str, str]]:
    """(head, model type) of every entry of the mappings."""
    from transformers.models.auto import modeling_auto

    for objective, (_, mapping) in HEADS.items():
        for model_type in getattr(modeling_auto, mapping):
            yield objective, model_type


def trained_row(objective: str, model_type: str, folder: Path, seconds: int) -> dict[str, Any]:
    """The row of one entry, made in a fork. It is a fault where the fork ends by itself or takes too long."""
    receiver, sender = _FORKS.Pipe(duplex=False)
    process = _FORKS.Process(target=_in_fork, args=(objective, model_type, folder, seconds, sender))
    process.start()
    sender.close()
    row: dict[str, Any] = {}
    try:
        while receiver.poll(10 * seconds):
            row |= receiver.recv()
        process.kill()
    except EOFError:  # it is done
        pass
    process.join()
    if process.exitcode:
        row |= {"verdict": "traceback", "words": f"the process ended with status {process.exitcode}"}
    return {"objective": objective, "model_type": model_type, **row}


def _in_fork(objective: str, model_type: str, folder: Path, seconds: int, sender: Any) -> None:
    import torch

    gc.freeze()  # what was imported is not looked through
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    peer, sizes = _peer(objective, model_type)
    sender.send({"peer": peer, **sizes})
    sender.send(_artel(objective, model_type, folder))
    sender.close()


def _peer(objective: str, model_type: str) -> tuple[str, dict[str, int]]:
    """What a plain loop makes of the model: "trains", or why it does not; and the number of its parameters."""
    import torch
    import transformers
    from tiny_configs import VOCABULARY, tiny_config
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    sizes: dict[str, int] = {}
    try:
        torch.manual_seed(0)
        values = tiny_config(model_type)
        config = CONFIG_MAPPING[values.pop("model_type")](**values)
        for part in {id(part): part for part in (config, config.get_text_config(decoder=True))}.values():
            part.vocab_size = VOCABULARY
            for name in ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id"):
                if isinstance(getattr(part, name, None), int):
                    setattr(part, name, 2)
            if objective == "causal":
                part.is_decoder = True
        _check_size(objective, config)
        model = getattr(transformers, HEADS[objective][0]).from_config(config).train()
        sizes["parameters"] = model.num_parameters()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        ids = torch.randint(10, 300, (ROWS, BLOCK))  # of the smallest vocabulary among them
        labels = {"labels": ids}
        if objective == "span_qa":
            labels = {"start_positions": torch.full((ROWS,), 3), "end_positions": torch.full((ROWS,), 5)}
        for _ in range(STEPS):
            loss = model(input_ids=ids, **labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return ("trains" if loss.isfinite() else f"its loss is {loss.item()}"), sizes
    except Exception as error:  # each architecture fails in its own way
        return _in_words(error), sizes


def _check_size(objective: str, config: Any) -> None:
    """Raise ValueError for a configuration with sizes that nobody here made small."""
    import torch
    import transformers

    with torch.device("meta"):
        size = getattr(transformers, HEADS[objective][0]).from_config(config).num_parameters()
    if size > MOST:
        raise ValueError(f"{size:,} parameters: its sizes have names that benchmarks/tiny_configs.py does not know")


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _run_file(objective: str, model_type: str, folder: Path) -> dict[str, Any]:
    from tiny_configs import tiny_config

    run: dict[str, Any] = {
        "run": str(folder / "run"),
        "objective": objective,
        "data": {"sources": [{"format": "dummy", "documents": 200}], "validation": 0, "block": BLOCK,
                 "store": str(folder / "stores")},
        "tokenizer": {"train": {"vocab": 300}},
        "model": {"config": _decoder(tiny_config(model_type)) if objective == "causal" else tiny_config(model_type)},
        "train": {"steps": STEPS, "batch": ROWS, "micro_batch": ROWS, "learning_rate": 1e-3, "precision": "fp32",
                  "compile": "off", "activation_checkpointing": "none", "threads": 1},
        "checkpoint": {"every": 2, "keep": 5},
        "prepare": {"workers": 1},
        "track": ["jsonl"],
    }  # fmt: skip
    if objective == "span_qa":
        run["data"]["sources"][0]["kind"] = "questions"
        run["span_qa"] = {"question": 24, "stride": 16}
    if objective == "images":
        run |= {"objective": "causal", "tokenizer": {}, "model": {"from": str(_saved_whole(model_type, folder))}}
    return run


def _decoder(values: dict[str, Any]) -> dict[str, Any]:
    """The values with the key that makes a decoder of an encoder's architecture, where it has one."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        config = CONFIG_MAPPING[values["model_type"]]()
    except Exception:  # its defaults are no model
        return values
    return {**{key: True for key in ("is_decoder", "causal") if getattr(config, key, None) is False}, **values}


def _saved_whole(model_type: str, folder: Path) -> Path:
    """A tiny model that takes images, in bf16 as such models are published, with a tokenizer."""
    import torch
    import transformers
    from tiny_configs import tiny_config
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from artel.config import TokenizerTraining
    from artel.tokens import train_tokenizer

    place = folder / model_type
    if not place.exists():
        torch.manual_seed(0)
        values = tiny_config(model_type)
        config = CONFIG_MAPPING[values.pop("model_type")](**values)
        _check_size("images", config)
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(place)
        texts = iter(["words and words, again and again. " * 50])
        train_tokenizer(texts, TokenizerTraining(vocab=270), encoder=False).save(place)
    return place


def _changed_beside(original: Path, made: Path) -> list[str]:
    """Names of tensors that are no part of the language and differ in any bit."""
    from safetensors.torch import load_file

    from artel.models.loading.language_part import find_language_part, plan_multimodal, plan_part
    from artel.models.loading.model_folder import read_config
    from artel.models.loading.safetensors_files import find_files

    config, _ = read_config(str(original))
    _, whole = find_language_part(config, str(original))
    with find_files(str(original), config) as files:
        plan = plan_part(whole, plan_multimodal(whole, files))
    own = {*plan.key_of_target.values()}
    own |= {key for entry in plan.conversion_of_target.values() for keys in entry.sources.values() for key in keys}
    before, after = (load_file(folder / "model.safetensors") for folder in (original, made))
    return [
        name
        for name in before.keys() | after.keys()
        if name not in own and not (name in before and name in after and before[name].equal(after[name]))
    ]


class _KeepModel:
    """A callback that keeps the model of the last step."""

    model: Any = None

    def __call__(self, run: Any) -> None:
        self.model = run.strategy.model


def _artel(objective: str, model_type: str, folder: Path) -> dict[str, Any]:
    """Train, open with transformers, compare, resume, compare."""
    import artel
    from artel.errors import ArtelError
    from artel.messages import route_messages

    lines: list[str] = []
    keep = _KeepModel()
    try:
        run = _run_file(objective, model_type, folder)
    except Exception as error:  # the model that is to be trained cannot be made
        return {"verdict": "not made", "words": _in_words(error)}
    shutil.rmtree(run["run"], ignore_errors=True)
    try:
        with route_messages(lambda record: lines.append(record.getMessage())):
            artel.train(run, callbacks=[keep])
        trained = keep.model
        difference, changed = _difference(objective, Path(run["run"]) / "model", trained)
        if difference > TOLERANCE:
            words = f"opened with transformers its logits differ by {difference:.0e} of the largest"
            words += f"; opening it changes {', '.join(changed[:3])}" if changed else ""
            trained.save_pretrained(folder / "plain")
            if _difference(objective, folder / "plain", trained)[0] > TOLERANCE:
                words += "; so does what its own save_pretrained writes"
            return {"verdict": "differs", "words": words, "difference": difference}
        if objective == "images":
            beside = _changed_beside(Path(run["model"]["from"]), Path(run["run"]) / "model")
            if beside:
                return {"verdict": "differs", "words": f"beside the language part {len(beside)} tensors: {beside[0]}"}
        _forget_the_end(Path(run["run"]))
        with route_messages(lambda record: lines.append(record.getMessage())):
            artel.train(run, callbacks=[keep])
        if not any("resuming from step 2" in line for line in lines):
            return {"verdict": "differs", "words": "it did not resume from its checkpoint"}
        others = dict(keep.model.state_dict())
        unequal = [name for name, value in trained.state_dict().items() if not value.equal(others[name])]
        if unequal:
            return {"verdict": "differs", "words": f"resumed, {len(unequal)} tensors differ: {unequal[0]}"}
        return {"verdict": "works", "difference": difference}
    except ArtelError as error:
        return {"verdict": "refused", "words": " ".join(error.one_line.split()).replace(str(folder), "")}
    except Exception as error:
        return {"verdict": "traceback", "words": _in_words(error), "traceback": traceback.format_exc()}


def _difference(objective: str, folder: Path, trained: Any) -> tuple[float, list[str]]:
    """How far the logits of the saved model are from those of the trained one, as a share of the largest; and names of
    tensors that differ."""
    import torch
    import transformers

    named = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"][0]
    opened = getattr(transformers, named).from_pretrained(folder).eval()
    inputs = {"use_cache": False} if objective in ("causal", "images") else {}
    ids = torch.randint(10, 250, (2, BLOCK), generator=torch.Generator().manual_seed(1))
    if objective == "span_qa" and (separator := getattr(trained.config, "sep_token_id", None)) is not None:
        ids[ids == separator] = 9
        ids[:, [8, 9, -1]] = separator  # as a question, its context and the end have: longformer counts them
    trained.eval()
    with torch.no_grad():
        ours, theirs = (_logits(model(input_ids=ids, **inputs)) for model in (trained, opened))
    trained.train()
    weights = dict(opened.state_dict())
    changed = [
        name for name, value in trained.state_dict().items() if name in weights and not value.equal(weights[name])
    ]
    return float((ours - theirs).abs().max() / theirs.abs().max()), changed


def _logits(output: Any) -> Any:
    import torch

    if hasattr(output, "logits"):
        return output.logits
    return torch.stack([output.start_logits, output.end_logits])


def _forget_the_end(run: Path) -> None:
    """Leave the run as one that was killed in its third step."""
    shutil.rmtree(run / "checkpoints" / "step-3", ignore_errors=True)
    for path in (run / "checkpoints").iterdir():
        if path.name.startswith("step-") and int(path.name.partition("-")[2]) > 2:
            shutil.rmtree(path)
    shutil.rmtree(run / "model")
    (run / "result.json").unlink()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the page; by default docs/architectures.md, with --only none")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="model types")
    parser.add_argument("--heads", nargs="*", default=list(HEADS), choices=list(HEADS))
    parser.add_argument("--kept", type=Path, default=KEPT, help="where rows are kept until the table is written")
    parser.add_argument("--seconds", type=int, default=120, help="processor time for a model")
    options = parser.parse_args()
    kept: dict[tuple[str, str], dict[str, Any]] = {}
    keeps = not options.only or options.out is not None
    if keeps:
        options.kept.parent.mkdir(exist_ok=True)
        options.kept.touch()
        rows = map(json.loads, options.kept.read_text(encoding="utf-8").splitlines())
        kept = {(row["objective"], row["model_type"]): row for row in rows}
    chosen = [
        (objective, model_type)
        for objective, model_type in entries()
        if objective in options.heads and (not options.only or model_type in options.only)
    ]
    with tempfile.TemporaryDirectory() as folder:
        for number, key in enumerate(chosen, start=1):
            if key in kept:
                continue
            row = kept[key] = trained_row(*key, Path(folder), options.seconds)
            if keeps:
                with options.kept.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
            words = row.get("words") or ("" if row["peer"] == "trains" else f"transformers: {row['peer']}")
            print(f"{number}/{len(chosen)} {key[1]} {key[0]}: {row['verdict']} {words}", flush=True)
            if options.only and "traceback" in row:
                print(row["traceback"])
    rows = [kept[key] for key in chosen]
    out = options.out or (None if options.only else ROOT / "docs/architectures.md")
    if out is not None:
        if options.heads == ["images"] and out.is_file():
            rest, _, _ = out.read_text(encoding="utf-8").partition(f"\n{IMAGES_TITLE}\n")
            out.write_text(f"{rest}\n{images_section(rows)}", encoding="utf-8")
        else:
            made = page(rows, entries=Counter(head for head, _ in entries()), tolerance=TOLERANCE)
            out.write_text(made, encoding="utf-8")
        options.kept.unlink(missing_ok=True)
    print(dict(Counter(row["verdict"] for row in rows)))
    return int(any(row["verdict"] == "traceback" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
