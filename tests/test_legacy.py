"""Configurations of older scripts: read as runs, converted to run files, nothing lost in silence."""

import json
import re

import pytest
import yaml

from artel.config import Overrides, load_run
from artel.config.converters.tools import convert
from artel.errors import InputError
from support.runs import artel, refused, succeed, write_run

OLD = {"inputs_path": "in.csv", "outputs_path": "out.csv", "model_path": "m", "epochs": 3, "batch_size": 32,
       "learning_rate": 5e-5, "world_size": 2}  # fmt: skip
# For each key of the recipe's .cfg another value than the shared file has.
OTHER = {"model": "roberta-base", "gpu": "False", "loss": "focal", "apex_level": "O0", "best_metric": "loss",
         "best_order": "<", "experiment_name": "other", "dump_dir": "elsewhere"}  # fmt: skip


@pytest.fixture
def cfg(shared_data):
    return (shared_data / "configs" / "neuro_test_bert.cfg").read_text()


def write_json(path, **changes):
    keys = {key: value for key, value in (OLD | changes).items() if value is not ...}
    path.write_text(json.dumps(keys))
    return path


def convert_cfg(text, place):
    """The run file, and what is told of keys that it does not hold, or not as they were meant."""
    converted = convert(text, place)
    return converted.run, converted.not_carried + converted.differs


def values_of(text):
    return dict(re.findall(r"^(\w+)\s*=\s*(.*)$", text, re.MULTILINE))


def another(key, value):
    if key in OTHER:
        return OTHER[key]
    if value in ("True", "False"):
        return "False" if value == "True" else "True"
    if value == "None":
        return "7" if key == "seed" else "some/file"
    return "3" if re.fullmatch(r"[\d.e-]+", value) else "other"


# The JSON of seven keys


def test_the_old_json_is_a_run(shared_data):
    run = load_run(
        str(shared_data / "configs" / "masked_lm_cpu.json"), Overrides.parse(["train.batch=128", "data.block=64"])
    )
    (source,) = run.data.sources
    assert (source.path, source.format, source.outputs) == (["labeled_dataset.csv"], "pairs", "")
    assert (run.objective, run.model.from_, run.parallel.data) == ("masked", "model", 2)
    assert (run.train.epochs, run.train.learning_rate, run.run) == (3, 5e-5, "runs/masked_lm_cpu")
    assert (run.train.batch, run.data.block) == (128, 64)  # the overrides are laid over it


def test_each_process_had_the_batch_size_and_outputs_may_lie_elsewhere(tmp_path):
    run = load_run(str(write_json(tmp_path / "old.json")))
    assert (run.train.batch, run.data.sources[0].outputs) == (64, "out.csv")
    run = load_run(str(write_json(tmp_path / "old.json", world_size=...)))
    assert (run.train.batch, run.parallel.data) == (32, 1)
    (tmp_path / "old.json").write_text(json.dumps(OLD, indent="\t"))
    assert load_run(str(tmp_path / "old.json")).train.epochs == 3


def test_all_problems_of_the_json_at_once(tmp_path):
    file = write_json(tmp_path / "old.json", epochs=True, batch_size=-4, learning_rate="much", world_size=1.5,
                      model_path="", outputs_path=..., input_path="x", colour=1)  # fmt: skip
    with pytest.raises(InputError) as error:
        load_run(str(file))
    for part in ("input_path: there is no such key\n    did you mean inputs_path?", "colour: there is no such key",
                 "epochs: True is not a number", "batch_size: -4 is below 1", "learning_rate: 'much' is not a number",
                 "world_size: 1.5 is not a whole number", "model_path: '' is not a path",
                 "outputs_path: is missing"):  # fmt: skip
        assert f"{file}: {part}" in str(error.value)
    assert len(error.value.problems) == 8
    assert all(problem.fix for problem in error.value.problems)


@pytest.mark.parametrize("changes", [{"learning_rate": 0}, {"epochs": -1}, {"epochs": None}, {"model_path": 3}])
def test_a_wrong_value_is_refused(tmp_path, changes):
    with pytest.raises(InputError, match=next(iter(changes))):
        load_run(str(write_json(tmp_path / "old.json", **changes)))


