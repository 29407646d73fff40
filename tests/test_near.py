"""Near-duplicates: found, verified, left out but the first, never on both sides of the split; each accounted for."""

import json
import random
import sys
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest

from artel.config import NearConfig, Overrides, load_run
from artel.config.load import parse_run
from artel.errors import InputError
from artel.preparing import prepare
from artel.preparing.prepare import store_key
from artel.text.dedup import near as near_module
from artel.text.dedup.near import (
    BAND_GROUPS,
    Signatures,
    SignatureWriter,
    choose_bands,
    find_similar_pairs,
    select_near_duplicates,
)
from artel.text.dedup.shingles import Shingler, jaccard, shingle_set
from support.messages import logged
from support.stores import stored


@pytest.fixture
def read(tmp_path):
    """(documents, ledger) of sources given as in a run file, with near-duplicates left out."""

    def read(near=None, dedup=None, objective="causal", **data):
        given = {"dedup": {"near": near or {}, **(dedup or {})}, **data}
        documents, prepared = stored(tmp_path, data=given, objective=objective)
        assert prepared["documents"]["read"] == len(documents) + sum(prepared["documents"]["dropped"].values())
        assert prepared["documents"]["kept"] == len(documents)
        return documents, prepared

    return read


def lines_of(name, texts):
    Path(name).write_text("\n".join(texts))
    return {"path": name, "document": "line"}


def texts_of(documents):
    return [document.text for document in documents]


def words_from(start, end):
    return " ".join(f"w{number}" for number in range(start, end))


def similarity(one, other):
    grams = Shingler(5)
    return jaccard(*(shingle_set(hashes) for hashes in grams.hashes([one, other])))


def families(count, seed=0):
    """(texts in mixed order, similarities of all pairs that share anything, by number): copies from alike to unlike."""
    chance = random.Random(seed)
    texts = []
    for _ in range(count):
        words = [f"слово{chance.randrange(20_000)}" for _ in range(chance.randrange(20, 120))]
        texts.append(" ".join(words))
        for _ in range(chance.randrange(4)):
            for _ in range(chance.randrange(1, 4)):  # a copy of the copy: chains
                words[chance.randrange(len(words))] = f"слово{chance.randrange(20_000)}"
            texts.append(" ".join(words))
    chance.shuffle(texts)
    texts = list(dict.fromkeys(texts))
    sets = [{tuple(words[place : place + 5]) for place in range(len(words) - 4)} for words in map(str.split, texts)]
    alike = {
        (one, other): len(sets[one] & sets[other]) / len(sets[one] | sets[other])
        for one, other in combinations(range(len(texts)), 2)
        if sets[one] & sets[other]
    }
    return texts, alike


def clusters_of(count, alike, threshold):
    """The first number of each text's cluster, by the plainest way there is."""
    first = list(range(count))
    changed = True
    while changed:
        changed = False
        for (one, other), value in alike.items():
            if value >= threshold and first[one] != first[other]:
                first[one] = first[other] = min(first[one], first[other])
                changed = True
    return first


def test_the_articles_pairs_are_found_and_nothing_else(shared_data, read):
    """Measured: recall 1.0, precision 1.0."""
    folder = shared_data / "dedup"
    documents, ledger = read(sources=[{"path": str(folder / "articles_1000.train"), "document": "line"}])
    names = [line.split()[0] for line in (folder / "articles_1000.train").read_text().splitlines()]
    kept = {text.split()[0] for text in texts_of(documents)}
    dropped = set(names) - kept
    assert ledger["documents"]["dropped"] == {"near_duplicate": len(dropped)}
    later = {max(line.split(), key=names.index) for line in (folder / "articles_1000.truth").read_text().splitlines()}
    assert len(later) == 10
    assert later <= dropped
    assert len(later) / len(dropped) >= 0.95


@pytest.mark.slow
def test_the_editions_of_a_novel_are_one(shared_data, read):
    names = ["anna_karenina.txt", "anna_karenina.other_edition.txt", "anna_karenina.cp1251.txt", "oblomov.txt"]
    documents, ledger = read(sources=[{"path": [str(shared_data / "literature" / name) for name in names]}])
    assert [document.origin.rpartition("/")[2] for document in documents] == [names[0], names[3]]
    assert ledger["documents"]["dropped"] == {"near_duplicate": 2}


@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.8, 0.9])
def test_what_is_left_is_what_comparing_all_pairs_leaves(read, threshold):
    texts, alike = families(150)
    first = clusters_of(len(texts), alike, threshold)
    expected = [text for number, text in enumerate(texts) if first[number] == number]
    assert len(texts) - len(expected) > 20
    documents, ledger = read({"threshold": threshold}, sources=[lines_of("a.txt", texts)])
    assert texts_of(documents) == expected
    assert ledger["documents"]["dropped"] == {"near_duplicate": len(texts) - len(expected)}


