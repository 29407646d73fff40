"""Model folders: weights that are missing, lying or poisoned, configurations out of all bounds, code beside them."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import struct
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
from mutations import change_json, change_safetensors
from safetensors.numpy import load_file, save_file

from hostile.case import Family, Place, Steps, check, edit_json, ends, refused, source, works
from hostile.given import add_rows, given, read_table
from hostile.made import ENCODER, json_lines
from hostile.results import check_trained, has_whole_model, logged_losses

family = Family("model folders")

GENERATE = ("--prompt", "word", "--max-new-tokens", "5")


def weights(place: Place, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the tensors of `model`."""
    tensors = load_file(place / "model/model.safetensors")
    change(tensors)
    save_file(tensors, place / "model/model.safetensors", {"format": "pt"})


def config(place: Place, **values: Any) -> None:
    edit_json(place / "model/config.json", **values)


def _drop(pattern: str) -> Callable[[Place], None]:
    def change(place: Place) -> None:
        def drop(tensors: dict[str, Any]) -> None:
            names = [name for name in tensors if re.search(pattern, name)]
            assert names, f"no tensor is like {pattern}"
            for name in names:
                del tensors[name]

        weights(place, drop)

    return change


def lacking(pattern: str, place: Place) -> Steps:
    """A model without some of its weights is not made up for."""
    place.take_foreign("model")
    _drop(pattern)(place)
    place.write("a.txt", "words of it\n" * 99)
    yield refused("generate", "model", *GENERATE)
    yield refused("chat", "model", "--script", "a.txt", "--new-tokens", 2)
    yield refused("evaluate", "model", "--data", "a.txt", "data.block=8")
    yield refused("export", "model", "exported")
    check(not (place / "exported").exists(), "a model with random weights was written")


for _name, _pattern in {"attention": r"h\.0\.attn\.c_attn\.weight", "norms": r"ln_", "a-bias": r"c_fc\.bias",
                        "embeddings": r"wte", "nearly-all": r"^(?!.*wpe)"}.items():  # fmt: skip
    family.add(f"without-{_name}", lacking, _pattern, quick=False)


def opened(make: Callable[[Place], object], verb: str, right: set[int], place: Place) -> Steps:
    """What a model folder holds is changed, and a verb opens it."""
    place.take_foreign("model")
    make(place)
    if verb == "generate":
        yield ends(right, "generate", "model", *GENERATE)
    elif verb == "train":
        done = yield ends(right, "train", place.run(FROM))
        if done.status == 0:
            check_trained(place)
    else:
        yield ends(right, "export", "model", "exported")


def _evil(place: Place) -> bytes:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {place.trap}",)

    return pickle.dumps({"transformer.wte.weight": Evil()})


def _pickled(place: Place) -> None:
    (place / "model/model.safetensors").unlink()
    place.write("model/pytorch_model.bin", _evil(place))


def _index_out(place: Place) -> None:
    (place / "model/model.safetensors").rename(place / "outside.safetensors")
    names = list(load_file(place / "outside.safetensors"))
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "../outside.safetensors")}
    place.write("model/model.safetensors.index.json", json.dumps(index))


def _own_code(place: Place) -> None:
    place.write("model/modeling_evil.py", f"open({str(place.trap)!r}, 'w')\n")
    config(
        place, model_type="evil", auto_map={"AutoConfig": "modeling_evil.C", "AutoModelForCausalLM": "modeling_evil.M"}
    )


