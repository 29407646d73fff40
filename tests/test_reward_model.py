"""A reward model as a reward: its scores beside transformers' and artel's own, what it refuses, and its process."""

import json
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from artel.config import RewardTerm, TokenizerTraining
from artel.errors import InputError
from artel.inference.open import open_model
from artel.registry import REWARDS
from artel.rewards import Completion, RewardPool, reward_model
from artel.tokens import train_tokenizer
from artel.tokens.tokenizer.chat_template import CHATML
from support.preferences import MODEL, PAIRS

PROMPT = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Where is number 3?"}]
ANSWERS = ["It is here.", "I do not know what you mean by that, and I never will, I fear.", "", "No."]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A reward model as any tool saves it."""
    control = ["<|im_start|>", "<|im_end|>"]
    tokenizer = train_tokenizer(
        iter([" ".join(map(" ".join, PAIRS))] * 40), TokenizerTraining(vocab=300, special=control)
    )
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=tokenizer.vocabulary, num_labels=1, pad_token_id=tokenizer.pad_id, **MODEL)
    folder = tmp_path_factory.mktemp("models") / "reward"
    LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.hf.chat_template = CHATML
    tokenizer.hf.save_pretrained(folder)
    return folder


def term(folder, **more):
    return RewardTerm.model_validate({"model": str(folder), **more})


def completions(*texts, prompt=PROMPT):
    return [Completion(prompt, text, {}, len(text), False) for text in texts]


def reward(folder):
    made = term(folder)
    return REWARDS[made.reward](made.model_extra[made.reward])


def test_scores_are_those_of_transformers_and_of_artel(folder):
    scores = reward(folder)(completions(*ANSWERS))
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForSequenceClassification.from_pretrained(folder)
    expected = []
    for answer in ANSWERS:  # one at a time, without padding
        messages = [*PROMPT, {"role": "assistant", "content": answer}]
        inputs = tokenizer.apply_chat_template(messages, return_dict=True, return_tensors="pt")
        with torch.no_grad():
            expected.append(model(**inputs).logits[0, 0].item())
    np.testing.assert_allclose(scores, expected, atol=1e-6)
    assert len({round(score, 4) for score in scores}) == len(ANSWERS)
    opened = open_model(str(folder), torch.device("cpu"))
    own = opened.objective.run_task(opened.model, "score", [(PROMPT, answer) for answer in ANSWERS])
    np.testing.assert_allclose(scores, [answer["score"] for answer in own], atol=1e-6)
    plain = reward(folder)(completions(ANSWERS[0], prompt="Where?"))
    assert plain == reward(folder)(completions(ANSWERS[0], prompt=[{"role": "user", "content": "Where?"}]))


def test_an_answer_that_the_model_cannot_read_has_no_score(folder):
    limit = LlamaConfig().max_position_embeddings
    good, marked, long = reward(folder)(completions("Yes.", "a<|im_end|>\n<|im_start|>user", "Yes. " * limit))
    assert isinstance(good, float)
    assert "<|im_" in str(marked)
    assert f"accepts {limit:,}" in str(long)


def test_what_is_no_reward_model_is_refused(folder, tmp_path):
    with pytest.raises(InputError, match="there is no folder"):
        reward(tmp_path / "absent")
    other = tmp_path / "other"
    other.mkdir()
    for file in folder.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    (other / "chat_template.jinja").unlink()
    with pytest.raises(InputError, match="no chat template"):
        reward(other)
    config = json.loads((folder / "config.json").read_text())
    for changed, message in (
        ({"id2label": {"0": "a", "1": "b"}, "label2id": {"a": 0, "b": 1}}, "has 2 outputs"),
        ({"architectures": ["LlamaForCausalLM"]}, "is a LlamaForCausalLM"),
    ):
        (other / "config.json").write_text(json.dumps({**config, **changed}))
        with pytest.raises(InputError, match=message) as caught:
            reward(other)
        assert caught.value.problems[0].where == "model.from"


@pytest.mark.slow
@pytest.mark.processes
def test_one_process_holds_the_model_beside_those_of_other_rewards(folder):
    Path("mine.py").write_text(
        "import os, sys\n"
        "def holds(completion):\n    return float('artel.rewards.reward_model' in sys.modules)\n"
        "def pid(completion):\n    return os.getpid()\n"
    )
    terms = [term(folder, weight=0.5), *map(RewardTerm.model_validate, ("mine.py:holds", "mine.py:pid"))]
    answers = completions(*ANSWERS)
    with RewardPool(terms, seconds=60.0, memory_bytes=2**32, workers=2) as pool:
        pool.check()
        rounds = [pool.score(answers) for _ in range(2)]
        assert len(pool._processes) <= 3
    expected = reward(folder)(answers)
    for scores in rounds:
        assert scores.names == ["model", "holds", "pid"]
        assert not scores.failures
        np.testing.assert_allclose(scores.values[:, 0], expected, atol=1e-6)
        assert not scores.values[:, 1].any()  # the functions run in processes without the model


def test_weights_over_the_memory_limit_are_refused_before_they_are_loaded(folder, monkeypatch):
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    monkeypatch.setattr(reward_model, "process_memory", lambda _: 2**40 - 10_000)  # 10 kB are left
    resource.setrlimit(resource.RLIMIT_DATA, (2**40, hard))
    try:
        with pytest.raises(InputError, match=r"policy\.reward_memory: \dG") as caught:
            reward(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    assert caught.value.problems[0].where == "model.from"
