"""fastokens, or words encoded once, in the place of `tokenizers`: the same ids for every text, or not at all."""

import json
import multiprocessing
import os
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from artel.config import TokenizerTraining
from artel.tokens import Tokenizer, load_tokenizer, train_tokenizer
from artel.tokens.tokenizer import word_cache as by_words
from artel.tokens.tokenizer.fast_encoder import _COMPARE_EVERY, Encoder, encode_in_one_thread

fastokens = pytest.importorskip("fastokens", reason="the extra fast is not installed")

LINE = "Все счастливые семьи похожи друг на друга; it's 1873, they'LL return (x == 12345).\n"
ENOUGH = [LINE] * 3500  # 290,000 characters: more than are encoded before fastokens is tried
CONTROL = ["<|endoftext|>", "<|pad|>", "<s>", "</s>", "<mask>", "<unk>", "<think>", "Онегин", "[CLS]", "abc"]

PIECES = [*"aZяЁ5 '\"\n\r\t.(—_\u00a0\u0301中👍\u200d²\x00\x85", "'s", "'LL", *CONTROL]
any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60) | st.lists(
    st.sampled_from(PIECES), max_size=40
).map("".join)


def wanted_ids(tokenizer, texts):
    """What tokenizers gives, asked of it without artel."""
    backend = tokenizer.hf.backend_tokenizer
    backend.encode_special_tokens = True  # as plain text: the name says the opposite
    return [encoding.ids for encoding in backend.encode_batch(texts, add_special_tokens=False)]


def ids_of(tokenizer, texts):
    return [ids.tolist() for ids in tokenizer.encode(texts)]


def with_fastokens(tokenizer):
    for _ in tokenizer.encode(ENOUGH):
        pass
    assert tokenizer.encoder == "fastokens", tokenizer.encoder_note
    return tokenizer


