"""Answers in several turns: tools, environments, and templates that change what was said."""

import json
import re
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from artel.config import RunConfig, TokenizerTraining
from artel.objectives.conversation.dialogue import Dialogue
from artel.objectives.conversation.writer import ConversationWriter
from artel.objectives.policy.config import PolicyConfig
from artel.objectives.policy.policy_objective import PolicyOptimization
from artel.objectives.rollouts import Rollout, Round, Segment
from artel.rewards.environments import Environments
from artel.text import Message, ToolCall
from artel.text.tool_functions import read_functions
from artel.tokens import Rows, train_tokenizer
from artel.tokens.tokenizer.chat_template import CHATML, render
from support.chat_models import MARKS, llama, saved, trained_tokenizer
from support.chat_templates import FAMILIES
from support.runs import artel, assert_same_models, merged, metrics, read_rollouts, start, succeed, torchrun, write_run

ROOT = Path(__file__).resolve().parents[1]
FUNCTIONS = '''
def weather(city: str):
    """
    The weather.

    Args:
        city: A city.
    """
    if city == "Tomsk":
        raise LookupError("no such city")
    return -3
'''
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "A city."}},
                "required": ["city"],
            },
        },
    }
]


def call(city):
    return {"type": "function", "function": {"name": "weather", "arguments": {"city": city}}}


def ask(number):
    return {"role": "user", "content": f"Is it cold {number}?"}


def talk(number, city, result, answer):
    """A conversation with a call, or without one if there is no city."""
    calls = [{"role": "assistant", "content": "", "tool_calls": [call(city)]}, {"role": "tool", "content": result}]
    return [ask(number), *(calls if city else []), {"role": "assistant", "content": answer}]


ANSWERS = [{"role": "assistant", "content": content} for content in ("Yes.", "No.", "a e", "o u i")]
MORE = {"role": "user", "content": "More."}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model that calls for Omsk or Tomsk, or answers at once. Without tools it says ANSWERS, in any order."""
    calls = [("Omsk", "-3", "Yes."), ("Tomsk", "error: no", "No."), ("", "", "No.")]
    conversations = [(talk(number, *call), TOOLS) for number in range(4) for call in calls]
    conversations += [
        ([ask(number), first, MORE, ANSWERS[(number + 1) % 4], MORE, ANSWERS[(number + 2) % 4]], None)
        for number, first in enumerate(ANSWERS * 2)
    ]
    tokenizer = trained_tokenizer(MARKS)
    texts = [render(tokenizer, CHATML, messages, False, tools) for messages, tools in conversations]
    tokenizer = train_tokenizer(iter(texts * 4), TokenizerTraining(vocab=600, special=MARKS))
    tokenizer.hf.chat_template = CHATML
    model = llama(tokenizer, hidden_size=32, intermediate_size=64).train()
    rows = [torch.tensor(encoded.ids) for encoded in tokenizer.encode_with_offsets(texts, control=True)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(100):
        loss = model(input_ids=ids.clamp(min=0), labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return saved(tmp_path_factory.mktemp("models") / "model", model, tokenizer)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"question": ask(number)["content"], "number": number} for number in range(12)]
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("functions.py").write_text(FUNCTIONS)
    Path("game.py").write_text(GAME)
    Path("rewards.py").write_text(REWARDS)
    return tmp_path


GAME = """
class Game:
    def reset(self, row):
        self.vowels = 0

    def step(self, reply):
        self.vowels += sum(letter in "aeiou" for letter in reply)
        return "More.", False

    def reward(self):
        return self.vowels / 10
"""
# Some answers to a prompt lose their process. The other answers in it are made again.
DIES = GAME.replace("self.vowels = 0", "self.vowels, self.number = 0, row['number']; return 'Go on.'").replace(
    '        return "More',
    "        if self.number == 3 and 'a' in reply:\n            __import__('os')._exit(7)\n        return \"More",
)
# The run is killed in the tenth step, once.
KILLS = "import os, pathlib, signal\n" + GAME.replace(
    '        return "More',
    "        with open('steps', 'ab') as steps:\n            steps.write(b'.')\n"
    "        if os.stat('steps').st_size == 10:\n"
    "            os.kill(int(pathlib.Path('pid').read_text()), signal.SIGKILL)\n"
    '        return "More',
)
REWARDS = """
def talks(messages, completion):
    return len(messages) + len(completion) / 10
