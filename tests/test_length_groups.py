"""Rows of a micro-batch in groups of similar length: each row gets what it gets alone."""

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForSequenceClassification

from artel.config import RunConfig
from artel.objectives.embedding.vectors import group_vectors
from artel.objectives.length_groups import batches_by_length, group_count, group_rows, predict_logits, row_logits

LENGTHS = (9, 30, 1, 17, 30, 2, 3)
SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
ROWS = [np.arange(5, 5 + length) for length in LENGTHS]
TYPES = [(np.arange(length) >= length // 2).astype(np.int64) for length in LENGTHS]


def bert():
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(vocab_size=64, num_labels=3, initializer_range=0.3, **SIZE)).eval()


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64, num_labels=1, pad_token_id=0, initializer_range=0.3, **SIZE)
    return LlamaForSequenceClassification(config).eval()


def alone(model, **more):
    """The logits of each row by itself, (rows, outputs)."""
    with torch.no_grad():
        return torch.cat([
            model(input_ids=torch.from_numpy(row)[None], **{name: torch.from_numpy(values[place])[None]
                                                            for name, values in more.items()}).logits
            for place, row in enumerate(ROWS)
        ])  # fmt: skip


@pytest.mark.parametrize("count", [1, 3, 7, 9])
@pytest.mark.parametrize(("model", "types"), [(llama, None), (bert, TYPES)])
def test_logits_of_rows_do_not_depend_on_those_beside_them(model, types, count):
    """Nine groups of seven rows: a model must be called as often on every rank, whatever there is."""
    made, calls = model(), []
    made.register_forward_pre_hook(lambda *_: calls.append(1))
    grouped = group_rows(ROWS, count, 0, types)
    with torch.no_grad():
        together = row_logits(made, grouped.tensors, grouped.groups)
    assert len(calls) == count
    expected = alone(made, **({} if types is None else {"token_type_ids": types}))
    assert torch.allclose(together, expected, atol=1e-6)
    assert np.allclose(predict_logits(made, ROWS, 0, types), expected, atol=1e-6)


def test_rows_begin_where_they_are_said_to():
    """In the groups, flattened and joined; three groups have half of the padding of one."""
    grouped = group_rows(ROWS, 3, 0)
    joined = torch.cat([group.slice(grouped.tensors["input_ids"]).flatten() for group in grouped.groups]).numpy()
    for row, start in zip(ROWS, grouped.starts, strict=True):
        assert (joined[start : start + len(row)] == row).all()
    assert len(joined) == sum(group.positions for group in grouped.groups)
    filler = len(joined) - sum(LENGTHS)
    assert filler < 0.55 * (len(LENGTHS) * max(LENGTHS) - sum(LENGTHS))
    assert (grouped.tensors["attention_mask"].sum(dim=1).numpy() == sorted(LENGTHS)).all()


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_vectors_are_those_of_each_text_alone(pooling):
    model = bert().bert
    grouped = group_rows(ROWS, 3, 0)
    with torch.no_grad():
        found = group_vectors(model, grouped.tensors, grouped.groups, pooling)
        hidden = [model(input_ids=torch.from_numpy(row)[None]).last_hidden_state[0] for row in ROWS]
    pooled = {
        "mean": lambda states: states.mean(dim=0),
        "cls": lambda states: states[0],
        "last": lambda states: states[-1],
    }
    assert torch.allclose(found, torch.stack([pooled[pooling](states) for states in hidden]), atol=1e-6)


def test_the_number_of_groups_follows_from_rows_and_run_alone():
    counts = [group_count(rows, RunConfig.model_validate({"data": {"block": 512}})) for rows in (1, 4, 5, 16)]
    assert counts == sorted(counts)
    assert counts[0] == 1
    stages = RunConfig.model_validate({"data": {"block": 512}, "parallel": {"pipeline": 2}})
    assert group_count(16, stages) == 1


def test_what_is_asked_together_is_all_of_it_by_length():
    lengths = [3, 9000, 4000, 4000, 4000, 5]
    parts = list(batches_by_length(lengths))
    assert sorted(number for part in parts for number in part) == list(range(len(lengths)))
    assert parts[0] == [1]
    assert max(len(part) * max(lengths[number] for number in part) for part in parts[1:]) <= 8192
