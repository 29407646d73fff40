"""Losses that learn from rewards: equal to TRL's, the same however a batch is cut, and finite whatever the rewards."""

import copy
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from artel.config import TokenizerTraining
from artel.models.logits_loss import target_log_probs
from artel.objectives.answer_rows import Answer, answer_tensors
from artel.objectives.policy.config import PRESETS, PolicyConfig
from artel.objectives.policy.losses import advantages, best_and_worst, corrections, has_signal, policy_sums
from artel.tokens import train_tokenizer
from support.preferences import MODEL

PROMPTS = ["Count to three.", "Say hello.", "Who are you, and what do you want?", "Add 2 and 3."]
REWARDS = [[1.0, 0.0, 0.5, 0.0], [None, 1.0, 0.25, 0.0], [1.0, 1.0, 1.0, 1.0], [0.3, 0.1, 0.2, -2.0]]
LONGEST = 12
# How TRL names the loss of each preset. RLOO has a trainer of its own.
IN_TRL = {
    "grpo": {"loss_type": "grpo"},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},  # the bound of the ratio; ours is above 1
    "rloo": {"beta": 0.0},  # 0.05 by default, taken from the rewards
}
# How far the policy moves after it wrote the answers: as far as some of its ratios, not all, are clipped.
STEP = {"grpo": 0.03, "dr_grpo": 0.03, "dapo": 0.03, "gspo": 2e-4, "cispo": 0.25, "rloo": 0.02, "raft": 0.03}


# Losses of single answers. online_dpo learns pairs.
OF_ANSWERS = [preset for preset in PRESETS if not PRESETS[preset].learns_pairs]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(iter([" ".join(PROMPTS)] * 40), TokenizerTraining(vocab=300))


def moved(model, size, seed):
    """Add noise to all weights, and return the model."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += size * torch.randn(parameter.shape, generator=random)
    return model


def folder_of_model(tokenizer, folder):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=tokenizer.vocabulary, **MODEL))
    moved(model, 0.05, 0).save_pretrained(folder)
    return folder


def written(tokenizer, cut_off=()):
    """Ids of an answer for each reward, of 1 to LONGEST tokens. Those that are cut off lack the end token."""
    random = np.random.default_rng(0)
    lengths = itertools.cycle([5, 1, LONGEST, 8, 3])
    ids = [random.integers(10, tokenizer.vocabulary, next(lengths)).tolist() for _ in itertools.chain(*REWARDS)]
    return [answer if number in cut_off else [*answer[:-1], tokenizer.end_id] for number, answer in enumerate(ids)]


def trl_trainer(preset, tokenizer, model, folder, answers, **more):
    """TRL's trainer for a preset. It takes these answers instead of generating, and REWARDS as their rewards."""
    trl = pytest.importorskip("trl", reason="trl is not installed")
    from datasets import Dataset

    is_rloo = preset == "rloo"
    arguments = (trl.RLOOConfig if is_rloo else trl.GRPOConfig)(
        output_dir=str(folder), report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False,
        per_device_train_batch_size=len(answers), num_generations=len(REWARDS[0]), max_completion_length=LONGEST,
        num_iterations=2,  # so that TRL computes the old log-probabilities
        **IN_TRL[preset], **more)  # fmt: skip
    trainer = (trl.RLOOTrainer if is_rloo else trl.GRPOTrainer)(
        model,
        reward_funcs=lambda completions, **_: list(itertools.chain(*REWARDS)),
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS]),
        processing_class=tokenizer.hf,
    )
    trainer._generate_single_turn = lambda *_, **__: answers if is_rloo else (answers, None)
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def samples_of(tokenizer, answers, masked=()):
    """The prompts with their answers, as the objective reads them. Masked answers have no targets."""
    numbered = iter(enumerate(answers))
    samples = []
    for prompt in PROMPTS:
        start = tokenizer.hf(prompt)["input_ids"]
        group = [next(numbered) for _ in REWARDS[0]]
        samples.append(
            [
                Answer(np.array(start + ids), np.array([0] * len(start) + [number not in masked] * len(ids)))
                for number, ids in group
            ]
        )
    return samples


def log_probs(model, tensors):
    inputs = {"input_ids": tensors["input_ids"], "use_cache": False}
    return target_log_probs(model, inputs, tensors["targets"], tensors["target_positions"])[0]


