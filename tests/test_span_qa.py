"""Question answering: windows and offsets on real data, heads, losses, whole documents, the official figures."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score
from torchmetrics.functional.text import squad
from transformers import AutoModel, AutoModelForQuestionAnswering, AutoTokenizer

from artel.config import DataConfig, Overrides, RunConfig, SourceConfig
from artel.errors import InputError
from artel.inference import open_model
from artel.objectives import SpanQA
from artel.objectives.span_qa.answers import CLASSES, average_precision, exact_match, strip_span, word_f1
from artel.objectives.span_qa.heads import best_spans
from artel.objectives.span_qa.question_windows import window_starts
from artel.objectives.types import DocumentSamples
from artel.planning import StartConditions, check_run
from artel.text import Ledger, read_documents
from artel.tokens import Rows
from support.runs import artel, losses, metrics, refused, succeed, write_run

BERT = {"model_type": "bert", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 128, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}  # fmt: skip
QUESTIONS = {"data": {"sources": [{"format": "dummy", "kind": "questions", "documents": 400}], "block": 96},
             "tokenizer": {"train": {"vocab": 380}}, "objective": "span_qa",
             "span_qa": {"question": 16, "stride": 32}}  # fmt: skip


def config(**span_qa):
    return RunConfig.model_validate({"objective": "span_qa", "data": {"block": 384}, "span_qa": span_qa})


def test_a_block_and_a_stride_that_are_too_long_for_a_small_model_are_refused_together():
    """The first try of a recipe with a small model was refused key by key."""
    model = {"config": BERT | {"max_position_embeddings": 128}}
    data = QUESTIONS["data"] | {"block": 384}
    run = RunConfig.model_validate(QUESTIONS | {"data": data, "model": model, "span_qa": {"question": 64}})
    with pytest.raises(InputError) as refused:
        check_run(run, StartConditions(checks_texts=False))
    block, stride = refused.value.problems
    assert (block.where, block.fix) == ("data.block", "write data.block: 128 or less")
    assert (stride.where, stride.fix) == ("span_qa.stride", "write 30")
    assert stride.what.startswith("with data.block: 128, 128 is more than the 60 tokens of a window")


def judged_documents(path, kind):
    source = SourceConfig(path=[str(path)], format=kind)
    data = DataConfig.model_validate({"sources": [source.model_dump()], "dedup": {"exact": False}})
    return list(read_documents(data.model_copy(update={"validation": 1.0}), Ledger()))


@pytest.mark.parametrize(
    ("name", "kind", "answered"),
    [
        ("xquad.ru.first36.json", "squad", 925),
        ("nq_simplified_1_dev.jsonl", "nq", 1),
        ("nq_simplified_1_train.jsonl", "nq", 0),
        ("nq_documents_5.jsonl", "nq", 2),
    ],
)
def test_answers_map_to_tokens_and_back_exactly(shared_data, roberta, name, kind, answered):
    """Through the tokens of every window that holds it, each gold answer comes back character for character."""
    run = config(question=256)  # an English vocabulary takes Russian letter by letter
    objective = SpanQA(run.model_copy(update={"data": DataConfig(block=512)}), roberta)
    documents = judged_documents(shared_data / "qa" / name, kind)
    count = 0
    for document, made in zip(documents, objective.samples(documents), strict=True):
        assert isinstance(made, DocumentSamples)
        question = document.record.fields
        holding = [sample for sample in made.samples if sample.numbers[-1] != CLASSES.index("unknown")]
        if not question.answers:
            assert not holding
            continue
        assert holding  # some window holds it whole
        count += 1
        for sample in holding:
            start, end = sample.numbers[3:5]
            span = strip_span(question.context, int(sample.flags[start]) >> 32, int(sample.flags[end]) & 0xFFFFFFFF)
            assert span == question.answers[0]
    assert count == answered


def test_windows_hold_the_question_and_every_token_of_the_document(shared_data, roberta):
    objective = SpanQA(config(), roberta)
    (document,) = judged_documents(shared_data / "qa" / "nq_simplified_1_dev.jsonl", "nq")
    (made,) = objective.samples([document])
    question = list(next(roberta.encode([document.record.fields.question])))
    context = list(next(roberta.encode([document.record.fields.context])))
    seen = set()
    for sample in made.samples:
        _, first, begins, *_ = sample.numbers
        ids = sample.ids.tolist()
        assert ids[:begins] == [0, *question, 2, 2]
        assert ids[-1] == 2
        window = ids[begins:-1]
        assert window == context[first : first + len(window)]
        assert len(ids) <= 384
        seen |= set(range(first, first + len(window)))
    assert seen == set(range(len(context)))


@given(tokens=st.integers(1, 500), room=st.integers(1, 60), stride=st.integers(1, 60))
@settings(max_examples=200)
def test_windows_leave_no_gap_and_none_is_needless(tokens, room, stride):
    stride = min(stride, room)
    starts = list(window_starts(tokens, room, stride))
    covered = {token for start in starts for token in range(start, min(start + room, tokens))}
    assert covered == set(range(tokens))
    assert all(start + room < tokens for start in starts[:-1])


@given(seed=st.integers(0, 10_000))
@settings(max_examples=50)
def test_best_spans_are_those_of_a_search_through_all(seed):
    rng = np.random.default_rng(seed)
    start, end = (torch.tensor(rng.normal(size=(3, 12)), dtype=torch.float32) for _ in range(2))
    allowed = torch.tensor(rng.random((3, 12)) < 0.7)
    allowed[:, 4] = True
    score, first, last = best_spans(start, end, allowed, max_tokens=5)
    for row in range(3):
        everything = [
            (float(start[row, a] + end[row, b]), a, b)
            for a in range(12) for b in range(a, min(12, a + 5)) if allowed[row, a] and allowed[row, b]
        ]  # fmt: skip
        best = max(everything)
        assert float(score[row]) == pytest.approx(best[0])
        assert (int(first[row]), int(last[row])) == best[1:]


def test_squad_figures_are_those_of_the_official_script(shared_data):
    """torchmetrics' form of evaluate-v1.1.py on 925 answers: right, cut, with articles, punctuation and other words."""
    entries = [
        document.record.fields for document in judged_documents(shared_data / "qa/xquad.en.first36.json", "squad")
    ]
    rng = np.random.default_rng(0)
    answers, golds = [], []
    for entry in entries:
        golds.append([entry.context[start:end] for start, end in entry.answers])
        words = golds[-1][0].split()
        changes = [words, words[1:], ["The", *words], [*words, "again."], [word.upper() for word in words], ["no"]]
        answers.append(" ".join(changes[rng.integers(len(changes))]))
    numbers = range(len(entries))
    theirs = squad(
        [{"prediction_text": answers[at], "id": str(at)} for at in numbers],
        [{"answers": {"answer_start": [0] * len(golds[at]), "text": golds[at]}, "id": str(at)} for at in numbers],
    )
    exact = np.mean([max(exact_match(answers[at], gold) for gold in golds[at]) for at in numbers])
    f1 = np.mean([max(word_f1(answers[at], gold) for gold in golds[at]) for at in numbers])
    assert 0.2 < exact < 0.9
    assert 100 * exact == pytest.approx(float(theirs["exact_match"]), rel=1e-6)
    assert 100 * f1 == pytest.approx(float(theirs["f1"]), rel=1e-5)  # theirs is in float32
    assert (word_f1("", ""), word_f1("x", ""), exact_match("", "")) == (1, 0, 1)  # unanswerable, as in v2


