"""Training a tokenizer by each pattern: what comes back, what is lost, and that what is lost is said."""

from pathlib import Path

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from artel.config import Overrides, TokenizerTraining, load_run
from artel.errors import InputError
from artel.preparing import prepare
from artel.tokens import Tokenizer, load_tokenizer, train_tokenizer
from support.messages import logged

TEXT = [
    "Все счастливые семьи похожи друг на друга, каждая несчастливая семья несчастлива по-своему.",
    "It's 1873; they'LL read 12345 pages (or more) —\n\n\tif x == 10:\n        return 'ы'\r\n",
    *(f"слово{number * 7919 % 1000} of words {number * 104729}" for number in range(200)),
] * 10

# The pattern of cl100k_base as tiktoken publishes it, for another engine to cut by.
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

PIECES = [*"aZяЁ5 '\"\n\r\t.(—_\u00a0\u0301中👍\u200d²", "'s", "'LL", "<|endoftext|>", "<mask>"]


def texts_of(*excluded):
    """Of any characters but those of some categories, or of telling pieces."""
    characters = st.characters(exclude_categories=["Cs", *excluded])
    return st.text(characters, max_size=60) | st.lists(st.sampled_from(PIECES), max_size=40).map("".join)


any_text = texts_of()


@pytest.fixture(scope="module")
def trained():
    """A tokenizer by pattern, of each kind; trained once."""
    made = {}

    def get(pattern, encoder=False):
        if (pattern, encoder) not in made:
            training = TokenizerTraining(vocab=330, pattern=pattern) if pattern != "whitespace" else _whitespace(300)
            made[pattern, encoder] = train_tokenizer(iter(TEXT), training, encoder=encoder)
        return made[pattern, encoder]

    return get


def _whitespace(vocab):
    return TokenizerTraining(vocab=vocab, pattern="whitespace")


@pytest.mark.parametrize("encoder", [False, True])
@pytest.mark.parametrize("pattern", ["gpt2", "gpt4"])
@given(texts=st.lists(any_text, max_size=3))
@settings(max_examples=150)
def test_every_text_comes_back_exactly(trained, pattern, encoder, texts):
    tokenizer = trained(pattern, encoder)
    assert [tokenizer.decode(ids) for ids in tokenizer.encode(texts)] == texts


# Not those without a category yet: the engines' Unicode is of other years (Small Seal Script is letters to one alone).
@given(text=texts_of("Cn"))
@settings(max_examples=300)
def test_gpt4_cuts_as_cl100k_does(trained, text):
    cut = trained("gpt4").hf.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    pieces, at = [], 0
    for _, (start, end) in cut:
        assert start == at
        pieces.append(text[start:end])
        at = end
    assert pieces == regex.findall(CL100K, text)


def test_gpt4_cuts_numbers_in_threes_and_keeps_a_sign_with_its_word(trained):
    def cut(pattern):
        parts = trained(pattern).hf.backend_tokenizer.pre_tokenizer.pre_tokenize_str("f(x12345) it'S")
        return [part.replace("Ġ", " ") for part, _ in parts]

    assert cut("gpt4") == ["f", "(x", "123", "45", ")", " it", "'S"]
    assert cut("gpt2") == ["f", "(", "x", "12345", ")", " it", "'", "S"]


@pytest.mark.parametrize("pattern", ["gpt2", "gpt4"])
def test_places_hold_for_every_pattern(trained, pattern):
    text = "Число 12345 (двенадцать тысяч), it's more."
    (encoded,) = trained(pattern).encode_with_offsets([text])
    places = zip(encoded.starts.tolist(), encoded.ends.tolist(), strict=True)
    assert {at for start, end in places for at in range(start, end)} == set(range(len(text)))
    first, last = encoded.token_range(6, 11)
    assert trained(pattern).decode(encoded.ids[first : last + 1]).strip() == "12345"


