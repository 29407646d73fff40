"""Figures of classification are scikit-learn's and scipy's; losses are torch's and transformers'."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn import metrics as sklearn
from sklearn.utils.class_weight import compute_class_weight
from transformers import BertConfig, BertForSequenceClassification

from artel.config import ClassificationConfig
from artel.objectives.classification.framing import longest_first
from artel.objectives.classification.kinds import KINDS
from artel.objectives.classification.label_metrics import (
    best_thresholds,
    multi_label_metrics,
    number_metrics,
    single_label_metrics,
    softmax,
)
from artel.objectives.statistics import sigmoid
from artel.text import LabeledText

LABELS = ["a", "b", "c", "d"]


def random_labels(labels, rows=200, seed=0):
    chance = np.random.default_rng(seed)
    gold = chance.integers(labels, size=rows)
    logits = chance.normal(size=(rows, labels)).round(1)  # some are equal
    logits[np.arange(rows), gold] += chance.normal(1, 1, size=rows).round(1)
    return logits, gold


@pytest.mark.parametrize("labels", [2, 3, 4])
def test_figures_of_one_label(labels):
    logits, gold = random_labels(labels)
    gold[gold == 3] = 0  # the fourth does not occur, and is predicted
    predicted, probabilities = logits.argmax(axis=1), softmax(logits)
    figures = single_label_metrics(logits, gold)
    if labels == 2:
        auc = sklearn.roc_auc_score(gold, probabilities[:, 1])
    else:
        occurring = range(min(labels, 3))
        auc = np.mean([sklearn.roc_auc_score(gold == label, probabilities[:, label]) for label in occurring])
    expected = {
        "accuracy": sklearn.accuracy_score(gold, predicted),
        "macro_f1": sklearn.f1_score(gold, predicted, average="macro"),
        "micro_f1": sklearn.f1_score(gold, predicted, average="micro"),
        "matthews": sklearn.matthews_corrcoef(gold, predicted),
        "auc": auc,
    }
    assert figures == pytest.approx(expected, abs=1e-12)
    kind = KINDS["single"](ClassificationConfig(kind="single", labels=LABELS[:labels]))
    details = kind.details(logits, gold)
    (matrix,) = details["matrices"].values()
    assert matrix["labels"] == LABELS[:labels]
    assert matrix["counts"] == sklearn.confusion_matrix(gold, predicted, labels=range(labels)).tolist()
    precision, recall, f1, _ = sklearn.precision_recall_fscore_support(
        gold, predicted, labels=range(labels), zero_division=0
    )
    for number, row in enumerate(details["tables"]["labels"]):
        assert [row["precision"], row["recall"], row["f1"]] == pytest.approx(
            [precision[number], recall[number], f1[number]]
        )
        assert row["texts"] == (gold == number).sum()


def test_figures_of_a_model_that_always_says_the_same():
    logits = np.tile([0.0, 1.0], (10, 1))
    figures = single_label_metrics(logits, np.array([0, 1] * 5))
    assert figures == pytest.approx({"accuracy": 0.5, "macro_f1": 1 / 3, "micro_f1": 0.5, "matthews": 0.0, "auc": 0.5})
    assert "auc" not in single_label_metrics(logits, np.ones(10, dtype=np.int64))


def several(rows=300, seed=0):
    chance = np.random.default_rng(seed)
    gold = chance.random((rows, 4)) < [0.5, 0.1, 0.3, 0.02]
    logits = chance.normal(size=gold.shape) + 2 * gold - [0, 2, 1, 3]
    return logits, gold


def test_figures_of_several_labels():
    logits, gold = several()
    probabilities = sigmoid(logits)
    predicted = probabilities > 0.5
    thresholds = best_thresholds(probabilities, gold)
    expected = {
        "accuracy": sklearn.accuracy_score(gold, predicted),
        "macro_f1": sklearn.f1_score(gold, predicted, average="macro", zero_division=0),
        "micro_f1": sklearn.f1_score(gold, predicted, average="micro"),
        "auc": sklearn.roc_auc_score(gold, probabilities, average="macro"),
        "tuned_macro_f1": sklearn.f1_score(gold, probabilities > thresholds, average="macro"),
    }
    assert multi_label_metrics(probabilities, gold, thresholds) == pytest.approx(expected, abs=1e-12)


def test_thresholds_have_the_best_f1_of_all():
    logits, gold = several()
    probabilities = sigmoid(logits).round(2)  # many are equal
    thresholds = best_thresholds(probabilities, gold)
    for label, threshold in enumerate(thresholds):
        column = probabilities[:, label]
        tried = [sklearn.f1_score(gold[:, label], column > other, zero_division=0) for other in np.arange(0, 1, 0.005)]
        assert sklearn.f1_score(gold[:, label], column > threshold) == pytest.approx(max(tried))
    assert best_thresholds(probabilities, np.zeros_like(gold)).tolist() == [0.5] * 4


def test_figures_of_a_number():
    chance = np.random.default_rng(0)
    gold = chance.normal(3, 2, size=100).round(1)
    predicted = gold + chance.normal(size=100).round(1)
    expected = {
        "rmse": sklearn.root_mean_squared_error(gold, predicted),
        "mae": sklearn.mean_absolute_error(gold, predicted),
        "r2": sklearn.r2_score(gold, predicted),
        "pearson": stats.pearsonr(gold, predicted).statistic,
        "spearman": stats.spearmanr(gold, predicted).statistic,
    }
    assert number_metrics(predicted, gold) == pytest.approx(expected, abs=1e-12)
    assert number_metrics(predicted, np.ones(100)).keys() == {"rmse", "mae"}


def kind_of(name, **config):
    labels = [] if name == "number" else LABELS[:3]
    return KINDS[name](ClassificationConfig.model_validate({"kind": name, "labels": labels, **config}))


def targets(kind, rows):
    return kind.decode_targets(np.array([kind.encode_target(row) for row in rows]))


ROWS = {
    "single": [LabeledText("x", labels=(label,)) for label in "abcab"],
    "multi": [LabeledText("x", labels=labels) for labels in [("a",), (), ("b", "c"), ("a", "b", "c"), ("c",)]],
    "number": [LabeledText("x", labels=(str(number),), number=number) for number in (0.5, -3.0, 1e6, 0.1, 7.0)],
}


@pytest.mark.parametrize("name", KINDS)
def test_the_loss_is_that_of_transformers(name):
    kind, rows = kind_of(name), ROWS[name]
    config = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=9,
                        num_labels=max(1, len(kind.labels)), problem_type=kind.problem_type)  # fmt: skip
    torch.manual_seed(0)
    model = BertForSequenceClassification(config).eval()
    labels = torch.from_numpy(targets(kind, rows))
    output = model(input_ids=torch.arange(5)[:, None], labels=labels)
    torch.testing.assert_close(kind.loss(output.logits, labels).mean(), output.loss)


def test_class_weights_focal_loss_and_smoothing():
    torch.manual_seed(0)
    logits = torch.randn(5, 3)
    kind = kind_of("single", class_weights="balanced")
    numbers = np.array([kind.encode_target(row) for row in ROWS["single"]])
    target = torch.from_numpy(kind.decode_targets(numbers))
    kind.balance(numbers)
    weights = torch.tensor(compute_class_weight("balanced", classes=np.arange(3), y=numbers[:, 0])).float()
    expected = torch.nn.functional.cross_entropy(logits, target, weight=weights, reduction="none")
    torch.testing.assert_close(kind.loss(logits, target), expected)
    probability = logits.softmax(dim=1)[torch.arange(5), target]
    focal = kind_of("single", loss="focal", focal_gamma=1.5).loss(logits, target)
    torch.testing.assert_close(focal, -((1 - probability) ** 1.5) * probability.log())
    smooth = kind_of("single", smoothing=0.2).loss(logits, target)
    expected = torch.nn.functional.cross_entropy(logits, target, label_smoothing=0.2, reduction="none")
    torch.testing.assert_close(smooth, expected)

    kind = kind_of("multi", class_weights="balanced")
    numbers = np.array([kind.encode_target(row) for row in ROWS["multi"]])
    target = torch.from_numpy(kind.decode_targets(numbers))
    kind.balance(numbers)
    positive = target.sum(dim=0)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(
        logits, target, pos_weight=(5 - positive) / positive, reduction="none"
    )
    torch.testing.assert_close(kind.loss(logits, target), expected.mean(dim=1))


def test_a_label_that_every_text_has_is_learned_all_the_same():
    kind = kind_of("multi", class_weights="balanced")
    kind.balance(np.array([[1, 1], [1, 0], [1, 0], [1, 1]]))
    loss = kind.loss(torch.zeros(1, 2), torch.tensor([[1.0, 0.0]]))
    assert loss.item() == pytest.approx(math.log(2))


def test_balance_goes_by_the_rarest_label():
    kind = kind_of("multi")
    numbers = np.array([[1, 1, 0], [1, 0, 0], [1, 0, 1], [0, 0, 0], [1, 1, 1]])
    classes = kind.classes(numbers)
    assert len(set(classes.tolist())) == 4  # by b, by a, by c, and without a label
    assert classes[0] == classes[4] or classes[2] == classes[4]


@pytest.mark.parametrize(
    ("first", "second", "room", "kept"),
    [(3, 4, 10, (3, 4)), (9, 3, 10, (7, 3)), (3, 9, 10, (3, 7)), (9, 9, 10, (5, 5)), (9, 8, 9, (5, 4)),
     (8, 9, 9, (4, 5)), (5, 5, 9, (4, 5))],
)  # fmt: skip
def test_pairs_are_cut_as_tokenizers_does_it(first, second, room, kept):
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(room, strategy="longest_first")
    encoding = tokenizer.encode("a " * first, "b " * second)
    assert longest_first(first, second, room) == kept == (encoding.ids.count(0), encoding.ids.count(1))
