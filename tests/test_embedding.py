"""Vectors of texts: the loss of a global batch against its definition, figures, the folder, what is refused."""

import json
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch.nn.functional import cosine_similarity, cross_entropy, normalize
from transformers import BertConfig

import artel as api
from artel.config import EmbeddingConfig, RunConfig, TokenizerTraining, load_run
from artel.errors import InputError
from artel.inference.retrieval import paragraphs
from artel.objectives import build_objective
from artel.objectives.embedding.embedding_objective import Embedding, example_code
from artel.objectives.embedding.losses import MatchKeys, Texts, loss_sum, match_keys
from artel.objectives.embedding.matches import DOCUMENT, HASH, choose_texts
from artel.objectives.embedding.retrieval import nearest, retrieval_metrics
from artel.objectives.embedding.sentence_transformers import folder_files, read_folder
from artel.objectives.statistics import spearman
from artel.preparing import prepare
from artel.text import Document, Match, Record
from artel.tokens import train_tokenizer
from artel.tokens.batches import training_rows
from artel.training.evaluation import Validation
from support.objectives import objective_run
from support.runs import artel, refused, succeed

SIZE = 8


def texts_of(matches, seed=0):
    torch.manual_seed(seed)
    keys = torch.from_numpy(match_keys(matches))
    count = int((keys[:, 0] < 4).sum())
    return Texts.from_vectors(torch.randn(count, SIZE), keys)


def loss(texts, part=slice(None), **config):
    return float(loss_sum(texts, EmbeddingConfig.model_validate(config), part))


PLAIN = [MatchKeys(1, 11, [], []), MatchKeys(2, 12, [], []), MatchKeys(3, 13, [], [])]
HARD = [MatchKeys(1, 11, [21, 22], []), MatchKeys(2, 12, [23], [])]


@pytest.mark.parametrize("matches", [PLAIN, HARD], ids=["in batch", "hard negatives, candidates of every query"])
def test_the_loss_of_a_query_is_the_cross_entropy_of_all_documents(matches):
    texts, count = texts_of(matches), len(matches)
    queries, documents = normalize(texts.vectors[:count], dim=1), normalize(texts.vectors[count:], dim=1)
    logits = queries @ documents.T / 0.05
    assert loss(texts) == pytest.approx(float(cross_entropy(logits, torch.arange(count), reduction="sum")), rel=1e-5)


@pytest.mark.parametrize(
    "matches",
    [
        [MatchKeys(1, 11, [], []), MatchKeys(2, 11, [], [])],  # the same document answers both
        [MatchKeys(1, 11, [], []), MatchKeys(1, 12, [], [])],  # the same query has two
        [MatchKeys(1, 11, [], [12]), MatchKeys(2, 12, [], [11])],  # another positive of it is in the batch
        [MatchKeys(1, 2, [], []), MatchKeys(2, 1, [], [])],  # the document is the query's own text
    ],
)
def test_what_matches_a_query_is_not_its_negative(matches):
    assert loss(texts_of(matches)) == pytest.approx(0.0, abs=1e-6)
    assert loss(texts_of([MatchKeys(1, 11, [], []), MatchKeys(2, 12, [], [])])) > 0.01


def test_triplet_is_a_mean_over_a_querys_negatives():
    texts = texts_of(HARD)
    query, near, far = texts.vectors[:2], texts.vectors[2:4], texts.vectors[4:]
    cosines = cosine_similarity(query, near)
    pairs = ((0, 0), (0, 1), (1, 2))
    each = [2.5 + cosine_similarity(query[row], far[number], dim=0) - cosines[row] for row, number in pairs]
    expected = (each[0] + each[1]) / 2 + each[2]
    assert loss(texts, loss="triplet", margin=2.5) == pytest.approx(float(expected), rel=1e-5)


