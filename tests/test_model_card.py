"""The model card of a run, and `artel push --dry-run`: what would be uploaded, and what is refused before."""

import contextlib
import io
import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from huggingface_hub import EvalResult, ModelCard
from markdown_it import MarkdownIt
from transformers import AutoModelForCausalLM

import artel
from artel.errors import InputError
from artel.inference import open_model
from artel.reports.model_card.markdown import hide_paths
from artel.training import RunFolder
from support.messages import logged
from support.objectives import objective_run
from support.runs import artel as command
from support.runs import write_run
from support.saved_models import word_pieces

SECRET = "hf_" + "Zz9Yy8Xx7Ww6" * 3
PROMPT = "Here `is` | a <b>prompt</b>"


def dry_run(run: Path | str, folder: str = "out", **options) -> ModelCard:
    artel.push(run, "me/novel", dry_run=folder, **options)
    return ModelCard.load(Path(folder) / "README.md")


def code(card: ModelCard, language: str) -> str:
    return re.search(rf"```{language}\n(.*?)\n```", card.text, re.DOTALL)[1]


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    """Texts at a place of the machine that no reader of a card may learn of."""
    folder = tmp_path_factory.mktemp("secret-place")
    for name in ("one", "two"):
        lines = [f"This is line {number} of {name}, and it says so again." for number in range(400)]
        (folder / f"{name}.txt").write_text("\n".join([*lines, lines[0]]))
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory, texts) -> Path:
    """A run with all that a card shows: two sources, samples, checkpoints, a plan that was measured."""
    folder = tmp_path_factory.mktemp("card")
    sources = [
        {"path": [str(texts / "one.txt")], "document": "line", "license": "cc-by-4.0", "name": "first"},
        {"path": [str(texts / "two.txt")], "document": "line"},
    ]
    run = write_run(
        folder / "novel.yaml",
        data={"sources": sources, "clean": {"symbols": 0.5}},
        validate={"every": 2, "prompts": [PROMPT]},
        checkpoint={"every": 2, "keep": 5},
    )
    artel.train(str(run))
    plan = {
        "tokens_per_second": {"mid": 1000.0, "low": 800.0, "high": 1200.0}, "per_rank_gib": {"reserved": 0.5},
        "host_gib": 1.0, "hours": 0.1, "steps": 6, "tokens": 12288, "micro_batch": 64, "memory_share": 0.1,
        "measured": {"tokens_per_second": 1100.0, "host_gib": 1.1},
    }  # fmt: skip
    (folder / "novel" / "plan.json").write_text(json.dumps(plan))
    return folder / "novel"


@pytest.fixture
def run(trained) -> Path:
    """A copy, where a test changes something."""
    return Path(shutil.copytree(trained, "novel", symlinks=True))


def test_the_metadata_is_what_the_hub_reads(trained):
    card = dry_run(trained, license="apache-2.0", languages=("en", "ru"))
    data, result = card.data, RunFolder(trained).read_result()["validation"]
    assert (data.license, data.language, data.library_name) == ("apache-2.0", ["en", "ru"], "transformers")
    assert (data.pipeline_tag, data.tags) == ("text-generation", ["artel", "causal", "gpt2"])
    assert (data.base_model, data.datasets, data.model_name) == (None, None, "novel")
    assert all(isinstance(metric, EvalResult) for metric in data.eval_results)
    assert {metric.metric_type: metric.metric_value for metric in data.eval_results} == pytest.approx(result, rel=1e-5)
    assert ModelCard(str(card)).data.to_dict() == data.to_dict()


