"""Rewards: how a run file names them, what each returns, and how a pool of processes adds them up."""

import json
import sys
import threading
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from pydantic import Field, ValidationError

from artel.cli.config import _describe_keys
from artel.config import RewardTerm, Section
from artel.config.explain import explain
from artel.config.suggest import all_keys
from artel.errors import InputError
from artel.registry import REWARDS
from artel.rewards import Completion, RewardPool
from artel.rewards.gym import is_harmless
from artel.rewards.judge import fill_prompt


class Policy(Section):
    """A section with rewards, as in a run file."""

    rewards: list[RewardTerm] = Field(default=[], description="Rewards.")


def term(written) -> RewardTerm:
    return RewardTerm.model_validate(written)


def completion(text="", *, prompt="p", tokens=1, **columns) -> Completion:
    return Completion(prompt, text, columns, tokens, False)


def reward(written):
    """The reward of an entry, in this process."""
    made = term(written)
    return REWARDS[made.reward](made.model_extra[made.reward])


def scored(written, text, **columns):
    (score,) = reward(written)([completion(text, **columns)])
    return score


# How it is written


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("rewards.py:exact", {"reward": "function", "function": {"name": "rewards.py:exact"}}),
        ("package.module:exact", {"reward": "function", "function": {"name": "package.module:exact"}}),
        ({"function": "rewards.py:exact", "weight": 2},
         {"reward": "function", "function": {"name": "rewards.py:exact"}, "weight": 2.0}),
        ("json", {"reward": "json"}),
        ("gym:countdown", {"reward": "gym", "gym": {"task": "countdown"}}),
        ("matches: '[0-9]'", {"reward": "matches", "matches": {"pattern": "[0-9]"}}),
        ("json:loads", {"reward": "function", "function": {"name": "json:loads"}}),
        ({"equals": {"column": "right"}, "weight": "2"},
         {"reward": "equals", "weight": 2.0, "equals": {"column": "right"}}),
        ({"equals": None}, {"reward": "equals"}),
    ],
)  # fmt: skip
def test_short_forms(short, long):
    assert term(short) == term(long)
    assert term(term(short).model_dump(mode="json", by_alias=True)) == term(short)


@pytest.mark.parametrize(
    ("written", "key", "message"),
    [
        ("equal", "0", "there is no reward 'equal'"),
        ({"weight": 2}, "0", "it names no reward"),
        ({"equals": {}, "json": {}}, "0", "it has 2 rewards (equals, json)"),
        ({"reward": "equals", "json": {}}, "0", "json has no effect, the reward is equals"),
        ({"equals": {"colum": "a"}}, "0.equals.colum", "there is no such key"),
        ({"reward": "equal"}, "0.reward", "'equal' is not one of"),
        ({"reward": "matches"}, "0.matches.pattern", "field required"),
        ({"matches": "("}, "0.matches.pattern", "is not a regular expression"),
        ({"function": "exact"}, "0.function.name", "'exact' is not a function"),
        ({"judge": {"url": "ftp://a", "model": "m", "prompt": "{{completion}}"}}, "0.judge.url", "is not an address"),
        ({"judge": {"url": "http://a", "model": "m", "prompt": "Good?"}}, "0.judge.prompt", "does not see the answer"),
    ],
)
def test_mistakes_are_reported_with_their_keys(written, key, message):
    with pytest.raises(ValidationError) as error:
        Policy.model_validate({"rewards": [written]})
    (problem,) = explain(error.value, {(): ""}).values()
    assert problem.where.endswith(f"rewards.{key}")
    assert message in problem.what
    assert problem.fix or "required" in message or "not one of" in problem.what or "no such key" in problem.what


