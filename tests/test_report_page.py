"""The report as a page: what stands in it, in both languages, and that nothing a run holds becomes HTML."""

import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from selectolax.lexbor import LexborHTMLParser

from artel.cli.main import main
from artel.config import load_run
from artel.reports.page import LANGUAGES, Page
from artel.reports.page.run_file import changed_keys, find_differences
from artel.reports.run_data import read_run, read_runs
from support.runs import write_run

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> & %{y}"

LEDGER = {
    "documents": {"read": 10, "kept": 7, "dropped": {"duplicate": 2, "too_short": 1}},
    "sets": {
        "news": {"read": 6, "kept": 4, "dropped": {"duplicate": 2}, "train": {"tokens": 4000}},
        HOSTILE: {"read": 4, "kept": 3, "dropped": {"too_short": 1}, "validation": {"tokens": 300}},
    },
    "parts": {"train": {"tokens": 4000}, "validation": {"tokens": 300}},
    "notes": [f"a note {HOSTILE}", {"text": "{labels: and }", "arguments": {"labels": [HOSTILE, "{x}"]}}],
}
PROFILE = {
    "device": "cpu",
    "steps": 3,
    "milliseconds": 80.0,
    "kinds": [
        {"kind": "attention", "milliseconds": 20.0, "percent": 25.0},
        {"kind": "matrix products", "milliseconds": 60.0, "percent": 75.0},
    ],
    "operators": [{"name": "aten::mm", "kind": "matrix products", "milliseconds": 60.0, "percent": 75, "calls": 4}],
}
DETAILS = {
    "step": 40,
    "tables": {
        "labels": [{"label": "micro", "precision": 0.5, "support": 4}],
        "averages": [{"label": "micro", "precision": 0.5, "support": 4}],
    },
}
PLAN = {
    "tokens_per_second": {"low": 800.0, "mid": 1000.0, "high": 1300.0},
    "per_rank_gib": {"reserved": 2.0},
    "host_gib": 3.0,
    "steps": 40,
    "micro_batch": 8,
    "measured": {"tokens_per_second": 1100.0, "host_gib": 2.7},
}
CHOICE = {
    "model": {"model_type": "gpt2"},
    "expected": {"bits_per_byte": 2.0, "tokens_per_second": 1000.0, "minutes": 30.0},
    "reached": {"bits_per_byte": 2.5, "tokens_per_second": 900.0, "minutes": HOSTILE},
}
ENVIRONMENT = {"hosts": 1, "device": "A processor", "torch": "2.13.0", "python": "3.11"}


def start(step, **chosen):
    return {
        "step": step,
        "time": f"2026-01-01T0{step % 10}:00:00+00:00",
        "processes": 2,
        "environment": ENVIRONMENT,
        "chosen": {
            "model": {"text": "{model}, {count:,} parameters", "arguments": {"model": "gpt2", "count": 39_296}},
            "train.micro_batch": 8,
            "train.steps": 40,
            "train.compile": "off",
            **chosen,
        },
    }


def in_lines(values) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def make_run(folder, *, steps=40, objective="causal", metric="perplexity", **changes):
    """The files of a run that was resumed and had a bad step, with hostile texts wherever texts can stand."""
    folder.mkdir()
    run = load_run(str(write_run(folder.parent / f"{folder.name}.yaml", **changes)))
    (folder / "config.yaml").write_text(
        yaml.safe_dump({**run.model_dump(mode="json", by_alias=True), "objective": objective})
    )
    lines = []
    for step in range(1, steps + 1):
        lines.append({"step": step, "loss": 5 - step / 20, "gradient_norm": 1.5, "learning_rate": 0.001,
                      "tokens": step * 1000, "tokens_per_second": 1000.0, "run_tokens_per_second": 1000.0,
                      "seconds": step * 60.0, "mfu": 0.41,
                      "memory_gib": 2.5})  # fmt: skip
        if step % 20 == 0:
            lines.append(
                {"step": step, "validation": {"loss": 4.9 - step / 20, metric: 50.0 - step, "bits_per_byte": 2.5}}
            )
    (folder / "metrics.jsonl").write_text(in_lines(lines))
    samples = [{"step": step, "prompt": "<b>Once", "text": f"{step} {HOSTILE}"} for step in range(5, steps + 1, 5)]
    (folder / "samples.jsonl").write_text(in_lines(samples))
    (folder / "ledger.json").write_text(json.dumps(LEDGER))
    rejected = [{"origin": f"a.txt:1{HOSTILE}", "reason": "not_json", "detail": HOSTILE, "set": "news"}]
    (folder / "rejected.jsonl").write_text(in_lines(rejected))
    (folder / "plan.json").write_text(json.dumps(PLAN))
    (folder / "choice.json").write_text(json.dumps(CHOICE))
    (folder / "starts.jsonl").write_text(in_lines([start(0), start(15)]))
    bad = {"step": 17, "loss": None, "what": f"the loss is NaN {HOSTILE}", "did": "skip", "documents": ["a.txt:3"]}
    (folder / "bad_steps.jsonl").write_text(in_lines([bad]))
    (folder / "profile").mkdir()
    (folder / "profile" / "table.json").write_text(json.dumps(PROFILE))
    for step in (20, 40):
        (folder / "checkpoints" / f"step-{step:09}").mkdir(parents=True)
        (folder / "checkpoints" / f"step-{step:09}" / "state.json").write_text("{}")
    (folder / "checkpoints" / "best").symlink_to("step-000000020")
    (folder / "hangs").mkdir()
    (folder / "hangs" / "2026-01-01-00-00-00-process-1.txt").write_text(f"process 1: {HOSTILE}")
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "novel")