def with_words(tokenizer):
    """As where fastokens is not installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "fastokens", None)
        for _ in tokenizer.encode(ENOUGH):
            pass
    assert tokenizer.encoder == "tokenizers by words", tokenizer.encoder_note
    return tokenizer


QUICK = {"fastokens": with_fastokens, "by words": with_words}
both = pytest.mark.parametrize("quick", QUICK.values(), ids=QUICK)


def trained(pattern, encoder=False, **more):
    return train_tokenizer(iter(ENOUGH[:50]), TokenizerTraining(vocab=320, pattern=pattern, **more), encoder=encoder)


def normalised_with_added_tokens():
    """NFC, the words of Qwen and Llama 3, and added tokens of every sort."""
    backend = Backend(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = trained("gpt4").hf.backend_tokenizer.pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        ENOUGH[:50],
        trainers.BpeTrainer(
            vocab_size=330, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken("Онегин", single_word=True),
                        AddedToken("abc", normalized=True, lstrip=True, rstrip=True)])  # fmt: skip
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True), AddedToken("[CLS]", rstrip=True)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>"), "here")


KINDS = {
    "gpt2 trained": lambda folder: trained("gpt2", special=["<think>"]),
    "gpt4 trained": lambda folder: trained("gpt4"),
    "gpt4 encoder": lambda folder: trained("gpt4", encoder=True),
    "normalised": lambda folder: normalised_with_added_tokens(),
    "gpt2": lambda folder: load_tokenizer(str(folder / "tokenizers" / "gpt2")),
    "roberta-base": lambda folder: load_tokenizer(str(folder / "tokenizers" / "roberta-base")),
}


TAKEN = [(quick, kind) for quick in QUICK for kind in KINDS if (quick, kind) != ("by words", "normalised")]


@pytest.fixture(scope="module", params=TAKEN, ids=" · ".join)
def fast(request):
    quick, kind = request.param
    folder = request.getfixturevalue("shared_data") if kind in ("gpt2", "roberta-base") else None
    return QUICK[quick](KINDS[kind](folder))


@given(texts=st.lists(any_text, max_size=4))
@settings(max_examples=150)
def test_any_text_gets_the_ids_of_tokenizers(fast, texts):
    assert ids_of(fast, texts) == wanted_ids(fast, texts)
    assert fast.encoder != "tokenizers"


def test_characters_of_every_block_get_the_ids_of_tokenizers(fast):
    characters = [chr(number) for number in range(0, 0x110000, 41) if not 0xD800 <= number < 0xE000]
    texts = [f"a{c}b {c} {c}{c}1{c}'s.{c}\n{c}" for c in characters]
    assert ids_of(fast, texts) == wanted_ids(fast, texts)


def test_special_tokens_in_a_text_are_letters(fast):
    special = fast.control_tokens
    texts = [f"Конец{token}, {token} и {token}{token}" for token in special] + ["".join(special), *special]
    result = ids_of(fast, texts)
    assert result == wanted_ids(fast, texts)
    assert fast.encoder != "tokenizers"
    assert not {token for ids in result for token in ids} & set(fast.special_ids)
    if not fast.hf.backend_tokenizer.normalizer:
        assert [fast.decode(ids) for ids in result] == texts


def test_novels_and_code_get_the_ids_of_tokenizers(fast, shared_data):
    """As lines, and as one text that fastokens cuts up among its threads."""
    novel = (shared_data / "literature" / "eugene_onegin.txt").read_text(encoding="utf-8")
    code = Path(os.__file__).read_text(encoding="utf-8")
    texts = [*novel.splitlines()[:1500], *code.splitlines(keepends=True), novel + code, (code + novel)[::-1]]
    assert ids_of(fast, texts) == wanted_ids(fast, texts)
    assert fast.encoder != "tokenizers"


def test_no_texts_empty_texts_and_many(fast):
    assert ids_of(fast, []) == []
    assert ids_of(fast, ["", "a", ""]) == wanted_ids(fast, ["", "a", ""])
    many = ids_of(fast, ["a b"] * 20_000)
    assert len(many) == 20_000
    assert many[0] == many[-1] == wanted_ids(fast, ["a b"])[0]
    assert next(fast.encode(["a"])).dtype == np.int64
    assert next(fast.encode([""])).shape == (0,)


@pytest.mark.long
@both
def test_one_text_of_50_megabytes(quick):
    fast = quick(trained("gpt2"))
    count = 50_000_000 // len(LINE.encode())
    line = np.array(wanted_ids(fast, [LINE + LINE])[0])[: len(wanted_ids(fast, [LINE])[0])]
    (ids,) = fast.encode([LINE * count])
    assert fast.encoder != "tokenizers"
    assert np.array_equal(ids.reshape(count, -1), np.broadcast_to(line, (count, len(line))))


@both
def test_letters_without_an_end_are_one_long_word(quick):
    fast = quick(trained("gpt4"))
    texts = [character * 50_000 for character in ("a", "ы", " ", "\n", "1", "!", "👍")]
    assert ids_of(fast, texts) == wanted_ids(fast, texts)
    assert fast.encoder != "tokenizers"


def test_a_prompt_does_not_load_it():
    tokenizer = trained("gpt2")
    assert (tokenizer.encoder, tokenizer.encoder_note) == ("tokenizers", "")
    next(tokenizer.encode(["Все счастливые"]))
    assert tokenizer.encoder == "tokenizers"
    assert tokenizer.encoder_note == "Tokenizing the first 250,000 characters with tokenizers"
    assert with_fastokens(tokenizer).encoder_note.startswith("Tokenizing with fastokens 0.")


def _simple(model, pre_tokenizer, trainer, **more):
    backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizer
    backend.train_from_iterator(
        ENOUGH[:50], trainer(vocab_size=120, special_tokens=["<unk>", "</s>"], show_progress=False, **more)
    )
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>"), "here")


def _isolated():
    tokenizer = trained("gpt2")
    tokenizer.isolate_punctuation()
    return tokenizer


UNREAD = {
    "whitespace": lambda: _simple(models.BPE(unk_token="<unk>"), pre_tokenizers.Whitespace(), trainers.BpeTrainer),
    "WordPiece": lambda: _simple(
        models.WordPiece(unk_token="<unk>"), pre_tokenizers.BertPreTokenizer(), trainers.WordPieceTrainer
    ),
    "Unigram": lambda: _simple(
        models.Unigram(), pre_tokenizers.Metaspace(), trainers.UnigramTrainer, unk_token="<unk>"
    ),
    "isolated punctuation": _isolated,
}


@pytest.mark.parametrize("kind", UNREAD)
def test_what_it_cannot_read_is_encoded_by_tokenizers(kind):
    tokenizer = UNREAD[kind]()
    texts = [*ENOUGH, "Конец</s> ☃"]
    *encoded, last = ids_of(tokenizer, texts)
    *expected, end = wanted_ids(tokenizer, texts)
    assert encoded == expected
    if kind == "Unigram":  # tokenizers itself reads an end token out of the letters
        assert (tokenizer.end_id in end, tokenizer.end_id in last) == (True, False)
    else:
        assert last == end
    assert tokenizer.encoder == "tokenizers"
    assert tokenizer.encoder_note.startswith("Tokenizing with tokenizers; fastokens does not support this tokenizer (")
    assert tokenizer.suspect_texts == 0


def test_another_answer_on_the_first_of_the_text_is_found():
    """Merges that are dropped at random: fastokens knows no such thing and would give other ids."""
    tokenizer = trained("gpt2")
    tokenizer.hf.backend_tokenizer.model.dropout = 0.3
    assert len(list(tokenizer.encode(ENOUGH))) == len(ENOUGH)
    assert tokenizer.encoder == "tokenizers"
    assert tokenizer.encoder_note.startswith(
        'Tokenizing with tokenizers; fastokens gives other ids for "Все счастливые'
    )
    reason = "it changes texts before it splits them, or splits them at random"
    assert tokenizer.encoder_note.endswith(f"by words does not support this tokenizer ({reason})")
    assert tokenizer.suspect_texts == 0


@pytest.mark.parametrize(("quick", "remedy"), [("fastokens", "pip uninstall fastokens"), ("by words", "pip install")])
def test_another_answer_later_on_is_found_and_said(quick, remedy):
    """The encoder of another tokenizer stands for one with an error that the first of the text did not show."""
    tokenizer, other = (QUICK[quick](trained(pattern)) for pattern in ("gpt4", "gpt2"))
    name = tokenizer.encoder
    tokenizer._encoder._fast_encode = other._encoder._fast_encode
    before, last = ["a"] * 1000, ["похожи 12345"] * 5000
    assert ids_of(tokenizer, before) == wanted_ids(tokenizer, before)
    assert ids_of(tokenizer, last) == wanted_ids(tokenizer, last)
    assert tokenizer.encoder == "tokenizers"
    assert tokenizer.suspect_texts == len(ENOUGH) + 1000
    assert tokenizer.encoder_note == (
        f"{name} gave other ids for 'похожи 12345': tokenizing with tokenizers from there on; the 4,500 texts that it "
        "encoded before may have wrong ids too"
    )
    assert tokenizer.encoder_remedy.startswith(remedy)
    assert ids_of(tokenizer, last[:3]) == wanted_ids(tokenizer, last[:3])


@both
def test_an_error_hands_over_to_tokenizers(quick):
    tokenizer = quick(trained("gpt4"))
    name = tokenizer.encoder
    with pytest.raises(TypeError):  # of tokenizers: half a surrogate pair is no text for either
        next(tokenizer.encode(["a\ud800b"]))
    assert tokenizer.encoder == "tokenizers"
    assert tokenizer.encoder_note.startswith(f"{name} failed ('utf-")
    assert ids_of(tokenizer, ["a"]) == wanted_ids(tokenizer, ["a"])


def test_an_error_in_the_comparison_hands_over_too():
    def encode(texts):
        if texts == ["abc"]:  # the beginning that is compared
            raise ValueError("a panic")
        return [np.array([1])] * len(texts)

    encoder = Encoder(lambda texts: [np.array([2])] * len(texts), lambda: None, max_compared_characters=3)
    encoder._has_decided, encoder._fast_encode, encoder.name, encoder._num_texts = (
        True,
        encode,
        "fastokens",
        _COMPARE_EVERY - 1,
    )
    assert [ids.tolist() for ids in encoder.encode(["abcdef"])] == [[2]]
    assert encoder.note.startswith("fastokens failed (a panic)")


def test_without_it_the_note_says_how_to_get_it():
    tokenizer = with_words(trained("gpt2"))
    assert "pip install 'artel-lm[fast]'" in tokenizer.encoder_note


def test_words_are_forgotten_when_they_are_many():
    tokenizer = trained("gpt4")
    words = by_words.WordCache(*_state_of(tokenizer), max_words=5)
    texts = [*ENOUGH[:20], "и" * 101, "и" * 101, LINE, LINE[::-1]]
    assert [ids.tolist() for ids in words.encode(texts)] == wanted_ids(tokenizer, texts)


def test_letters_of_later_unicodes_are_left_to_tokenizers():
    """Of 2023 and 2025, and ones that every Unicode has; emoji, of whatever year, are letters to nobody."""
    words = by_words.WordCache(*_state_of(trained("gpt4")))
    result = words.encode(["a\U00031350", "\U000323b0", "Ꟃ", "Привет 👍 🫠", "你好", "é ½ ²"])
    assert [ids is None for ids in result] == [True, True, True, False, False, False]


def _state_of(tokenizer):
    backend = tokenizer.hf.backend_tokenizer
    return backend, json.loads(backend.to_str())


@pytest.mark.parametrize(
    ("change", "why"),
    [({"normalizer": {"type": "NFC"}}, "changes texts"), ({"model": {"type": "WordPiece"}}, "not byte-level BPE"),
     ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}}, "changes texts"),
     ({"pre_tokenizer": None}, "not byte-level BPE"),
     ({"added_tokens": [{"content": "x", "special": False}]}, "not special"),
     ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
         {"type": "Split", "pattern": {"String": " "}, "behavior": "Isolated", "invert": False},
         {"type": "ByteLevel", "use_regex": False, "add_prefix_space": False}]}}, "another way")],
)  # fmt: skip
def test_what_words_do_not_take(change, why):
    backend, state = _state_of(trained("gpt2"))
    with pytest.raises(by_words.UnsupportedTokenizer, match=why):
        by_words.WordCache(backend, {**state, **change})


def test_a_tokenizer_that_is_changed_is_not_encoded_as_it_was():
    texts = ["Хорошо, семьи<think>похожи (it's).", *ENOUGH]
    tokenizer = with_fastokens(trained("gpt2"))
    tokenizer.hf.add_tokens(["<think>"])
    result = ids_of(tokenizer, texts)
    assert result == wanted_ids(tokenizer, texts)
    assert tokenizer.hf.convert_tokens_to_ids("<think>") in result[0]
    assert tokenizer.encoder == "fastokens"
    tokenizer.isolate_punctuation()
    assert ids_of(tokenizer, texts) == wanted_ids(tokenizer, texts) != result


def test_a_copy_for_another_process_makes_its_own():
    tokenizer = with_fastokens(trained("gpt4"))
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.encoder == "tokenizers"
    assert ids_of(with_fastokens(copy), [LINE]) == ids_of(tokenizer, [LINE])


@pytest.mark.long
def test_memory_stays_flat(shared_data):
    """Texts that are all different, 30 MB of them: the caches of fastokens are bounded."""
    fast = with_fastokens(load_tokenizer(str(shared_data / "tokenizers" / "gpt2")))
    words = (shared_data / "literature" / "eugene_onegin.txt").read_text(encoding="utf-8").split()
    random = np.random.default_rng(0)

    def megabytes(count):
        for _ in range(count):
            text = "".join(random.choice(words, 90_000))  # 1 MB of words that run into each other, none seen before
            for _ in fast.encode([text]):
                pass
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6

    first = megabytes(10)
    assert megabytes(20) - first < 30


@both
def test_little_is_left_to_tokenizers(quick):
    """It takes 20 times as long on prose and 100 times on code: it encodes one text in 4,999."""
    tokenizer = quick(trained("gpt4"))
    exact, left = tokenizer._encoder._exact, []
    tokenizer._encoder._exact = lambda texts: left.extend(texts) or exact(texts)
    texts = [f"{number} {LINE}" for number in range(10_000)]
    assert ids_of(tokenizer, texts) == wanted_ids(tokenizer, texts)
    assert len(left) == 2


def _thread_names():
    return {(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()}


def _in_one_thread(answers):
    encode_in_one_thread()
    tokenizer = with_fastokens(trained("gpt4"))
    answers.put((ids_of(tokenizer, [LINE * 3000]), _thread_names()))


def _in_a_fork(tokenizer, answers):
    answers.put((ids_of(tokenizer, [LINE * 100] * 300), tokenizer.encoder))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc, which only Linux has")
def test_a_worker_process_encodes_in_one_thread():
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    worker = context.Process(target=_in_one_thread, args=(answers,))
    worker.start()
    ids, names = answers.get()
    worker.join()
    here = with_fastokens(trained("gpt4"))
    assert ids == ids_of(here, [LINE * 3000])
    assert not [name for name in names if name.startswith("fastokens")]
    if len(os.sched_getaffinity(0)) > 1:
        assert [name for name in _thread_names() if name.startswith("fastokens")]  # so they would have been seen


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork on this system")
def test_a_forked_child_encodes_without_the_threads_of_its_parent():
    tokenizer = with_fastokens(trained("gpt4"))
    expected = ids_of(tokenizer, [LINE * 100] * 300)
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=_in_a_fork, args=(tokenizer, answers))
    child.start()
    assert answers.get() == (expected, "fastokens")
    child.join()
    assert child.exitcode == 0