def test_the_card_says_what_the_run_says(trained):
    text = dry_run(trained).text
    assert "It is a gpt2 model of 39,296 parameters, trained from scratch." in text
    assert "| `first`: `…/one.txt` | auto | `cc-by-4.0` |" in text
    documents = json.loads((trained / "ledger.json").read_text())["documents"]
    assert f"{documents['read']:,} documents were read: {documents['kept']:,} kept" in text
    assert re.search(r"\| `first` \| 401 \| \d+ \| \d+ \|", text)
    for row in ("| learning rate | 0.001 at most, cosine, warmup 2 |", "| steps | 6 |", "| tokens | 12,288 |",
                "| precision | fp32, weights fp32 |", "| processes | 1 |"):  # fmt: skip
        assert row in text
    loss = RunFolder(trained).read_result()["validation"]["loss"]
    assert re.search(rf"\| loss \| [\d.]+ \| {loss:.3f} \| [\d.]+ \|", text)
    assert "| tokens/s | 1,000 (800.0 to 1,200) | 1,100 | +10% |" in text
    assert f"Prompt:\n\n```\n{PROMPT}\n```" in text
    run_file = yaml.safe_load(code(ModelCard(text), "yaml"))
    assert run_file["train"]["steps"] == 6
    assert run_file["data"]["sources"][1] == {"path": ["…/two.txt"], "document": "line"}
    assert all(name in text for name in ("torch 2", "transformers 5", f"artel {artel.__version__}"))


def test_no_secret_and_no_place_of_the_machine_is_in_the_folder(run, texts):
    tree = yaml.safe_load((run / "config.yaml").read_text())
    tree["data"]["sources"][0]["path"] = ["s3://bucket/one.txt?token=abcdefgh", f"https://u:{SECRET}@host/a.txt"]
    tree["validate"]["prompts"] = [f"my token is {SECRET}"]
    (run / "config.yaml").write_text(yaml.safe_dump(tree))
    dry_run(run)
    for file in Path("out").iterdir():
        content = file.read_bytes()
        for hidden in (SECRET, "abcdefgh", str(texts), texts.name, str(Path.cwd()), str(run.resolve())):
            assert hidden.encode() not in content, (file.name, hidden)


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("/home/me/texts/*.txt", "…/*.txt"),
        ("~/a.txt", "…/a.txt"),
        ("../others/a.txt", "…/a.txt"),
        ("texts/../../a.txt", "…/a.txt"),
        ("file:///home/me/a.txt", "…/a.txt"),
        ("texts/*.txt", "texts/*.txt"),
        ("hf://datasets/owner/name/a.parquet", "hf://datasets/owner/name/a.parquet"),
        ("https://host/a..b.txt", "https://host/a..b.txt"),
        ("module:function", "module:function"),
    ],
)
def test_where_a_file_lies_on_the_machine_is_not_shown(written, shown):
    assert hide_paths({"path": [written], "weight": 2}) == {"path": [shown], "weight": 2}


def test_what_others_wrote_is_text_in_the_card(run):
    """Names of sets, prompts and samples neither end a block nor make HTML or a column for a reader of Markdown."""
    evil = "a|b `c` ``` </details><script>alert(1)</script>"
    ledger = json.loads((run / "ledger.json").read_text())
    ledger["sets"][evil] = ledger["sets"].pop("first")
    (run / "ledger.json").write_text(json.dumps(ledger))
    tree = yaml.safe_load((run / "config.yaml").read_text())
    tree["data"]["sources"][0]["name"] = evil
    (run / "config.yaml").write_text(yaml.safe_dump(tree))
    with (run / "samples.jsonl").open("a") as file:
        for text in ("````\n# heading\n" + evil, "\x1b[31m"):
            file.write(json.dumps({"step": 6, "prompt": evil, "text": text}) + "\n")
            file.write(json.dumps({"step": 6, "prompt": text, "text": text}) + "\n")
    html = MarkdownIt("commonmark", {"html": True}).enable("table").render(dry_run(run).text)
    assert "<script>" not in html
    assert "<h1>heading" not in html
    assert html.count("<details>") == html.count("</details>") == 1
    rows = [row.split("</tr>")[0] for row in html.split("<tr>")[1:]]
    rows = [row.count("<td") for row in rows if "&lt;script&gt;" in row]
    assert rows == [3, 6]  # the source, and its set: read, kept, dropped for one reason, tokens of two splits
    assert "\x1b" not in html


def test_the_folder_of_a_dry_run_is_the_whole_model(trained):
    dry_run(trained)
    names = {file.name for file in Path("out").iterdir()}
    assert names == {file.name for file in (trained / "model").iterdir()} | {"README.md"}
    assert not any(file.is_symlink() for file in Path("out").iterdir())
    for name in names - {"README.md"}:
        assert (Path("out") / name).read_bytes() == (trained / "model" / name).read_bytes()