"""
RUN = {
    "objective": "policy",
    "data": {"sources": [{"path": "prompts.jsonl", "format": "prompts"}], "validation": 0.2, "block": 400},
    "policy": {"answers": 4, "new_tokens": 120},
    "train": {"steps": 2, "batch": 2, "learning_rate": 1e-3, "warmup": 0, "compile": "off", "precision": "fp32",
              "threads": 1},
    "checkpoint": {"every": 1},
    "log": {"every": 1},
    "track": ["jsonl"],
}  # fmt: skip
TOOLS_POLICY = {"tools": "functions.py", "turns": 3, "rewards": ["rewards.py:talks"]}
GAME_POLICY = {"environment": "game.py:Game", "turns": 3}


def turns_run(model, policy, name="run", **changes):
    run = merged(RUN, {"model": {"from": str(model)}, "policy": policy} | changes)
    return write_run(Path.cwd() / f"{name}.yaml", run)


def written_texts(line, tokenizer):
    """The texts of the tokens that the model wrote, one for each reply."""
    texts, current = [], []
    for segment in [line, *line["restarts"]]:
        for token, log_prob in [*zip(segment["ids"], segment["log_probs"], strict=True), (None, None)]:
            if log_prob is not None:
                current.append(token)
            elif current:
                texts.append(tokenizer.decode(current))
                current = []
    return texts


@pytest.mark.slow
def test_tools_are_called_and_their_results_are_not_learned(folder, model, artel_here):
    from artel.tokens import load_tokenizer

    rows = [{"question": ask(number)["content"]} for number in range(4)]
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = artel_here("train", turns_run(model, TOOLS_POLICY, data={"validation": 0}))
    assert done.returncode == 0, done.stderr
    lines = [line for round_lines in read_rollouts(folder / "run") for line in round_lines]
    tokenizer = load_tokenizer(str(model))
    called = [line for line in lines if any(message["role"] == "tool" for message in line["messages"])]
    assert called
    for line in lines:
        replies = [message for message in line["messages"] if message["role"] == "assistant"]
        texts = written_texts(line, tokenizer)
        assert len(texts) == len(replies)
        assert texts[-1].removesuffix("<|im_end|>") == line["text"]
        assert len(line["ids"]) == len(line["log_probs"]) <= 120
    results = {message["content"] for line in called for message in line["messages"] if message["role"] == "tool"}
    assert "-3" in results
    failed = [line for line in lines if "LookupError: no such city" in line["failures"].get("tools", "")]
    assert all(line["reward"] is not None for line in failed)
    steps = [line for line in metrics(folder / "run") if "loss" in line]
    assert all(line["mismatch"] < 1e-5 for line in steps)
    assert steps[0]["turns"] > 1
    assert sum(line["failed_calls"] for line in steps) == sum("tools" in line["failures"] for line in lines)
    assert [line["restarts"] for line in steps] == [0, 0]


@pytest.mark.slow
def test_an_environment_answers_and_a_lost_process_costs_one_answer(folder, model, artel_here):
    Path("game.py").write_text(DIES.replace("== 3", "== -1"))
    assert artel_here("train", turns_run(model, GAME_POLICY, "all", train={"steps": 1, "batch": 8})).returncode == 0
    Path("game.py").write_text(DIES)
    assert artel_here("train", turns_run(model, GAME_POLICY, train={"steps": 1, "batch": 8})).returncode == 0
    (undisturbed,), (lines,) = read_rollouts(folder / "all"), read_rollouts(folder / "run")
    lost = [line for line in lines if line["failures"]]
    assert all("status 7" in line["failures"]["environment"] and line["reward"] is None for line in lost)
    assert [line for line in lines if not line["failures"]] == [
        line for line, other in zip(undisturbed, lines, strict=True) if not other["failures"]
    ]
    whole = [line for line in undisturbed if not line["cut_off"]]
    assert whole
    for line in whole:
        assert [message["role"] for message in line["messages"]] == ["user", *["assistant", "user"] * 3]
        assert line["ids"] == []
        assert len(line["restarts"]) == 1
        vowels = sum(letter in "aeiou" for turn in line["messages"][1::2] for letter in turn["content"])
        assert line["rewards"] == {"environment": vowels / 10}


@pytest.mark.slow
@pytest.mark.long
def test_killed_between_turns_a_run_ends_like_an_undisturbed_one(folder, model):
    undisturbed, killed = (turns_run(model, GAME_POLICY, name) for name in ("undisturbed", "killed"))
    succeed("train", undisturbed)
    Path("game.py").write_text(KILLS)
    process = start("train", killed)
    Path("pid").write_text(str(process.pid))
    process.wait()
    assert process.returncode == -signal.SIGKILL
    assert not list((folder / "killed" / "rollouts").glob("*.zst"))
    succeed("train", killed)
    assert_same_models(undisturbed, killed)
    assert read_rollouts(folder / "undisturbed") == read_rollouts(folder / "killed")


@pytest.mark.ci
@pytest.mark.processes
@pytest.mark.parametrize("layout", [{}, {"data": "fsdp"}], ids=["ddp", "fsdp"])
def test_two_processes_write_the_same_turns(folder, model, layout):
    policy = TOOLS_POLICY | GAME_POLICY
    succeed("train", turns_run(model, policy, "one", train={"steps": 1}))
    done = torchrun(2, "-m", "artel", "train", turns_run(model, policy, "two", train={"steps": 1}, parallel=layout))
    assert done.returncode == 0, done.stderr
    one, two = ([line["messages"] for line in read_rollouts(folder / name)[0]] for name in ("one", "two"))
    assert one == two


def make_objective(model, **policy):
    from artel.tokens import load_tokenizer

    keys = {"form": "conversation", "environment": "game.py:Game", "answers": 2, "new_tokens": 20} | policy
    run = RunConfig.model_validate({"objective": "policy", "data": {"block": 100}, "policy": keys})
    return PolicyOptimization(run, load_tokenizer(str(model)))


def make_rollout(answer, reward, segments):
    (prompt, ids, log_probs), *restarts = segments
    return Rollout(
        number=0, index=0, epoch=0, answer=answer, attempt=0, seed=0, prompt_ids=prompt, ids=ids, log_probs=log_probs,
        text="", cut_off=False, rewards={}, reward=reward, failures={}, messages=[],
        restarts=[Segment(*segment) for segment in restarts],
    )  # fmt: skip


@pytest.mark.parametrize("divide_by", ["tokens", "answers", "longest"])
@pytest.mark.parametrize("shared", [False, True])
def test_each_written_token_counts_once_and_each_answer_once(model, divide_by, shared):
    objective = make_objective(model, divide_by=divide_by)
    objective._shares_prompts = shared
    segments = [([5, 6, 7], [8, 9, 10, 11], [-1.0, None, None, -2.0]), ([5, 6, 12], [13, 14], [-3.0, -4.0])]
    rollouts = [make_rollout(0, 1.0, segments), make_rollout(1, 0.0, [([5, 6, 7], [8, 15], [-1.0, -5.0])])]
    objective.set_round(Round(0, tuple(rollouts)), is_fresh=True, seconds={})
    rows = Rows(
        ids=np.array([[5, 6, 7]]), lengths=np.array([3]), valid=np.array([True]), indices=np.array([0]),
        epochs=np.array([0]), flags=None, numbers=np.empty((1, 0)),
    )  # fmt: skip
    batch = objective.batch(rows)
    tensors = batch.tensors
    assert tensors["targets"].tolist() == [8, 11, 13, 14, 8, 15]
    assert tensors["old_log_probs"].tolist() == [-1, -2, -3, -4, -1, -5]
    assert tensors["answer_targets"].tolist() == [[[0, 1, 2, 3], [4, 5, 6, 6]]]
    assert batch.targets == {"tokens": 6, "answers": 2, "longest": 40}[divide_by]
    assert objective.training_metrics(dict.fromkeys(objective.sums, 0.0))["restarts"] == 1
    length = tensors["input_ids"].shape[1]
    inputs = tensors["input_ids"].flatten()[tensors["target_positions"]].tolist()
    assert inputs == [7, 10, 12, 13, 7, 8], length


@pytest.mark.parametrize("kind", ["result", "message", "thought", "thought and result"])
@pytest.mark.parametrize("family", ["qwen2_5", "qwen3", "llama3", "mistral_nemo", "gemma3"])
def test_a_turn_extends_its_beginning_unless_the_template_changes_it(family, kind):
    """The ids so far and the added ones are those of the whole conversation; Qwen 3 drops thoughts of earlier turns."""
    tokenizer = FAMILIES[family].tokenizer()
    writer = ConversationWriter(tokenizer, tokenizer.hf.chat_template)
    if "result" in kind and family == "gemma3":
        pytest.skip("its template has no tools")
    if "thought" in kind and family != "qwen3":
        pytest.skip("its template has no thoughts")
    calls = (ToolCall("weather", {"city": "Omsk"}),) if "result" in kind else ()
    tools = tuple(TOOLS) if calls else ()
    question, thought = [Message("user", "Is it cold?")], "Well." if "thought" in kind else ""
    answer = Message("assistant", "" if calls else "Yes.", thought, tool_calls=calls)
    sample = writer.sample([*question, answer], {1}, tools)
    prompt = writer.prompt_ids(question, tools)
    reply = sample.ids[sample.flags > 0].tolist()
    dialogue = Dialogue(writer, question, tools)
    read_calls = dialogue.add_reply(tokenizer.decode(reply[:-1]))
    assert [(call.name, call.arguments) for call in read_calls] == [(call.name, call.arguments) for call in calls]
    dialogue.add([Message("tool", "-3") if calls else Message("user", "More.")])
    following = dialogue.next_prompt((reply[-1], tokenizer.decode(reply[-1:])))
    whole = writer.prompt_ids(dialogue._messages, tools)
    assert following.restarts == (kind == "thought")
    assert (following.ids if following.restarts else prompt + reply + following.ids) == whole


@pytest.mark.parametrize(
    ("policy", "key"),
    [
        ({"turns": 2}, "policy.turns"),
        ({"tools": "nothing.py"}, "policy.tools"),
        ({"tools": "functions.py", "form": "text"}, "policy.form"),
        ({"environment": "game"}, "policy.environment"),
    ],
)
def test_mistakes_are_refused_with_their_key(folder, policy, key):
    done = artel("config", "check", turns_run("gpt2", {"rewards": ["rewards.py:talks"]} | policy))
    assert done.returncode == 2
    assert key in done.stderr


@pytest.mark.parametrize("page", ["docs/policy.md", "docs/ru/policy.md"])
def test_the_examples_of_the_page(folder, page):
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```(?:python|yaml)\n(.*?)```", text, re.DOTALL)
    functions, game, tools_run, game_run = (
        next(block for block in blocks if text in block)
        for text in ("# functions.py", "# game.py", "tools: functions.py", "environment: game.py:Guess")
    )
    Path("functions.py").write_text(functions)
    Path("game.py").write_text(game)
    for run in (tools_run, game_run):
        PolicyConfig.model_validate(yaml.safe_load(run)["policy"])
    assert read_functions("functions.py").tools[0]["function"]["parameters"]["required"] == ["first", "second"]
    environments = Environments("functions.py", yaml.safe_load(game_run)["policy"]["environment"])
    call = {"call": {"name": "multiply", "arguments": {"first": 6, "second": 7}}}
    assert environments.answer(call) == {"text": "42"}
    state = {"answer": "0:0:0", "row": {"answer": "5"}, "opening": "Write your guess as a number.", "steps": []}
    assert environments.answer({"action": "reset", **state}) == {"text": state["opening"]}
    steps = [("A 7.", "Lower.", False), ("Well?", "That is not a number.", False), ("5", None, True)]
    for reply, message, done in steps:
        assert environments.answer({"action": "step", "reply": reply, **state}) == {"text": message, "done": done}
        state["steps"].append([reply, message])
    assert Environments(None, "game.py:Guess").answer({"action": "reward", **state}) == {"value": 1 / 3}
    state["steps"][0][1] = "Higher."
    assert "repeated" in Environments(None, "game.py:Guess").answer({"action": "reward", **state})["failure"]
