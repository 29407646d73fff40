"""A score for answers: losses beside TRL's and by hand, folders that transformers opens, and the best of several."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForSequenceClassification,
    pipeline,
)

import artel
from artel.config import RunConfig, TokenizerTraining
from artel.objectives.reward import Reward
from artel.objectives.statistics import calibration_bins, calibration_error
from artel.printable import escape_lines
from artel.text import Message, Preference
from artel.text.formats.preferences import read_preferences
from artel.tokens import evaluation_rows, train_tokenizer
from support.objectives import judgements, objective_run
from support.preferences import MODEL, PAIRS, assert_same_as_trl, stored_documents
from support.reading import read, rows_of
from support.serving import client_of, served_model

MARGINS = (0.0, 0.5, 2.0)
SHORT = {"steps": 3, "batch": 8}
PROMPT, ANSWERS = "Where is number 3?", ["It is here.", "I do not know what you mean by that, and I never will."]


@pytest.fixture(scope="module")
def tokenizer():
    control = ["<|im_start|>", "<|im_end|>"]
    return train_tokenizer(iter([" ".join(map(" ".join, PAIRS))] * 40), TokenizerTraining(vocab=300, special=control))


def rewarding(tokenizer, **more):
    run = {"objective": "reward", "data": {"block": 512}, "chat": {"template": "chatml"}, "reward": more}
    return Reward(RunConfig.model_validate(run), tokenizer)


def model_of(tokenizer):
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=tokenizer.vocabulary, num_labels=1, pad_token_id=tokenizer.pad_id, **MODEL)
    return LlamaForSequenceClassification(config).eval()


def pairs_of(margins=MARGINS):
    return [
        Preference((Message("user", question),), *(Message("assistant", text) for text in answers), margin=margin)
        for (question, *answers), margin in zip(PAIRS, margins, strict=True)
    ]


def batch_of(objective, part):
    """All samples as one batch with a row of padding."""
    return objective.batch(evaluation_rows(objective.dataset(part), np.arange(part.samples), part.samples + 1))


@pytest.mark.parametrize("center", [0.0, 0.01])
def test_loss_and_gradient_equal_trl_on_the_same_batch(tokenizer, tmp_path, center):
    trl = pytest.importorskip("trl", reason="the extra trl is not installed")
    from datasets import Dataset

    objective, model = rewarding(tokenizer, center=center), model_of(tokenizer)
    part = stored_documents(objective, tmp_path / "store", pairs_of())
    rows = []
    for sample, margin in zip(map(part.sample, range(part.samples)), MARGINS, strict=True):
        chosen, rejected = np.split(sample.ids, [sample.numbers[0]])
        rows.append({"chosen_ids": chosen.tolist(), "rejected_ids": rejected.tolist(), "margin": margin})
    arguments = trl.RewardConfig(output_dir=str(tmp_path / "trl"), report_to=[], use_cpu=True, bf16=False,
                                 per_device_train_batch_size=3, center_rewards_coefficient=center or None,
                                 max_length=None, gradient_checkpointing=False, disable_dropout=True)  # fmt: skip
    trainer = trl.RewardTrainer(model, arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer.hf)
    assert_same_as_trl(trainer, rows, model, lambda: objective.loss(model, batch_of(objective, part)))


def test_answers_with_labels_and_pairs_count_alike(tokenizer, tmp_path):
    """A pair is a target, and so is an answer with a label: its score is the logit of its being good."""
    objective, model = rewarding(tokenizer), model_of(tokenizer)
    question = (Message("user", "Count."),)
    good, bad = Message("assistant", "One, two."), Message("assistant", "Seven!")
    preferences = [*pairs_of(), Preference(question, good, None), Preference(question, None, bad)]
    batch = batch_of(objective, stored_documents(objective, tmp_path / "store", preferences))
    with torch.no_grad():
        sums, outputs = objective.evaluate_batch(model, batch)
    alone = [
        [score(model, objective, pair.prompt, answer) if answer else 0.0 for answer in (pair.chosen, pair.rejected)]
        for pair in preferences
    ]
    for row, (chosen, rejected) in zip(outputs.tolist(), alone[:3], strict=False):
        assert row == pytest.approx([chosen, rejected], abs=1e-6)
    sigmoid = torch.nn.functional.logsigmoid
    losses = [-sigmoid(torch.tensor(chosen - rejected - margin)) for (chosen, rejected), margin
              in zip(alone[:3], MARGINS, strict=True)]  # fmt: skip
    losses += [-sigmoid(torch.tensor(alone[3][0])), -sigmoid(torch.tensor(-alone[4][1]))]
    assert batch.targets == 5
    assert sums.tolist() == pytest.approx([float(sum(losses)), 5.0], rel=1e-5)


def score(model, objective, prompt, answer):
    text = objective._reader.writer.write([*prompt, answer]).text
    (ids,) = objective._reader.encode([text])
    with torch.no_grad():
        return model(input_ids=torch.from_numpy(ids)[None]).logits.item()


def test_calibration_by_hand():
    """Confidences 0.88, 0.88 and 0.73 in two bins: (2/3)·|0.5 - 0.88| + (1/3)·|1 - 0.73|."""
    logits, truth = np.array([2.0, -2.0, 1.0]), np.array([True, True, True])
    confident, unsure = 1 / (1 + np.exp(-2.0)), 1 / (1 + np.exp(-1.0))
    expected = 2 / 3 * abs(0.5 - confident) + 1 / 3 * (1 - unsure)
    assert calibration_error(logits, truth) == pytest.approx(expected)
    assert [(one["count"], one["accuracy"]) for one in calibration_bins(logits, truth)] == [(1, 1.0), (2, 0.5)]
    assert calibration_error(np.array([800.0, -800.0]), np.array([True, False])) == pytest.approx(0)


def test_metrics_of_pairs_and_labels(tokenizer, tmp_path):
    objective = rewarding(tokenizer)
    labeled = Preference((Message("user", "Count."),), None, Message("assistant", "Seven!"))
    part = stored_documents(objective, tmp_path / "store", [*pairs_of(), labeled])
    outputs = np.array([[1.0, 0.0], [0.0, 1.0], [3.0, -1.0], [0.0, -2.0]])
    figures = objective.metrics({"loss": 4.0, "targets": 4.0}, outputs, part)
    assert figures["loss"] == 1.0
    assert figures["accuracy"] == pytest.approx(2 / 3)
    assert figures["margin"] == pytest.approx(4 / 3)
    assert figures["outcome_accuracy"] == 1.0  # a bad answer, and its score is below 0
    assert figures.keys() <= objective.metric_directions.keys()
    (table,) = objective.details(outputs, part)["tables"].values()
    assert sum(row["count"] for row in table) == 4


@pytest.mark.parametrize("margin", ["large", True, [1]])
def test_a_margin_that_is_no_number_is_named_by_its_line(tmp_path, margin):
    row = {"prompt": "who?", "chosen": "me", "rejected": "no"}
    first, second = read(read_preferences, rows_of(tmp_path, [row | {"margin": 1}, row | {"margin": margin}]),
                         format="preference")  # fmt: skip
    assert first.fields.margin == 1.0
    assert (second.origin, second.reason) == ("a.jsonl:2", "bad_margin")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folders of a model that scores answers and of one that writes them, by objective."""
    place = tmp_path_factory.mktemp("runs")
    runs = {name: objective_run(place / f"{name}.yaml", name, train=SHORT) for name in ("reward", "chat")}
    return {name: artel.train(run).folder for name, run in runs.items()}