def sums_of(policy, old, reference, samples, rewards, settings, of_answers=None, factors=None):
    tensors = answer_tensors(samples, share_prompts=False)
    with torch.no_grad():
        before = log_probs(old, tensors)
        at_first = None if reference is None else log_probs(reference, tensors)
    of_answers = advantages(rewards, settings.advantage) if of_answers is None else torch.tensor(of_answers)
    values = log_probs(policy, tensors)
    return policy_sums(values, before, at_first, of_answers, tensors["answer_targets"], settings, factors)


def gradients(model):
    return torch.cat([parameter.grad.flatten() for _, parameter in sorted(model.named_parameters())])


def difference_to_trl(preset, tokenizer, folder, *, kl=0.0, cut_off=(), **more):
    """Return (difference of the losses, of the gradients relative to the largest; our sums; TRL's trainer)."""
    folder_of_model(tokenizer, folder / "model")
    answers = written(tokenizer, cut_off)
    old = moved(AutoModelForCausalLM.from_pretrained(folder / "model"), 0.02, 1)
    trained_by_trl = copy.deepcopy(old)
    trainer = trl_trainer(preset, tokenizer, trained_by_trl, folder / "trl", answers, **more)
    inputs = trainer._generate_and_score_completions([{"prompt": p} for p in PROMPTS for _ in REWARDS[0]])
    moved(trained_by_trl, STEP[preset], 2)
    theirs = trainer._compute_loss(trainer.model, inputs)
    theirs.backward()

    settings = PolicyConfig(preset=preset, kl=kl, new_tokens=LONGEST).resolve()
    rewards = torch.tensor([[np.nan if reward is None else reward for reward in group] for group in REWARDS]).double()
    of_answers = advantages(rewards, settings.advantage)
    assert torch.allclose(of_answers.flatten(), inputs["advantages"].double(), atol=1e-5)
    policy = moved(copy.deepcopy(old), STEP[preset], 2)
    reference = AutoModelForCausalLM.from_pretrained(folder / "model") if kl else None
    samples = samples_of(tokenizer, answers, masked=cut_off)
    sums = sums_of(policy, old, reference, samples, rewards, settings)
    ours = sums.loss / sums.targets
    ours.backward()
    expected = gradients(trained_by_trl)
    assert expected.abs().max() > 1e-3
    gradient = (gradients(policy) - expected).abs().max() / expected.abs().max()
    return abs(ours.item() - theirs.item()), gradient.item(), sums, trainer


@pytest.mark.parametrize("preset", IN_TRL)
def test_loss_and_gradient_equal_those_of_trl(preset, tokenizer, tmp_path):
    loss, gradient, sums, trainer = difference_to_trl(preset, tokenizer, tmp_path)
    clipped = sums.clipped_low + sums.clipped_high
    print(f"{preset}: loss {loss:.1e}, gradient {gradient:.1e}; {clipped:g} of {sums.tokens:g} tokens clipped")
    assert loss < 1e-5
    assert gradient < 1e-5
    assert 0 < clipped < sums.tokens
    if PRESETS[preset].ratio == "token" and preset != "cispo":  # TRL counts other ratios by answer, and cispo's by sign
        metrics = trainer._metrics["train"]
        assert metrics["clip_ratio/low_mean"] == pytest.approx([(sums.clipped_low / sums.tokens).item()])
        assert metrics["clip_ratio/high_mean"] == pytest.approx([(sums.clipped_high / sums.tokens).item()])


@pytest.mark.parametrize("preset", [preset for preset in IN_TRL if preset != "rloo"])
def test_loss_with_kl_equals_that_of_trl(preset, tokenizer, tmp_path):
    """TRL's rloo subtracts log ratios from the rewards instead. By default TRL also multiplies k3 by the ratio."""
    loss, gradient, sums, trainer = difference_to_trl(
        preset, tokenizer, tmp_path, kl=0.1, beta=0.1, use_bias_correction_kl=False
    )
    print(f"{preset}, kl 0.1: loss {loss:.1e}, gradient {gradient:.1e}")
    assert loss < 1e-5
    assert gradient < 1e-5
    assert trainer._metrics["train"]["kl"] == pytest.approx([(sums.kl / sums.tokens).item()], rel=1e-4)