def test_losses_of_scores():
    texts = texts_of([MatchKeys(n, 10 + n, [], [], score) for n, score in enumerate([0, 500_000, 1_000_000])])
    cosines, scores = cosine_similarity(texts.vectors[:3], texts.vectors[3:]), torch.tensor([0.0, 0.5, 1.0])
    assert loss(texts, loss="cosine") == pytest.approx(float(((cosines - scores) ** 2).sum()), rel=1e-5)
    worse = [(cosines[i] - cosines[j]) / 0.05 for i in range(3) for j in range(3) if scores[i] < scores[j]]
    expected = 3 * torch.logsumexp(torch.stack([torch.zeros(()), *worse]), dim=0)
    assert loss(texts, loss="cosent") == pytest.approx(float(expected), rel=1e-5)


def test_matryoshka_is_the_mean_over_beginnings():
    texts = texts_of(PLAIN)
    cut = [Texts(texts.vectors[:, :size], texts.keys, texts.pairs) for size in (8, 4)]
    assert loss(texts, matryoshka=[4, 8]) == pytest.approx(np.mean([loss(each) for each in cut]), rel=1e-5)


@pytest.mark.parametrize("name", ["in_batch_negatives", "triplet", "cosent"])
def test_parts_add_up(name):
    """Two micro-batches: what each has of the loss of both, and its gradient, are those of one."""
    matches = [MatchKeys(1, 11, [21], [13], 100_000), MatchKeys(2, 12, [22], [], 900_000),
               MatchKeys(3, 13, [23], [], 500_000)]  # fmt: skip
    first, second, together = (match_keys(part) for part in (matches[:2], matches[2:], matches))
    torch.manual_seed(0)
    vectors = torch.randn(9, SIZE)
    config = EmbeddingConfig.model_validate({"loss": name})
    order = [0, 1, 3, 4, 6, 7, 2, 5, 8]
    apart, whole = vectors[order].clone().requires_grad_(), vectors.clone().requires_grad_()
    parts = Texts.from_vectors(apart, torch.from_numpy(np.concatenate([first, second])))
    total = loss_sum(parts, config, slice(0, 6)) + loss_sum(parts, config, slice(6, 9))
    expected = loss_sum(Texts.from_vectors(whole, torch.from_numpy(together)), config, slice(None))
    assert total.item() == pytest.approx(expected.item(), rel=1e-5)
    total.backward()
    expected.backward()
    assert torch.allclose(apart.grad, whole.grad[order], atol=1e-5)


def test_choosing_is_a_function_of_its_key():
    ids = np.arange(12)
    flags = np.array([1, 0, 2, 0, 2, 0, 3, 0, 3, 0, 3, 0], dtype=np.uint8)
    drawn = [choose_texts(ids, flags, 2, f"match:0:{epoch}:7") for epoch in range(30)]
    assert {tuple(each.positive) for each in drawn} == {(2, 3), (4, 5)}
    assert {len(each.negatives) for each in drawn} == {2}
    assert len({str(each.negatives) for each in drawn}) == 3
    again = choose_texts(ids, flags, 2, "match:0:3:7")
    assert (str(again.negatives), str(again.positive)) == (str(drawn[3].negatives), str(drawn[3].positive))


def test_figures_of_retrieval_by_hand():
    corpus = np.eye(12, dtype=np.float32)
    query = np.zeros((2, 12), dtype=np.float32)
    query[0, [3, 5]] = [0.9, 0.8]  # its documents come first and third
    query[0, 4] = 0.85
    query[1, 0], query[1, 7] = 0.9, 0.5  # its own text is nearest, then its document
    figures = retrieval_metrics(query, corpus, [{3: 1.0, 5: 1.0}, {7: 1.0}], {1: 0})
    assert figures["recall_at_1"] == pytest.approx((0.5 + 1) / 2)
    assert figures["recall_at_5"] == 1.0
    assert figures["mrr_at_10"] == 1.0
    assert figures["ndcg_at_10"] == pytest.approx(((1 + 1 / 2) / (1 + 1 / np.log2(3)) + 1) / 2)
    assert list(nearest(query[1:], corpus[:3], 10, {0: 0})[0]) == [1, 2, -1]