def written(tokenizer, answer):
    messages = [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": answer}]
    return tokenizer.apply_chat_template(messages, tokenize=False)


def by_transformers(folder, model=None):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = model or AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        inputs = [tokenizer(written(tokenizer, answer), return_tensors="pt") for answer in ANSWERS]
        return [model(**one).logits.item() for one in inputs]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "bert"])
def test_the_folder_gives_transformers_the_same_scores(architecture):
    """A decoder, whose score is the last token's, and an encoder."""
    run = objective_run(Path("run.yaml").absolute(), "reward", train=SHORT)
    folder = artel.train(run, {"model.config.model_type": architecture}).folder
    model = artel.open(folder)
    scores = model.score(PROMPT, ANSWERS)
    assert scores == pytest.approx(by_transformers(folder / "model"), abs=1e-5)
    assert scores[0] != scores[1]
    assert model.score(PROMPT, []) == []
    ask = pipeline("text-classification", str(folder / "model"))
    texts = [written(model.tokenizer, answer) for answer in ANSWERS]
    assert [one["score"] for one in ask(texts)] == pytest.approx(scores, abs=1e-5)
    # Of a folder alone, too: what has one label and a chat template is a reward model.
    alone = artel.open(shutil.copytree(folder / "model", "alone"))
    assert alone.objective == "reward"
    assert alone.score([{"role": "user", "content": PROMPT}], ANSWERS) == pytest.approx(scores, abs=1e-6)
    with pytest.raises(artel.InputError, match="has no role and content"):
        alone.score([{"role": "user"}], ANSWERS)
    with pytest.raises(artel.InputError, match="the model accepts"):
        alone.score(PROMPT, "long " * 2000)


@pytest.mark.slow
def test_an_adapter_brings_its_head(tmp_path, trained):
    from peft import PeftModel

    base, folder = artel.open(trained["chat"]).model, trained["chat"] / "model"
    assert isinstance(AutoModelForCausalLM.from_pretrained(folder), type(base))
    judged = judgements(tmp_path)
    run = {"run": "lora", "objective": "reward", "data": {"sources": [judged], "block": 96, "validation": 0.1},
           "model": {"from": str(folder), "lora": {"rank": 4}},
           "train": {"steps": 3, "batch": 8, "threads": 1, "compile": "off"}}  # fmt: skip
    trained_run = artel.train(run)
    scores = artel.open(trained_run.folder).score(PROMPT, ANSWERS)
    settings = json.loads((trained_run.folder / "model" / "adapter_config.json").read_text())
    assert settings["modules_to_save"] == ["score"]
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    adapted = PeftModel.from_pretrained(model, trained_run.folder / "model").eval()
    assert by_transformers(trained_run.folder / "model", adapted) == pytest.approx(scores, abs=1e-5)