@pytest.mark.parametrize("pattern", ["gpt2", "gpt4", "whitespace"])
@pytest.mark.parametrize("encoder", [False, True])
def test_transformers_opens_what_was_trained_and_gives_the_same_ids(trained, tmp_path, pattern, encoder):
    tokenizer = trained(pattern, encoder)
    tokenizer.save(tmp_path)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(str(tmp_path))
    text = "несчастливая семья, it's 12345 ☃ pages.\n\n  return"
    ids = next(tokenizer.encode([text])).tolist()
    assert theirs(text, add_special_tokens=False)["input_ids"] == next(ours.encode([text])).tolist() == ids
    assert (ours.fingerprint, ours.end_id) == (tokenizer.fingerprint, tokenizer.end_id)
    if encoder:
        assert theirs(text)["input_ids"] == [0, *ids, 2]
        assert ours.mask_id == tokenizer.mask_id
        assert tokenizer.frame(pair=True).before == (0,)
    size = 300 if pattern == "whitespace" else 330
    assert len(theirs) == tokenizer.vocabulary == size
    assert tokenizer.word_starts().shape == (size,)


def test_whitespace_is_the_quick_tours_tokenizer():
    """The same merges as its few lines give: BPE with an unknown token over pre_tokenizers.Whitespace, no decoder."""
    theirs = Backend(models.BPE(unk_token="<unk>"))
    theirs.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["<|endoftext|>", "<|pad|>", "<unk>"]
    trainer = trainers.BpeTrainer(vocab_size=300, min_frequency=1, special_tokens=special, show_progress=False)
    theirs.train_from_iterator(TEXT, trainer)
    ours = train_tokenizer(iter(TEXT), _whitespace(300)).hf.backend_tokenizer
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.decoder is None
    for text in TEXT[:2]:
        assert ours.encode(text).ids == theirs.encode(text).ids


def test_whitespace_loses_spacing_and_unknown_characters_and_says_so(trained):
    tokenizer = trained("whitespace")
    assert tokenizer.loses_spacing
    ids = [ids.tolist() for ids in tokenizer.encode(["семья  \n несчастлива.", "семья несчастлива .", "☃"])]
    assert ids[0] == ids[1]
    assert ids[2] == [tokenizer.hf.unk_token_id]
    assert tokenizer.decode(ids[2]) == "<unk>"
    assert tokenizer.word_starts().all()  # its tokens do not tell whether they begin a word


def test_spacing_is_kept_where_it_is(trained, shared_data):
    real = (load_tokenizer(str(shared_data / "tokenizers" / name)) for name in ("gpt2", "roberta-base"))
    assert not any(each.loses_spacing for each in (trained("gpt2"), trained("gpt4", True), *real))


@pytest.mark.parametrize(
    ("normalizer", "changed"),
    [
        (None, {}),
        (normalizers.NFD(), {}),  # the same letters
        (normalizers.Lowercase(), {"A": "a", "É": "é", "Й": "й"}),
        (normalizers.BertNormalizer(lowercase=True), {"A": "a", "É": "e", "é": "e", "Й": "и", "й": "и", "ё": "е"}),
    ],
)
def test_letters_that_a_model_cannot_write_are_named(trained, normalizer, changed):
    """ruBERT reads й as и: a model that writes would write и."""
    backend = Backend.from_str(trained("gpt2").hf.backend_tokenizer.to_str())
    if normalizer is not None:
        backend.normalizer = normalizer
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>"), "here")
    assert tokenizer.changed_letters == changed
    tokenizer.save(Path("tokenizer"))
    Path("a.txt").write_text("\n".join(f"Ёж и йод {number}" for number in range(9)))
    said = logged()
    prepared_with("tokenizer={from: tokenizer}", "data.validation=0")
    noted = [note for note in said if "changes letters" in note]
    assert len(noted) == bool(changed)
    assert all(f"{letter} becomes {other}" in noted[0] for letter, other in changed.items())