def test_configurations_of_deepspeed_and_of_models_are_no_runs(tmp_path, shared_data):
    deepspeed, bare = tmp_path / "ds.json", tmp_path / "bare.json"
    deepspeed.write_text('{"train_batch_size": "auto", "zero_optimization": {"stage": 3}}')
    bare.write_text('{"hidden_size": 32, "vocab_size": 100}')
    for file in (deepspeed, bare, *sorted((shared_data / "tokenizers").glob("*/config.json"))):
        says = r"is a model's config\.json, not a run\n.*model: \{from: FOLDER\}"
        if file == deepspeed:
            says = r"is a DeepSpeed configuration, not a run\n.*parallel: \{deepspeed: .*ds\.json\}"
        for read in (lambda: load_run(str(file)), lambda: convert(file.read_text(), str(file))):  # noqa: B023
            with pytest.raises(InputError, match=says):
                read()


# The .cfg


def test_the_cfg_becomes_a_run_file(cfg):
    tree, left = convert_cfg(cfg, "test.cfg")
    assert tree == {
        "run": "./results/test", "objective": "span_qa",
        "data": {"block": 512, "sources": [{"format": "dummy", "kind": "questions"}]},
        "model": {"from": "bert-base-uncased"},
        "span_qa": {
            "heads": "five", "question": 64, "stride": 15, "class_loss": "smooth", "smoothing": 0.01,
            "weights": {"start": 1, "end": 1, "start_position": 1, "end_position": 1, "answer_class": 1},
            "focal_alpha": 1, "focal_gamma": 2, "class_weights": "balanced", "balanced_sampling": True,
        },
        "train": {
            "epochs": 2, "batch": 256, "micro_batch": 2, "learning_rate": 1e-5, "weight_decay": 1e-4, "clip": 1,
            "betas": [0.9, 0.999], "epsilon": 1e-6, "schedule": "linear", "warmup": 0.6, "precision": "auto",
        },
        "checkpoint": {"best": "mean_average_precision"},
    }  # fmt: skip
    assert any(": data_path = ./data/simplified-nq-train.jsonl: " in line for line in left)
    assert all(re.match(r"test\.cfg:\d+: \w+ = \S+: \w", line) for line in left)


def test_no_key_of_the_cfg_is_passed_over(cfg):
    """Another value of any key shows, in the run file or among what is told."""
    before = convert_cfg(cfg, "test.cfg")
    for key, value in values_of(cfg).items():
        changed = re.sub(rf"^{key}\s*=.*$", f"{key} = {another(key, value)}", cfg, flags=re.MULTILINE)
        assert changed != cfg, key
        assert convert_cfg(changed, "test.cfg") != before, f"{key} is lost in silence"


def test_every_key_of_the_cfg_is_carried_or_told(cfg):
    """A key taken out shows too, unless its value is what the recipe does without it."""
    before = convert_cfg(cfg, "test.cfg")
    same_without = {
        "merges_file", "last", "seed", "finetune", "finetune_transformer", "finetune_position", "finetune_class",
        "clear_processed", "hidden_dropout_prob", "attention_probs_dropout_prob",  # nothing, or what models have
        "model", "smooth_alpha", "best_metric", "best_order", "max_question_len",  # the recipe's defaults
    } | {"lr"}  # fmt: skip
    for key in values_of(cfg).keys() - same_without:
        without = re.sub(rf"^{key}\s*=.*$", "", cfg, flags=re.MULTILINE)
        assert convert_cfg(without, "test.cfg") != before, key