def test_what_does_not_go_with_a_reward_is_refused_before_text_is_read(tmp_path):
    run = objective_run(tmp_path / "run.yaml", "reward", validate={"prompts": ["x"]}, checkpoint={"best": "f1"})
    with pytest.raises(artel.InputError) as error:
        artel.train(run)
    where = [problem.where.split(": ")[-1] for problem in error.value.problems]
    assert {"validate.prompts", "checkpoint.best"} <= set(where)


def test_the_server_scores_pairs_as_vllm_does(trained):
    folder = trained["reward"]
    expected = artel.open(folder).score(PROMPT, ANSWERS)
    with served_model(folder) as served, client_of(served) as client:
        assert scores_from(client, text_1=PROMPT, text_2=ANSWERS) == pytest.approx(expected, abs=1e-6)
        assert scores_from(client, text_1=[PROMPT] * 2, text_2=ANSWERS) == pytest.approx(expected, abs=1e-6)
        asked = [{"role": "user", "content": PROMPT}]
        assert scores_from(client, text_1=asked, text_2=ANSWERS[1]) == pytest.approx(expected[1:], abs=1e-6)
        (model,) = client.get("/v1/models").json()["data"]
        assert "/v1/score" in model["endpoints"]
        assert "/v1/answers" not in model["endpoints"]
        response = client.post("/v1/score", json={"text_1": [PROMPT] * 3, "text_2": ANSWERS})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "text_1")


def scores_from(client: TestClient, **body):
    response = client.post("/v1/score", json=body).json()
    assert [(entry["index"], entry["object"]) for entry in response["data"]] == [
        (index, "score") for index in range(len(response["data"]))]  # fmt: skip
    return [entry["score"] for entry in response["data"]]


# The best of several ----------------------------------------------------------------


@pytest.mark.slow
def test_the_best_of_several_answers(command, trained):
    writer, reward = trained["chat"], trained["reward"]
    options = ["--max-new-tokens", 8, "--best-of", 3, "--reward", reward]
    status, out, err = command("generate", writer, "--prompt", PROMPT, *options, "--seed", 5, "--json")
    assert status == 0, err
    result = json.loads(out)
    judge, model = artel.open(reward), artel.open(writer)
    assert [answer["seed"] for answer in result["answers"]] == [5, 6, 7]
    for answer in result["answers"]:
        alone = model.generate(PROMPT, max_new_tokens=8, seed=answer["seed"])
        assert answer["text"] == alone
        assert answer["score"] == pytest.approx(judge.score(PROMPT, alone)[0], abs=1e-5)
    assert result["score"] == max(answer["score"] for answer in result["answers"])
    assert result["text"] in [each["text"] for each in result["answers"] if each["score"] == result["score"]]
    status, out, err = command("generate", writer, "--prompt", PROMPT, *options, "--seed", 5)
    assert (status, escape_lines(out.strip())) == (0, escape_lines(result["text"].strip()))
    assert "the best of 3" in err

    Path("prompts.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": PROMPT}]}) + "\n" + json.dumps({"prompt": "Who?", "id": 7})
    )
    files = [writer, "--prompts", "prompts.jsonl", "--out", "out.jsonl", *options]
    assert command("generate", *files)[0] == 0
    lines = Path("out.jsonl").read_text().splitlines()
    first, second = map(json.loads, lines)
    assert [answer["seed"] for answer in first["answers"] + second["answers"]] == [0, 1, 2, 3, 4, 5]
    assert second["id"] == 7
    Path("out.jsonl").write_text(lines[0] + "\n")
    assert command("generate", *files)[0] == 0
    assert Path("out.jsonl").read_text().splitlines() == lines
    status, _, err = command("generate", *files[:-4], "--best-of", 2, "--reward", reward)
    assert status == 2
    assert "started with other settings" in err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--best-of", 2], "--reward: --best-of needs a reward model"),
        (["--reward", "x"], "--best-of: must be at least 2"),
        (["--best-of", 2, "--reward", "x", "--temperature", 0], "--temperature: 0 makes all answers"),
    ],
)
def test_best_of_needs_a_reward_and_a_choice(command, options, said):
    status, _, err = command("generate", "nowhere", "--prompt", "x", *options)
    assert (status, said in err) == (2, True), err


def test_a_model_without_scores_chooses_nothing(command, trained):
    writer = trained["chat"]
    status, _, err = command("generate", writer, "--prompt", "x", "--best-of", 2, "--reward", writer)
    assert status == 2
    assert "which does not score answers" in err