def test_spearman_gives_equal_numbers_their_mean_rank():
    assert spearman([1, 2, 3], [10, 20, 15]) == pytest.approx(0.5)
    assert spearman([1, 1, 2], [3, 3, 4]) == pytest.approx(1.0)
    assert spearman([1, 1], [2, 3]) == 0.0


@pytest.mark.parametrize("prompts", [{}, {"query": "q: ", "document": "document: "}])
def test_a_querys_own_text_is_known_behind_another_prompt(prompts):
    """In training, where keys are queries, then documents; and in validation, where each text is a sample."""
    texts = ["what is one", "one is here", "what is two"]
    tokenizer = train_tokenizer(iter([" ".join(texts)] * 40), TokenizerTraining(vocab=270), encoder=True)
    run = RunConfig.model_validate({"objective": "embedding", "embedding": {"prompts": prompts}, "data": {"block": 32}})
    objective = Embedding(run, tokenizer)
    matches = [Match(texts[0], (texts[1],)), Match(texts[2], (texts[0],))]  # the second's document is the first query

    def samples(split):
        documents = [Document(Record(match.query, "a:1", "a", match), split) for match in matches]
        return [sample for made in objective.samples(documents) for sample in made.samples]

    keys = objective.batch(stacked(samples("train"))).tensors["keys"][:, 1].tolist()
    assert keys[0] == keys[3]
    assert len(set(keys)) == 3
    validated = [sample.numbers[HASH] for sample in samples("validation")]
    assert [validated[place] for place in (0, 2, 1, 3)] == keys


def stacked(samples):
    """A micro-batch of them."""

    class Listed:
        read = staticmethod(samples.__getitem__)

    return training_rows(Listed, np.arange(len(samples)), len(samples))


@pytest.mark.parametrize("normalize", [True, False])
def test_the_card_normalizes_where_the_model_does(normalize):
    lines = example_code(EmbeddingConfig(normalize=normalize), ["a", "b"])
    assert ("normalize(" in lines) is normalize
    assert ("cosine_similarity(" in lines) is not normalize
    compile(lines, "card", "exec")


