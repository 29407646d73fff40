"""Documents packed into blocks: what is where, how full blocks are, the same losses however the batch is cut."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artel.config import RunConfig
from artel.objectives import InsertionTagging, PreferenceOptimization, SpanQA
from artel.storage import new_folder
from artel.tokens import Sample, StoreWriter, TokenBlocks, TokenStore
from artel.tokens.packing import PackedBlocks, best_fit, document_numbers, is_predictable
from support import WORKERS
from support.objectives import conversations
from support.runs import largest_difference, losses, merged, metrics, refused, succeed, torchrun, write_run

CASES = WORKERS / "train_cases.py"


def part_of(folder, documents, shard_tokens=50):
    with new_folder(folder) as written:
        writer = StoreWriter(written, vocabulary=2**16, shard_tokens=shard_tokens)
        for number, ids in enumerate(documents):
            writer.add("train", [Sample(ids)], len(ids), f"a.txt:{number}")
        writer.close({})
    return TokenStore(folder).train


def documents_of(lengths):
    """Documents of which no two tokens are equal."""
    return np.split(np.arange(1, 1 + sum(lengths)), np.cumsum(lengths)[:-1])


def one_by_one(sizes, length):
    """Best-fit decreasing as the paper tells it: the rooms left in the blocks, ascending."""
    rooms = []
    for size in sorted(sizes, reverse=True):
        fitting = [room for room in rooms if room >= size]
        room = min(fitting, default=length)
        if fitting:
            rooms.remove(room)
        rooms.append(room - size)
    return sorted(rooms)


@settings(max_examples=300)
@given(st.data(), st.integers(1, 40))
def test_pieces_lie_where_best_fit_decreasing_puts_them(data, length):
    sizes = np.array(data.draw(st.lists(st.integers(1, length), min_size=1, max_size=120)))
    blocks, count = best_fit(sizes, length)
    used = np.bincount(blocks, weights=sizes, minlength=count)
    assert len(used) == count
    assert sorted(length - used) == one_by_one(sizes.tolist(), length)


@settings(max_examples=60)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(2, 12))
def test_packed_blocks_predict_each_token_that_begins_no_document_once(tmp_path_factory, lengths, length):
    documents = documents_of(lengths)
    part = part_of(tmp_path_factory.mktemp("packed") / "store", documents)
    blocks = PackedBlocks(part, length, lookahead=1)
    begins = {int(ids[0]) for ids in documents}
    before = {int(ids[at]): int(ids[at - 1]) for ids in documents for at in range(1, len(ids))}
    predicted = []
    for index in range(len(blocks)):
        sample = blocks.read(index)
        numbers, is_target = document_numbers(sample.flags), is_predictable(sample.flags)
        assert len(sample.ids) == len(sample.flags) == length + 1
        assert ((sample.ids > 0) == (numbers > 0)).all()  # padding has number 0
        for at in np.flatnonzero(is_target[1:]) + 1:
            token = int(sample.ids[at])
            predicted.append(token)
            if token in begins:  # after the whole of another document, or its rest
                assert numbers[at - 1] != numbers[at]
                assert any(int(ids[-1]) == sample.ids[at - 1] for ids in documents)
            else:
                assert before[token] == sample.ids[at - 1]
                assert numbers[at - 1] == numbers[at]
        here = [f"a.txt:{at}" for at, ids in enumerate(documents) if set(ids.tolist()) & set(sample.ids.tolist())]
        assert sorted(set(blocks.origins(index))) == sorted(here)
    assert len(predicted) == len(set(predicted))
    assert set(before) <= set(predicted) <= set(before) | begins


@settings(max_examples=60)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(2, 12))
def test_without_lookahead_each_token_is_in_one_block(tmp_path_factory, lengths, length):
    documents = documents_of(lengths)
    blocks = PackedBlocks(part_of(tmp_path_factory.mktemp("packed") / "store", documents), length, lookahead=0)
    samples = [blocks.read(index) for index in range(len(blocks))]
    ids = np.concatenate([sample.ids for sample in samples])
    assert sorted(ids[ids > 0]) == list(range(1, 1 + sum(lengths)))
    for document in documents:
        holding = [sample for sample in samples if np.isin(sample.ids, document).any()]
        assert len(holding) == -(-len(document) // length)
        for sample in holding:  # its pieces are whole runs of it, under a number of their own
            mine = np.isin(sample.ids, document)
            assert (np.diff(sample.ids[mine]) == 1).all()
            assert len(set(document_numbers(sample.flags)[mine])) == 1
            assert not np.isin(document_numbers(sample.flags)[~mine], document_numbers(sample.flags)[mine]).any()
    assert blocks.padding == pytest.approx(1 - sum(lengths) / (len(blocks) * length))
    assert blocks.leftover_tokens == 0


def test_packing_is_the_same_each_time_and_nearly_without_padding(tmp_path):
    lengths = np.maximum(2, np.random.default_rng(0).lognormal(3.5, 1.2, 10_000).astype(int))
    part = part_of(tmp_path / "store", [np.arange(length) for length in lengths], shard_tokens=10**6)
    one, again = PackedBlocks(part, 128, 1), PackedBlocks(part, 128, 1)
    for index in range(0, len(one), 97):
        first, second = one.read(index), again.read(index)
        assert (first.ids == second.ids).all()
        assert (first.flags == second.flags).all()
    assert 0 <= one.padding < 0.001


def test_joined_blocks_say_where_their_documents_are(tmp_path):
    documents = documents_of([5, 1, 90, 4, 8, 3])
    part = part_of(tmp_path / "store", documents)
    document_of = np.repeat(np.arange(6), [len(ids) for ids in documents])
    for lookahead in (0, 1):
        blocks = TokenBlocks(part, 7, lookahead, documents=True)
        for index in range(len(blocks)):
            sample = blocks.read(index)
            expected = document_of[sample.ids - 1]
            assert (document_numbers(sample.flags) == expected - expected[0] + 1).all()
            assert is_predictable(sample.flags).all()


@pytest.mark.processes
def test_same_losses_and_gradient_norms_however_the_batch_is_cut(tmp_path):
    """Packed blocks, causal, masked and of conversations, on 1 and 2 processes, accumulation 1 and 4: 1e-5 relative."""
    encoder = {"model_type": "roberta", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
               "intermediate_size": 64, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}  # fmt: skip
    conversation = {"objective": "chat", "data": {"block": 96, "sources": [conversations(tmp_path)]}}
    kinds = {"causal": {}, "masked": {"objective": "masked", "model": {"config": encoder}}, "chat": conversation}
    kinds = {name: merged(kind, {"data": {"packing": "best_fit"}}) for name, kind in kinds.items()}
    results = {}
    for processes in (1, 2):
        files = [
            write_run(tmp_path / f"{processes}-{name}-{accumulation}.yaml", **kind,
                      train={"optimizer": "sgd", "learning_rate": 0.1, "batch": 8, "steps": 4,
                             "micro_batch": 8 // processes // accumulation})
            for name, kind in kinds.items() for accumulation in (1, 4)
        ]  # fmt: skip
        done = torchrun(processes, CASES, *files)
        assert done.returncode == 0, done.stderr[-3000:]
        for file in files:
            results[file.stem] = losses(file.with_suffix(""))
    for name in kinds:
        reference = results[f"1-{name}-1"]
        assert len(reference) == 4
        for other, figures in results.items():
            if f"-{name}-" in other:
                assert largest_difference(reference, figures) < 1e-5, other


def test_train_with_packing_counts_no_padding(tmp_path):
    """One epoch sees the tokens of the part but for those that are only predicted; joined it sees other blocks."""
    train = {"steps": None, "epochs": 1, "batch": 4}
    packed = write_run(tmp_path / "packed.yaml", data={"packing": "best_fit", "block": 64}, train=train)
    done = succeed("train", packed, "--json")
    report = json.loads(done.stdout)
    manifest = json.loads(next((tmp_path / "stores").glob("*/manifest.json")).read_text())
    part = manifest["parts"]["train"]
    assert part["tokens"] - part["samples"] <= report["tokens"] <= part["tokens"]
    assert {"loss", "perplexity", "bits_per_byte"} <= set(report["validation"])
    assert metrics(tmp_path / "packed")


@pytest.mark.parametrize("kind", [PreferenceOptimization, InsertionTagging, SpanQA])
def test_where_samples_stand_alone_packing_is_refused(kind):
    problems = kind.problems(RunConfig.model_validate({"data": {"packing": "best_fit", "document_mask": True}}))
    assert {"data.packing", "data.document_mask"} <= {problem.where for problem in problems}
    problems = kind.problems(RunConfig.model_validate({"data": {"document_mask": False}}))
    assert not [problem for problem in problems if problem.where.startswith("data.")]


def test_a_model_that_cannot_keep_documents_apart_is_refused_before_any_text_is_read(tmp_path):
    run = write_run(tmp_path / "run.yaml", data={"packing": "best_fit"}, model={"config": {"model_type": "rwkv"}})
    done = refused("train", run)
    assert "data.document_mask" in done.stderr
    assert "set data.document_mask: false" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "stores").exists()
