"""Checks before a run: every verb says the same of a wrong run, all in one round; memory is reckoned, not tried."""

import re

import pytest
import torch
import yaml
from huggingface_hub import constants, hf_hub_download
from transformers import GPT2Config, GPT2LMHeadModel

from artel.config import parse_run
from artel.config.schema.quantities import read_seconds
from artel.errors import InputError
from artel.host import Memory
from artel.parallel.mesh import read_parallel_dims
from artel.planning import StartConditions, check_run, machine_limits
from artel.planning.machine_limits import MIN_PROCESS_BYTES, check_memory
from support.hub import Hub, Repo
from support.runs import TINY, merged
from support.stores import bytes_tokenizer

GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2}
HUGE = {"n_layer": 96, "n_embd": 12288, "n_head": 96}
WHEREVER = ("config check", "train", "launch slurm --dry-run")
# `prepare` checks these at once; all others in a process beside it (test_prepare.py), which takes seconds to start.
PREPARED = ("no such tokenizer", "no such text", "in the file and beyond it")


def sections(**changes):
    return changes


def config(**changes):
    return {"model": {"config": GPT2 | changes}}


FROM_X = {"model": {"config": None, "from": "./nowhere"}, "tokenizer": {"train": None}}

# A wrong run file (laid over TINY), what is said of it, once each, and by which verbs.
WRONG = {
    "a key of the model that there is not": (config(n_layers=2), ["n_layers: gpt2 has no such key"]),
    "heads that do not divide the width": (config(n_embd=100, n_head=3), ["model.config: gpt2 cannot be built"]),
    "below zero": (config(n_layer=-1), ["model.config.n_layer: -1 is below zero"]),
    "below zero, but for ids": (config(n_layer=-1, bos_token_id=-1), ["model.config.n_layer: -1 is below zero"]),
    "a word for a number": (config(n_layer="two"), ["n_layer"]),
    "layers without end": (config(n_layer=10**6), ["model.config: n_layer is 1000000"]),
    "positions below the block": (config(n_positions=16), ["data.block: 32 tokens are more than the model's 16"]),
    "vocabulary below the tokenizer's": (config(vocab_size=10), ["model.config.vocab_size: 10 is less than"]),
    "masked with gpt2": (sections(objective="masked"), ["gpt2 has no head for masked tokens"]),
    "no such tokenizer": (sections(tokenizer={"train": None, "from": "./nowhere"}), ["tokenizer.from: ./nowhere"]),
    "no such model": (FROM_X, ["model.from: ./nowhere is not a folder"]),
    "a batch that nothing holds": (sections(train={"batch": 10**18}), ["train.batch"]),
    "a vocabulary of 10**12": (sections(tokenizer={"train": {"vocab": 10**12}}), ["tokenizer.train.vocab"]),
    "threads": (sections(train={"threads": 10**6}), ["train.threads"]),
    "threads on such a machine": (sections(train={"threads": 4096}), ["train.threads: 4,096 threads would"],
                                  ("config check", "train")),
    "a seed of 70 bits": (sections(seed=2**70), ["seed"]),
    "a long store": (sections(data={"store": "x" * 300}), ["data.store"]),
    "a run below a file": (sections(run="run.yaml/run"), ["run: run.yaml/run cannot be a folder"],
                           ("config check",)),
    "a store below a file": (sections(data={"store": "run.yaml/s"}), ["data.store: run.yaml/s cannot be a folder"]),
    "no such text": (sections(data={"sources": [{"path": "nowhere.txt"}]}), ["there is no file nowhere.txt"]),
    "a figure nobody makes": (sections(checkpoint={"best": "bleu"}), ["checkpoint.best: 'bleu' is not a metric"]),
    "a tokenizer for no model": (sections(model={"config": None, "from": "no/such"}),
                                 ["tokenizer.train: a newly", "model.from: there is no folder no/such"],
                                 ("config check", "train")),
    "stages that there are not": (sections(parallel={"pipeline": 8}), ["parallel.pipeline"],
                                  ("config check",)),
    "optimizer and weights": (sections(train={"weights": "bf16", "optimizer": "sgd"}),
                              ["bf16 would lose small steps", "bf16 weights do not compute in fp32"]),
    "more than there is memory": (config(**HUGE), ["GiB in one process, but this machine has"],
                                  ("config check", "train")),
    "in the file and beyond it": (
        merged(sections(train={"batch": "x", "weights": "bf16", "optimizer": "sgd"}, colour=3, seed=-1),
               sections(data={"sources": [{"path": "nowhere.txt"}], "blok": 3}, model={"config": {"n_layers": 3}},
                        checkpoint={"best": "bleu"})),
        ["train.batch", "colour", "seed", "data.blok", "there is no file nowhere.txt", "n_layers", "'bleu'",
         "bf16 would", "bf16 weights do not"],
    ),
    "nothing that only follows": (sections(objective="maskd", model={"config": None, "form": "x"}, track=["jsnl"]),
                                  ["objective: 'maskd' is not", "model.form: there is no such", "'jsnl' is not"]),
}  # fmt: skip