def test_no_cluster_stands_on_both_sides_of_the_split(tmp_path, read):
    texts, alike = families(200, seed=1)
    number = {text: place for place, text in enumerate(texts)}

    def across(documents):
        part = {number[document.text]: document.split for document in documents}
        return [value for (one, other), value in alike.items() if {part.get(one), part.get(other)} == {"train", "validation"}]  # fmt: skip  # noqa: E501

    source = lines_of("a.txt", texts)
    documents, ledger = read({"threshold": 0.7}, sources=[source], validation=0.5)
    assert min(ledger["parts"][part]["documents"] for part in ("train", "validation")) > 50
    assert max(across(documents), default=0.0) < 0.7
    without, _ = stored(tmp_path, data={"sources": [source], "validation": 0.5})
    assert max(across(without)) > 0.9  # the texts do offer the mistake


def test_a_pair_just_under_the_threshold_stays_and_one_at_it_goes(read):
    """Sets of 100 runs of words in all. With 79 in both, 9,998 pairs of 10,000 have an equal key and are compared."""
    under, at = [], []
    for place in range(0, 50_000, 1000):
        under += [words_from(place, place + 94), words_from(place + 11, place + 104)]  # 79 of 100
        at += [words_from(place + 500, place + 594), words_from(place + 510, place + 604)]  # 80 of 100
    assert similarity(*under[:2]) == 0.79
    assert similarity(*at[:2]) == 0.8
    documents, _ = read(sources=[lines_of("a.txt", [*under, *at])])
    assert texts_of(documents) == [*under, *at[::2]]


def test_equal_texts_are_duplicates_and_not_near_ones(read):
    text, near = words_from(0, 60), words_from(1, 60)
    source = lines_of("a.txt", [text, text, near, text.upper() + "!", text])
    documents, ledger = read(sources=[source])
    assert texts_of(documents) == [text]
    assert ledger["documents"]["dropped"] == {"duplicate": 2, "near_duplicate": 2}
    assert read(dedup={"exact": False}, sources=[source])[1]["documents"]["dropped"] == {"near_duplicate": 4}


def test_texts_of_too_few_words_are_left_to_the_exact_rule(read):
    short = ["— Да!", "— Да?", "один два три четыре", "один, два, три, четыре", "...", "!!!"]
    whole = ["один два три четыре пять", "Один, два, три, четыре, пять!"]
    documents, _ = read(sources=[lines_of("a.txt", [*short, *whole])])
    assert texts_of(documents) == [*short, whole[0]]


def test_writing_without_spaces_has_words_too():
    text = "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。"
    assert similarity(text, text.replace("無い", "ない")) == pytest.approx(20 / 33, abs=0.1)
    assert similarity(text, text.replace("。", "！")) == 1.0


def test_training_texts_near_given_validation_texts_are_dropped(read):
    held = [words_from(0, 100), words_from(3, 100), words_from(1000, 1100)]  # the first two are near each other
    near = [words_from(1, 99), words_from(1000, 1098), words_from(1000, 1098) + " end"]
    alone = [words_from(5000, 5100), words_from(5000, 5099)]
    Path("held.txt").write_text("\n".join(held))
    source = lines_of("a.txt", [near[0], alone[0], *near[1:], held[0], alone[1]])
    documents, ledger = read(sources=[source], validation="held.txt")
    assert [(document.text, document.split) for document in documents] == [
        *((text, "validation") for text in held),
        (alone[0], "train"),
    ]
    assert ledger["documents"]["dropped"] == {"duplicate": 1, "near_duplicate": 1, "near_validation": 3}


def test_validation_texts_do_not_depend_on_training_texts(read):
    """A training text between two validation texts makes all three one cluster; both validation texts stay."""
    held = [words_from(0, 100), words_from(16, 116)]
    between = words_from(8, 108)
    assert similarity(*held) < 0.8 <= min(similarity(text, between) for text in held)
    Path("held.txt").write_text("\n".join(held))
    source = lines_of("a.txt", [between, words_from(500, 600)])
    documents, ledger = read(sources=[source], validation="held.txt")
    assert texts_of(documents) == [*held, words_from(500, 600)]
    assert ledger["documents"]["dropped"] == {"near_validation": 1}


def left_out(folder, texts, cuts=(), *, signed=None, open_files=200, comparisons=1000, **near):
    """Numbers of the texts that are left out, when signers share them by the cuts."""
    config = NearConfig(**near)
    shares = [texts[start:stop] for start, stop in pairwise([0, *cuts, len(texts)])]
    folders = [folder / f"{len(list(folder.iterdir())) + number}" for number in range(len(shares))]
    for share, place in zip(shares, folders, strict=True):
        with SignatureWriter(place, config, **(signed or {})) as signer:
            for number, text in enumerate(share):
                signer.add(number, text)
    signatures = Signatures(folders, [len(share) for share in shares], np.ones(len(texts), bool), open_files=open_files)
    bands, _ = choose_bands(config.threshold)
    pairs = [
        find_similar_pairs(signatures, range(group, bands, BAND_GROUPS), config.threshold, comparisons)
        for group in range(BAND_GROUPS)
    ]
    dropped = select_near_duplicates(signatures, pairs, *np.zeros((2, len(texts)), bool))
    return sorted(np.concatenate(list(dropped.values())).tolist())