def test_a_checkpoint_is_a_model_of_its_step(trained):
    early, last = dry_run(trained, "early", step=2), dry_run(trained, "last", step="latest")
    assert "after step 2 of training" in early.text
    assert "| steps | 2 of 6 |" in early.text
    assert 'revision="step-2"' in code(early, "python")
    assert early.data.eval_results[0].metric_value > last.data.eval_results[0].metric_value
    final = AutoModelForCausalLM.from_pretrained(trained / "model").state_dict()
    saved = AutoModelForCausalLM.from_pretrained("last").state_dict()
    assert all(saved[name].equal(tensor) for name, tensor in final.items())
    before = AutoModelForCausalLM.from_pretrained("early").state_dict()
    assert not all(before[name].equal(tensor) for name, tensor in final.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["causal", "masked", "restoring", "span_qa", "tokens", "chat", "dpo", "reward", "rerank"]
)
def test_the_python_of_a_card_runs(name, trained, tmp_path):
    """By transformers alone, on the folder in place of the repository; where artel has one answer, it is the same."""
    run = trained
    if name != "causal":
        keys = {}
        if name == "tokens":  # a vocabulary whose words the pipeline finds; for others the card has other lines
            word_pieces(tmp_path / "pieces")
            keys = {"tokenizer.train": None, "tokenizer.from": str(tmp_path / "pieces")}
        artel.train(str(objective_run(tmp_path / f"{name}.yaml", name)), keys)
        run = tmp_path / name
    card = dry_run(run)
    program = code(card, "python").replace('"me/novel"', '"./out"')
    written = io.StringIO()
    with contextlib.redirect_stdout(written):
        exec(program, {})
    opened = open_model(str(run))
    if name == "restoring":
        assert written.getvalue().strip() == artel.open(run).fill("He said that he would come but he did not").text
    if name == "masked":
        best = artel.open(run).fill(opened.decoding.example_prompt(None)).masks[0][0]
        assert f"{best[1]:.3f}" in written.getvalue()
    if name == "tokens":
        text = "Anna Karenina went to Moscow."
        found = [(entity.start, entity.end, entity.label) for entity in artel.open(run).entities(text)]
        rows = [line.split() for line in written.getvalue().splitlines()]
        assert [(int(start), int(end), label) for start, end, label, *_ in rows] == found
    if name in ("reward", "rerank"):
        texts = re.findall(r'"([^"]+[.?])"', code(card, "python"))  # the prompt and the answer, or query and document
        assert float(written.getvalue()) == pytest.approx(artel.open(run).score(*texts)[0], abs=1e-5)
    assert card.data.pipeline_tag == opened.objective.presentation.pipeline_tag != ""
    assert code(card, "bash").splitlines()[1] == opened.decoding.demo_command("novel", None)


def test_an_adapter_names_the_base_that_others_have(run):
    write_run(Path("lora.yaml"), data={"sources": [{"format": "dummy", "documents": 100}]})
    tree = yaml.safe_load(Path("lora.yaml").read_text())
    tree |= {"model": {"from": "novel/model", "lora": {"rank": 4}}, "tokenizer": {"from": "novel/model"}}
    Path("lora.yaml").write_text(yaml.safe_dump(tree))
    artel.train("lora.yaml")
    for step in (None, "latest"):
        with pytest.raises(InputError, match="base model of this adapter is the folder"):
            dry_run("lora", step=step)
    card = dry_run("lora", base_model="me/base")
    assert (card.data.base_model, card.data.base_model_relation) == ("me/base", "adapter")
    assert (card.data.library_name, "lora" in card.data.tags) == ("peft", True)
    assert "LoRA adapter of 4,096 parameters (rank 4, alpha 32) for [me/base]" in card.text
    assert json.loads(Path("out/adapter_config.json").read_text())["base_model_name_or_path"] == "me/base"
    assert json.loads(Path("lora/model/adapter_config.json").read_text())["base_model_name_or_path"] != "me/base"