def learned_samples(tokenizer, answers, settings):
    """The prompts whose rewards differ, with the answers that are learned."""
    rewards = torch.tensor([[np.nan if reward is None else reward for reward in group] for group in REWARDS]).double()
    indices = best_and_worst(rewards)[:, : settings.learned_answers].tolist()
    groups = zip(samples_of(tokenizer, answers), indices, strict=True)
    return [[group[index] for index in learned] for group, learned in groups if learned[0] >= 0]


def test_raft_is_the_cross_entropy_of_the_best_answers(tokenizer, tmp_path):
    folder_of_model(tokenizer, tmp_path / "model")
    policy, other = (AutoModelForCausalLM.from_pretrained(tmp_path / "model") for _ in range(2))
    settings = PolicyConfig(preset="raft", new_tokens=LONGEST).resolve()
    samples = learned_samples(tokenizer, written(tokenizer), settings)
    assert len(samples) == 3  # the rewards of one prompt are equal
    sums = sums_of(policy, policy, None, samples, None, settings, [[1.0]] * 3)
    (sums.loss / sums.targets).backward()
    total, count = 0.0, 0
    for (answer,) in samples:
        ids, labels = torch.from_numpy(answer.ids)[None], torch.from_numpy(np.where(answer.flags, answer.ids, -100))
        total = total + other(ids, labels=labels[None]).loss * int(answer.flags.sum())
        count += int(answer.flags.sum())
    (total / count).backward()
    assert sums.targets == count
    assert (sums.loss / sums.targets).item() == pytest.approx((total / count).item(), abs=1e-5)
    assert torch.allclose(gradients(policy), gradients(other), atol=1e-6)


def test_online_dpo_equals_that_of_trl(tokenizer, tmp_path):
    pytest.importorskip("trl", reason="trl is not installed")
    from datasets import Dataset
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    folder_of_model(tokenizer, tmp_path / "model")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    policy = moved(copy.deepcopy(reference), 0.03, 1)
    trained_by_trl = copy.deepcopy(policy)
    settings = PolicyConfig(preset="online_dpo", new_tokens=LONGEST).resolve()
    samples = learned_samples(tokenizer, written(tokenizer), settings)
    sums = sums_of(policy, policy, reference, samples, None, settings, [[1.0, 1.0]] * len(samples))
    ours = sums.loss / sums.targets
    ours.backward()

    trainer = OnlineDPOTrainer(
        trained_by_trl, ref_model=reference, reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=OnlineDPOConfig(output_dir=str(tmp_path / "trl"), report_to=[], use_cpu=True, bf16=False,
                             gradient_checkpointing=False, per_device_train_batch_size=len(samples)),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS]), processing_class=tokenizer.hf,
    )  # fmt: skip
    in_order = [pair[0] for pair in samples] + [pair[1] for pair in samples]  # all best answers, then all worst
    questions = [answer.ids[answer.flags == 0] for answer in in_order]
    answers = [answer.ids[answer.flags > 0] for answer in in_order]

    def padded(rows, values, *, left):
        longest = max(map(len, rows))
        sides = [(longest - len(row), 0) if left else (0, longest - len(row)) for row in rows]
        return torch.tensor(np.stack([np.pad(value, side) for value, side in zip(values, sides, strict=True)]))

    arrays = [
        padded(rows, values, left=left)
        for rows, left in ((questions, True), (answers, False))
        for values in (rows, [np.ones(len(row), dtype=np.int64) for row in rows])
    ]
    trainer._generate = lambda *_: (*arrays, None)
    trainer._calculate_rewards_from_functions = lambda **_: torch.tensor([1.0, 0.0]).repeat_interleave(len(samples))
    trainer.current_gradient_accumulation_steps = 1
    theirs = trainer.training_step(trainer.model, {"prompt": PROMPTS[: len(samples)]})
    expected = gradients(trained_by_trl)
    gradient = (gradients(policy) - expected).abs().max() / expected.abs().max()
    print(f"online_dpo: loss {abs(ours.item() - theirs.item()):.1e}, gradient {gradient:.1e}")
    assert ours.item() != pytest.approx(np.log(2), abs=1e-3)
    assert abs(ours.item() - theirs.item()) < 1e-5
    assert gradient < 1e-5
    assert sums.targets == len(samples)