def test_small_batches_and_shares_give_what_large_ones_give(tmp_path):
    texts, _ = families(60, seed=2)
    expected = left_out(tmp_path, texts)
    assert 0 < len(expected) < len(texts)
    assert left_out(tmp_path, texts, cuts=(1, 40, 40, len(texts) - 1)) == expected
    small = {"batch_documents": 7, "batch_characters": 300}
    assert left_out(tmp_path, texts, cuts=(50,), signed=small, open_files=1) == expected


def test_a_template_is_compared_with_a_bounded_number(tmp_path, monkeypatch):
    """Pages alike but under the threshold: each is compared with so many others of its key and no more."""
    pages = [f"{words_from(0, 60)} {words_from(place, place + 40)}" for place in range(1000, 5000, 40)]  # 0.4
    compared = []
    counted = near_module.jaccard
    monkeypatch.setattr(near_module, "jaccard", lambda one, other: compared.append(1) or counted(one, other))
    assert left_out(tmp_path, pages, comparisons=3, threshold=0.8) == []
    bands, _ = choose_bands(0.8)
    assert 0 < len(compared) <= 3 * bands * len(pages)


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.8, 0.9])
def test_bands_find_a_pair_at_the_threshold(threshold):
    def probability(rows):
        return 1 - (1 - threshold**rows) ** (128 // rows)

    bands, rows = choose_bands(threshold)
    assert bands == 128 // rows
    assert probability(rows) >= 0.999 > probability(rows + 1)


def test_pairs_and_conversations_are_compared_by_their_texts(read):
    answers = [words_from(0, 60), words_from(1, 60), words_from(100, 160)]
    pairs = [{"input": f"question {number}", "output": answer} for number, answer in enumerate(answers)]
    chats = [{"instruction": row["input"], "output": row["output"]} for row in pairs]
    for objective, rows, kind in (("chat", chats, "chat"), ("causal", pairs, "jsonl")):
        file = Path(f"{kind}.jsonl")
        file.write_text("\n".join(map(json.dumps, rows)))
        documents, ledger = read(sources=[{"path": str(file), "format": kind, "field": "output"}], objective=objective)
        assert len(documents) == 2
        assert ledger["documents"]["dropped"] == {"near_duplicate": 1}


def test_a_text_of_which_no_sample_is_made_stands_for_no_other(read):
    """The first of three is too long for a block: of the other two one is kept, where all three had been lost."""
    answers = [words_from(0, 75), words_from(0, 62), words_from(0, 61)]
    file = Path("chat.jsonl")
    file.write_text("\n".join(json.dumps({"instruction": "Say.", "output": answer}) for answer in answers))
    source = {"path": str(file), "format": "chat"}
    documents, ledger = read(sources=[source], objective="chat", block=290)
    assert len(documents) == 1
    assert ledger["documents"]["dropped"] == {"longer_than_block": 1, "near_duplicate": 1}


@pytest.mark.parametrize("source", [{"path": "a.json", "format": "squad"}, {"path": "a.jsonl", "format": "preference"}])
def test_what_shares_a_document_or_a_prompt_is_refused(source):
    with pytest.raises(InputError, match=r"(?s)data.*dedup\.near.*sources\.1") as error:
        parse_run({"data": {"sources": [{"path": "x.txt"}, source], "dedup": {"near": {}}}}, {}, {(): "run.yaml"})
    assert "remove dedup.near" in str(error.value)


def test_a_missing_package_is_told_before_any_text_is_read(tmp_path, read, monkeypatch):
    source = lines_of("a.txt", ["one"])
    monkeypatch.setitem(sys.modules, "rensa", None)
    with pytest.raises(InputError, match=r"(?s)data\.dedup\.near: .*rensa.*artel-lm\[near\]"):
        read(sources=[source])
    assert not Path("stores").exists()
    stored(tmp_path, data={"sources": [source]})  # nobody else needs it


def test_prepare_looks_for_them_once():
    texts, alike = families(100, seed=3)
    first = clusters_of(len(texts), alike, 0.8)
    source = lines_of("a.txt", texts)
    given = ["data.store=stores", f"data.sources={json.dumps([source])}", "tokenizer.train.vocab=300", "data.block=8"]
    run = load_run("novel-small", Overrides.parse([*given, "data.dedup.near={}"]))
    messages = logged()
    ledger = prepare(run).ledger()  # the texts are read for the tokenizer and again for the tokens
    assert messages.count("looking for near-duplicates") == 1
    kept = len(set(first))
    assert ledger["documents"] == {"read": len(texts), "kept": kept, "dropped": {"near_duplicate": len(texts) - kept}}
    keys = {
        store_key(load_run("novel-small", Overrides.parse([*given, f"data.dedup.near={near}"])))
        for near in ("null", "{}", "{threshold: 0.7}")
    }
    assert len(keys) == 3
