"""The words of the report, in English and Russian: phrases, names, numbers."""

import json
import re
from pathlib import Path

import pytest

from artel.registry import OBJECTIVES
from artel.reports.page import LANGUAGES, Language, language


@pytest.mark.parametrize(
    ("english", "russian"),
    [
        ("llama, 1,441,792 parameters", "llama, параметров: 1\u202f441\u202f792"),
        ("none (mamba does not support it)", "нет (mamba этого не умеет)"),
        ("cross-entropy of the label (focal, gamma 2, weighed by label)",
         "кросс-энтропия метки (focal, gamma 2, с весами меток)"),
        ("in-batch negatives of the whole global batch, at 768, 64 numbers",
         "негативы из всего глобального батча, по 768, 64 чисел"),
        ("1 of 400 records (0.25%) cannot be used; it is listed in rejected.jsonl of the run's folder, the first: "
         "a.txt:1: not {json}",
         "Не удалось использовать 1 запись из 400 (0,25 %); она названа в rejected.jsonl в папке запуска: a.txt:1: "
         "not {json}"),
        ("the chat template ends a turn with '[/S]', which is no token of the tokenizer: artel stops there, and "
         "programs that stop at tokens do not",
         "Шаблон чата заканчивает реплику на '[/S]', а такого токена у токенизатора нет: artel там остановится, а "
         "программы, которые останавливаются на токенах, — нет"),
        ("a sentence of a tool {x}", "a sentence of a tool {x}"),
    ],
)  # fmt: skip
def test_phrases_of_a_runs_files_are_in_russian(english, russian):
    assert (Language("ru").phrase(english), Language("en").phrase(english)) == (russian, english)


def test_every_metric_of_an_objective_has_a_russian_name():
    russian = Language("ru")
    metrics = {metric for name in OBJECTIVES.names for metric in OBJECTIVES[name].better}
    plain = [
        metric
        for metric in metrics
        if metric not in russian.words and russian.label(metric) == metric.replace("_", " ")
    ]
    assert plain == []


def test_both_languages_have_the_same_words():
    english, russian = (Language(name).words for name in LANGUAGES)
    assert english.keys() == russian.keys()
    for name, text in english.items():
        assert set(re.findall(r"\{\w+\}", text)) == set(re.findall(r"\{\w+\}", russian[name])), name
    for file in Path(language.__file__).parent.joinpath("words").glob("*.json"):
        for phrase, own in json.loads(file.read_text(encoding="utf-8"))["phrases"].items():
            assert set(re.findall(r"\{\w+\}", phrase)) == set(re.findall(r"\{\w+\}", own)), phrase


def test_every_reason_for_which_a_document_is_dropped_has_a_russian_name():
    package = Path(language.__file__).parents[2]
    source = "\n".join(file.read_text() for file in package.rglob("*.py"))
    reasons = set(re.findall(r"""\b(?:BadRecord|Dropped)\(\s*"([a-z_]+)\"""", source))
    assert {"longer_than_block", "bad_json"} <= reasons
    russian, words = Language("ru"), [reason.replace("_", " ") for reason in sorted(reasons)]
    assert [word for word in words if russian.phrase(word) == word] == []


@pytest.mark.parametrize(
    ("value", "english", "russian"),
    [(0, "0.000", "0,000"), (3.14159, "3.142", "3,142"), (1234.5, "1,234", "1\u202f234"), (0.01, "0.01000", "0,01000"),
     (7.3e-7, "7.300e-07", "7,300e-07"), (123456, "123,456", "123\u202f456"), (-2.5, "\u22122.500", "\u22122,500"),
     (float("nan"), "NaN", "NaN"), (None, "NaN", "NaN")],
)  # fmt: skip
def test_numbers(value, english, russian):
    assert (Language("en").number(value), Language("ru").number(value)) == (english, russian)


def test_durations():
    words = Language("en")
    shown = [words.duration(seconds) for seconds in (0, 59.4, 60, 3725, 90_000, 86_400)]
    assert shown == ["0 s", "59 s", "1 min", "1 h 2 min", "1 d 1 h", "1 d"]