@given(seed=st.integers(0, 10_000))
@settings(max_examples=50)
def test_average_precision_is_scikit_learns(seed):
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, 8, size=30) / 8  # with ties
    positive = rng.random(30) < 0.3
    positive[0] = True
    assert average_precision(scores, positive) == pytest.approx(average_precision_score(positive, scores))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A short run with five heads on the dummy source."""
    five = {"question": 16, "stride": 32, "heads": "five", "class_loss": "focal", "class_weights": "balanced"}
    run = write_run(
        tmp_path_factory.mktemp("qa") / "run.yaml", **(QUESTIONS | {"span_qa": five}),
        train={"steps": 30, "batch": 32, "learning_rate": 2e-3}, checkpoint={"best": "mean_average_precision"},
    )  # fmt: skip
    succeed("train", run, f"model.config={json.dumps(BERT)}")
    return run.with_suffix("")


@pytest.mark.slow
def test_five_heads_learn_are_saved_and_open_again(trained):
    by_step = losses(trained)
    assert by_step[30][0] < by_step[1][0]
    figures = metrics(trained)[-1]["validation"]
    assert set(figures) == {"loss", "exact_match", "f1", "start_accuracy", "end_accuracy", "class_accuracy",
                            "mean_average_precision"}  # fmt: skip
    opened = open_model(str(trained))
    theirs = AutoModelForQuestionAnswering.from_pretrained(trained / "model").eval()
    assert type(theirs).__name__ == "BertForQuestionAnswering"
    ids = torch.randint(5, 300, (2, 20))
    with torch.no_grad():
        assert torch.equal(theirs(ids).start_logits, opened.model.eval()(ids).start_logits)
    assert opened.model.answer_class.weight.shape == (5, 64)
    assert opened.model.answer_class.weight.std() > 0.001  # read, not zero
    AutoModel.from_pretrained(trained / "model")
    tokenizer = AutoTokenizer.from_pretrained(trained / "model")
    ours = opened.objective.tokenizer.hf
    assert tokenizer("where?", "(here).")["input_ids"] == ours("where?", "(here).")["input_ids"]


@pytest.mark.slow
def test_evaluate_repeats_the_validation_and_writes_official_predictions(trained, tmp_path):
    file = tmp_path / "predictions.json"
    done = succeed("evaluate", trained, "--predictions", file, "--json")
    (judged,) = json.loads(done.stdout)["models"]
    assert judged["metrics"] == pytest.approx(metrics(trained)[-1]["validation"], rel=1e-5)
    answers = json.loads(file.read_text())
    assert len(answers) == judged["documents"]
    assert all(name.startswith("dummy-") for name in answers)


@pytest.mark.slow
def test_evaluate_a_question_model_on_squad_and_nq_files(trained, shared_data, tmp_path):
    """Files of another language and form, all of them judged; NQ's predictions are counted in its words."""
    file = tmp_path / "nq.json"
    data = shared_data / "qa/nq_simplified_1_dev.jsonl"
    done = succeed("evaluate", trained, "--data", data, "span_qa.question=48", "--predictions", file, "--json")
    assert json.loads(done.stdout)["models"][0]["documents"] == 1
    (answer,) = json.loads(file.read_text())["predictions"]
    assert answer["example_id"] == 5328212470870865242
    done = refused("evaluate", trained, "--data", data, "data.block=384")
    assert "data.block: 384 tokens are more than the model's 96 positions" in done.stderr
    assert set(answer) == {"example_id", "long_answer", "long_answer_score", "short_answers", "short_answers_score",
                           "yes_no_answer"}  # fmt: skip