def changed(run, changes):
    """A run file with these keys of its sections."""
    tree = yaml.safe_load(run.read_text())
    for section, values in changes.items():
        tree[section] = {**tree.get(section, {}), **values}
    run.write_text(yaml.safe_dump(tree))
    return run


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run: tiny, in float32."""
    run = objective_run(tmp_path_factory.mktemp("embedding") / "run.yaml", "embedding")
    prompts = {"prompts": {"query": "q: ", "document": "d: "}}
    train = {"steps": 30, "batch": 32, "learning_rate": 0.003, "precision": "fp32"}
    succeed("train", changed(run, {"embedding": prompts, "train": train}))
    return run.with_suffix("")


@pytest.mark.slow
def test_a_run_learns_and_says_what_is_found(trained):
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    figures = next(line["validation"] for line in reversed(lines) if "validation" in line)
    assert set(figures) == {"loss", "recall_at_1", "recall_at_5", "recall_at_10", "mrr_at_10", "ndcg_at_10"}
    details = json.loads((trained / "validation.json").read_text())
    assert "16" in json.dumps(details)


@pytest.mark.slow
def test_sentence_transformers_gives_the_same_vectors(trained):
    import sentence_transformers  # takes seconds

    texts = ["What is one?", "two is what it is, and it is longer", "the answer"]
    theirs = sentence_transformers.SentenceTransformer(str(trained / "model"), device="cpu")
    ours = api.open(trained)
    for kind, encode in (("query", theirs.encode_query), ("document", theirs.encode_document)):
        assert np.abs(ours.embed(texts, kind=kind) - encode(texts)).max() < 1e-5
    short = theirs.encode(texts, truncate_dim=16, normalize_embeddings=True)
    assert np.abs(ours.embed(texts, dimensions=16) - short).max() < 1e-5
    foreign = api.open(trained / "model")
    assert foreign.objective == "embedding"
    assert np.abs(foreign.embed(texts, kind="query") - ours.embed(texts, kind="query")).max() == 0.0
    with pytest.raises(InputError, match="query or document"):
        ours.embed(["a"], kind="paragraph")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("one\ntwo\n\n\n three\n", [(1, "one\ntwo"), (5, "three")]),
        ("one\ntwo\n  \nthree", [(1, "one\ntwo"), (4, "three")]),
        ("\n\none\n\n\n\ntwo", [(3, "one"), (7, "two")]),
        ("one\n two\nthree\n\n", [(1, "one"), (2, "two"), (3, "three")]),
        ("one", [(1, "one")]),
        (" \n\n", []),
    ],
)
def test_paragraphs_are_named_by_their_first_line(text, found):
    assert list(paragraphs(text)) == found
    for line, paragraph in found:
        assert text.splitlines()[line - 1].strip() == paragraph.splitlines()[0]


def st_folder(folder, file, **changes):
    """The files of sentence-transformers with prompts, and `changes` in one of them."""
    config = EmbeddingConfig.model_validate({"prompts": {"query": "q: "}})
    for name, content in folder_files(config, SIZE, 32).items():
        (folder / name).parent.mkdir(exist_ok=True)
        values = json.loads(content)
        (folder / name).write_text(json.dumps(values | changes if name == file else values))
    return folder


@pytest.mark.parametrize(
    ("file", "changes", "said"),
    [
        ("1_Pooling/config.json", {"include_prompt": False}, "1_Pooling: include_prompt: false leaves the prompt"),
        ("sentence_bert_config.json", {"do_lower_case": True}, "sentence_bert_config.json: do_lower_case: true"),
    ],
)
def test_a_folder_that_reads_texts_in_another_way_is_refused(tmp_path, file, changes, said):
    folder = st_folder(tmp_path, file, **changes)
    with pytest.raises(InputError, match=r"use (it|the model)") as error:
        read_folder(str(folder))
    assert said in str(error.value)
    # The same vectors: there is no prompt, and a tokenizer that makes texts lower case itself.
    (folder / "config_sentence_transformers.json").unlink()
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": true}')
    assert read_folder(str(folder))["embedding"]["pooling"] == "mean"


def test_beginnings_longer_than_the_vectors_of_a_folder_are_refused_before_text_is_read(tmp_path):
    BertConfig(hidden_size=32, num_attention_heads=2).save_pretrained(tmp_path)
    tree = {"objective": "embedding", "model": {"from": str(tmp_path)}, "embedding": {"matryoshka": [768, 256, 16]}}
    (problem,) = Embedding.problems(RunConfig.model_validate(tree))
    assert (problem.where, problem.fix) == ("embedding.matryoshka", "write [32, 16]")
    tree["embedding"]["matryoshka"] = [32, 16]
    assert not Embedding.problems(RunConfig.model_validate(tree))


def test_the_commands_know_it(trained):
    done = succeed("generate", trained, "--prompt", "What is one?", "--json")
    assert len(json.loads(done.stdout)["embedding"]) == 32
    (result,) = json.loads(succeed("evaluate", trained, "--json").stdout)["models"]
    (shorter,) = result["details"]["tables"]["Shorter vectors"]
    assert (shorter["dimensions"], shorter["ndcg_at_10"] > 0) == ("16", True)
    assert 0 < result["metrics"]["ndcg_at_10"] <= 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train": {"batch": 1}}, "write 32 or more"),
        ({"embedding": {"loss": "triplet", "negatives": 0}}, "write 1 or more"),
        ({"validate": {"prompts": ["a"]}}, "validate.prompts"),
        ({"embedding": {"matryoshka": [64]}}, "64 is more than the 32 numbers"),
        ({"embedding": {"loss": "cosine"}}, "it has no score"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, changes, said):
    assert said in refused("train", changed(objective_run(tmp_path / "run.yaml", "embedding"), changes)).stderr


def test_the_command_at_the_end_has_a_query_of_the_data(tmp_path):
    rows = [json.dumps({"query": f"Где  дом {n}?", "pos": [f"Дом {n} в лесу."]}, ensure_ascii=False) for n in range(20)]
    (tmp_path / "matches.jsonl").write_text("\n".join(rows), encoding="utf-8")
    run = RunConfig.model_validate({
        "objective": "embedding", "embedding": {"prompts": {"query": "q: ", "document": "d: "}},
        "tokenizer": {"train": {"vocab": 300}},
        "data": {"sources": [{"path": str(tmp_path / "matches.jsonl"), "format": "matches"}], "block": 64,
                 "store": str(tmp_path / "stores")},
    })  # fmt: skip
    made = prepare(run)
    objective = build_objective(run, made.tokenizer())
    *_, prompt, json_flag = shlex.split(objective.demo_command("runs/x", objective.dataset(made.open().train)))
    assert prompt in {f"Где дом {n}?" for n in range(20)}
    assert json_flag == "--json"


def test_a_validation_has_the_texts_of_one_match_at_least(tmp_path):
    """Of fewer not all vectors would be there, and their loss would be 0."""
    prepared = prepare(load_run(str(objective_run(tmp_path / "run.yaml", "embedding"))))
    validation = Validation(build_objective(prepared.config, prepared.tokenizer()), prepared.open().validation)
    documents = validation.split.numbers()[:, DOCUMENT]
    assert validation.num_samples(1) == (documents == documents[0]).sum() > 1
    assert validation.num_samples(None) == len(documents)


def test_mined_negatives_are_near_and_no_positives(trained, tmp_path):
    rows = [{"query": f"What is {word}?", "pos": [f"{word} is what it is"]} for word in ("one", "two", "three", "four")]
    rows.append({"query": "What is one?", "pos": ["the answer to 1 is one"], "neg": ["one is not"]})
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    more = tmp_path / "more.txt"
    more.write_text("six is what it is\nseven is not\n")
    done = succeed("data", "mine", trained, data, "out.jsonl", "--negatives", 3, "--corpus", more, "--json")
    mined = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    result = json.loads(done.stdout)
    assert (result["queries"], result["documents"]) == (4, 8)
    assert result["negatives"] == sum(len(row["neg"]) for row in mined) - 1
    assert mined[0]["pos"] == ["one is what it is", "the answer to 1 is one"]
    assert mined[0]["neg"][0] == "one is not"
    model = api.open(trained)
    for row in mined:
        assert not set(row["neg"]) & {*row["pos"], row["query"]}
        query = model.embed([row["query"]], kind="query")[0]
        limit = (model.embed(row["pos"], kind="document") @ query).min()
        found = row["neg"][1:] if row is mined[0] else row["neg"]
        if found:
            assert (model.embed(found, kind="document") @ query <= limit + 1e-6).all()
    assert "exists already and is not overwritten" in refused("data", "mine", trained, data, "out.jsonl").stderr
    scored = tmp_path / "scored.jsonl"
    scored.write_text('{"sentence1": "a", "sentence2": "b", "score": 1}')
    done = artel("data", "mine", trained, scored, "other.jsonl")
    assert (done.returncode, "is a pair with a score" in done.stderr) == (2, True)


def test_rows_that_mining_cannot_use_are_told(trained, tmp_path):
    rows = [json.dumps({"query": f"What is {number}?", "pos": [f"{number} is here"]}) for number in range(200)]
    rows[6] = '{"query": "What is"'
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join([*rows, rows[0]]))
    done = succeed("data", "mine", trained, data, "out.jsonl", "--json")
    assert "201 documents read, 199 kept, 2 dropped (1 bad json, 1 duplicate)" in done.stderr
    assert f"{data}:7: " in done.stderr
    result = json.loads(done.stdout)
    assert (result["queries"], result["rejected"]) == (199, 1)
