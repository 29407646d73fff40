"""A teacher with another tokenizer: which targets are its tokens, too, how its ids are mapped, and what is learned."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from artel.config import TokenizerTraining, load_run
from artel.errors import InputError
from artel.objectives import build_objective
from artel.objectives.distill.other_tokenizer import TokenMap
from artel.objectives.distill.teacher_outputs import divergence, map_classes, reduce_to_classes
from artel.objectives.types import Batch
from artel.tokens import Tokenizer, evaluation_rows, load_tokenizer, train_tokenizer
from artel.tokens.tokenizer.chat_template import CHATML_TOKENS
from support.messages import logged
from support.objectives import conversations, objective_run, student_of, taught
from support.runs import losses, metrics, refused, succeed, write_run
from support.two_tokenizers import ENGLISH, OTHER, RUSSIAN, byte_level, fast, sentencepiece

FEW = {"data.sources": [{"format": "dummy", "documents": 60}]}


def batch_of(tokenizer, texts, drop=0):
    """One row: the texts, an end token after each, without the first `drop` tokens."""
    ids = np.concatenate([np.append(ids_of(tokenizer, text), tokenizer.end_id) for text in texts])[drop:]
    return Batch(
        {"input_ids": torch.tensor(ids[None, :-1]), "targets": torch.tensor(ids[None, 1:])}, len(ids) - 1, len(ids) - 1
    )


def ids_of(tokenizer, text):
    return next(tokenizer.encode_with_offsets([text])).ids


def spans(tokenizer, text):
    """The characters of each token, as tokenizers says."""
    encoded = next(tokenizer.encode_with_offsets([text]))
    return list(zip(encoded.starts.tolist(), encoded.ends.tolist(), strict=True))


def aligned(student, teacher, texts, **more):
    """The targets that are aligned, by their number in a row of `texts`; what the teacher reads is checked."""
    batch = batch_of(student, texts, more.pop("drop", 0))
    token_map = TokenMap(student, teacher, packs_text=True, key="distill.teacher")
    reading = token_map.read(batch, more.pop("limit", None), isolated_documents=False)
    assert (reading.batch.tensors["input_ids"].flatten()[reading.positions + 1] == reading.labels).all()
    targets = batch.tensors["targets"].flatten()[reading.targets]
    assert (token_map.ids[reading.labels.numpy()] == targets.numpy()).all()
    return set(reading.targets.tolist()), reading


@pytest.mark.parametrize("kinds", [(byte_level, byte_level), (byte_level, sentencepiece), (sentencepiece, byte_level),
                                   (sentencepiece, sentencepiece)])  # fmt: skip
def test_targets_are_aligned_where_both_have_a_token_of_the_same_characters(kinds):
    """By the offsets of tokenizers, but for the first of a text, before which SentencePiece puts a space."""
    student, teacher = kinds[0](ENGLISH), kinds[1](OTHER)
    texts = ["It is the wonderful frost, and my friend is awake.", "The day, the night!"]
    expected, first, at = set(), set(), -1  # the first token of a row is no target
    for text in texts:
        theirs = set(spans(teacher, text))
        own = spans(student, text)
        expected |= {at + place for place, span in enumerate(own) if span in theirs}
        first |= {at + place for place, span in enumerate(own) if span[0] == 0}
        at += len(own) + 1
        expected.add(at - 1)
    found, _ = aligned(student, teacher, texts)
    assert found - first == expected - first
    assert 15 < len(found) < at


def test_characters_that_are_cut_into_bytes():
    student = byte_level("😀😁😂 мороз " * 9 + RUSSIAN, 320)  # has the first three bytes of these as a token
    teacher = byte_level(ENGLISH)  # has a token for each byte
    assert [len(ids_of(each, "😀")) for each in (student, teacher)] == [2, 4]
    own = student.hf.convert_ids_to_tokens(ids_of(student, "и 😀ё").tolist())
    found, _ = aligned(student, teacher, ["и 😀ё"])
    single = {place - 1 for place, token in enumerate(own) if len(token) == 1 and place > 0}
    assert found == single | {len(own) - 1}
    assert len(single) < len(own) - 1


def test_a_row_that_begins_and_ends_within_a_character():
    student, teacher = byte_level(ENGLISH), byte_level(OTHER)  # a token for each byte of Cyrillic
    batch = batch_of(student, ["жар и мороз"], drop=1)
    cut = Batch({name: tensor[:, :-2] for name, tensor in batch.tensors.items()}, batch.targets - 2, batch.tokens - 2)
    reading = TokenMap(student, teacher, packs_text=True, key="key").read(cut, None, isolated_documents=False)
    read = bytes(teacher.decode(reading.batch.tensors["input_ids"][0].tolist()), "utf-8")
    assert read == "ар и моро".encode()
    assert reading.targets.tolist() == list(range(1, cut.targets - 1))  # but the first byte of а, and of з


def test_ids_are_mapped_by_their_text():
    student, teacher = byte_level(ENGLISH + RUSSIAN, 400), sentencepiece(ENGLISH + RUSSIAN, 150)
    token_map = TokenMap(student, teacher, packs_text=True, key="key")
    own, theirs = student.hf.get_vocab(), teacher.hf.get_vocab()
    assert token_map.ids[theirs["▁fr"]] == own["Ġfr"]
    assert token_map.ids[theirs["▁п"]] == own["ĠÐ¿"]
    assert token_map.ids[theirs["<0xD0>"]] == own["Ð"]
    assert token_map.ids[theirs["</s>"]] == own["<|endoftext|>"]
    assert token_map.ids[theirs["<unk>"]] == -1
    assert 0.5 < token_map.shared < 1
    of_conversations = TokenMap(student, teacher, packs_text=False, key="key")
    assert of_conversations.ids[theirs["</s>"]] == -1  # there a template gives it its role
    back = TokenMap(teacher, student, packs_text=True, key="key")
    assert back.ids[own["a"]] == theirs["a"]  # not the byte that stands in for it
    assert back.ids[own["<|pad|>"]] == -1


def test_a_tokenizer_with_itself_gives_every_target():
    tokenizer = byte_level(ENGLISH)
    batch = batch_of(tokenizer, [OTHER, ENGLISH])
    found, reading = aligned(tokenizer, tokenizer, [OTHER, ENGLISH])
    assert found == set(range(batch.targets))
    assert (reading.batch.tensors["input_ids"][:, :-1] == batch.tensors["input_ids"]).all()


def test_a_teacher_that_normalizes_the_text_is_followed_behind_what_it_changes():
    student = byte_level(ENGLISH)
    backend = Backend.from_str(byte_level(OTHER).hf.backend_tokenizer.to_str())
    backend.normalizer = normalizers.NFKC()
    teacher = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>"), "tokenizer")
    plain, changed = "a day... and the sun", "a day… and the sun"
    found, _ = aligned(student, teacher, [changed])
    unchanged, _ = aligned(student, teacher, [plain])
    after = len(ids_of(student, " and the sun"))
    ends = [len(ids_of(student, text)) for text in (changed, plain)]
    for place in range(after + 1):
        assert (ends[0] - 1 - place in found) == (ends[1] - 1 - place in unchanged)
    before = len(ids_of(student, "a day"))
    assert not found & set(range(before - 1, ends[0] - after - 1))


def test_rows_longer_than_the_teacher_reads_are_read_in_parts():
    student, teacher = byte_level(ENGLISH, 320), byte_level(OTHER, 300)
    found, whole = aligned(student, teacher, [OTHER, ENGLISH])
    in_parts, reading = aligned(student, teacher, [OTHER, ENGLISH], limit=64)
    assert in_parts == found
    assert len(reading.targets) == len(set(reading.targets.tolist()))
    assert reading.batch.tensors["input_ids"].shape[1] == 64 < whole.batch.tensors["input_ids"].shape[1]
    columns = reading.positions.numpy() % 64
    assert ((columns >= 31) | (reading.positions.numpy() < 64)).all()  # half of what it can read stands before


def test_a_teacher_is_given_the_beginning_token_that_its_tokenizer_puts_before_a_text():
    student = byte_level(ENGLISH)
    backend = Backend.from_str(byte_level(OTHER).hf.backend_tokenizer.to_str())
    backend.add_special_tokens(["<s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 310)])
    teacher = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>"), "tokenizer")
    found, reading = aligned(student, teacher, ["the sun", "the frost"])
    ids = reading.batch.tensors["input_ids"][0].tolist()
    assert [place for place, number in enumerate(ids) if number == 310] == [0, ids.index(teacher.end_id) + 1]
    assert ids[:-1].count(teacher.end_id) == 1
    assert len(found) > 3


def test_probability_is_conserved():
    """What the likeliest ids and all others have is 1, whatever has no counterpart; and each id has its own."""
    torch.manual_seed(0)
    log_probs = (3 * torch.randn(50, 70)).log_softmax(dim=1)
    ids = torch.randint(-1, 40, (70,))  # some twice, some none
    likeliest, classes = map_classes(log_probs, ids, 40, 8)
    assert (classes.exp().sum(dim=1) - 1).abs().max() < 1e-6
    for row in range(50):
        expected = [float(log_probs[row, ids == number].exp().sum()) for number in range(40)]
        order = sorted(range(40), key=lambda number: -expected[number])
        assert likeliest[row].tolist() == order[:8]
        assert classes[row, :8].exp().tolist() == pytest.approx([expected[number] for number in order[:8]], abs=1e-6)


def test_ids_that_the_teacher_never_says_leave_reverse_kl_finite():
    """Fewer ids have a counterpart than are kept."""
    torch.manual_seed(0)
    likeliest, teacher = map_classes(
        torch.randn(9, 20).log_softmax(dim=1), torch.arange(20).where(torch.arange(20) < 3, -1), 50, 8
    )
    student = reduce_to_classes(torch.randn(9, 50).log_softmax(dim=1), likeliest)
    assert divergence(teacher.half().float().log_softmax(dim=1), student, "reverse_kl", 0.5).max() < 90


def validation_batch(objective, store, rows=3):
    return objective.batch(evaluation_rows(objective.dataset(store.validation), np.arange(rows), rows))


@pytest.mark.slow
def test_what_is_kept_is_what_the_teacher_says_of_the_text(tmp_path):
    """Beside transformers, which reads each document of a block by itself, and the offsets of tokenizers."""
    run, objective, store = taught(tmp_path, "distill_by_text", **FEW)
    batch = validation_batch(objective, store, 8)
    own, theirs = objective.tokenizer, load_tokenizer(str(tmp_path / "teacher"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "teacher", dtype=torch.float32)
    counterpart = TokenMap(own, theirs, packs_text=True, key="key").ids
    compared = 0
    for row in range(8):
        ids, documents = batch.tensors["input_ids"][row], batch.tensors["documents"][row]
        for number in range(1, int(documents.max()) + 1):
            places = ((documents == number) & (ids != own.end_id)).nonzero()[:, 0]
            text = own.decode(ids[places].tolist())
            if ids_of(own, text).tolist() != ids[places].tolist():
                continue  # a piece of a longer document, which was cut within a word
            first = int(places[0])
            read = np.append(ids_of(theirs, text), theirs.end_id)
            with torch.no_grad():
                probabilities = (model(torch.tensor(read[None])).logits[0].double() / 2).softmax(dim=-1)
            place_of = {span: place for place, span in enumerate(spans(theirs, text))}
            for place, span in enumerate(spans(own, text)):
                if place == 0:
                    continue  # is predicted from the document before
                at = first + place - 1
                is_aligned = bool(batch.tensors["teacher_aligned"][row, at])
                assert is_aligned == (span in place_of), text[span[0] : span[1]]
                if not is_aligned:
                    continue
                expected = np.zeros(own.vocabulary)
                said = probabilities[place_of[span] - 1].numpy()
                np.add.at(expected, counterpart[counterpart >= 0], said[counterpart >= 0])
                kept = batch.tensors["teacher_ids"][row, at].numpy()
                log_probs = batch.tensors["teacher_log_probs"][row, at].float().numpy()
                assert np.exp(log_probs[:-1]) == pytest.approx(expected[kept], rel=5e-3)
                assert np.exp(log_probs[-1]) == pytest.approx(1 - expected[kept].sum(), rel=5e-3)
                assert expected[kept].min() >= np.sort(expected)[-run.distill.top_k] * 0.999
                compared += 1
    assert compared > 20


@pytest.mark.slow
def test_targets_that_are_not_aligned_have_the_cross_entropy_alone(tmp_path):
    messages = logged()
    _, objective, store = taught(tmp_path, "distill_by_text", **FEW, **{"distill.alpha": 0.25})
    batch, model = validation_batch(objective, store), student_of(objective)
    with torch.no_grad():
        sums = dict(zip(objective.sums, objective.loss(model, batch).tolist(), strict=True))
        documents = batch.tensors["documents"]
        mask = (documents[:, None, :, None] == documents[:, None, None, :]) & torch.ones(48, 48).tril().bool()
        logits = model(batch.tensors["input_ids"], attention_mask=mask, position_ids=batch.tensors["positions"]).logits
    has_target = batch.tensors["targets"] >= 0
    own, labels = logits[has_target], batch.tensors["targets"][has_target]
    is_aligned = batch.tensors["teacher_aligned"][has_target]
    plain = F.cross_entropy(own, labels, reduction="none")
    classes = reduce_to_classes((own / 2).log_softmax(-1), batch.tensors["teacher_ids"][has_target].long())
    teacher = batch.tensors["teacher_log_probs"][has_target].float().log_softmax(-1)
    apart = divergence(teacher, classes, "forward_kl", 0.5)
    expected = torch.where(is_aligned, 0.25 * plain + 0.75 * 4 * apart, plain).sum()
    assert sums["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert sums["plain"] == pytest.approx(float(plain.sum()), rel=1e-5)
    assert sums["divergence"] == pytest.approx(float(apart[is_aligned].sum()), rel=1e-5)
    assert 0 < sums["aligned"] == is_aligned.sum() < sums["targets"] == len(labels)
    figures = objective.metrics(sums, np.zeros((3, 0)), store.validation)
    assert figures["divergence"] == pytest.approx(float(apart[is_aligned].mean()), rel=1e-5)
    (note,) = (text for text in messages if "of the targets are also its tokens" in text)
    assert "of its ids have a counterpart" in note


@pytest.mark.slow
def test_with_the_teachers_tokenizer_by_text_is_the_same(tmp_path):
    results, messages = {}, logged()
    for kind in ("same", "by_text"):
        (tmp_path / kind).mkdir()
        _, objective, store = taught(tmp_path / kind, "distill", **FEW, **{"distill.tokenizer": kind})
        model = student_of(objective)
        sums = objective.loss(model, validation_batch(objective, store))
        sums[0].backward()
        results[kind] = sums.detach(), model.lm_head.weight.grad
    for one, other in zip(*results.values(), strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=0)
    assert messages[-1] == "distill.tokenizer: by_text has no effect: teacher and student have the same tokenizer"


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
def test_conversations(tmp_path, packing):
    """Special tokens that are written the same are the same, and the words between them are mapped as texts are."""
    special = list(CHATML_TOKENS)
    settings = TokenizerTraining(vocab=290, special=special)
    train_tokenizer(iter([ENGLISH]), settings, encoder=False).save(tmp_path / "own")
    changes = {"distill.on": "chat", "distill.tokenizer": "by_text", "data.packing": packing, "data.block": 96,
               "tokenizer.train": None, "tokenizer.from": str(tmp_path / "own"),
               "data.sources": [conversations(tmp_path)]}  # fmt: skip
    _, objective, store = taught(tmp_path, "distill_by_text", **changes)
    batch = validation_batch(objective, store)
    targets, is_aligned = batch.tensors["targets"], batch.tensors["teacher_aligned"]
    end = objective.tokenizer.hf.convert_tokens_to_ids("<|im_end|>")
    assert (targets == end).sum() >= 3
    assert is_aligned[targets == end].all()
    assert not is_aligned[targets < 0].any()
    assert 0 < is_aligned.sum() < (targets >= 0).sum()


@pytest.mark.slow
def test_a_student_comes_nearer_to_a_teacher_with_another_tokenizer(tmp_path):
    train = {"steps": 60, "batch": 8, "learning_rate": 5e-3}
    teacher = write_run(tmp_path / "large.yaml", train=train, tokenizer={"train": {"vocab": 300}})
    succeed("train", teacher)
    changes = {"train": train, "validate": {"every": 10}, "distill": {"alpha": 0.1, "temperature": 1}}
    learner = f"distill.teacher={teacher.with_suffix('')}"
    run = objective_run(tmp_path / "run.yaml", "distill_by_text", **changes)
    done = succeed("train", run, learner)
    note = next(line for line in done.stderr.splitlines() if "of the targets are also its tokens" in line)
    lines = [line["validation"] for line in metrics(run.with_suffix("")) if "validation" in line]
    assert lines[-1]["divergence"] < 0.7 * lines[0]["divergence"]
    assert lines[-1]["cross_entropy"] < lines[0]["cross_entropy"]

    # What was kept serves the next run, which reads the same.
    other = objective_run(tmp_path / "other.yaml", "distill_by_text", **changes)
    done = succeed("train", other, learner)
    assert note in done.stderr
    assert "loading the teacher" not in done.stderr
    assert losses(run.with_suffix("")) == losses(other.with_suffix(""))


@pytest.mark.parametrize(
    ("changes", "said"),
    [(["distill.top_k=null"], "distill.top_k: null runs the teacher in training"),
     (["distill.hidden.loss=mse"], "distill.hidden: hidden states of other tokens cannot be compared"),
     (["distill.on=masked", "distill.top_k=null"], "distill.on: masked hides the student's tokens"),
     (["tokenizer.train.pattern=whitespace"], "tokenizer.train.pattern: with whitespace")],
)  # fmt: skip
def test_what_another_tokenizer_cannot_teach_is_refused_before_text_is_read(tmp_path, changes, said):
    run = objective_run(tmp_path / "run.yaml", "distill_by_text")
    assert said in refused("config", "check", run, *changes).stderr
    assert not (tmp_path / "stores").exists()


def test_a_teacher_whose_tokens_do_not_join_to_the_text_is_refused(tmp_path):
    run = objective_run(tmp_path / "run.yaml", "distill_by_text")
    backend = Backend(models.WordPiece(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=90, special_tokens=["<unk>", "</s>"], show_progress=False)
    backend.train_from_iterator([ENGLISH + RUSSIAN], trainer)
    fast(backend, decoders.WordPiece()).save(tmp_path / "teacher")
    done = refused("config", "check", run)
    assert "distill.teacher: its tokens cannot be joined back to their text" in done.stderr


def test_a_teacher_that_shares_no_token_is_refused():
    token_map = TokenMap(byte_level(ENGLISH), byte_level(OTHER), packs_text=True, key="distill.teacher")
    with pytest.raises(InputError, match=r"distill\.tokenizer: the teacher has no token that is a target"):
        token_map.note(0.0)


def test_another_tokenizer_is_another_key(tmp_path):
    """What is kept of a teacher depends on its tokenizer, and on the student's."""
    keys = set()
    for vocab in (290, 280):
        file = objective_run(tmp_path / f"{vocab}.yaml", "distill_by_text")
        run = load_run(str(file), {"tokenizer.train.vocab": vocab})
        objective = build_objective(run, byte_level(ENGLISH, vocab))
        assert objective.teacher.reads_text
        keys.add(json.dumps(objective.teacher.settings))
    assert len(keys) == 2