def test_data_sets_and_the_base_of_the_hub_are_linked(run):
    tree = yaml.safe_load((run / "config.yaml").read_text())
    tree["data"]["sources"][0]["path"] = ["hf://datasets/owner/pages/data/*.parquet"]
    tree["data"]["sources"][1]["path"] = ["https://huggingface.co/datasets/owner/books@main/resolve/main/a.txt"]
    tree["data"]["clean"]["languages"] = ["ru"]
    tree["model"], tree["tokenizer"] = {"from": "owner/base"}, {}
    (run / "config.yaml").write_text(yaml.safe_dump(tree))
    shutil.rmtree(run / "checkpoints")  # they say that it was trained from scratch
    card = dry_run(run)
    assert card.data.datasets == ["owner/pages", "owner/books"]
    assert (card.data.base_model, card.data.base_model_relation) == ("owner/base", "finetune")
    assert card.data.language == ["ru"]
    assert "fine-tuned from [owner/base]" in card.text


def test_what_a_user_wrote_into_the_model_is_left_out_but_a_card_is_taken(run):
    (run / "model" / "notes.txt").write_text("mine")
    (run / "model" / "README.md").write_text("---\nlicense: mit\n---\n\n# Mine\n")
    told = logged()
    artel.push(run, "me/novel", dry_run="out")
    assert "not uploaded, since artel did not write it: notes.txt" in told
    assert not Path("out/notes.txt").exists()
    assert Path("out/README.md").read_text() == "---\nlicense: mit\n---\n\n# Mine\n"


# What is refused ---------------------------------------------------------------------


def refused(*arguments) -> str:
    done = command("push", *arguments)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_wrong_options_are_reported_together(trained):
    said = refused(trained, "https://huggingface.co/me/novel", "--license", "Apache 2.0", "--language", "Russian",
                   "--step", "soon", "--revision", "a..b", "--base-model", "base")  # fmt: skip
    assert "REPO: https://huggingface.co/me/novel is an address" in said
    assert "write me/novel" in said
    for flag in ("--license", "--language", "--step", "--revision", "--base-model"):
        assert f"artel: {flag}: " in said


@pytest.mark.parametrize("repo", ["a/b/c", "me/no vel", "-", "me/", "модель", "me/x.git"])
def test_a_name_that_is_no_repository(repo, trained):
    with pytest.raises(InputError, match=r"REPO: .*is not the name of a hub repository"):
        artel.push(trained, repo, dry_run="out")


def test_folders_that_are_no_run_with_a_model(run):
    shutil.copytree(run / "model", "alone")
    assert "alone: is the folder of a model, not of a run" in refused("alone", "me/novel")
    assert "there is no such folder" in refused("nowhere", "me/novel")
    assert "--step: novel has no checkpoint 3\n    use one of: 2, 4, 6" in refused(run, "me/novel", "--step", 3)
    (run / "result.json").unlink()
    shutil.rmtree(run / "model")
    assert "has no model yet: the run is not complete\n    push a checkpoint: --step 6" in refused(run, "me/novel")
    assert "after step 6 of training" in dry_run(run, step="latest").text


def test_a_model_that_artel_did_not_write(run):
    mark = json.loads((run / ".artel-run.json").read_text())
    (run / ".artel-run.json").write_text(json.dumps(mark | {"model": []}))
    said = refused(run, "me/novel", "--dry-run", "out")
    assert "novel/model: does not contain the model that artel wrote there; artel did not write config.json" in said


def test_a_dry_run_writes_over_nothing(trained):
    Path("out").mkdir()
    assert "out: exists already" in refused(trained, "me/novel", "--dry-run", "out")


def test_without_a_token_or_a_network_nothing_begins(trained):
    assert "HF_HUB_OFFLINE: is set" in refused(trained, "me/novel")


def test_the_licence_of_a_source_changes_no_run(run):
    """It may be given afterwards, and the run is the same."""
    tree = yaml.safe_load((run / "config.yaml").read_text())
    tree["data"]["sources"][1]["license"] = "mit"
    (run / "config.yaml").write_text(yaml.safe_dump(tree))
    told = logged()
    artel.train(str(run), {"run": "novel"})
    assert "`mit`" in dry_run(run).text
    assert not any("differs" in line for line in told)