@pytest.fixture
def said(command):
    """What a verb says of a wrong run, a problem a line, without the place in the file."""

    def said(*arguments):
        status, out, err = command(*arguments)
        assert (status, "Traceback" in err, out) == (2, False, ""), err
        return sorted(line for line in err.splitlines() if line.startswith("artel: "))

    return said


@pytest.mark.parametrize("name", WRONG)
def test_every_verb_says_the_same_of_a_wrong_run(name, tmp_path, said, monkeypatch):
    wrong, says, *verbs = WRONG[name]
    monkeypatch.setenv("ARTEL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(merged(merged(TINY, {"run": "run"}), wrong)))
    verbs = [*(verbs[0] if verbs else WHEREVER), *(["prepare"] if name in PREPARED else [])]
    problems = [said(*verb.split(), "run.yaml") for verb in verbs]
    assert all(each == problems[0] for each in problems), problems
    assert len(problems[0]) == len(says), problems[0]
    for text in says:
        assert sum(text in line for line in problems[0]) == 1, problems[0]
    assert all(re.match(r"artel: run\.yaml:\d+: \w|artel: model: its configuration", line) for line in problems[0])
    files = [file.relative_to(tmp_path) for file in tmp_path.rglob("*") if file.is_file()]
    begun = [file for file in files if any(part.endswith(".parts") for part in file.parts)]  # of the text, by prepare
    written = [file.name for file in files if file not in begun and file.suffix != ".lock"]
    assert [name for name in written if not name.startswith(".")] == ["run.yaml"]  # locks, and the mark of the folder


@pytest.mark.slow
def test_a_right_run_passes_and_so_does_one_for_a_cluster(tmp_path, monkeypatch):
    """One that is wrong for this machine alone is right where another trains it."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    run = described(sections())
    check_run(run)
    check_run(described(config(**HUGE)), StartConditions(64, 8, trains_here=False))
    with pytest.raises(InputError, match="GiB"):
        check_run(described(config(**HUGE)), StartConditions(1, 1))
    check_run(described(config(**HUGE) | {"parallel": {"data": "fsdp"}}))  # over as many machines as it takes


def test_what_train_refuses_later_is_said_before(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "metrics.jsonl").write_text("{}")
    for wrong, says in [
        ({"run": "mine"}, r"metrics\.jsonl: exists but is not from artel"),
        *(({"model": {"config": None, "from": name}, "tokenizer": {"train": None}}, r"model\.from")
          for name in ("my model", "my--model", "модель")),
    ]:  # fmt: skip
        with pytest.raises(InputError, match=says):
            check_run(described(wrong), StartConditions(1, 1))
    with pytest.raises(InputError, match=r"data\.from_store: nowhere"):
        check_run(parse_run({**TINY, "data": {"from_store": "nowhere"}, "tokenizer": {}}, {}, {}))


@pytest.mark.slow
def test_a_budget_that_the_first_steps_outlast_is_refused_before_any_text_is_read():
    """Of a GPT-2 on the fastest of machines; the budget that the message asks for, and room, is not."""
    large = merged(config(n_layer=12, n_embd=768, n_head=12), {"data": {"block": 1024}})

    def run(budget):
        return described(merged(large, {"train": {"steps": None, "budget": budget, "batch": 4096}}))

    (problem,) = problems_of(run("1s"))
    assert problem.where.endswith("train.budget")
    assert "1s is too short: at peak speed, this machine needs " in problem.what
    shortest = problem.fix.split()[1]
    assert read_seconds(shortest) > 60
    assert problems_of(run(10 * read_seconds(shortest))) == []


def problems_of(run):
    try:
        check_run(run, StartConditions(1, 1))
    except InputError as error:
        return error.problems
    return []


def test_memory_is_said_of_no_layout_that_is_wrong_itself(tmp_path, said):
    """Nor of this machine by a verb that starts the run elsewhere."""
    wrong = merged(TINY, config(**HUGE) | {"parallel": {"data": "fspd"}})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(wrong))
    assert not any("GiB" in line for line in said("config", "check", "run.yaml"))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(merged(TINY, config(**HUGE) | {"log": {"evry": 1}})))
    assert any("GiB" in line for line in said("config", "check", "run.yaml"))
    elsewhere = said("launch", "slurm", "run.yaml", "--dry-run")
    assert (len(elsewhere), "evry" in elsewhere[0]) == (1, True), elsewhere


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["--data.sources.1.path=x"], "write data.sources.1.path=x"),
        (["--min_lr", "6e-5"], "write train.minimum_learning_rate=…: a fraction of the peak"),
        (["--gradient_accumulation_steps", "4"], "write train.batch=…: samples per optimizer step"),
        (["--load_in_8bit", "true"], "write model.quantize=…: int8"),
        (["--lr", "1e-3"], "train.learning_rate=1e-3"),
        (["-r"], ""),
    ],
)
def test_an_option_that_is_a_key_brings_no_value_of_another_unit(words, advice, command):
    status, _, err = command("train", "run.yaml", *words)
    assert status == 2
    assert advice in err if advice else "model.lora" not in err


def described(wrong):
    return parse_run(merged(TINY, wrong), {}, {(): "run.yaml"})


def on_meta(**sizes):
    with torch.device("meta"):
        return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=1024, n_head=16, **sizes))


# Muon keeps one average of the layers' 25,165,824 numbers in matrices, AdamW two of all others.
MUON = 16 - 4 * 25_165_824 / 77_706_240


@pytest.mark.parametrize(
    ("changes", "world", "on_host", "bytes_each"),
    [
        ({}, 1, 1, 16), ({}, 2, 2, 32), ({}, 4, 2, 32), ({"train": {"weights": "bf16", "precision": "bf16"}}, 1, 1, 12),
        ({"train": {"optimizer": "sgd"}}, 1, 1, 8), ({"train": {"optimizer": "sgd", "momentum": 0.9}}, 1, 1, 12),
        ({"train": {"optimizer": "adafactor"}}, 1, 1, 8.1), ({"train": {"optimizer": "muon"}}, 1, 1, MUON),
        ({"parallel": {"data": "fsdp"}}, 2, 2, 16), ({"parallel": {"data": "fsdp"}}, 4, 2, 8),
        ({"parallel": {"tensor": 2}}, 2, 2, 16), ({"parallel": {"pipeline": 2}}, 2, 2, 16),
        ({"parallel": {"data": "hsdp"}}, 4, 2, 16),
    ],
)  # fmt: skip
def test_memory_is_what_is_held_at_a_step(changes, world, on_host, bytes_each, monkeypatch):
    """Refused with a byte less than weights, gradients and averages take in the processes of this host; not with it."""
    model = on_meta()
    needed = round(model.num_parameters() * bytes_each) + MIN_PROCESS_BYTES * on_host
    run = described(changes)
    grid = read_parallel_dims(run.parallel, world, on_host)
    monkeypatch.setattr(machine_limits, "local_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(machine_limits, "swap_bytes", lambda: 0)
    monkeypatch.setattr(machine_limits, "memory", lambda: Memory(2 * needed, 0, needed))
    check_memory(model, run, grid, on_host)
    monkeypatch.setattr(machine_limits, "memory", lambda: Memory(2 * needed, 0, needed - world))
    with pytest.raises(InputError, match=r"parameters need at least .* GiB"):
        check_memory(model, run, grid, on_host)


def test_frozen_weights_and_adapters_take_no_gradients(monkeypatch):
    """A base of float32 files may stay on the disk; what is converted or quantized is held."""
    model = on_meta()
    count = model.num_parameters()
    lora = {"model": {"config": None, "from": "x", "lora": {"rank": 4}}, "tokenizer": {"train": None}}
    nf4 = merged(lora, {"model": {"quantize": "nf4"}})
    grid = read_parallel_dims(described({}).parallel, 1, 1)
    monkeypatch.setattr(machine_limits, "local_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(machine_limits, "swap_bytes", lambda: 0)
    for changes, dtype, needed in (
        (lora, torch.bfloat16, 4 * count), (nf4, torch.bfloat16, count // 2), (lora, torch.float32, 0)
    ):  # fmt: skip
        model.config.dtype = dtype
        model.config.save_pretrained("x")
        needed += MIN_PROCESS_BYTES
        monkeypatch.setattr(machine_limits, "memory", lambda room=needed: Memory(room, 0, None))
        check_memory(model, described(changes), grid, 1)
        monkeypatch.setattr(machine_limits, "memory", lambda room=needed: Memory(room - 1, 0, None))
        with pytest.raises(InputError, match="parameters need at least"):
            check_memory(model, described(changes), grid, 1)


def test_a_models_folder_is_asked_without_its_weights_being_read(tmp_path, monkeypatch):
    """config.json and the files' headers tell positions, memory and names; the hub is not asked where not wished."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "tiny"
    sizes = {"n_positions": 16, "n_layer": 1, "n_embd": 8, "n_head": 1, "vocab_size": 50}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(folder)
    taken = {"model": {"config": None, "from": str(folder)}, "tokenizer": {"train": None}}
    with pytest.raises(InputError) as error:
        check_run(described(taken))
    assert [problem.where for problem in error.value.problems] == ["run.yaml: model.from", "run.yaml: data.block"]
    assert "holds no tokenizer" in str(error.value)
    with pytest.raises(InputError, match=r"model\.from: there is no folder no/such, and the hub's cache"):
        check_run(described(merged(taken, {"model": {"from": "no/such", "lora": {"rank": 2}}})))
    (folder / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(InputError, match="cannot be loaded: Error while deserializing header"):
        check_run(described(taken))


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub with a model that has a tokenizer, a tokenizer without a model, and a private model."""
    hub = Hub()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "ENDPOINT", hub.address)
    template = "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.address + template)
    tokenizer = {file.name: file.read_bytes() for file in bytes_tokenizer(tmp_path).iterdir()}
    model = {"config.json": GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=300).to_json_string().encode()}
    for name, files in {"base": {**tokenizer, **model}, "tokenizer": tokenizer, "private": model}.items():
        repo = hub.repos[f"me/{name}"] = Repo(name == "private")
        repo.commit("main", "files", files)
    yield hub
    hub.close()


def test_a_model_or_tokenizer_that_no_hub_has_is_refused_at_once(hub, caplog, monkeypatch):
    def absent(model, tokenizer, **changes):
        taken = {"model": {"config": None, "from": model}, "tokenizer": {"train": None, "from": tokenizer}, **changes}
        try:
            check_run(described(taken))
        except InputError as error:
            return {problem.where.split()[-1]: problem.what for problem in error.problems}
        return {}

    assert absent("me/base", "me/tokenizer") == {}
    for wrong in ("me/private", "no/such"):
        said = absent(wrong, wrong)
        assert said.keys() == {"model.from", "tokenizer.from"}
        assert all(
            f"no folder {wrong}, and the hub has no visible model of that name" in what for what in said.values()
        )
    teacher = {"objective": "distill", "distill": {"teacher": "no/teacher"}}
    assert absent("me/base", None, **teacher).keys() == {"distill.teacher"}
    assert not caplog.messages

    for name in hub.files("me/tokenizer"):
        hf_hub_download("me/tokenizer", name)
    hub.refuse("HEAD", "me/base", 503, "down for maintenance")
    assert absent("me/base", "me/tokenizer") == {}
    (message,) = caplog.messages
    assert message.startswith(f"model.from: {hub.address} does not answer")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    said = absent("me/base", "me/tokenizer")  # the tokenizer is in the cache
    assert said.keys() == {"model.from"}
    assert "the hub's cache does not have it" in said["model.from"]
