"""Characters that a tokenizer has no token for: counted, told, and refused where texts become equal."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import artel
from artel.errors import InputError
from artel.reports.page.language import Language
from support.tokenizer_families import LETTERS, bert, framed, numbered, unigram

GEORGIAN = ["სახლი", "წყალი", "მზე", "მთვარე", "ცა", "ზღვა", "ქარი", "წვიმა"]
CHINESE = ["山上有雪", "河里有鱼", "天上有云", "树下有人"]
ENGLISH = ["the mill", "on the hill", "by the river", "a word"]
COUNTS = ("documents", "documents_with_unknown", "equal_documents", "unknown")


def words(*known):
    """A vocabulary of whole words."""
    backend = Backend(models.WordLevel(numbered("<unk>", "</s>", *known), unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")


def without_fallback(unknown):
    """SentencePiece's BPE without bytes: what the vocabulary lacks is <unk>, or left out."""
    backend = Backend(models.BPE(numbered("<unk>", "</s>", "▁", *LETTERS), [], unk_token=unknown))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    backend.add_special_tokens(["<unk>", "</s>"])
    roles = {"unk_token": "<unk>"} if unknown else {}
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", **roles)


def t5():
    from transformers import T5Tokenizer

    return T5Tokenizer(vocab=unigram("<pad>", "</s>", "<unk>"), extra_ids=2)


def prepared(tokenizer, rows, objective="causal", **source):
    Path("rows.jsonl").write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    return prepared_of(tokenizer, [{"path": "rows.jsonl", **source}], objective)


def prepared_of(tokenizer, sources, objective="causal"):
    tokenizer.save_pretrained("tokenizer")
    values = {
        "objective": objective, "data": {"sources": sources, "validation": 0, "block": 64, "store": "stores"},
        "tokenizer": {"from": "tokenizer"},
    }  # fmt: skip
    made = artel.prepare(values)
    return made.ledger().get("unknown_tokens"), made.notes()


def texts(*lines):
    return [{"text": line} for line in lines]


@pytest.mark.parametrize(
    ("tokenizer", "lines", "equal"),
    [(bert, GEORGIAN, 8), (bert, CHINESE, 4), (lambda: words("the"), ["mill", "hill", "river"], 3),
     (lambda: words("the"), ["mill", "hill", "river"] * 4, 12),
     (lambda: without_fallback("<unk>"), ["Я", "Ю", "Э"], 3), (lambda: without_fallback(None), ["Я", "Ю", "Э"], 3)],
    ids=["WordPiece, Georgian", "WordPiece, Chinese", "WordLevel", "duplicates",
         "BPE with unknown", "BPE that leaves out"],
)  # fmt: skip
def test_texts_that_become_equal_are_refused(tokenizer, lines, equal):
    with pytest.raises(InputError, match=rf"^tokenizer\.from: .* {equal} of {equal} documents get the") as error:
        prepared(tokenizer(), texts(*lines))
    assert any(repr(character) in str(error.value) for character in "".join(lines))


def test_texts_of_several_sources_are_compared():
    sources = []
    for word in GEORGIAN:
        Path(f"{word}.txt").write_text(word)
        sources.append({"path": f"{word}.txt"})
    with pytest.raises(InputError, match="8 of 8 documents get the same"):
        prepared_of(bert(), sources)


@pytest.mark.parametrize("count", [1, 600])
def test_a_sentence_that_comes_twice_with_other_tags_is_one_text(count):
    """`count`: sentences; of 600, twice, the shard compares them itself."""
    words = ["".join("abcdefghij"[int(digit)] for digit in str(number)) for number in range(count)]
    sentences = [f"{word} O\nმზე {tag}\n" for word in words for tag in ("O", "B-X")]
    Path("a.conll").write_text("\n".join(sentences))
    entry, _ = prepared_of(bert(), [{"path": "a.conll", "format": "conll"}], "tokens")
    (of_set,) = entry["sets"].values()
    assert of_set["documents_with_unknown"] > count
    assert of_set["equal_documents"] == 0


@pytest.mark.parametrize(
    ("tokenizer", "lines", "counts", "shown"),
    [(bert, [*ENGLISH, *GEORGIAN[:3]], (7, 3, 3, 3), GEORGIAN[0][0]),
     (lambda: words(*" ".join(ENGLISH).split()), [*ENGLISH, "the wood"], (5, 1, 0, 1), "w"),
     (lambda: without_fallback("<unk>"), [*ENGLISH, "a {b}"], (5, 1, 0, 2), "{"),
     (lambda: without_fallback(None), [*ENGLISH, "a {b} and {c}"], (5, 1, 0, 4), "{"),
     (t5, [*ENGLISH, "a {b}"], (5, 1, 0, 2), "{")],
    ids=["WordPiece", "WordLevel", "BPE with unknown", "BPE that leaves out", "Unigram"],
)  # fmt: skip
def test_unknown_tokens_are_counted_and_told(tokenizer, lines, counts, shown):
    entry, notes = prepared(tokenizer(), texts(*lines))
    (of_set,) = entry["sets"].values()
    assert tuple(of_set[name] for name in COUNTS) == counts
    assert entry["share"] == of_set["unknown"] / of_set["tokens"]
    assert shown in entry["characters"]
    (note,) = notes
    assert note.startswith(f"{entry['share']:.1%} of the tokens are unknown, in {counts[1]} of {counts[0]} documents")
    assert "unknown" not in Language("ru").phrase(note)


def test_few_unknown_tokens_are_in_the_ledger_alone():
    entry, notes = prepared(without_fallback("<unk>"), texts("a word " * 30, "on the hill " * 30 + "{"))
    assert (entry["characters"], notes) == ({"{": 1}, [])


def test_any_unknown_token_of_an_output_is_told():
    """T5's vocabulary has no line feeds and braces, which answers in JSON are full of."""
    pairs = [{"input": "a word " * 20, "output": output} for output in ("one", 'a {"b": 1}')]
    entry, (note, *_) = prepared(t5(), [*pairs, {"input": "{}", "output": "three"}], "seq2seq", format="pairs")
    (of_set,) = entry["sets"].values()
    assert of_set["unknown"] > of_set["unknown_in_outputs"] == 3
    assert note.startswith("3 tokens of the outputs are unknown (")
    assert "unknown" not in Language("ru").phrase(note)


def test_bytes_lack_nothing():
    """A byte-level tokenizer may name an unknown token all the same."""
    tokenizer = framed("<s>", "", "<s>", "</s>", "<unk>", bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    assert prepared(tokenizer, texts(*GEORGIAN, *CHINESE)) == (None, [])