@pytest.fixture(scope="module")
def page(run):
    return Page().html(read_runs([str(run)]))


def data_of(html: str) -> dict:
    return json.loads(LexborHTMLParser(html).css_first("script#data").text())


def texts(tree, selector: str) -> list[str]:
    return [" ".join(node.text().split()) for node in tree.css(selector)]


def test_the_figures_stand_in_the_page(page):
    tree = LexborHTMLParser(page)
    assert texts(tree, "h1")[0].startswith("novel")
    tiles = dict(zip(texts(tree, ".tile .label"), texts(tree, ".tile .figure"), strict=True))
    assert tiles["validation loss"] == "2.900"
    assert tiles["bits per byte"] == "2.500"
    assert (tiles["training loss"], tiles["step"], tiles["tokens"], tiles["time"]) == (
        "3.000",
        "40",
        "40,000",
        "40 min",
    )
    assert (tiles["MFU"], tiles["speed, tokens/s"], tiles["memory, GiB"]) == ("41.0%", "1,000", "2.50")
    assert "best: 3.900, step 20" in texts(tree, ".tile .more")
    assert texts(tree, ".plot-card h3") == [
        "Loss", "Perplexity", "Bits per byte", "Learning rate", "Gradient norm", "Speed", "MFU", "Memory"
    ]  # fmt: skip
    assert next(texts(row, "td") for row in tree.css("#text tbody tr")) == ["news", "6", "4", "2", "0", "4,000", "0"]
    assert next(texts(row, "td") for row in tree.css("#time tbody tr")) == ["matrix products", "60.00", "75.0%"]
    rows = [texts(row, "td") for row in tree.css("#plan tbody tr")]
    assert rows[-3:] == [
        ["bits per byte of validation", "2.000 (1.800 to 2.200)", "2.500", "+25%"],
        ["tokens/s", "1,000", "900.0", "\u221210%"],
        ["time", "30 min", "", ""],
    ]
    plan = {cells[0]: cells[1:] for cells in rows[:-3]}
    assert plan["tokens/s"] == ["1,000 (800.0 to 1,300)", "1,100", "+10%"]
    assert plan["GiB of all processes"] == ["3.000", "2.700", "\u221210%"]
    assert plan["micro-batch"] == ["8", "8", ""]
    events = [texts(row, "td") for row in tree.css("#curves details[id^=events] tbody tr")]
    assert [event[:2] for event in events] == [
        ["15", "restart"], ["17", "bad step"], ["20", "best checkpoint"], ["40", "checkpoint"]
    ]  # fmt: skip
    set_keys = dict(texts(row, "td") for row in tree.css("#file tbody tr"))
    assert set_keys["train.warmup"] == "2"
    assert set_keys["data.sources.0.documents"] == "300"
    assert "train.clip" not in set_keys
    assert set_keys["train.micro_batch"] == "8"  # what was chosen
    assert ["torch", "2.13.0"] in [texts(row, "td") for row in tree.css("#repeat tbody tr")]
    assert [section.id for section in tree.css("main > section")] == [
        "curves", "samples", "text", "time", "plan", "faults", "file", "repeat"
    ]  # fmt: skip