@pytest.mark.parametrize("kind", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_corrections_for_a_server_equal_those_of_trl(kind, tokenizer, tmp_path):
    """Loss and gradient within 1e-5, where some tokens or answers are limited and others are not."""
    folder_of_model(tokenizer, tmp_path / "model")
    answers, random = written(tokenizer), np.random.default_rng(1)
    old = moved(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), 0.02, 1)
    trained_by_trl = copy.deepcopy(old)
    tensors = answer_tensors(samples_of(tokenizer, answers), share_prompts=False)
    with torch.no_grad():
        before = log_probs(old, tensors).numpy()
    by_server = before - random.normal(0, 0.6, len(before)).astype(np.float32)
    ends = np.cumsum([len(answer) for answer in answers])[:-1]
    trainer = trl_trainer("dr_grpo", tokenizer, trained_by_trl, tmp_path / "trl", answers,
                          vllm_importance_sampling_mode=kind, vllm_importance_sampling_clip_max=1.5)  # fmt: skip
    trainer._generate_single_turn = lambda *_, **__: (answers, [part.tolist() for part in np.split(by_server, ends)])
    trainer.use_vllm = True
    inputs = trainer._generate_and_score_completions([{"prompt": p} for p in PROMPTS for _ in REWARDS[0]])
    moved(trained_by_trl, STEP["dr_grpo"], 2)
    theirs = trainer._compute_loss(trainer.model, inputs)
    theirs.backward()

    pairs = zip(np.split(before, ends), np.split(by_server, ends), strict=True)
    factors, limited = zip(*(corrections(ours - server, kind, 1.5) for ours, server in pairs), strict=True)
    assert 0 < np.concatenate(limited).mean() < 1
    rewards = torch.tensor([[np.nan if reward is None else reward for reward in group] for group in REWARDS]).double()
    settings = PolicyConfig(new_tokens=LONGEST).resolve()
    policy = moved(copy.deepcopy(old), STEP["dr_grpo"], 2)
    factor_tensor = torch.from_numpy(np.concatenate(factors)).float()
    sums = sums_of(policy, old, None, samples_of(tokenizer, answers), rewards, settings, factors=factor_tensor)
    ours = sums.loss / sums.targets
    ours.backward()
    expected = gradients(trained_by_trl)
    gradient = (gradients(policy) - expected).abs().max() / expected.abs().max()
    print(f"{kind}: loss {abs(ours.item() - theirs.item()):.1e}, gradient {gradient:.1e}")
    assert abs(ours.item() - theirs.item()) < 1e-5
    assert gradient < 1e-5


def test_masked_answers_equal_those_of_trl(tokenizer, tmp_path):
    """DAPO. With other denominators TRL counts masked answers, so that masking lowers the learning rate."""
    loss, gradient, sums, _ = difference_to_trl(
        "dapo", tokenizer, tmp_path, cut_off=(2, 7, 13), mask_truncated_completions=True
    )
    print(f"dapo, masked: loss {loss:.1e}, gradient {gradient:.1e}")
    assert loss < 1e-5
    assert gradient < 1e-5
    assert sums.answers == 13


def test_penalties_of_long_answers_equal_those_of_trl():
    rewards = pytest.importorskip("trl.rewards", reason="trl is not installed")
    lengths = list(range(1, 21))
    expected = rewards.get_soft_overlong_punishment(20, 6)([[0] * length for length in lengths])
    policy = PolicyConfig(overlong="punish", new_tokens=20, overlong_tokens=6)
    assert [policy.overlong_penalty(length) for length in lengths] == pytest.approx(expected)


