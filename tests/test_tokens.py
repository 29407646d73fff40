"""Order, batches, blocks and the token store."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artel.config import TokenizerTraining
from artel.errors import InputError
from artel.storage import new_folder
from artel.tokens import (
    BalancedOrder,
    Order,
    Sample,
    StoreWriter,
    TokenBlocks,
    TokenStore,
    load_tokenizer,
    micro_batches,
    step_positions,
    train_tokenizer,
)
from artel.tokens.store import find_line_ends
from artel.tokens.tokenizer.train import auto_vocabulary, describe_vocabulary

TEXT = "Все счастливые семьи похожи друг на друга, каждая несчастливая семья несчастлива по-своему. " * 20


@pytest.mark.slow
@given(samples=st.integers(1, 3000), seed=st.integers(0, 2**40))
@settings(max_examples=60)
def test_every_epoch_is_a_permutation(samples, seed):
    order = Order(samples, seed)
    numbers = order.at(np.arange(2 * samples))
    for epoch in (numbers[:samples], numbers[samples:]):
        assert np.array_equal(np.sort(epoch), np.arange(samples))


def test_order_depends_on_seed_epoch_and_position_alone():
    order = Order(1000, seed=7)
    assert (order.at(np.arange(3000))[1234:1300] == order.at(np.arange(1234, 1300))).all()
    assert (order.at(np.arange(1000)) != order.at(np.arange(1000, 2000))).any()
    assert (order.at(np.arange(1000)) != Order(1000, seed=8).at(np.arange(1000))).any()


def test_order_mixes():
    """Each position gets each sample about equally often over seeds and epochs (chi-square, 31 degrees of freedom)."""
    counts = np.zeros((32, 32))
    for seed in range(20):
        for epoch in Order(32, seed).at(np.arange(100 * 32)).reshape(100, 32):
            counts[np.arange(32), epoch] += 1
    chi_square = ((counts - 2000 / 32) ** 2 / (2000 / 32)).sum(axis=1)
    assert chi_square.max() < 75  # p = 0.00002 a row


class _Numbers:
    """Samples of one token each to four, which are their own index."""

    def __len__(self):
        return 100

    def read(self, index):
        return Sample(np.full(1 + index % 4, index), None, (index,))


@given(batch=st.integers(1, 40), world=st.integers(1, 5), size=st.integers(1, 9), left=st.integers(1, 40))
@settings(max_examples=100)
def test_ranks_and_micro_batches_cover_the_step_exactly_once(batch, world, size, left):
    indices = np.arange(min(left, batch))
    shapes, seen = set(), []
    for rank in range(world):
        rows = micro_batches(
            _Numbers(), indices, indices + 7, rank=rank, world_size=world, batch_size=batch, max_rows=size
        )
        shapes.add((len(rows), *(len(part.ids) for part in rows)))
        for part in rows:
            assert len(part.ids) == len(part.epochs) == len(part.numbers) == len(part.indices) == len(part.lengths)
            for at in np.flatnonzero(part.valid):
                index = int(part.indices[at])
                assert part.epochs[at] == index + 7
                assert part.numbers[at] == [index]
                assert part.lengths[at] == 1 + index % 4
                assert (part.ids[at] == [index] * (1 + index % 4) + [0] * (part.ids.shape[1] - 1 - index % 4)).all()
                seen.append(index)
    assert seen == list(indices)
    assert len(shapes) == 1  # every rank runs equally many micro-batches of equally many rows


def test_balanced_order_draws_every_class_and_every_member_equally_often():
    classes = np.array([0] * 90 + [1] * 9 + [2])
    order = BalancedOrder(classes, seed=3)
    drawn = order.at(np.arange(2700))
    assert (np.bincount(classes[drawn]) == 900).all()
    assert (np.bincount(drawn)[:90] == 10).all()
    assert (np.bincount(drawn)[90:99] == 100).all()
    assert (drawn[1234:1300] == order.at(np.arange(1234, 1300))).all()  # a function of the position alone
    assert (drawn != BalancedOrder(classes, seed=4).at(np.arange(2700))).any()
    assert len({tuple(classes[drawn[at : at + 3]]) for at in range(0, 300, 3)}) == 6  # the classes' turns are mixed


def test_the_last_step_is_shorter_and_nothing_is_skipped():
    numbers = [number for step in range(4) for number in step_positions(step, batch_size=3, total_samples=10)]
    assert numbers == list(range(10))


@pytest.fixture
def store(tmp_path):
    documents = [np.arange(start, start + length) for start, length in ((0, 5), (100, 1), (200, 9), (300, 4), (400, 8))]
    with new_folder(tmp_path / "store") as folder:
        writer = StoreWriter(folder, vocabulary=500, shard_tokens=10)
        for number, ids in enumerate(documents):
            sample = Sample(ids, (ids % 7).astype(np.uint8), (number, -number))
            writer.add("train", [sample], 3 * len(ids), f"a.txt:{number}", {"id": number})
        writer.close({})
    return TokenStore(tmp_path / "store"), documents


def test_store_gives_back_what_was_written_across_shards(store):
    opened, documents = store
    stream = np.concatenate(documents)
    assert opened.manifest["dtype"] == "uint16"
    assert len(opened.manifest["parts"]["train"]["shards"]) > 1
    for start in range(len(stream)):
        for count in range(1, len(stream) - start + 1):
            assert (opened.train.read(start, count) == stream[start : start + count]).all()
    for (origin, ids), (number, expected) in zip(opened.train.iter_samples(), enumerate(documents), strict=True):
        assert origin == f"a.txt:{number}"
        assert (ids == expected).all()
    for number, expected in enumerate(documents):
        sample = opened.train.sample(number)
        assert (sample.ids == expected).all()
        assert (sample.flags == expected % 7).all()
        assert sample.numbers == (number, -number)
        assert opened.train.origin(number) == f"a.txt:{number}"
    assert list(opened.train.references()) == [{"id": number} for number in range(5)]
    assert [opened.train.reference(number) for number in (4, 0, 3)] == [{"id": 4}, {"id": 0}, {"id": 3}]
    assert opened.train.origins(4, 7) == ["a.txt:0", "a.txt:1", "a.txt:2"]
    assert opened.train.origins(19, 20) == ["a.txt:4"]


@pytest.mark.parametrize("chunk_bytes", [1, 7, 1 << 24])
def test_the_ends_of_lines_are_found_in_chunks(chunk_bytes):
    text = b"".join(b"x" * length + b"\n" for length in range(20))
    ends = find_line_ends(np.frombuffer(text, np.uint8), chunk_bytes)
    assert [text[end - 1 : end] for end in ends] == [b"\n"] * 20
    assert ends[-1] == len(text)


def test_references_are_found_by_the_number_of_their_document(tmp_path):
    references = [{"text": "a\nb" * number, "n": None} for number in range(20)]
    with new_folder(tmp_path / "store") as folder:
        writer = StoreWriter(folder, vocabulary=9)
        for number, reference in enumerate(references):
            samples = [Sample(np.arange(3))] * (number % 3)  # a document may have no samples, or several
            writer.add("train", samples, 1, "a", reference)
            writer.add("validation", [Sample(np.arange(3))], 1, "a", reference if number else None)
        writer.close({})
    store = TokenStore(tmp_path / "store")
    for number in np.random.default_rng(0).permutation(20):
        assert store.train.reference(int(number)) == references[number]
    for number in (-1, 20):
        with pytest.raises(IndexError, match=f"no document {number}: .*train has 20"):
            store.train.reference(number)
    with pytest.raises(
        ValueError, match=r"19 of the 20 documents in .*validation have a reference; .*all must have one"
    ):
        store.validation.reference(0)


def test_blocks_predict_every_token_but_the_first_once(store):
    opened, documents = store
    stream = np.concatenate(documents)
    blocks = TokenBlocks(opened.train, length=4, lookahead=1)
    targets = np.concatenate([blocks.read(index).ids[1:] for index in range(len(blocks))])
    assert (targets == stream[1 : 1 + len(targets)]).all()
    assert len(blocks) * 4 + blocks.leftover_tokens == len(stream)
    assert 1 <= blocks.leftover_tokens <= 4


def test_tokens_beyond_the_vocabulary_are_found(store):
    opened, _ = store
    opened.verify(408)
    with pytest.raises(InputError, match=r"00001\.tokens: holds the token 407, but its tokenizer has 407"):
        opened.verify(407)


def test_a_file_that_is_cut_while_it_is_read_ends_in_words(store):
    """Memory-mapped: the process would end by SIGBUS."""
    opened, _ = store
    script = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from artel.tokens import TokenStore\n"
        "store = TokenStore(Path(sys.argv[1]))\n"
        "os.truncate(store.folder / 'train/00000.tokens', 0)\n"
        "print(store.train.sample(0).ids)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(opened.folder)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert "became shorter" in done.stderr


def test_a_flipped_bit_is_found_and_named(store):
    opened, _ = store
    file = opened.folder / "train" / "00000.tokens"
    data = bytearray(file.read_bytes())
    data[3] ^= 4
    file.write_bytes(data)
    with pytest.raises(InputError, match=r"00000\.tokens"):
        TokenStore(opened.folder).verify()
    file.write_bytes(data[:-1])
    with pytest.raises(InputError, match="another size"):
        TokenStore(opened.folder)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(iter([TEXT]), TokenizerTraining(vocab=300))


def test_special_tokens_in_a_text_stay_text(tokenizer):
    ids = next(tokenizer.encode(["до <|endoftext|> после"]))
    assert tokenizer.end_id not in ids
    assert tokenizer.decode(ids) == "до <|endoftext|> после"


@pytest.mark.parametrize("pattern", ["gpt2", "gpt4", "whitespace"])
def test_a_vocabulary_that_the_text_cannot_give_is_the_largest_that_it_can(pattern):
    text = " ".join(f"слово{number % 400:x} и другое" for number in range(1200))
    largest = train_tokenizer(iter([text]), TokenizerTraining(vocab=30000, pattern=pattern))
    one_less = TokenizerTraining(vocab=largest.vocabulary - 1, pattern=pattern)
    assert train_tokenizer(iter([text]), one_less).vocabulary == largest.vocabulary - 1
    told = describe_vocabulary(30000, largest.vocabulary, pattern)
    assert told.startswith(f"tokenizer.train.vocab: {largest.vocabulary:,} instead of 30,000")
    assert describe_vocabulary(300, 300, pattern) == ""


def test_a_text_of_more_characters_than_the_vocabulary_keeps_them_all():
    text = "".join(chr(0x4E00 + number) for number in range(1000))
    tokenizer = train_tokenizer(iter([" ".join(text)] * 3), TokenizerTraining(vocab=400, pattern="whitespace"))
    assert tokenizer.vocabulary == 1003  # with <|endoftext|>, <|pad|> and <unk>
    ids = next(tokenizer.encode([text[7]]))
    assert tokenizer.hf.unk_token_id not in ids
    assert "pattern: gpt4 begins with the 256 bytes" in describe_vocabulary(400, 1003, "whitespace")
    assert "gpt4" not in describe_vocabulary(257, 258, "gpt4")
    assert train_tokenizer(iter(["text"]), TokenizerTraining(vocab=257, pattern="gpt4")).vocabulary == 258


@pytest.mark.parametrize("pattern", ["gpt2", "whitespace"])
@pytest.mark.parametrize("encoder", [False, True])
def test_the_vocabulary_of_auto_is_that_of_a_training_for_its_size(pattern, encoder):
    """Also its ids: merges are found in order, so the first ones are those of a smaller vocabulary."""
    numbers = np.random.default_rng(0).integers(0, 5000, 60_000)
    text = " ".join(f"w{number:x}, x{number % 77}" for number in numbers)
    size = auto_vocabulary(len(text))
    assert size == 1024
    made = [
        train_tokenizer(iter([text]), TokenizerTraining(vocab=vocab, pattern=pattern), encoder=encoder)
        for vocab in ("auto", size)
    ]
    assert made[0].hf.get_vocab() == made[1].hf.get_vocab()
    assert made[0].vocabulary == size
    assert made[0].fingerprint == made[1].fingerprint
    assert [list(ids) for ids in made[0].encode([text[:5000]])] == [list(ids) for ids in made[1].encode([text[:5000]])]
    assert [auto_vocabulary(size) for size in (0, 3_000_000, 10**12)] == [1024, 4096, 32768]


@pytest.mark.parametrize(("name", "end"), [("gpt2", 50256), ("roberta-base", 2)])
def test_known_vocabularies_load_from_a_folder(shared_data, name, end):
    opened = load_tokenizer(str(shared_data / "tokenizers" / name))
    assert opened.end_id == end
    text = "Hello  world, привет\n\tмир!"
    assert opened.decode(next(opened.encode([text]))) == text