@pytest.mark.parametrize("begin", [128000, 77, 0])
def test_a_post_processor_of_another_vocabulary_is_noticed(trained, tmp_path, begin):
    """`train_new_from_iterator` leaves the begin token of Llama 3, 128000, in the file of a small vocabulary."""
    trained("gpt2").save(tmp_path)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(single="<b> $A", special_tokens=[("<b>", begin)])
    backend.save(str(tmp_path / "tokenizer.json"))
    if begin == 128000:
        with pytest.raises(InputError, match=r"puts the id 128,000 around each text, but its largest id is \d+"):
            load_tokenizer(str(tmp_path))
        return
    tokenizer = load_tokenizer(str(tmp_path))
    named = tokenizer.hf.convert_ids_to_tokens(begin)
    assert tokenizer.plain_frame_tokens == ([f"{named!r} (77)"] if begin == 77 else [])


def test_a_russian_alphabet_does_not_make_spaces_look_lost():
    """SentencePiece's form: no letter of the probe is known, yet ▁ keeps every space."""
    backend = Backend(models.BPE({"<unk>": 0, "▁": 1, "\n": 2, "ы": 3}, [], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.decoder = decoders.Metaspace(prepend_scheme="never")
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<unk>"), "here")
    assert not tokenizer.loses_spacing


def test_a_tokenizer_that_cuts_off_and_fills_up_does_neither(trained, tmp_path):
    """Files of sentence encoders carry both; a text cut off in silence is a text lost."""
    trained("gpt4", True).save(tmp_path)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(5)
    backend.enable_padding(length=5)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path))
    fingerprint, frame = tokenizer.fingerprint, tokenizer.frame()
    texts = ["ы", TEXT[0]]
    assert [tokenizer.decode(ids) for ids in tokenizer.encode(texts)] == texts
    tokenizer.hf(texts[1], truncation=True, max_length=4)  # what a call of transformers leaves behind
    assert [tokenizer.decode(encoded.ids) for encoded in tokenizer.encode_with_offsets(texts)] == texts
    assert frame == trained("gpt4", True).frame()
    assert fingerprint == tokenizer.fingerprint == trained("gpt4", True).fingerprint


def prepared_with(*overrides):
    """What is prepared of the lines of a.txt."""
    source = "data.sources=[{path: a.txt, document: line}]"
    return prepare(load_run("novel-small", Overrides.parse(["data.store=stores", source, "data.block=8", *overrides])))


def test_the_run_file_chooses_the_pattern():
    Path("a.txt").write_text("\n".join(f"Слово  номер {number * 104729}" for number in range(300)))
    prepared = prepared_with("tokenizer.train={pattern: whitespace, vocab: 300}")
    tokenizer = prepared.tokenizer()
    assert tokenizer.loses_spacing
    (_, ids), *_ = prepared.open().train.iter_samples()
    assert ids[-1] == tokenizer.end_id
    assert tokenizer.decode(ids[:-1]).startswith("Слово номер ")  # one space of the two


def test_a_text_has_no_special_token_of_a_unigram_model_either():
    """Its vocabulary has them as pieces of the best score (T5, XLM-R): in letters they were taken for themselves."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((letter, -5.0) for letter in "\u2581abps</>ad")]
    backend = Backend(models.Unigram(list(dict(pieces).items()), unk_id=2))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token="<pad>", unk_token="<unk>")
    tokenizer = Tokenizer(hf, "here")
    text = "ab</s>a <pad>"
    (ids,), (encoded,) = tokenizer.encode([text]), tokenizer.encode_with_offsets([text])
    assert not {0, 1} & {*ids.tolist()}
    assert ids.tolist() == encoded.ids.tolist()
    assert hf.convert_ids_to_tokens(ids.tolist())[1:7] == ["a", "b", "<", "/", "s", ">"]
    (control,) = tokenizer.encode_with_offsets([text], control=True)
    assert {0, 1} <= {*control.ids.tolist()}