@pytest.mark.parametrize("preset", OF_ANSWERS)
def test_micro_batches_give_the_same_loss_and_gradient(preset):
    """7 prompts at once and 2 at a time, with a masked answer, one without reward and a group without signal."""
    torch.manual_seed(0)
    reference = moved(LlamaForCausalLM(LlamaConfig(vocab_size=120, **MODEL)), 0.05, 0)
    old = moved(copy.deepcopy(reference), 0.02, 1)
    settings = PolicyConfig(preset=preset, kl=0.1, new_tokens=LONGEST).resolve()
    random = np.random.default_rng(0)
    samples = []
    for _ in range(7):
        prompt = random.integers(5, 120, random.integers(3, 9))
        lengths = random.integers(1, LONGEST, 3)
        samples.append(
            [Answer(np.r_[prompt, random.integers(5, 120, n)], np.repeat([0, 1], [len(prompt), n])) for n in lengths]
        )
    samples[3][1].flags[:] = 0
    rewards = torch.from_numpy(random.random((7, 3)))
    rewards[2, 0] = np.nan
    rewards[5] = 0.1

    results = []
    for size in (7, 2):
        policy = moved(copy.deepcopy(old), STEP[preset], 2)
        micro_batches = [slice(start, start + size) for start in range(0, 7, size)]
        sums = [sums_of(policy, old, reference, samples[part], rewards[part], settings) for part in micro_batches]
        totals = [sum(values) for values in zip(*sums, strict=True)]
        (totals[0] / totals[1]).backward()
        results.append((torch.stack(totals).detach(), gradients(policy)))
    (sums, gradient), (sums_of_parts, gradient_of_parts) = results
    assert torch.allclose(sums, sums_of_parts, rtol=1e-5)
    assert torch.allclose(gradient, gradient_of_parts, rtol=0, atol=1e-5 * gradient.abs().max().item())
    tokens = sum(int(answer.flags.sum()) for sample in samples for answer in sample)
    assert sums[1] == settings.targets(tokens=tokens, answers=20)
    assert sums[2:4].tolist() == [tokens, 20]


NAN = float("nan")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("mean", [-1.0, NAN, 2.0, -1.0]),
        ("deviation", [-1 / 3**0.5, NAN, 2 / 3**0.5, -1 / 3**0.5]),
        ("leave_one_out", [-1.5, NAN, 3.0, -1.5]),
        ("best", [0.0, NAN, 1.0, 0.0]),
    ],
)
def test_advantages_by_hand(kind, expected):
    rewards = torch.tensor([[0.0, NAN, 3.0, 0.0], [0.1 + 0.2, 0.3, 0.3, NAN], [NAN, 5.0, NAN, NAN], [NAN] * 4]).double()
    assert has_signal(rewards).tolist() == [True, False, False, False]
    values = advantages(rewards, kind)
    assert values.dtype == torch.float64
    assert values[0].tolist() == pytest.approx([0.0 if x != x else x for x in expected], rel=1e-3)
    assert values[1:].tolist() == [[0.0] * 4] * 3


def test_the_first_of_equal_answers_is_the_best_or_worst():
    rewards = torch.tensor([[0.0, 0.1 + 0.2, 0.3, 0.0], [NAN, 2.0, 5.0, 5.0], [1.0] * 4, [NAN, NAN, NAN, 3.0]]).double()
    assert best_and_worst(rewards).tolist() == [[1, 0], [2, 1], [-1, -1], [-1, -1]]


