"""The words of the report, in English and Russian: phrases, names, numbers."""

import ast
import json
import re
from pathlib import Path
from string import Formatter

import pytest

from artel.messages import Phrase, from_json, to_json
from artel.registry import OBJECTIVES
from artel.reports.page import LANGUAGES, Language, language


@pytest.mark.parametrize(
    ("phrase", "english", "russian"),
    [
        (Phrase("{model}, {count:,} parameters", model="llama", count=1_441_792), "llama, 1,441,792 parameters",
         "llama, параметров: 1\u202f441\u202f792"),
        (Phrase("none ({model} does not support it)", model="mamba"), "none (mamba does not support it)",
         "нет (mamba этого не умеет)"),
        (Phrase("{loss} ({options})", loss=Phrase("cross-entropy of the label"),
                options=[Phrase("focal, gamma {gamma:g}", gamma=0.5), Phrase("weighted by class")]),
         "cross-entropy of the label (focal, gamma 0.5, weighted by class)",
         "кросс-энтропия метки (focal, gamma 0,5, с весами меток)"),
        (Phrase("{labels} differ only in case and are used as different labels: unify the spelling",
                labels=[Phrase("{labels: and }", labels=labels) for labels in (["'A'", "'a'"], ["'B'", "'b'"])]),
         "'A' and 'a', 'B' and 'b' differ only in case and are used as different labels: unify the spelling",
         "Модель учится им как разным меткам: 'A' и 'a', 'B' и 'b'. Пишите каждую одинаково"),
        (Phrase("{count:,} of {read:,} records ({share:.2%}) cannot be used; it is listed in rejected.jsonl of the "
                "run's folder, the first: {origin}: {detail}", count=1, read=400, share=0.0025, origin="a.txt:1",
                detail="loss {json}"),
         "1 of 400 records (0.25%) cannot be used; it is listed in rejected.jsonl of the run's folder, the first: "
         "a.txt:1: loss {json}",
         "Не удалось использовать 1 запись из 400 (0,25 %); она названа в rejected.jsonl в папке запуска: a.txt:1: "
         "loss {json}"),
        ("squared error", "squared error", "квадрат ошибки"),
        ("a sentence of a tool {x}", "a sentence of a tool {x}", "a sentence of a tool {x}"),
        (Phrase("a plugin has {count:,}", count=1000), "a plugin has 1,000", "a plugin has 1,000"),
    ],
)  # fmt: skip
def test_phrases_of_a_runs_files_are_in_russian(phrase, english, russian):
    stored = from_json(json.loads(json.dumps(to_json(phrase))))
    for text in (phrase, stored):
        assert (str(text), Language("ru").phrase(text), Language("en").phrase(text)) == (english, russian, english)


@pytest.mark.parametrize(
    ("template", "arguments"),
    [("{x.__class__}", {"x": "a"}), ("{x[0]}", {"x": "a"}), ("{}", {"x": "a"}), ("{x:>999999}", {"x": 1}),
     ("{y}", {"x": 1}), ("{x", {"x": 1}), ("{x:,}", {"x": "a"}), ("{x:c}", {"x": 2**40}),
     ("{x:,}", {"x": {}}), ("{x}", "x")],
)  # fmt: skip
def test_a_damaged_phrase_is_shown_as_its_template(template, arguments):
    assert from_json([{"text": template, "arguments": arguments}]) == [template]


@pytest.mark.parametrize("template", ["{x}{x}", "{x!r}", "{x:{x}}"])
def test_a_small_file_cannot_fill_the_memory(template):
    phrase = "\\"
    for _ in range(50):
        phrase = {"text": template, "arguments": {"x": phrase}}
    assert len(from_json(phrase)) < 100


def templates_of(node, scopes):
    """Return the texts that an expression can be: literals, also those assigned to its names in the nearest scope."""
    match node:
        case ast.Constant(value=text):
            return {text}
        case ast.IfExp(body=one, orelse=other):
            parts = [one, other]
        case ast.Dict(values=parts):
            pass
        case ast.Subscript(value=table):
            parts = [table]
        case ast.Name(id=name):
            assigned = (
                [
                    found.value
                    for found in ast.walk(scope)
                    if isinstance(found, ast.Assign) and name in {getattr(target, "id", "") for target in found.targets}
                ]
                for scope in scopes
            )
            parts = [part for part in next(filter(None, assigned)) if not isinstance(part, ast.JoinedStr)]
    return set().union(*(templates_of(part, scopes) for part in parts))


def phrases_of_sources():
    """Yield (place, templates, names of the arguments) of each `Phrase`, and of each text that names a loss."""
    package = Path(language.__file__).parents[2]
    for file in sorted({*package.rglob("*.py")} - {package / "messages.py"}):
        module = ast.parse(file.read_text(encoding="utf-8"))
        functions = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)]
        for call in ast.walk(module):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "Phrase":
                around = [node for node in functions if node.lineno <= call.lineno <= node.end_lineno]
                names = {keyword.arg for keyword in call.keywords}
                yield f"{file}:{call.lineno}", templates_of(call.args[0], [*around[-1:], module]), names
        for function in functions:
            for node in ast.walk(function) if function.name == "loss_description" else ():
                if isinstance(node, ast.Return) and isinstance(node.value, ast.Constant):
                    yield f"{file}:{node.lineno}", templates_of(node.value, []) - {""}, set()


def fields_of(template):
    """Return the arguments of a template with their formats, except separators of lists, which are translated."""
    fields = [(name, conversion, spec) for _, name, spec, conversion in Formatter().parse(template) if name is not None]
    return sorted((name, conversion or "", "" if spec.endswith(" ") else spec) for name, conversion, spec in fields)


def test_every_phrase_of_the_sources_is_in_russian():
    package = Path(language.__file__).parent
    phrases = json.loads((package / "words" / "ru.json").read_text(encoding="utf-8"))["phrases"]
    found = [(place, text, names) for place, texts, names in phrases_of_sources() for text in texts]
    every = {text for _, text, _ in found}
    assert {"{model}, {count:,} parameters", "lacks {names}", "squared error"} <= every
    assert [(place, text) for place, text, _ in found if text not in phrases] == []
    for place, text, names in found:
        assert fields_of(text) == fields_of(phrases[text]), place
        assert None in names or {name for name, *_ in fields_of(text)} <= names, place
    assert [text for text in phrases if "{" in text and text not in every] == []


def test_every_metric_of_an_objective_has_a_russian_name():
    russian = Language("ru")
    metrics = {metric for name in OBJECTIVES.names for metric in OBJECTIVES[name].metric_directions}
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


def test_every_reason_for_which_a_document_is_dropped_has_a_russian_name():
    package = Path(language.__file__).parents[2]
    source = "\n".join(file.read_text() for file in package.rglob("*.py"))
    reasons = set(re.findall(r"""\b(?:BadRecord|DroppedRecord)\(\s*"([a-z_]+)\"""", source))
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
