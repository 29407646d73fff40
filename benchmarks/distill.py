"""A student of a quarter of its teacher's size, distilled, beside the same student trained alone: The Pile's sample.

    python benchmarks/distill.py --data ../shared/data/pile [--seeds 1 2 3] [--steps 300] [--by-text]

One teacher is trained first on the sample's training texts. Then the student is trained twice for each seed, with the
same steps, batches, order and initial weights: on the tokens alone (objective causal), and by distillation. Shown is
the cross-entropy of the validation texts after the last step and at its best, in nats per token: the same metric of the
same tokens for all. No student reads any other text than the teacher did. Beside it are the size of the teacher's
stored outputs and the seconds they took. With --by-text the student has a tokenizer of its own. Writes
benchmarks/distill.md.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from contest import Contest, Training, hold, read_json_lines

COMMON = {"model_type": "gpt2", "n_head": 4, "n_positions": 128, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
TEACHER = {**COMMON, "n_layer": 4, "n_embd": 192}
STUDENT = {**COMMON, "n_layer": 2, "n_embd": 112}
TRAIN = {"batch": 16, "optimizer": "muon", "learning_rate": 2e-3, "schedule": "wsd", "decay": 0.6, "warmup": 0.02,
         "compile": "off", "weight_decay": 0.1, "betas": [0.9, 0.95]}  # fmt: skip
ABOUT = """GPT-2 models on the sample of The Pile, blocks of 128 tokens, 16 a step; the teacher has 4 layers of 192, the
student 2 of 112. By default forward KL at temperature 1, alpha 0.3, the 64 most likely ids and the rest."""
SETTINGS = ("temperature", "alpha", "top_k")


def arguments(parser):
    parser.add_argument("--data", type=Path, required=True, help="the folder of 00, 01 and val.jsonl.zst")
    parser.add_argument("--steps", type=int, default=300, help="of a student")
    parser.add_argument("--teacher-steps", type=int, default=500)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--alpha", type=float, default=0.3)
    parser.add_argument("--top-k", type=int, default=64)
    parser.add_argument("--by-text", action="store_true", help="teacher and student have tokenizers of their own")


def cases(session):
    options = session.options
    name = "a tokenizer of its own" if options.by_text else "the teacher's tokenizer"
    case = {key: getattr(options, key) for key in ("steps", "teacher_steps", "by_text", *SETTINGS)}
    return {f"{name}, {options.steps} steps": case}


def run_of(training: Training, steps: int, **sections: Any) -> dict[str, Any]:
    folder = training.options.data.resolve()
    texts = [f"{folder}/{number}.jsonl.zst" for number in ("00", "01")]
    return {
        "data": {"sources": [{"path": texts}], "validation": f"{folder}/val.jsonl.zst", "block": 128},
        "train": {**TRAIN, "steps": steps}, "validate": {"every": steps // 2},
        "checkpoint": {"every": steps // 2, "keep": 1, "best": "loss"}, **sections,
    }  # fmt: skip


def student_run(training: Training) -> dict[str, Any]:
    """The run of a student alone; trains the teacher first if there is none."""
    import artel

    case, teacher = training.case, training.data / "teacher"
    if not teacher.is_dir():
        vocabulary = {"vocab": 4096, "pattern": "gpt4"} if case["by_text"] else {"vocab": 2048}
        run = run_of(training, case["teacher_steps"], tokenizer={"train": vocabulary}, model={"config": TEACHER})
        artel.train(training.complete(run) | {"run": str(teacher), "seed": 42})
    own = {"train": {"vocab": 2048}} if case["by_text"] else {"from": str(teacher / "model")}
    return run_of(training, case["steps"], tokenizer=own, model={"config": STUDENT})


def train(training: Training, *, distilled: bool):
    case, run = training.case, student_run(training)
    if distilled:
        settings = {name: case[name] for name in SETTINGS} | {"teacher": str(training.data / "teacher")}
        settings["tokenizer"] = "by_text" if case["by_text"] else "same"
        run |= {"objective": "distill", "distill": settings}
        run["checkpoint"] = run["checkpoint"] | {"best": "cross_entropy"}
    lines = read_json_lines(training.artel(run) / "metrics.jsonl")
    metrics = [line["validation"] for line in lines if "validation" in line]
    losses = [each.get("cross_entropy", each["loss"]) for each in metrics]
    clock = [line["seconds"] for line in lines if "seconds" in line]
    found = {"last": losses[-1], "best": min(losses), "seconds": clock[-1] - clock[0]}
    return found | (stored_outputs(training) | {"agreement": metrics[-1]["agreement"]} if distilled else {})


def stored_outputs(training: Training) -> dict[str, Any]:
    """The teacher's outputs: their size on disk, the seconds they took, and a note about other tokenizers."""
    (file,) = (training.data / "stores").glob("*.teachers/*/manifest.json")
    manifest = json.loads(file.read_text())
    size = sum(shard["bytes"] for shard in manifest["shards"].values())
    return {"mebibytes": size / 2**20, "teacher_seconds": manifest["seconds"], "note": manifest.get("note")}


if __name__ == "__main__":
    hold(Contest(
        __file__, "Distillation: a student of a quarter of its teacher's size", __doc__,
        {"last": "validation cross-entropy, nats per token", "best": "at its best",
         "agreement": "agrees with the teacher", "seconds": "seconds",
         "mebibytes": "teacher's outputs, MiB", "teacher_seconds": "seconds they took"}, "",
        {"student alone": partial(train, distilled=False), "student distilled": partial(train, distilled=True)},
        lambda options, folder: ABOUT, cases, arguments=arguments, seeds=(1, 2, 3),
    ))  # fmt: skip