groups = st.lists(
    st.lists(st.one_of(st.just(NAN), st.sampled_from([0.0, 1.0]), st.floats(-100, 100)), min_size=5, max_size=5),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("kind", ["mean", "deviation", "leave_one_out"])
@given(groups=groups)
def test_advantages_add_up_to_zero_and_ignore_missing_rewards(kind, groups):
    rewards = torch.tensor(groups).double()
    values = advantages(rewards, kind)
    assert values.isfinite().all()
    assert (values[rewards.isnan()] == 0).all()
    assert values.sum(dim=1).abs().max() <= 1e-7
    assert (values.abs().amax(dim=1) > 0).tolist() == has_signal(rewards).tolist()
    for group, present, result in zip(rewards, ~rewards.isnan(), values, strict=True):
        if present.any():
            assert torch.allclose(advantages(group[present][None], kind)[0], result[present], atol=1e-7)


@pytest.mark.parametrize("preset", OF_ANSWERS)
@given(
    lengths=st.lists(st.lists(st.integers(0, 4), min_size=2, max_size=2), min_size=2, max_size=5),
    cut=st.integers(1, 4),
    scale=st.sampled_from([1e-4, 0.3, 300.0]),
    seed=st.integers(0, 99),
)
def test_sums_add_up_and_are_finite(preset, lengths, cut, scale, seed):
    """Cut anywhere, also with answers without tokens, and after steps that change probabilities by 100 orders."""
    settings = PolicyConfig(preset=preset, kl=0.1, new_tokens=4).resolve()
    random = torch.Generator().manual_seed(seed)
    count = sum(map(sum, lengths))
    old, steps, reference = (torch.randn(count, generator=random) for _ in range(3))
    whole = (old - 3 + scale * steps).requires_grad_()
    weights = torch.randn((len(lengths), 2), generator=random).double().round()

    def sums(first, last):
        start, end = sum(map(sum, lengths[:first])), sum(map(sum, lengths[:last]))
        indices = torch.full((len(lengths[first:last]), 2, 4), end - start)
        numbers = itertools.count()
        for sample, answers in enumerate(lengths[first:last]):
            for answer, length in enumerate(answers):
                indices[sample, answer, :length] = torch.tensor([next(numbers) for _ in range(length)])
        part = slice(start, end)
        return policy_sums(whole[part], old[part] - 3, reference[part] - 3, weights[first:last], indices, settings)

    totals = sums(0, len(lengths))
    (gradient,) = torch.autograd.grad(totals.loss, whole)
    cut = min(cut, len(lengths) - 1)
    halves = [sums(0, cut), sums(cut, len(lengths))]
    assert torch.stack(totals).isfinite().all()
    assert gradient.isfinite().all()
    for total, *parts in zip(totals, *halves, strict=True):
        assert sum(parts).item() == pytest.approx(total.item(), rel=1e-4, abs=1e-4)
    (gradient_of_parts,) = torch.autograd.grad(sum(half.loss for half in halves), whole)
    assert torch.allclose(gradient, gradient_of_parts, rtol=1e-4, atol=1e-5)
    assert totals.tokens == count
    assert totals.answers == sum(length > 0 for answers in lengths for length in answers)


@pytest.mark.parametrize("preset", OF_ANSWERS)
def test_before_the_first_step_each_token_learns_its_advantage(preset):
    settings = PolicyConfig(preset=preset, new_tokens=4).resolve()
    values = torch.tensor([-0.5, -1.0, -2.0, -0.1]).requires_grad_()
    indices = torch.tensor([[[0, 1, 2], [3, 4, 4]]])
    sums = policy_sums(values, values.detach(), None, torch.tensor([[0.5, -2.0]]), indices, settings)
    sums.loss.backward()
    per_answer = settings.divide_by == "answers" and settings.ratio != "product"
    expected = torch.tensor([-0.5, -0.5, -0.5, 2.0]) / (torch.tensor([3.0, 3.0, 3.0, 1.0]) if per_answer else 1)
    assert torch.allclose(values.grad, expected)
    assert [sums.clipped_low, sums.clipped_high, sums.kl, sums.difference] == [0, 0, 0, 0]


def test_keys_that_are_set_change_the_preset():
    assert PolicyConfig().resolve().divide_by == "longest"
    settings = PolicyConfig(preset="dapo", clip_high=0.3, resample=0, kl=0.01, new_tokens=9).resolve()
    assert (settings.clip_low, settings.clip_high, settings.resample) == (0.2, 0.3, 0)
    assert (settings.advantage, settings.divide_by, settings.kl, settings.new_tokens) == (
        "deviation",
        "tokens",
        0.01,
        9,
    )
    assert PolicyConfig(overlong="punish", new_tokens=100).overlong_penalty(90) == -0.5  # a fifth is 20 tokens


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"overlong_tokens": 5}, "write overlong: punish"),
        ({"overlong": "punish", "overlong_tokens": 300}, "write e.g. 51"),
        ({"answers": 1}, "greater than or equal to 2"),
        ({"clip_low": 1.5}, "less than or equal to 1"),
        ({"preset": "ppo"}, "'grpo', 'dr_grpo'"),
        ({"beta": 0.1}, "beta"),
        ({"preset": "raft", "clip_low": 0.2}, "clip_low"),
        ({"preset": "online_dpo", "kl": 0.1, "ratio": "token"}, "ratio, kl have no effect"),
    ],
)
def test_wrong_keys_are_refused(keys, message):
    with pytest.raises(ValidationError, match=message):
        PolicyConfig.model_validate(keys)