def test_editors_and_help_know_the_keys_of_each_reward():
    schema = Policy.model_json_schema()
    validator = jsonschema.Draft202012Validator(schema)
    right = ["rewards.py:exact", "json", {"equals": {"column": "a"}, "weight": 2}, {"function": "a:b"},
             {"reward": "json", "json": {"keys": ["a"]}}]  # fmt: skip
    assert [error.message for error in validator.iter_errors({"rewards": right})] == []
    for wrong in (3, {"equals": {"colum": "a"}}, {"reward": "equal"}):
        assert not validator.is_valid({"rewards": [wrong]}), wrong
    keys = set(all_keys(Policy))
    assert {"rewards.0.reward", "rewards.0.weight", "rewards.0.equals.column", "rewards.0.judge.prompt"} <= keys
    shown = dict(_describe_keys(Policy, ""))
    assert shown["rewards.0.equals.column"].startswith('rewards.0.equals.column = "answer"\n    Column with the right')
    assert "One of: function, equals," in shown["rewards.0.reward"]


def test_each_reward_has_settings_and_a_line_about_it():
    for name in REWARDS.names:
        assert REWARDS.get_settings(name).__doc__.count("\n") == 0
        assert isinstance(REWARDS[name], type)


# What each returns


@pytest.mark.parametrize(
    ("written", "text", "columns", "expected"),
    [
        ("equals", " 4\n", {"answer": 4}, 1),
        ("equals", "5", {"answer": "4"}, 0),
        ("equals", "b", {"answer": ["a", "b"]}, 1),
        ("equals", "b", {"answer": None}, None),
        ({"matches": r"^\d+$"}, "12", {}, 1),
        ({"matches": r"^\d+$"}, "12a", {}, 0),
        ("number", "so 2 and 2 are 1,234.50.", {"answer": 1234.5}, 1),
        ("number", "it is 42", {"answer": "6 * 7 = 42\n#### 42"}, 1),
        ("number", "it is -42", {"answer": 42}, 0),
        ("number", "nothing", {"answer": 42}, 0),
        ("number", "it is 42", {"answer": None}, None),
        ({"number": {"tolerance": 0.5}}, "3", {"answer": 3.4}, 1),
        ("json", '{"a": 1}', {}, 1),
        ("json", '{"a": NaN}', {}, 0),
        ("json", "[" * 100_000, {}, 0),
        ("json", 'Sure! {"a": 1}', {}, 0),
        ({"json": {"keys": ["a"]}}, '{"b": 1}', {}, 0),
        ({"json": {"keys": ["a"]}}, '["a"]', {}, 0),
        ({"length": {"minimum": 2}}, "a", {"tokens": 1}, 0),
        ({"length": {"maximum": 2}}, "a b", {"tokens": 2}, 1),
        ("format", "<think>Two and two.</think>\n4", {}, 1),
        ("format", "<think>Two and two.</think>\n", {}, 0),
        ("format", "4 <think>Two and two.</think>", {}, 0),
        ("format", "<think>a</think> <think>b</think> 4", {}, 0),
        ({"format": {"answer": "answer"}}, "<think>a</think>\n<answer>4</answer>\n", {}, 1),
        ({"format": {"answer": "answer"}}, "<think>a</think>\n<answer>4</answer> ok", {}, 0),
        ({"format": {"answer": "answer"}}, "<think>a</think>\n4", {}, 0),
    ],
)
def test_checks(written, text, columns, expected):
    assert scored(written, text, **columns) == expected


def test_a_check_without_its_column_fails_with_the_columns_that_there_are():
    with pytest.raises(LookupError, match=r"no column 'answer' \(it has: question, level\)"):
        scored("equals", "4", question="q", level=1)
    with pytest.raises(ValueError, match="column 'answer' has no number: 'four'"):
        scored("number", "4", answer="four")


def test_languages():
    pytest.importorskip("py3langid")
    russian = "Все счастливые семьи похожи друг на друга, каждая несчастливая семья несчастлива по-своему. " * 2
    written = {"language": {"languages": ["ru"]}}
    assert scored(written, russian) > 0.9
    assert scored(written, "All happy families are alike; each unhappy family is unhappy in its own way. " * 2) < 0.1
    assert scored(written, "Да.") is None
    with pytest.raises(InputError, match=r"language.languages: xx: unknown language"):
        reward({"language": {"languages": ["xx"]}})