def test_the_plots_data_are_the_runs(page):
    data = data_of(page)
    loss = data["plots"]["charts"][0]
    training, validation = loss["traces"]
    assert (training["step"][:2], training["value"][:2], training["seconds"][:2]) == ([1, 2], [4.95, 4.9], [60, 120])
    assert (validation["step"], validation["value"], validation["tokens"]) == ([20, 40], [3.9, 2.9], [20_000, 40_000])
    marks = {mark["kind"]: (mark["step"], mark["value"]) for mark in loss["marks"]}
    assert marks == {"restart": ([15], [4.25]), "bad": ([17], [4.15]), "best": ([20], [4]), "checkpoint": ([40], [3])}
    assert [bars["categories"] for bars in data["plots"]["bars"]] == [
        ["news", HOSTILE], ["matrix products", "attention"]
    ]  # fmt: skip


def test_a_plots_table_has_its_figures(page):
    rows = [texts(row, "th, td") for row in LexborHTMLParser(page).css("#figures-loss tbody tr")]
    assert ["20", "4.000", "3.900"] in rows
    assert rows[0] == ["1", "4.950", ""]


@pytest.mark.parametrize("language", LANGUAGES)
def test_nothing_that_a_run_holds_becomes_html(run, language):
    html = Page(language).html(read_runs([str(run)]))
    tree = LexborHTMLParser(html)
    assert len(tree.css("script")) == 3
    assert tree.css("img, iframe, object, embed, link, b") == []
    assert [node for node in tree.css("*") if any(name.startswith("on") for name in node.attributes)] == []
    assert html.count("</script") == 3
    assert "alert(1)</script>" not in html
    shown = tree.body.text()
    assert shown.count(HOSTILE) > 10  # as text
    policy = tree.css_first("meta[http-equiv]").attributes["content"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "connect-src 'none'" in policy


def test_it_needs_no_network(page):
    tree = LexborHTMLParser(page)
    places = [node.attributes.get(name) for node in tree.css("*") for name in ("src", "href", "action", "srcset")]
    assert [place for place in places if place and not place.startswith("#")] == []
    assert re.findall(r"url\(|@import", tree.css_first("style").text()) == []


def test_it_is_in_russian_too(run):
    html = Page("ru").html(read_runs([str(run)]))
    tree = LexborHTMLParser(html)
    assert tree.css_first("html").attributes["lang"] == "ru"
    tiles = dict(zip(texts(tree, ".tile .label"), texts(tree, ".tile .figure"), strict=True))
    assert (tiles["потери на валидации"], tiles["токены"]) == ("2,900", "40 000")
    assert "матричные произведения" in texts(tree, "#time td")
    assert data_of(html)["separators"] == ",\u202f"
    assert texts(tree, ".about") == ["causal · gpt2, параметров: 39 296 · A processor · процессов: 2"]
    rows = [texts(row, "td") for row in tree.css("#file tbody tr, #repeat tbody tr")]
    keys = {row[0]: row[1] for row in rows}
    assert (keys["model"], keys["train.compile"]) == ("gpt2, параметров: 39 296", "нет")
    assert (keys["хосты"], keys["устройство"], keys["процессы"]) == ("1", "A processor", "2")
    plan = {cells[0]: cells[1:] for cells in (texts(row, "td") for row in tree.css("#plan tbody tr"))}
    assert plan["шаги"][0] == "40"
    assert plan["бит на байт на валидации"] == ["2,000 (от 1,800 до 2,200)", "2,500", "+25 %"]
    assert texts(tree, "#file h3") == ["Настройки запуска", "Что выбрано при старте"]


def test_tables_of_a_validation_are_in_russian_where_artel_names_them(run, tmp_path):
    folder = Path(shutil.copytree(run, tmp_path / "named", symlinks=True))
    (folder / "validation.json").write_text(json.dumps(DETAILS))
    tree = LexborHTMLParser(Page("ru").html([read_run(folder)]))
    assert texts(tree, "#details h4") == ["метки", "средние"]
    assert texts(tree, "#details th")[:3] == ["метка", "точность (precision)", "в данных"]
    rows = [texts(row, "td")[0] for row in tree.css("#details tbody tr")]
    assert rows == ["micro", "по всем (micro)"]  # the first is a label of the data


def test_runs_are_compared(run, tmp_path):
    other = make_run(tmp_path / "other", steps=20, train={"learning_rate": 3e-4})
    runs = read_runs([str(run), str(other)])
    tree = LexborHTMLParser(Page().html(runs))
    rows = {cells[0]: cells[1:] for cells in (texts(row, "td") for row in tree.css("#differences tbody tr"))}
    assert rows["train.learning_rate"] == ["0.001", "0.0003"]
    assert "run" not in rows
    loss = data_of(Page().html(runs))["plots"]["charts"][0]
    assert [trace["label"] for trace in loss["traces"]] == [
        "novel · training", "novel · validation", "other · training", "other · validation"
    ]  # fmt: skip
    assert texts(tree, "header .notice") == []


def test_runs_of_different_objectives_have_plots_of_their_own(run, tmp_path):
    other = make_run(tmp_path / "answers", objective="span_qa", metric="exact_match")
    html = Page().html(read_runs([str(run), str(other)]))
    tree = LexborHTMLParser(html)
    assert "have different objectives (causal, span_qa)" in texts(tree, "header .notice")[0]
    titles = texts(tree, ".plot-card h3")
    assert titles[:2] == ["Loss · causal", "Perplexity · causal"]
    assert "Loss · span_qa" in titles
    assert "Exact match · span_qa" in titles
    charts = {chart["id"]: chart for chart in data_of(html)["plots"]["charts"]}
    assert len(charts) == len(titles)
    shared = next(chart for name, chart in charts.items() if name.startswith("gradient-norm"))
    assert {trace["run"] for trace in shared["traces"]} == {0, 1}


def test_a_run_that_has_not_begun_is_a_page(tmp_path):
    folder = tmp_path / "new"
    folder.mkdir()
    (folder / "config.yaml").write_text("run: new\nobjective: causal\n")
    tree = LexborHTMLParser(Page().html([read_run(folder)]))
    assert texts(tree, ".state") == ["not begun"]
    assert "The run has not started" in texts(tree, ".verdict")[0]
    assert "Nothing is logged yet." in tree.css_first("#curves").text()


def test_the_command_to_repeat_names_what_a_shell_would_take_apart(tmp_path):
    folder = make_run(tmp_path / "my runs; x")
    tree = LexborHTMLParser(Page().html([read_run(folder)]))
    first = tree.css_first("#repeat pre").text().splitlines()[0]
    assert shlex.split(first) == ["artel", "train", str(folder), f"run={folder}-again", "--nproc", "2"]


def test_which_keys_were_set(tmp_path):
    run = load_run(str(write_run(tmp_path / "a.yaml", train={"clip": 0.5})))
    keys = changed_keys(run.model_dump(mode="json", by_alias=True))
    assert keys["train.clip"] == 0.5
    assert keys["model.config.n_layer"] == 2
    assert "train.optimizer" not in keys
    assert find_differences([{"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"c": 3, "d": 4}}]) == {
        "b.c": [2, 3],
        "b.d": ["", 4],
    }


# The verb ----------------------------------------------------------------------------------


@pytest.fixture
def artel(monkeypatch, capfd):
    def call(*words) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["artel", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), *capfd.readouterr()

    return call


def test_the_verb_writes_the_page(artel, run, tmp_path):
    status, out, err = artel("report", run, "--html", "report.html", "--language", "ru", "--json")
    assert (status, json.loads(out)["runs"][0]["state"]) == (0, "unknown")
    assert "report.html: the report of" in err
    assert '<html lang="ru">' in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_several_runs_in_the_terminal_are_a_table(artel, run, tmp_path):
    other = make_run(tmp_path / "other", steps=20)
    status, out, err = artel("report", run, other, "--json")
    assert status == 0
    header, first, second = err.splitlines()
    assert re.split(r"\s{2,}", header)[:5] == ["run", "objective", "state", "step", "training loss"]
    assert "validation loss" in header
    assert (first.split()[0], second.split()[3:5]) == (str(run), ["20", "4.0000"])
    assert [row["steps"] for row in json.loads(out)["runs"]] == [40, 20]


def test_all_that_is_wrong_with_all_runs_is_said_at_once(artel, tmp_path):
    (tmp_path / "empty").mkdir()
    status, out, err = artel("report", "nowhere", "empty", "--html", "x.html")
    assert (status, out) == (2, "")
    assert "nowhere: there is no such folder" in err
    assert "empty: is not the folder of a run" in err
    assert not (tmp_path / "x.html").exists()
    for name in ("a", "b"):
        make_run(tmp_path / name)
        with (tmp_path / name / "metrics.jsonl").open("a") as file:
            file.write("x\n")
    status, _, err = artel("report", "a", "b", "--html", "x.html")
    assert status == 2
    assert "a/metrics.jsonl:43: is not a line of a run" in err
    assert "b/metrics.jsonl:43: is not a line of a run" in err


def test_without_plotly_the_command_says_what_to_install(artel, run, monkeypatch):
    monkeypatch.setattr("artel.reports.page.page.find_spec", lambda name: None)
    status, _, err = artel("report", run, "--html", "x.html")
    assert status == 2
    assert "--html: needs the package plotly" in err
    assert "pip install 'artel-lm[report]'" in err