def test_a_question_is_answered_from_a_text(trained):
    context = "the baker is in the forest . the miller is in the garden ."
    done = succeed("generate", trained, "--prompt", "where is the miller ?", "--context", context, "--json")
    answer = json.loads(done.stdout)
    assert answer["class"] in CLASSES
    assert sum(answer["classes"].values()) == pytest.approx(1, abs=1e-5)
    assert answer["answer"] in ("", context[answer["start"] : answer["end"]])
    assert "--context" in refused("generate", trained, "--prompt", "where is the miller ?").stderr


@pytest.mark.parametrize("class_loss", ["cross_entropy", "focal", "smooth"])
def test_the_five_losses_are_what_they_are_said_to_be(trained, class_loss):
    """Each term computed anew from the model's outputs, for a batch with padding and a window without the answer."""
    weights = {"start": 2.0, "end": 0.5, "start_position": 3.0, "end_position": 0.7, "answer_class": 1.5}
    opened = open_model(str(trained))
    run = config(heads="five", class_loss=class_loss, weights=weights, focal_alpha=0.25, smoothing=0.2)
    objective, model = SpanQA(run, opened.tokenizer), opened.model.eval()
    ids = np.random.default_rng(0).integers(5, 300, size=(3, 24))
    numbers = np.array([[0, 0, 6, 8, 11, 2], [1, 0, 6, 0, 0, 4], [1, 0, 6, 7, 7, 0]])
    lengths = np.array([24, 20, 24])
    ids[1, 20:] = 0
    batch = objective.batch(Rows(ids, lengths, np.array([True, True, False]), np.arange(3), np.zeros(3), None, numbers))
    assert (batch.targets, batch.tokens) == (2, 44)
    with torch.no_grad():
        loss, count = objective.loss(model, batch).tolist()
        expected = 0.0
        for row in range(2):
            shown = torch.tensor(ids[row : row + 1, : lengths[row]])
            types = (torch.arange(lengths[row]) >= 6).long()[None] * objective.tokenizer.frame(pair=True).second_type
            output = model(input_ids=shown, token_type_ids=types, output_hidden_states=True)
            first = output.hidden_states[-1][:, 0]
            start, end, kind = numbers[row, 3:]
            logs = model.answer_class(first).log_softmax(-1)[0]
            class_term = -logs[kind]
            if class_loss == "focal":
                class_term = 0.25 * (1 - logs[kind].exp()) ** 2 * class_term
            if class_loss == "smooth":
                class_term = 0.8 * class_term - 0.2 * logs.mean()
            places = model.answer_position(first).sigmoid()[0]
            answered = float(kind != 4)
            expected += float(
                2.0 * -output.start_logits.log_softmax(-1)[0, start]
                + 0.5 * -output.end_logits.log_softmax(-1)[0, end]
                + 3.0 * answered * (places[0] - start / lengths[row]) ** 2
                + 0.7 * answered * (places[1] - end / lengths[row]) ** 2
                + 1.5 * class_term
            )
    assert count == 2
    assert loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_early_stopping_keeps_the_best_model(tmp_path):
    """At a ruinous learning rate nothing improves: the run ends after `patience` validations, its model the best."""
    run = write_run(tmp_path / "run.yaml", **QUESTIONS, validate={"every": 2, "patience": 2},
                    train={"steps": 60, "batch": 16, "learning_rate": 0.5, "schedule": "constant", "warmup": 0},
                    checkpoint={"best": "exact_match"})  # fmt: skip
    done = succeed("train", run, f"model.config={json.dumps(BERT)}", "--json")
    result = json.loads(done.stdout)
    judged = {line["step"]: line["validation"] for line in metrics(run.with_suffix("")) if "validation" in line}
    best = max(judged, key=lambda step: (judged[step]["exact_match"], -step))
    assert result["steps"] == best + 4 < 60
    assert result["model_step"] == best
    assert result["validation"] == judged[best]
    figures = json.loads(artel("evaluate", run.with_suffix(""), "--json").stdout)["models"][0]["metrics"]
    assert figures["exact_match"] == pytest.approx(judged[best]["exact_match"])
    again = artel("train", run, f"model.config={json.dumps(BERT)}")
    assert "is complete" in again.stderr


def test_balanced_sampling_draws_the_classes_equally_often(tmp_path):
    from artel.config import load_run
    from artel.objectives import build_objective
    from artel.preparing import prepare

    run = load_run(
        str(write_run(tmp_path / "run.yaml", **QUESTIONS)), Overrides.parse(["span_qa.balanced_sampling=true"])
    )
    prepared = prepare(run)
    part = prepared.open().train
    order = build_objective(run, prepared.tokenizer()).order(part, part.samples)
    classes = part.numbers()[order.at(np.arange(500)), -1]
    assert (np.bincount(classes) == 100).all()
