"""The notebooks of docs/, run from top to bottom as a reader runs them, and what stands below their cells."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from support.runs import TINY, merged
from support.waiting import wait_until

pytest.importorskip("nbmake")

NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "docs/notebooks").glob("*.ipynb"))
SECONDS = 1500  # a cell takes at most half a minute on two cores that nobody else uses
SAYS = {"novel": "A thirsty crow", "roberta": "two processes", "pile": "Github", "lora_chat": "I am artel",
        "questions": "exact match", "rewards": "signal"}  # fmt: skip
WITHOUT_VALIDATION_LOSS = ("lora_chat", "rewards")


@pytest.fixture
def one_core():
    """The kernel computes on one core: two threads wait for one another long where other tests share the cores."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    yield
    os.sched_setaffinity(0, cores)


def outputs(notebook) -> list[dict]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def text_of(output) -> str:
    """An output as people see it: the HTML of one that has some, else the text."""
    if output["output_type"] == "stream":
        return output["text"]
    return output["data"].get("text/html") or output["data"]["text/plain"]


@pytest.mark.timeout(3000)
@pytest.mark.processes
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_runs(notebook, tmp_path, monkeypatch, one_core):
    from nbmake.nb_run import NotebookRun

    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("ARTEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    copy = Path(shutil.copy(notebook, tmp_path))
    result = NotebookRun(copy, SECONDS).execute()
    assert result.error is None, result.error.trace
    shown = [text_of(output) for output in outputs(result.nb)]
    assert SAYS[notebook.stem] in "\n".join(shown)
    assert any("<table>" in text and "(complete)" in text for text in shown)
    has_loss = any("<progress" in text and "validation loss" in text for text in shown)
    assert has_loss or notebook.stem in WITHOUT_VALIDATION_LOSS
    for output, text in zip(outputs(result.nb), shown, strict=True):
        assert not re.search(r"[\r\x1b]|Traceback", text), text
        assert output.get("name") != "stderr" or notebook.stem == "roberta", text  # what its processes say


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_is_stored_without_outputs_and_without_network(file):
    assert SAYS.keys() == {notebook.stem for notebook in NOTEBOOKS}
    notebook = json.loads(file.read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert not re.search(r"https?://", "".join("".join(cell["source"]) for cell in code))
    titles = [line for cell in notebook["cells"] if cell["cell_type"] == "markdown" for line in cell["source"]]
    assert titles[0].startswith("# ")
    assert "## A real size\n" in titles


def answer_of(client, message: str) -> dict:
    """The reply to an execution; replies to others are left out."""
    while True:
        reply = client.get_shell_msg(timeout=SECONDS)
        if reply["parent_header"].get("msg_id") == message:
            return reply["content"]


@pytest.mark.timeout(3000)
@pytest.mark.processes
def test_the_stop_button_saves_and_the_kernel_goes_on(tmp_path, monkeypatch, one_core):
    from jupyter_client.manager import start_new_kernel

    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    run = merged(TINY, {"run": "runs/tiny", "data": {"store": "stores"}, "train": {"steps": 100_000}})
    manager, client = start_new_kernel(cwd=str(tmp_path))
    try:
        # Or the kernel may abort the cell that is sent next, which for a moment counts as queued behind this one.
        training = client.execute(f"import artel\nartel.train({run!r})", stop_on_error=False)
        metrics = tmp_path / "runs/tiny/metrics.jsonl"
        wait_until(lambda: metrics.exists() and b'"loss"' in metrics.read_bytes(), lambda: "a step")
        manager.interrupt_kernel()
        stopped = answer_of(client, training)
        assert (stopped["status"], stopped["ename"]) == ("error", "Interrupted")
        shown = "\n".join(stopped["traceback"])  # all that stands below the cell: no traceback
        assert re.fullmatch(r"Interrupted:\nstopped and saved after step [\d,]+ of [\d,]+\n    the same .*", shown)
        assert (tmp_path / "runs/tiny/checkpoints/latest/state.json").exists()
        assert answer_of(client, client.execute("artel.Run('runs/tiny').metrics"))["status"] == "ok"
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
