"""Distillation: the loss beside PyTorch's own on whole logits, what is kept of a teacher, and what is refused."""

import json
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from artel.config import TokenizerTraining
from artel.config.schema.distill import HiddenStatesConfig
from artel.models.attention_switch import use_artel_attention
from artel.models.logits_loss import PositionLogits, loss_of_logits
from artel.objectives.distill.teacher_outputs import divergence, hidden_loss, reduce_to_classes
from artel.tokens import evaluation_rows, load_tokenizer, micro_batches, train_tokenizer
from artel.training.teacher_cache import CachedOutputs, split_into_shards
from support import WORKERS
from support.objectives import objective_run, student_of, taught
from support.runs import kill, losses, metrics, refused, start, succeed, torchrun
from support.waiting import wait_until


def distributions(seed=0, count=40, vocabulary=50):
    torch.manual_seed(seed)
    teacher, student = torch.randn(2, count, vocabulary, dtype=torch.float64)
    return (3 * teacher).log_softmax(-1), (2 * student).log_softmax(-1)


def test_divergences_are_those_of_pytorch():
    teacher, student = distributions()

    def kl(p, q):
        return F.kl_div(q, p, reduction="none", log_target=True).sum(-1)

    assert torch.allclose(divergence(teacher, student, "forward_kl", 0.5), kl(teacher, student))
    assert torch.allclose(divergence(teacher, student, "reverse_kl", 0.5), kl(student, teacher))
    mixture = (0.3 * teacher.exp() + 0.7 * student.exp()).log()
    expected = 0.3 * kl(teacher, mixture) + 0.7 * kl(student, mixture)
    assert torch.allclose(divergence(teacher, student, "js", 0.3), expected)
    for kind in ("forward_kl", "reverse_kl", "js"):
        assert divergence(teacher, teacher, kind, 0.5).abs().max() < 1e-12


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "js"])
def test_the_likeliest_ids_and_all_others_as_one_class(kind):
    """Nothing is renormalized, the classes' divergence is never above the whole one, and all but one id give it."""
    teacher, student = distributions()
    whole = divergence(teacher, student, kind, 0.5)
    order = teacher.argsort(dim=1, descending=True)
    before = torch.zeros_like(whole)
    for k in (1, 8, 49):
        ids = order[:, :k]
        theirs, own = reduce_to_classes(teacher, ids), reduce_to_classes(student, ids)
        assert torch.allclose(theirs.exp().sum(-1), torch.ones(40, dtype=torch.float64))
        others = teacher.exp().sum(-1) - teacher.exp().gather(1, ids).sum(-1)
        assert torch.allclose(theirs[:, -1].exp(), others)
        of_classes = divergence(theirs, own, kind, 0.5)
        assert (of_classes >= before - 1e-12).all()
        assert (of_classes <= whole + 1e-12).all()
        before = of_classes
    assert torch.allclose(before, whole)


def test_the_first_layers_of_a_deeper_student_are_drawn_towards_the_teachers_first():
    torch.manual_seed(0)
    first, last = torch.randn(2, 1, 5, 8)
    config = HiddenStatesConfig(layers="even")
    for student in ([first, first, last, last], [first, first, first, first, last, last]):
        assert hidden_loss([first, last], student, torch.arange(5), config) == 0
    assert hidden_loss([first, last], [last, last, first, first], torch.arange(5), config) > 1


def test_a_loss_of_logits_in_chunks_is_that_of_whole_logits():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=90_000, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                                         intermediate_size=16))  # fmt: skip
    ids, places = torch.randint(0, 90_000, (2, 150)), torch.arange(3, 298)
    assert len(list(PositionLogits(model, {"input_ids": ids}, places).chunks())) > 1

    def loss(logits, chunk):
        wanted = places[chunk] % 7
        return torch.stack([(logits.log_softmax(-1)[:, 5] * wanted).sum(), wanted.sum().float()])

    whole = loss(model(input_ids=ids).logits.flatten(0, 1)[places], slice(None))
    expected = torch.autograd.grad(whole[0], list(model.parameters()))
    sums = loss_of_logits(model, {"input_ids": ids}, places, loss, 2)
    actual = torch.autograd.grad(2 * sums[0], list(model.parameters()))
    assert torch.allclose(sums, whole, rtol=1e-6)
    for one, other in zip(actual, expected, strict=True):
        assert torch.allclose(one, 2 * other, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["distill", "distill_beside"])
