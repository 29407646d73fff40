"""Tokens of Megatron-LM, nanoGPT and llm.c become a store that holds what the same texts prepared here would."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import yaml

from artel.config import Overrides, TokenizerTraining, load_run
from artel.errors import InputError
from artel.preparing import prepare
from artel.preparing.import_tokens import import_tokens, make_text_counter, open_token_files
from artel.tokens import TokenStore, load_tokenizer, train_tokenizer
from support.messages import logged
from support.runs import TINY, refused, succeed

TEXTS = [f"Письмо {number}: it rained for {number * 7} days, и дождь не переставал. 🙂" * 3 for number in range(40)]
CODES = {np.dtype("int32"): 4, np.dtype("int64"): 5, np.dtype("uint16"): 8}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(iter(TEXTS), TokenizerTraining(vocab=350)).save(folder)
    return folder


@pytest.fixture(scope="module")
def ids(tokenizer):
    """The tokens of each text, without an end."""
    return list(load_tokenizer(str(tokenizer)).encode(TEXTS))


def end_of(tokenizer):
    return load_tokenizer(str(tokenizer)).end_id


def write_megatron(prefix, documents, dtype=np.int32):
    """NAME.bin and NAME.idx as megatron/core/datasets/indexed_dataset.py has them, of documents of sequences."""
    sequences = [np.asarray(sequence, dtype=dtype) for document in documents for sequence in document]
    lengths = np.array([len(sequence) for sequence in sequences], dtype="<i4")
    pointers = np.concatenate([[0], np.cumsum(lengths[:-1], dtype="<i8") * np.dtype(dtype).itemsize]).astype("<i8")
    bounds = np.cumsum([0, *map(len, documents)]).astype("<i8")
    prefix.with_suffix(".bin").write_bytes(b"".join(sequence.tobytes() for sequence in sequences))
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, CODES[np.dtype(dtype)], len(sequences), len(bounds))
    prefix.with_suffix(".idx").write_bytes(header + lengths.tobytes() + pointers.tobytes() + bounds.tobytes())
    return prefix


def write_llm_c(file, tokens, magic=20240520, version=1, dtype="<u2"):
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, len(tokens)
    file.write_bytes(header.tobytes() + np.asarray(tokens, dtype=dtype).tobytes())
    return file


def texts_of(folder, part="train"):
    """The text of each document, having checked that it ends with the one end token."""
    tokenizer = load_tokenizer(str(folder / "tokenizer"))
    results = []
    for _, document in getattr(TokenStore(folder), part).iter_samples():
        assert document.tolist().count(tokenizer.end_id) == 1
        assert document[-1] == tokenizer.end_id
        results.append(tokenizer.decode(document[:-1]))
    return results


def refusal(path, tokenizer, folder, validation=0.0):
    with pytest.raises(InputError) as error:
        import_tokens(str(path), folder, str(tokenizer), validation)
    assert not folder.exists()
    assert not list(folder.parent.glob(".*partial*"))
    assert len(error.value.problems) == 1
    assert error.value.problems[0].fix
    return str(error.value)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16])
def test_megatron_documents_of_one_sequence_and_of_several(tokenizer, ids, tmp_path, dtype):
    end = end_of(tokenizer)
    documents = [[np.append(text, end)] for text in ids[:30]]  # --append-eod
    documents += [[text[:5], text[5:5], text[5:]] for text in ids[30:]]  # --split-sentences, and no end token
    write_megatron(tmp_path / "corpus", documents, dtype)
    made = import_tokens(str(tmp_path / "corpus"), tmp_path / "store", str(tokenizer), 0.0)
    assert texts_of(tmp_path / "store") == TEXTS
    assert made.ledger["changed"] == {"end_added": 10}
    assert made.ledger["bytes"]["train"] == sum(len(text.encode()) for text in TEXTS)
    assert made.ledger["parts"]["train"]["characters"] == sum(map(len, TEXTS))
    store = TokenStore(tmp_path / "store")
    store.verify()
    assert store.train.bytes == made.ledger["bytes"]["train"]
    assert store.train.origin(3) == f"{tmp_path}/corpus.bin[3]"


@pytest.mark.parametrize("form", ["nanoGPT", "llm.c", "llm.c of llama"])
def test_streams_are_cut_at_end_tokens(tokenizer, ids, tmp_path, form):
    end, file = end_of(tokenizer), tmp_path / "train.bin"
    if form == "nanoGPT":  # the end token behind each document
        np.concatenate([np.append(text, end) for text in ids]).astype("<u2").tofile(file)
    else:  # in front of each
        tokens = np.concatenate([np.append(end, text) for text in ids])
        write_llm_c(file, tokens) if form == "llm.c" else write_llm_c(file, tokens, 20240801, 7, "<u4")
    ledger = import_tokens(str(file), tmp_path / "store", str(tokenizer), 0.0).ledger
    assert texts_of(tmp_path / "store") == TEXTS
    if form == "nanoGPT":
        assert (ledger["documents"]["dropped"], ledger["changed"]) == ({}, {})
    else:  # before the first end token stands nothing, behind the last text none
        assert (ledger["documents"]["dropped"], ledger["changed"]) == ({"empty": 1}, {"end_added": 1})
    documents = ledger["documents"]
    assert documents["read"] == documents["kept"] + sum(documents["dropped"].values())


@pytest.fixture
def both_forms(tokenizer, ids, tmp_path):
    """The same documents as a stream and as a pair of Megatron-LM; the tokens of the stream."""
    stream = np.concatenate([np.append(text, end_of(tokenizer)) for text in ids])
    stream.astype("<u2").tofile(tmp_path / "train.bin")
    write_megatron(tmp_path / "corpus", [[text] for text in ids])
    return stream.tolist()


def test_documents_longer_than_a_piece_and_across_pieces(tokenizer, both_forms, tmp_path, monkeypatch):
    monkeypatch.setattr(f"{import_tokens.__module__}.CHUNK_TOKENS", 50)
    for name in ("train.bin", "corpus"):
        made = import_tokens(str(tmp_path / name), tmp_path / f"store-{name}", str(tokenizer), 0.0)
        store = TokenStore(tmp_path / f"store-{name}")
        assert store.train.read(0, store.train.tokens).tolist() == both_forms
        assert (store.train.documents, made.ledger["documents"]["kept"]) == (len(TEXTS), len(TEXTS))
        assert store.train.samples > store.train.documents
        assert store.train.bytes == sum(len(text.encode()) for text in TEXTS)


def test_a_share_that_catches_no_document_holds_out_one(tokenizer, ids, tmp_path):
    end = end_of(tokenizer)
    np.concatenate([[*document, end] for document in ids[:3]]).astype("<u2").tofile(tmp_path / "a.bin")
    said = logged()
    import_tokens(str(tmp_path / "a.bin"), tmp_path / "store", str(tokenizer), 0.0001)
    assert "--validation 0.0001 catches none of the 3 documents: one is held out" in said
    held, kept = texts_of(tmp_path / "store", "validation"), texts_of(tmp_path / "store")
    assert (len(held), sorted(held + kept)) == (1, sorted(TEXTS[:3]))
    TokenStore(tmp_path / "store").verify()
    ids[0].astype("<u2").tofile(tmp_path / "one.bin")
    assert "none can be held out" in refusal(tmp_path / "one.bin", tokenizer, tmp_path / "other", 0.5)


def test_validation_by_share_is_the_same_for_every_form_and_by_path(tokenizer, both_forms, tmp_path):
    for name in ("train.bin", "corpus"):
        import_tokens(str(tmp_path / name), tmp_path / f"store-{name}", str(tokenizer), 0.3)
    held = texts_of(tmp_path / "store-corpus", "validation")
    assert 0 < len(held) < 30
    assert held == texts_of(tmp_path / "store-train.bin", "validation")
    assert sorted(held + texts_of(tmp_path / "store-corpus")) == sorted(TEXTS)
    import_tokens(str(tmp_path / "train.bin"), tmp_path / "given", str(tokenizer), str(tmp_path / "corpus.idx"))
    assert texts_of(tmp_path / "given") == texts_of(tmp_path / "given", "validation") == TEXTS


def test_the_command_and_a_glob(tokenizer, ids, tmp_path):
    end, options = end_of(tokenizer), ("--tokenizer", tokenizer)
    for number in range(2):
        half = ids[number * 20 : number * 20 + 20]
        write_llm_c(tmp_path / f"part_{number}.bin", np.concatenate([np.append(end, text) for text in half]))
    done = succeed("data", "import", f"{tmp_path}/part_*.bin", tmp_path / "store", *options, "--json")
    report = json.loads(done.stdout)
    assert report["documents"] == {"read": 42, "kept": 40, "dropped": {"empty": 2}}
    assert report["changed"] == {"end_added": 2}
    assert report["tokens_per_second"] > 0
    assert "'Письмо 0: it rained" in done.stderr
    assert sorted(texts_of(tmp_path / "store") + texts_of(tmp_path / "store", "validation")) == sorted(TEXTS)
    succeed("data", "verify", tmp_path / "store")
    assert json.loads(succeed("data", "show", tmp_path / "store", "--json").stdout)["part"] == "train"
    one = ("data", "import", f"{tmp_path}/part_0.bin")
    assert "exists already" in refused(*one, tmp_path / "store", *options).stderr
    assert "not a fraction" in refused(*one, tmp_path / "s", *options, "--validation", "1.5").stderr


def test_the_counts_of_a_text_are_exact_also_where_a_character_is_cut(tokenizer):
    loaded = load_tokenizer(str(tokenizer))
    count_text, text = make_text_counter(loaded), "naïve 🙂 ю <|endoftext|> <|pad|>"
    (encoded,) = loaded.encode([text])
    assert count_text(encoded) == (len(text), len(text.encode()))
    sizes = [count_text(encoded[at : at + 1]) for at in range(len(encoded))]  # of each token by itself
    assert tuple(map(sum, zip(*sizes, strict=True))) == (len(text), len(text.encode()))
    assert count_text(np.array([loaded.end_id])) == (0, 0)


def test_the_counts_of_a_text_of_a_vocabulary_that_is_not_of_bytes():
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from artel.tokens import Tokenizer

    backend = Backend(models.WordLevel({"▁я": 0, "▁иду": 1, "</s>": 2, "?": 3}, unk_token="?"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"), "here")
    assert make_text_counter(tokenizer)(np.array([0, 1, 2])) == (5, 9)


def test_ids_that_the_tokenizer_does_not_have_are_named(tokenizer, ids, tmp_path):
    documents = [ids[0].copy(), ids[1].copy()]
    documents[1][4] = 350
    write_megatron(tmp_path / "high", [[document] for document in documents])
    token = len(ids[0]) + 4
    expected = f"high.bin: token {token:,} (byte {token * 4:,}): id 350 in document 1; the tokenizer's ids are 0 to 349"
    assert expected in refusal(tmp_path / "high", tokenizer, tmp_path / "store")
    documents[1][4] = -1
    write_megatron(tmp_path / "low", [[document] for document in documents])
    assert "id -1 in document 1" in refusal(tmp_path / "low", tokenizer, tmp_path / "store")
    write_llm_c(tmp_path / "high.c.bin", [1, 2, 65535])
    assert "token 2 (byte 1,028): id 65,535" in refusal(tmp_path / "high.c.bin", tokenizer, tmp_path / "store")


def cut(file, bytes_left):
    file.write_bytes(file.read_bytes()[:bytes_left])


def patch(file, at, content):
    data = bytearray(file.read_bytes())
    data[at : at + len(content)] = content
    file.write_bytes(data)


def eight(number):
    return struct.pack("<q", number)


# Three sequences of 10, 20 and 30 tokens in two documents: lengths from byte 34, places from 46, bounds from 70 to 94.
HOSTILE = {
    "wrong magic": (
        lambda b, i: patch(i, 0, b"TNTIDX\0\0\0"),
        "is not an index of Megatron-LM: it begins with b'TNTIDX",
    ),
    "empty index": (lambda b, i: cut(i, 0), "is not an index of Megatron-LM: it begins with b''"),
    "cut within the header": (lambda b, i: cut(i, 20), "is cut off after 20 bytes, within its header"),
    "cut index": (lambda b, i: cut(i, 90), "has 90 bytes, but its header says 3 sequences and 3 ends"),
    "absurd counts": (lambda b, i: patch(i, 18, eight(2**62)), "4,611,686,018,427,387,904 sequences"),
    "version": (lambda b, i: patch(i, 9, eight(2)), "is of version 2"),
    "floats": (lambda b, i: patch(i, 17, b"\6"), "has the token type 6"),
    "images": (lambda b, i: i.write_bytes(i.read_bytes() + bytes(3)), "images"),
    "cut tokens": (lambda b, i: cut(b, 200), "has 200 bytes, but its sequences in corpus.idx need 240"),
    "cut within a token": (lambda b, i: cut(b, 239), "its 239 bytes are not 3 sequences"),
    "empty tokens": (lambda b, i: cut(b, 0), "is empty"),
    "no tokens": (lambda b, i: b.unlink(), "is missing next to its .idx"),
    "negative length": (lambda b, i: patch(i, 38, struct.pack("<i", -1)), "sequence 1 (-1 tokens) does not begin"),
    "place": (lambda b, i: patch(i, 54, eight(44)), "sequence 1 (20 tokens) does not begin where the one before it"),
    "ends fall": (lambda b, i: patch(i, 78, eight(7)), "the ends of its documents do not rise from 0 to its 3"),
    "last end": (lambda b, i: patch(i, 86, eight(2)), "the ends of its documents do not rise from 0 to its 3"),
    "first end": (lambda b, i: patch(i, 70, eight(1)), "the ends of its documents do not rise from 0 to its 3"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_damaged_megatron_pair_is_refused(tokenizer, tmp_path, name):
    damage, message = HOSTILE[name]
    write_megatron(tmp_path / "corpus", [[np.arange(10), np.arange(20)], [np.arange(30)]])
    damage(tmp_path / "corpus.bin", tmp_path / "corpus.idx")
    assert message in refusal(tmp_path / "corpus", tokenizer, tmp_path / "store")


def test_other_files_that_are_none_are_refused(tokenizer, tmp_path):
    store = tmp_path / "store"
    (tmp_path / "odd.bin").write_bytes(b"\1\0\2")
    assert "odd.bin: has 3 bytes" in refusal(tmp_path / "odd.bin", tokenizer, store)
    cut(write_llm_c(tmp_path / "short.bin", range(100)), 1100)
    assert "has 1,100 bytes, but its header says 100 tokens" in refusal(tmp_path / "short.bin", tokenizer, store)
    write_llm_c(tmp_path / "new.bin", range(5), version=2)
    assert "is llm.c's format in version 2" in refusal(tmp_path / "new.bin", tokenizer, store)
    write_llm_c(tmp_path / "none.bin", [])
    assert "holds no tokens" in refusal(tmp_path / "none.bin", tokenizer, store)
    assert "no such token files" in refusal(tmp_path / "x*.bin", tokenizer, store)
    assert "is a folder" in refusal(tmp_path, tokenizer, store)
    np.array([1, 2, 3], "<u2").tofile(tmp_path / "good.bin")
    assert "none can be held out" in refusal(tmp_path / "good.bin", tokenizer, store, 0.05)
    assert "--validation" in refusal(tmp_path / "good.bin", tokenizer, store, str(tmp_path / "missing.bin"))
    np.array([end_of(tokenizer)] * 3, "<u2").tofile(tmp_path / "ends.bin")
    assert "none of its 0 documents is left" in refusal(tmp_path / "ends.bin", tokenizer, store)
    with pytest.raises(InputError, match="uint16 as nanoGPT writes it, which cannot hold the 70,000 ids"):
        open_token_files(str(tmp_path / "good.bin"), 70_000, "PATH")
    with pytest.raises(InputError) as error:  # each of them is named
        open_token_files(str(tmp_path / "[os]*.bin"), 350, "PATH")
    assert len(error.value.problems) == 2


def test_a_run_trains_from_what_was_imported(tokenizer):
    random = np.random.default_rng(0)
    documents = [np.append(random.integers(0, 300, 50), end_of(tokenizer)) for _ in range(100)]
    np.concatenate(documents).astype("<u2").tofile("tokens.bin")
    succeed("data", "import", "tokens.bin", "store", "--tokenizer", tokenizer)
    tree = {**TINY, "data": {"from_store": "store", "block": 32}}
    del tree["tokenizer"]
    Path("run.yaml").write_text(yaml.safe_dump(tree))
    succeed("train", "run.yaml")
    assert json.loads(Path("runs/run/result.json").read_text())["steps"] == 6
    succeed("train", "run.yaml")  # RUN/config.yaml says the same
    for overrides, says in (
        (["objective=masked", "model.config={model_type: roberta}"], "data.from_store: "),
        (["data.sources=[{format: dummy}]"], "from_store is an existing store, which sources would not change"),
        (["data.from_store=none"], "none is not a token store"),
    ):
        with pytest.raises(InputError, match=says):
            prepare(load_run("run.yaml", Overrides.parse(overrides)))