def _tensor(dtype: str, shape: list[int], end: int) -> bytes:
    header = json.dumps({"transformer.wte.weight": {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(min(end, 100))


_OPENED: dict[str, Callable[[Place], object]] = {
    "pickle": _pickled,
    "index-that-leads-out": _index_out,
    "own-code": _own_code,
    "tensor-without-end": lambda place: place.write("model/model.safetensors", _tensor("F32", [2**40, 2**40], 2**62)),
    "layers-below-nothing": lambda place: config(place, n_layer=-1),
    "weights-of-another-model": lambda place: weights(
        place, lambda tensors: [tensors.__setitem__(name, tensors[name][..., :1].copy()) for name in list(tensors)]),
}  # fmt: skip
family.each("{}-generate", opened, _OPENED, "generate", {2})
_FOLDER: dict[str, Any] = {"foreign": ["model"], "run": None}
add_rows(family, "opened", refused("generate", "model", *GENERATE), name="{}-generate", **_FOLDER)
add_rows(
    family, "generation_config", ends({0, 2}, "generate", "model", *GENERATE), name="generation-config-{}",
    content="model/generation_config.json", **_FOLDER,
)  # fmt: skip
_EXPORTED = {"own-code": {0, 2}}
"""Where the code is copied with the rest, and not run, that is right too."""
for _name in ("pickle", "own-code", "layers-below-nothing", "weights-of-another-model"):  # fmt: skip
    family.add(f"{_name}-train", opened, _OPENED[_name], "train", {2})
    family.add(f"{_name}-export", opened, _OPENED[_name], "export", _EXPORTED.get(_name, {2}))


def _poison(value: float) -> Callable[[Place], None]:
    def change(place: Place) -> None:
        weights(place, lambda tensors: [tensor.fill(value) for tensor in tensors.values()])

    return change


family.add("weights-of-nan-generate", opened, _poison(float("nan")), "generate", {1, 2})
family.add("weights-without-end-generate", opened, _poison(float("inf")), "generate", {1, 2})
family.add("weights-of-nan-train", opened, _poison(float("nan")), "train", {1, 2})
family.add("weights-of-nan-export", opened, _poison(float("nan")), "export", {0, 1, 2})
family.add("weights-of-1e38-generate", opened, _poison(1e38), "generate", {0, 1, 2})


def changed(name: str, change: Callable[[bytes, Random], bytes], seed: int, place: Place) -> Steps:
    """Values or bytes of a file changed: refused, or a text, or a loss that failed in words."""
    path = place.take_foreign("model") / name
    path.write_bytes(change(path.read_bytes(), Random(f"{name}:{seed}")))
    yield ends({0, 1, 2}, "generate", "model", *GENERATE)


for _seed in range(3):
    family.add(f"config-changed-{_seed}", changed, "config.json", change_json, _seed)
    family.add(f"weights-changed-{_seed}", changed, "model.safetensors", change_safetensors, _seed)


# Adapters


_ADAPTER = "adapter/run/model"


def _only_a_bin(place: Place) -> None:
    (place / _ADAPTER / "adapter_model.safetensors").unlink()
    place.write(f"{_ADAPTER}/adapter_model.bin", _evil(place))


_OPEN_IT = (refused("generate", _ADAPTER, *GENERATE), refused("export", _ADAPTER, "merged", "--merge"))
"""Neither generated from nor merged."""
_SHARED: dict[str, Any] = {"foreign": ["adapter"], "run": None, "absent": ["merged"]}
add_rows(family, "adapters", *_OPEN_IT, name="adapter-{}", slow=True, **_SHARED)
family.add("adapter-only-a-bin", given(*_OPEN_IT, make=_only_a_bin, **_SHARED), quick=False)


# Architectures from scratch


def architecture(values: dict[str, Any], place: Place) -> Steps:
    """From scratch: losses as a model's that knows nothing, or refused."""
    done = yield ends({0, 2}, "train", place.run({"model": {"config": values}}), fresh=True)
    if done.status == 0:
        losses = logged_losses(place)
        check(bool(losses) and max(losses) < 12 and min(losses) > 2, f"losses {losses}")


for _name, _values in read_table(family, "from_scratch").items():
    family.add(f"from-scratch-{_name}", architecture, {"model_type": _name, **_values}, quick=False)


@family.case
def tokens_that_a_terminal_obeys(place: Place) -> Steps:
    place.take_foreign("model")
    path = place / "model/tokenizer.json"
    tree = json.loads(path.read_text())
    letters = {chr(0x100 + number): number for number in range(32)}  # as GPT-2's alphabet writes control bytes
    vocabulary = tree["model"]["vocab"]
    others = [token for token in vocabulary if token not in letters and len(token) == 1]
    for token, letter in zip(others, [*letters] * 99, strict=False):
        number = vocabulary.pop(token)
        vocabulary[f"{letter}x{number}"] = number
    tree["model"]["merges"] = []
    path.write_text(json.dumps(tree))
    yield ends({0, 2}, "generate", "model", "--prompt", "\x1b[2J", "--max-new-tokens", 60)


def _cut_vocabulary(place: Place) -> None:
    name = "transformer.wte.weight"
    weights(place, lambda tensors: tensors.__setitem__(name, tensors[name][:100]))
    config(place, vocab_size=100)


def nothing_exported(place: Place) -> None:
    check(not (place / "exported").exists(), "something was written")


FROM = {"model": {"config": None, "from": "model"}, "tokenizer": {"train": None}}
family.table(
    export_into_what_is_there=given(
        *(refused("export", "model", target) for target in ("exported", "model", "model/config.json")),
        foreign=["model"], files={"exported/config.json": "mine"}, run=None,
    ),
    model_with_a_tokenizer_trained_anew=given(
        refused("train", "run.yaml"), foreign=["model"], run=[{"model": {"config": None, "from": "model"}}]
    ),
    model_that_goes_on_from_itself=given(
        works("train", "run.yaml"), foreign=["model"], run=[FROM],
        then=lambda place: check(has_whole_model(place), "no model was left"),
    ),
    vocabulary_below_the_tokenizer=given(
        ends({1, 2}, "generate", "model", "--prompt", "Все", "--max-new-tokens", 5), foreign=["model"], run=None,
        make=_cut_vocabulary,
    ),
)  # fmt: skip


@family.case
def model_trained_into_its_own_folder(place: Place) -> Steps:
    place.take_foreign("model")
    for run in ("model", "model/run", "."):
        yield refused("train", place.run(FROM, {"run": run}))


@family.case
def gguf_of_no_type(place: Place) -> Steps:
    place.take_foreign("model")
    yield refused("export", "model", "exported", "--gguf", "../../f99")
    nothing_exported(place)


BASE = {"model": {"config": None, "from": "base"}, "tokenizer": {"train": None, "from": "base"}}


@family.case
def encoder_that_learns_next_tokens(place: Place) -> Steps:
    place.take_foreign("encoder/run/model", "base")
    yield refused("train", place.run(BASE), says=("roberta is an encoder", "objective: masked", "is_decoder"))
    keys = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    yield refused("train", place.run({"model": {"config": keys}}), says=("bert is an encoder",))


@family.slow
def tensors_that_transformers_ignores(place: Place) -> Steps:
    """A layer that predicts one more token: saved again bit for bit with the model, and exported."""
    keys = {"model_type": "glm4_moe", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 2, "intermediate_size": 48, "moe_intermediate_size": 16, "num_experts_per_tok": 2,
            "num_nextn_predict_layers": 1, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1,
            "n_group": 1, "topk_group": 1, "head_dim": 16}  # fmt: skip
    yield works("train", place.run({"run": "first", "model": {"config": keys}, "train": {"steps": 1}}))
    shutil.copytree(place / "first/model", place / "base")
    file = place / "base/model.safetensors"
    tensors = load_file(file)
    extra = {name.replace(".1.", ".2.", 1): -tensor for name, tensor in tensors.items() if "layers.1." in name}
    save_file(tensors | extra, file, {"format": "pt"})
    yield works("train", place.run(BASE, {"train": {"steps": 1}}))
    yield works("export", "run", "exported")
    for folder in ("run/model", "exported"):
        saved = load_file(place / folder / "model.safetensors")
        lacking = [name for name, tensor in extra.items() if not np.array_equal(saved.get(name, ()), tensor)]
        check(not lacking, f"{folder} lacks {lacking}")


@family.slow
def labels_in_another_order(place: Place) -> Steps:
    """The rows of the head follow the names of their labels."""
    rows = [{"text": f"words of it {number}", "label": "abc"[number % 3]} for number in range(60)]
    place.write("a.jsonl", json_lines(rows))
    keys = ENCODER | {"objective": "classification", **source("a.jsonl", format="labels")}
    yield works("train", place.run(keys, {"run": "base-run", "classification": {"labels": ["c", "a", "b"]}}))
    shutil.copytree(place / "base-run/model", place / "base")
    slow = {"train": {"steps": 1, "learning_rate": 1e-12}, "classification": {"labels": ["a", "b", "c"]}}
    yield works("train", place.run(keys, BASE, slow), says=("rows kept: a, b, c",))
    before, after = (load_file(place / folder / "model.safetensors") for folder in ("base", "run/model"))
    head = "classifier.out_proj.weight"
    check(np.allclose(after[head], before[head][[1, 2, 0]]), "the rows of the head are others")
