"""The Python of the pages about rewards, reranking, embeddings and pairs of texts runs as printed, on a run of each."""

import re
from pathlib import Path

import pytest

import artel
from support.objectives import objective_run

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "docs/rewards.md": ("reward", "runs/reward"),
    "docs/ru/rewards.md": ("reward", "runs/reward"),
    "docs/reranking.md": ("rerank", "runs/rerank"),
    "docs/ru/reranking.md": ("rerank", "runs/rerank"),
    "docs/embeddings.md": ("embedding", "runs/embed-ru"),
    "docs/ru/embeddings.md": ("embedding", "runs/embed-ru"),
    "docs/search.md": ("embedding", "runs/embed-ru"),
    "docs/ru/search.md": ("embedding", "runs/embed-ru"),
    "docs/seq2seq.md": ("seq2seq", "runs/spelling-ru"),
    "docs/ru/seq2seq.md": ("seq2seq", "runs/spelling-ru"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", sorted({name for name, _ in PAGES.values()}))
def test_the_python_of_the_pages(name):
    pages = {page: folder for page, (objective, folder) in PAGES.items() if objective == name}
    (folder,) = set(pages.values())
    run = objective_run(Path("run.yaml").absolute(), name, train={"steps": 2, "batch": 8})
    artel.train(run, {"run": folder})
    Path("notes.txt").write_text("The key hangs behind the clock.\n\nThe train leaves at nine.\n")
    for page in pages:
        (block,) = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL)
        exec(block, {})