def test_the_loss_is_that_of_whole_logits(tmp_path, case):
    """alpha x cross-entropy + (1 - alpha) x T² x divergence + hidden states, with transformers and PyTorch alone."""
    changes = {"distill.temperature": 2.0, "distill.alpha": 0.25, "data.packing": "concatenate"}
    run, objective, store = taught(tmp_path, case, **changes)
    dataset = objective.dataset(store.validation)
    rows = evaluation_rows(dataset, np.arange(3), 4)  # one of them is padding
    batch, model = objective.batch(rows), student_of(objective)
    with torch.no_grad():
        sums = dict(zip(objective.sums, objective.loss(model, batch), strict=True))

    master = AutoModelForCausalLM.from_pretrained(tmp_path / "teacher", dtype=torch.float32)
    ids = batch.tensors["input_ids"]
    targets = batch.tensors["targets"].flatten()
    has_target = targets >= 0
    labels = targets[has_target]
    with torch.no_grad():
        outputs = [each(ids, output_hidden_states=True) for each in (master, model)]
    theirs, own = (each.logits.flatten(0, 1)[has_target] for each in outputs)
    teacher, learner = ((logits / 2).log_softmax(-1) for logits in (theirs, own))
    if run.distill.top_k is not None:
        likeliest = theirs.topk(run.distill.top_k).indices
        teacher, learner = reduce_to_classes(teacher, likeliest), reduce_to_classes(learner, likeliest)
    apart = divergence(teacher, learner, run.distill.loss, run.distill.beta).sum()
    plain = F.cross_entropy(own, labels, reduction="sum")
    hidden = torch.zeros(())
    if run.distill.hidden is not None:  # layers 2 and 4 of the teacher's four; the last are after the models' norms
        between = [each.hidden_states[at].flatten(0, 1)[has_target] for each, at in zip(outputs, (2, 1), strict=True)]
        last = []
        for each, layer in ((master, 4), (model, 2)):
            states = []
            hook = each.model.layers[layer - 1].register_forward_hook(
                lambda _, __, out, states=states: states.append(out)
            )
            with torch.no_grad():
                each(ids)
            hook.remove()
            last.append(states[0].flatten(0, 1)[has_target])
        pairs = [between, last]
        hidden = torch.stack([(one - other).square().mean(-1).sum() for one, other in pairs]).mean()
    assert float(sums["plain"]) == pytest.approx(float(plain), rel=1e-5)
    # What is kept is kept in 16 bits, and is what the sum of the classes is 1 by.
    assert float(sums["divergence"]) == pytest.approx(float(apart), rel=1e-5 if run.distill.top_k is None else 1e-3)
    assert float(sums["hidden"]) == pytest.approx(float(hidden), rel=1e-5)
    expected = 0.25 * plain + 0.75 * 4 * sums["divergence"] + hidden
    assert float(sums["loss"]) == pytest.approx(float(expected), rel=1e-5)
    assert sums["agreed"] == (theirs.argmax(-1) == own.argmax(-1)).sum()
    assert sums["correct"] == (own.argmax(-1) == labels).sum()
    assert sums["targets"] == sums["taught"] == len(labels) == batch.targets


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
def test_what_is_kept_is_found_by_sample_in_every_epoch(tmp_path, packing):
    """Kept logits of a block are those of the teacher reading that block: whichever the epoch, order or row."""
    _, objective, store = taught(tmp_path, "distill", **{"data.packing": packing})
    master = AutoModelForCausalLM.from_pretrained(tmp_path / "teacher", dtype=torch.float32)
    assert use_artel_attention(master)
    dataset = objective.dataset(store.train)
    order = objective.order(store.train, len(dataset))
    for epoch in (0, 1):
        indices = order.at(np.arange(epoch * len(dataset), epoch * len(dataset) + 5))
        (rows,) = micro_batches(dataset, indices, np.full(5, epoch), rank=0, world_size=1, batch_size=5, max_rows=5)
        batch = objective.batch(rows)
        has_target = (batch.tensors["targets"] >= 0).flatten()
        ids = batch.tensors["teacher_ids"].flatten(0, 1)[has_target].numpy()
        log_probs = batch.tensors["teacher_log_probs"].flatten(0, 1)[has_target].float().numpy()
        with torch.no_grad():
            _, counts, now = objective.outputs_to_cache(master, batch)
        assert counts.sum() == len(ids) > 100
        assert (now["ids"] == ids).mean() > 0.99  # ids of equal probability may change places
        assert np.abs(now["log_probs"].astype(np.float32) - log_probs).max() < 0.02