def test_real_questions_and_the_other_choices():
    tree, left = convert_cfg("data_path = nq.jsonl\nloss=ce\nbest_metric=f1\nbest_order=<\nwarmup_coef=0\n"
                             "batch_split=1000\nlerning = 3  # a slip\noptimizer=adamod\nwarmup_coef_=2\n",
                             "a.cfg")  # fmt: skip
    assert tree["data"] == {"block": 384, "sources": [{"path": "nq.jsonl", "format": "nq"}]}
    assert tree["span_qa"]["class_loss"] == "cross_entropy"
    assert (tree["train"]["schedule"], tree["train"]["warmup"], tree["train"]["micro_batch"]) == ("constant", 0, 1)
    assert (tree["train"]["precision"], tree["train"]["batch"]) == ("fp32", 128)
    assert tree["checkpoint"] == {"best": "f1"}
    keys = [line.split(": ")[1].split(" = ")[0] for line in left]
    assert keys == ["best_order", "lerning", "optimizer", "warmup_coef_"]
    assert "did you mean warmup_coef?" in left[-1]


def test_all_problems_of_the_cfg_at_once():
    with pytest.raises(InputError) as error:
        convert_cfg("[section]\nlr=fast\n# fine\nbatch_split=0\nloss=l2\ndebug=maybe\nlr=2\nn_epochs\n", "a.cfg")
    text = str(error.value)
    for part in ("a.cfg:1: is not of the form key = value", "a.cfg:7: the key lr is given twice", "a.cfg:8: is not of",
                 "a.cfg:4: batch_split: '0' is below 1", "a.cfg:5: loss: 'l2' is not one of ce, focal, smooth",
                 "a.cfg:6: debug: 'maybe' is neither True nor False"):  # fmt: skip
        assert part in text
    with pytest.raises(InputError, match=r"a\.cfg:1: lr: 'fast' is not a number"):
        convert_cfg("lr=fast", "a.cfg")


@pytest.mark.parametrize("text", ["", "seed: 3\ndata: {}\n", '{"a": 1}', "{", "PK\x03\x04"])
def test_other_files_are_no_old_configuration(text):
    with pytest.raises(InputError, match=r"is not a known configuration|is not the JSON|is not valid JSON"):
        convert(text, "file")


@pytest.mark.parametrize("name", ["neuro_test_bert.cfg", "masked_lm_cpu.json"])
def test_what_convert_prints_is_a_run_file(tmp_path, shared_data, name):
    done = succeed("config", "convert", shared_data / "configs" / name)
    file = tmp_path / "run.yaml"
    file.write_text(done.stdout)
    assert load_run(str(file)).objective in ("span_qa", "masked")
    output = done.stderr.splitlines()
    assert all(line.startswith(("not carried over: ", "differs: ", "same in artel: ")) for line in output)
    as_json = json.loads(artel("config", "convert", shared_data / "configs" / name, "--json").stdout)
    assert as_json["run"] == yaml.safe_load(done.stdout)
    for kind, beginning in (("not_carried", "not carried over: "), ("differs", "differs: ")):
        assert as_json[kind] == [line.removeprefix(beginning) for line in output if line.startswith(beginning)]


def test_convert_checks_what_it_prints(tmp_path):
    file = tmp_path / "a.cfg"
    file.write_text("lr = -1\ndata_path = nq.jsonl\n")
    done = artel("config", "convert", file)
    assert (done.returncode, done.stdout) == (2, "")
    assert "a.cfg: train.learning_rate" in done.stderr


# parallel.data, which world_size becomes


@pytest.mark.parametrize(
    ("data", "arguments", "environment", "message"),
    [
        (2, ["--nproc", "3"], {}, "the run needs 2 processes, but 3 are started"),
        (3, ["--nnodes", "2", "--master-addr", "127.0.0.1"], {}, "2 hosts cannot share 3 processes evenly"),
        (2, ["--nproc", "2", "--nnodes", "2", "--master-addr", "127.0.0.1"], {}, "but 4 are started"),
        (2, [], {"RANK": "0", "WORLD_SIZE": "4"}, "but 4 are started"),
    ],
)
def test_the_number_of_processes_is_that_of_the_run(tmp_path, data, arguments, environment, message):
    run = write_run(tmp_path / "run.yaml", parallel={"data": data})
    done = refused("train", run, *arguments, env=environment)
    assert "parallel.data" in done.stderr
    assert message in done.stderr


@pytest.mark.processes
def test_a_run_that_wants_two_processes_starts_two(tmp_path):
    assert "2 processes" in succeed("train", write_run(tmp_path / "run.yaml", parallel={"data": 2})).stderr