def test_math():
    pytest.importorskip("math_verify")
    assert scored("math", r"The answer is $\frac{2}{4}$.", answer=r"\frac{1}{2}") == 1
    assert scored("math", r"So it is \boxed{0.5}", answer="1/2") == 1
    assert scored("math", "It is 3.", answer="4") == 0
    assert scored("math", "It is 3.", answer=None) is None
    assert scored("math", "__import__('os').system('touch run')", answer="4") == 0
    assert not Path("run").exists()


def test_a_package_that_is_missing_is_named(monkeypatch):
    for name, package in (("math", "math_verify"), ("gym:countdown", "reasoning_gym.factory")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(InputError, match="pip install 'artel-lm"):
            reward(name)


def test_a_task_of_reasoning_gym(monkeypatch):
    asked = []

    def score_answer(answer, entry):
        asked.append((answer, entry))
        return 0.5

    factory = types.ModuleType("reasoning_gym.factory")
    factory.DATASETS = {"countdown": None, "maze": None}
    factory.get_score_answer_fn = lambda task: score_answer
    monkeypatch.setitem(sys.modules, "reasoning_gym", types.ModuleType("reasoning_gym"))
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", factory)
    columns = {"answer": "4", "metadata": {"level": 1}}
    assert scored("gym:countdown", "I think <answer> 2 * (1 + 1) </answer>", **columns) == 0.5
    assert asked == [("2 * (1 + 1)", {"question": "p", **columns})]
    assert scored("gym:countdown", "__import__('os').system('ls')", **columns) == 0
    assert len(asked) == 1
    assert scored("gym:maze", "__import__('os')", **columns) == 0.5  # compared as text
    with pytest.raises(InputError, match="did you mean countdown"):
        reward("gym:countdwn")


@pytest.mark.parametrize("text", ["3*x**2 - x*y + 1", "sin(x)/2 + C", "[[1, 0], [0, 1]]", "['Q', '_']", "1.5 + .5"])
def test_answers_that_may_be_evaluated(text):
    assert is_harmless(text)


@pytest.mark.parametrize(
    "text",
    ["open('a')", "x.__class__", "exec('a')", "().real", "f'{x}'", "'a'.join", "1 .real", "lambda: 0", "x\\\ny", "a;b",
     "x if 1 else y", "print(1)", '"" "import os"', "S('import_os')", "1.e.real", "x := 1"],
)  # fmt: skip
def test_answers_that_may_not(text):
    assert not is_harmless(text)


def test_every_scorer_of_reasoning_gym_that_evaluates_is_known():
    gym = pytest.importorskip("reasoning_gym.factory")
    import inspect
    import re

    from artel.rewards.gym import EVALUATING_TASKS

    evaluates = re.compile(r"\b(?:sp\.|sympy\.)?(?:eval|exec|parse_expr|sympify)\((?!entry\[)")
    found = {
        name for name, (dataset, _) in gym.DATASETS.items()
        if evaluates.search(inspect.getsource(dataset.score_answer)) and name != "propositional_logic"
    }  # fmt: skip
    assert found <= EVALUATING_TASKS


# Functions


FUNCTIONS = """
import asyncio

def one(completion, answer, level=3):
    return float(completion == answer) * level

def batch(completions, answer, **columns):
    assert len(columns["level"]) == len(answer) == len(completions) == len(columns["prompts"])
    return [float(text == right) for text, right in zip(completions, answer)]

def only_keywords(**columns):
    return [float(len(text)) for text in columns["completions"]]

def messages(completions, prompts, **kwargs):
    return [len(prompt) + len(completion[0]["content"]) for prompt, completion in zip(prompts, completions)]

async def slow(completion):
    await asyncio.sleep(0.01)
    return len(completion)

async def slow_batch(completions, **kwargs):
    return [await slow(text) for text in completions]

class Judge:
    def __call__(self, completion):
        return 0.25

judge = Judge()

def sometimes(completion, answer):
    return None if answer is None else 1.0
"""


@pytest.fixture
def functions():
    Path("mine.py").write_text(FUNCTIONS)


@pytest.mark.usefixtures("functions")
def test_a_function_gets_what_its_arguments_name():
    both = [completion("4", answer="4", level=2), completion("5", answer="4", level=2)]
    assert reward("mine.py:one")(both[:1]) == [2.0]
    assert reward("mine.py:one")([completion("4", answer="4")]) == [3.0]
    assert reward("mine.py:batch")(both) == [1.0, 0.0]
    assert reward("mine.py:only_keywords")(both) == [1.0, 1.0]
    assert reward("mine.py:judge")(both) == [0.25, 0.25]
    conversation = [completion("abc", prompt=[{"role": "user", "content": "hi"}])]
    assert reward("mine.py:messages")(conversation) == [4]
    with pytest.raises(LookupError, match=r"mine.py:one takes answer, but the columns are"):
        reward("mine.py:one")([completion("4")])


def test_files_of_one_name_in_two_folders_are_two_modules():
    for folder, score in (("a", 1.0), ("b", 2.0)):
        Path(folder).mkdir()
        Path(folder, "same.py").write_text(
            "from dataclasses import dataclass\n@dataclass\nclass Score:\n    value: 'float'\n"
            f"def score(completion):\n    return Score({score}).value\n"
        )
    first, second = reward("a/same.py:score"), reward("b/same.py:score")
    assert (first([completion()]), second([completion()])) == ([1.0], [2.0])
    modules = [sys.modules[each._function.__module__] for each in (first, second)]
    assert [module.score([completion()]) for module in modules] == [1.0, 2.0]


def test_functions_of_trl_are_taken_as_they_are():
    trl = pytest.importorskip("trl.rewards")
    conversation = [{"role": "user", "content": "hi"}]
    texts = ["<think>\nSo.\n</think>\nYes.", "Yes."]
    answers = [completion(text, prompt=conversation, solution="1") for text in texts]
    score = reward("trl.rewards:think_format_reward")
    assert score.batch
    assert score(answers) == trl.think_format_reward([[{"content": text}] for text in texts]) == [1.0, 0.0]


# A pool


def pool_of(*written, **options):
    return RewardPool(
        [term(each) for each in written], **{"seconds": 60.0, "memory_bytes": 2**29, "workers": 2, **options}
    )


@pytest.mark.usefixtures("functions")
def test_scores_are_weighted_and_do_not_depend_on_the_number_of_processes():
    answers = [completion("x" * (index % 5), answer=None if index % 3 else "x", level=1) for index in range(23)]
    terms = ["mine.py:slow", "mine.py:batch", {"function": "mine.py:sometimes", "weight": -2},
             "mine.py:sometimes", "mine.py:slow_batch"]  # fmt: skip
    results = []
    for workers in (1, 3):
        with pool_of(*terms, workers=workers) as pool:
            results.append(pool.score(answers))
            again = pool.score(answers[::-1])
    one, three = results
    assert one.names == ["slow", "batch", "sometimes", "sometimes_2", "slow_batch"]
    assert one.failures == three.failures == []
    assert np.array_equal(one.values, three.values, equal_nan=True)
    assert np.array_equal(one.values[::-1], again.values, equal_nan=True)
    assert one.values.dtype == np.float64
    assert np.isnan(one.values[1]).tolist() == [False, False, True, True, False]
    assert one.totals[0] == 0.0 + 0.0 - 2 + 1 + 0
    assert one.totals[1] == 1.0 + 0.0 + 1


@pytest.mark.usefixtures("functions")
def test_a_completion_that_no_reward_applies_to_has_no_total():
    with pool_of("mine.py:sometimes", workers=1) as pool:
        scores = pool.score([completion(answer=None), completion(answer=1)])
        assert pool.score([]).values.shape == (0, 1)
    assert np.isnan(scores.totals[0])
    assert scores.totals[1] == 1.0
    assert scores.failures == []


def test_a_missing_column_is_a_failure_with_its_reason():
    with pool_of("equals", workers=1) as pool:
        scores = pool.score([completion("a", answer="a"), completion("b", right="b")])
    ((index, name, reason),) = scores.failures
    assert (index, name) == (1, "equals")
    assert reason == "the prompt's record has no column 'answer' (it has: right)"
    assert scores.values[0, 0] == 1.0


def test_all_that_cannot_be_made_is_reported_together():
    with (
        pool_of(
            "nothing.py:one", "no_such_module:one", {"language": {"languages": ["xx"]}}, key="validate.rewards"
        ) as pool,
        pytest.raises(InputError) as error,
    ):
        pool.check()
    problems = error.value.problems
    assert [problem.where for problem in problems[:2]] == [
        f"validate.rewards.{index}.function.name" for index in (0, 1)
    ]
    assert problems[2].where == "validate.rewards.2.language.languages"
    assert "there is no file nothing.py" in problems[0].what
    assert "'no_such_module' cannot be imported" in problems[1].what


def test_a_reward_of_a_plugin():
    Path("my_short.py").write_text(
        "from pydantic import Field\nfrom artel.config import Section\nfrom artel.registry import REWARDS\n"
        "class Short(Section):\n    '''How short.'''\n    words: int = Field(default=3, description='Words.')\n"
        "@REWARDS.register('short', settings=Short)\nclass ShortReward:\n"
        "    def __init__(self, settings):\n        self.words = settings.words\n"
        "    def __call__(self, completions):\n"
        "        return [min(1.0, self.words / max(1, len(each.text.split()))) for each in completions]\n"
    )
    from artel.plugins import load_plugin

    load_plugin("my_short")
    with pool_of({"short": {"words": 1}}, "short", plugins=["my_short"], workers=1) as pool:
        scores = pool.score([completion("a b"), completion("")])
    assert scores.names == ["short", "short_2"]
    assert scores.values.tolist() == [[0.5, 1.0], [1.0, 1.0]]


# A judge


class Server(BaseHTTPRequestHandler):
    """Answers with the number of words of the prompt; refuses the first request, and texts with `bad`."""

    requests: list = []  # noqa: RUF012

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append((self.path, self.headers.get("Authorization"), body))
        (message,) = body["messages"]
        status = 429 if len(self.requests) == 1 else 400 if "bad" in message["content"] else 200
        text = "no idea" if "hard" in message["content"] else f"I say {len(message['content'].split())}."
        reply = json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *args):
        pass