def test_shards_are_the_same_for_any_number_of_ranks():
    shards = split_into_shards("train", 1000, 1000)
    assert [shard.start for shard in shards] == list(range(0, 1000, 32))
    assert shards[-1].end == 1000
    assert shards[1].name == "train/00001.safetensors"
    assert len(split_into_shards("train", 3, 2**30)) == 3
    assert split_into_shards("validation", 0, 10) == []


@pytest.mark.processes
@pytest.mark.parametrize("case", ["distill", "distill_by_text"])
def test_killed_while_it_asks_the_teacher_it_asks_for_the_rest_alone(tmp_path, case):
    """Finished shards are not computed again; what comes out is what an unbroken run has, also by two processes."""
    run = objective_run(tmp_path / "run.yaml", case)
    succeed("prepare", run)
    process = start("train", run)
    stores = tmp_path / "stores"

    def finished():
        return sorted(stores.glob("*.teachers/*.parts/*/*.safetensors"))

    wait_until(lambda: len(finished()) > 3 or process.poll() is not None, lambda: f"{len(finished())} shards")
    kill(process)
    there = {file: file.stat().st_mtime_ns for file in finished()}
    assert there
    assert "shards already exist" in succeed("train", run).stderr
    (whole,) = [folder for folder in stores.glob("*.teachers/*") if (folder / "manifest.json").is_file()]
    for file, written in there.items():
        assert (whole / file.parent.name / file.name).stat().st_mtime_ns == written
    figures = losses(run.with_suffix(""))

    # By two processes: the same outputs, and the same losses.
    aside = tmp_path / "of one"
    shutil.move(whole, aside)
    other = objective_run(tmp_path / "other.yaml", case)
    done = torchrun(2, WORKERS / "train_cases.py", other)
    assert done.returncode == 0, done.stderr[-3000:]
    for split in ("train", "validation"):
        one, two = CachedOutputs(aside, split), CachedOutputs(whole, split)
        assert len(one) == len(two) > 0
        for number in range(0, len(one), 7):
            a, b = one.read(number), two.read(number)
            assert np.abs(a["log_probs"].astype(np.float32) - b["log_probs"].astype(np.float32)).max() < 0.02
            assert np.array_equal(a.get("aligned"), b.get("aligned"))
    again = losses(other.with_suffix(""))
    assert max(abs(figures[step][0] - again[step][0]) for step in figures) < 1e-4


@pytest.mark.slow
def test_a_damaged_shard_is_computed_again_and_the_teacher_may_be_gone(tmp_path):
    run = objective_run(tmp_path / "run.yaml", "distill")
    assert "the teacher on validation: cross-entropy" in succeed("train", run).stderr
    last = metrics(run.with_suffix(""))[-1]["validation"]
    assert list(last)[:4] == ["loss", "cross_entropy", "perplexity", "accuracy"]
    assert last["loss"] == pytest.approx(0.5 * last["cross_entropy"] + 0.5 * 4 * last["divergence"], rel=1e-6)
    shard = next((tmp_path / "stores").glob("*.teachers/*/train/00002.safetensors"))
    content, outputs = shard.read_bytes(), load_file(shard)
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    other = objective_run(tmp_path / "other.yaml", "distill")
    assert f"{shard} was changed or damaged: the teacher runs again" in succeed("train", other).stderr
    assert all((outputs[name] == array).all() for name, array in load_file(shard).items())
    assert losses(run.with_suffix("")) == losses(other.with_suffix(""))

    # A run that is there already, longer: what the teacher said is enough.
    shutil.move(tmp_path / "teacher", tmp_path / "gone")
    evaluated = succeed("evaluate", run.with_suffix(""), "--json")
    assert json.loads(evaluated.stdout)["models"][0]["metrics"] == pytest.approx(last, rel=1e-6)
    shutil.rmtree(shard.parent.parent)
    evaluated = succeed("evaluate", run.with_suffix(""), "--json")
    assert "metrics of the teacher omitted: " in evaluated.stderr
    figures = json.loads(evaluated.stdout)["models"][0]["metrics"]
    assert "loss" not in figures
    assert figures["cross_entropy"] == pytest.approx(last["cross_entropy"], rel=1e-6)


