"""Every Python block of the README and the docs is run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from printed.inputs import novel
from support.runs import ENVIRONMENT, write_run

ROOT = Path(__file__).resolve().parents[1]
RUN_HERE = ["README.md", "docs/python.md"]
TRANSLATED = {
    "README.ru.md": "README.md",
    "docs/ru/python.md": "docs/python.md",
    "docs/ru/extending.md": "docs/extending.md",
}
IN_BOTH_LANGUAGES = {
    "chat": "test_chat_tools.py",  # functions that a model may call
    "entities": "test_entities.py",
    "classification": "test_classification.py",
    **dict.fromkeys(("rewards", "reranking", "embeddings", "search", "seq2seq"), "test_python_of_pages.py"),
    "multimodal": "test_vlm_text.py",
    "policy": "test_rounds.py",
    "serve": "test_serve_clients.py",
}
RUN_ELSEWHERE = {
    f"docs/{language}{page}.md": test for page, test in IN_BOTH_LANGUAGES.items() for language in ("", "ru/")
} | {"docs/extending.md": "test_extending.py"}  # each block with the run file beside it


def blocks(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL)


def test_each_page_with_python_is_run():
    pages = [path.relative_to(ROOT) for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))]
    with_python = {str(page) for page in pages if blocks(str(page))}
    assert with_python - set(TRANSLATED) == {*RUN_HERE, *RUN_ELSEWHERE}
    for page, test in RUN_ELSEWHERE.items():
        assert page in (ROOT / "tests" / test).read_text(encoding="utf-8")
    for page, original in TRANSLATED.items():
        assert blocks(page) == blocks(original)


@pytest.mark.processes
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.ci] if page == "README.md" else []) for page in RUN_HERE]
)
def test_the_blocks_of_a_page_are_one_program(page, tmp_path):
    novel()(tmp_path)
    write_run(tmp_path / "run.yaml", run="runs/tiny")
    Path("program.py").write_text("\n".join(blocks(page)), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "program.py"], capture_output=True, text=True, env={**ENVIRONMENT, "ARTEL_CACHE": "cache"}
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