def test_a_judge(monkeypatch):
    Server.requests = []
    monkeypatch.setenv("MY_KEY", "secret")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    settings = {"url": f"http://127.0.0.1:{server.server_port}/v1", "model": "m", "key": "MY_KEY",
                "prompt": "Rate: {{ completion }} {{answer}}"}  # fmt: skip
    try:
        with pool_of({"judge": settings}, workers=1) as pool:
            scores = pool.score([completion(text, answer="{{prompt}}") for text in ("a b", "bad", "hard", "c")])
    finally:
        server.shutdown()
        server.server_close()
    assert scores.values[[0, 3], 0].tolist() == [4.0, 3.0]
    (_, _, refused), (_, _, silent) = scores.failures
    assert "status 400" in refused
    assert "the judge's reply has no number: 'no idea'" in silent
    path, key, body = Server.requests[0]
    assert (path, key) == ("/v1/chat/completions", "Bearer secret")
    assert body["temperature"] == 0
    assert len(Server.requests) == 5


def test_what_is_filled_into_a_judges_prompt_is_not_read_again():
    asked = completion("{{answer}}", prompt=[{"role": "user", "content": "{{completion}}"}], answer=4)
    assert fill_prompt("{{prompt}}|{{completion}}|{{ answer }}", asked) == "user: {{completion}}|{{answer}}|4"


def test_a_judge_without_its_key_is_refused():
    settings = {"url": "http://a", "model": "m", "prompt": "{{completion}}", "key": "NO_SUCH_KEY"}
    with pytest.raises(InputError, match="there is no NO_SUCH_KEY in the environment"):
        reward({"judge": settings})