@pytest.mark.slow
def test_masked_models_learn_from_a_teacher_in_memory(tmp_path):
    run = objective_run(tmp_path / "run.yaml", "masked", train={"steps": 2})
    succeed("train", run)
    tree = yaml.safe_load(run.read_text())
    tree |= {"run": str(tmp_path / "small"), "objective": "distill", "tokenizer": {}, "masked": {}}
    tree["distill"] = {"teacher": str(tmp_path / "run"), "on": "masked", "top_k": None, "loss": "reverse_kl"}
    tree["model"]["config"]["num_hidden_layers"] = 1
    small = tmp_path / "small.yaml"
    small.write_text(yaml.safe_dump(tree))
    succeed("train", small)
    last = metrics(tmp_path / "small")[-1]["validation"]
    assert {"loss", "cross_entropy", "commonest_token", "divergence", "agreement"} <= last.keys()
    tree["distill"]["top_k"] = 8
    small.write_text(yaml.safe_dump(tree))
    assert "distill.top_k: other tokens are hidden in each epoch" in refused("config", "check", small).stderr


def test_another_tokenizer_is_refused_with_what_differs(tmp_path):
    run = objective_run(tmp_path / "run.yaml", "distill")
    own = train_tokenizer(iter(["a text of other words"] * 20), TokenizerTraining(vocab=270), encoder=False)
    own.save(tmp_path / "own")
    done = refused("config", "check", run, f"tokenizer.from={tmp_path / 'own'}")
    assert "tokenizer.from: the student's tokenizer is not the teacher's: the teacher lacks" in done.stderr
    assert "artel generate TEACHER --prompts FILE writes them" in done.stderr
    done = refused("config", "check", run, "tokenizer.train.vocab=300")
    assert "tokenizer.train: a newly trained tokenizer has a different vocabulary" in done.stderr
    same = load_tokenizer(str(tmp_path / "teacher"))
    same.save(tmp_path / "same")
    succeed("config", "check", run, f"tokenizer.from={tmp_path / 'same'}")


@pytest.mark.parametrize(
    ("changes", "said"),
    [(["distill.teacher=null"], "distill.teacher: is required"),
     (["distill.teacher=./nowhere"], "distill.teacher: there is no folder ./nowhere"),
     (["distill.hidden.loss=mse"], "distill.hidden: hidden states are not cached"),
     (["distill.top_k=null", "parallel.pipeline=2"], "parallel.pipeline: must be 1"),
     (["distill.top_k=null", "parallel.context=2"], "parallel.context: must be 1"),
     (["distill.top_k=5000"], "distill.top_k: 5,000 are more than the"),
     (["distill.beta=1"], "distill.beta"), (["distill.alpha=1"], "distill.alpha")],
)  # fmt: skip
def test_what_does_not_go_together_is_refused_before_text_is_read(tmp_path, changes, said):
    run = objective_run(tmp_path / "run.yaml", "distill")
    assert said in refused("config", "check", run, *changes).stderr
    assert not (tmp_path / "stores").exists()


@pytest.mark.parametrize(
    ("case", "on", "said"),
    [("distill", "chat", "chat needs conversations, but the sources contain text"),
     ("distill_beside", "causal", "causal needs text, but the sources contain conversations"),
     ("distill_beside", "masked", "masked needs text, but the sources contain conversations")],
)  # fmt: skip
def test_sources_that_what_is_taught_does_not_learn_from_are_refused(tmp_path, case, on, said):
    done = refused("config", "check", objective_run(tmp_path / "run.yaml", case), f"distill.on={on}")
    assert f"distill.on: {said}" in done.stderr


def test_hidden_states_of_another_width_are_refused(tmp_path):
    run = objective_run(tmp_path / "run.yaml", "distill_beside")
    done = refused("train", run, "model.config.hidden_size=48")
    assert "distill.hidden: the teacher's hidden states have 32 numbers, the student's 48" in done.stderr


def test_a_run_that_is_not_finished_teaches_nobody(tmp_path):
    run = objective_run(tmp_path / "run.yaml", "distill")
    (tmp_path / "unfinished").mkdir()
    shutil.copy(run, tmp_path / "unfinished" / "config.yaml")
    done = refused("config", "check", run, f"distill.teacher={tmp_path / 'unfinished'}")
    assert "is a run that has not finished training" in done.stderr


@pytest.mark.slow
def test_the_plan_counts_what_is_kept(tmp_path):
    run = objective_run(tmp_path / "run.yaml", "distill")
    succeed("prepare", run)
    assert "teacher" in json.loads(succeed("plan", run, "--json").stdout)["disk_gib"]
    assert "not counted: the teacher, which stays in memory" in succeed("plan", run, "distill.top_k=null").stdout


def test_new_leads_to_a_recipe(tmp_path):
    (tmp_path / "text.txt").write_text("A text.\n" * 50)
    answers = ("--text", tmp_path / "text.txt", "--learn", "distill", "--from", "scratch", "--time", "5min")
    assert "distill needs more than texts" in refused("new", tmp_path / "run.yaml", *answers).stderr
