"""The table of docs/architectures.md: the script trains, saves, compares and resumes, and says what did not go."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.processes
def test_rows_of_a_few_architectures(tmp_path):
    script, out = ROOT / "benchmarks/architectures.py", tmp_path / "page.md"
    command = [sys.executable, str(script), "--out", str(out), "--kept", str(tmp_path / "kept.jsonl"), "--only"]
    done = subprocess.run(
        [*command, "llama", "inkling2_text", "t5", "qwen2_5_vl", "florence2"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    page = out.read_text(encoding="utf-8")
    assert "| `llama` | works | – | works |" in page
    assert "| `inkling2_text` | works | – | – |" in page
    assert "| `t5` | – | – | refused† |" in page
    assert "| causal | 2 | 2 | 0 | 0 | 0 | 2 | 100.0% |" in page
    assert "2 entries: 1 works, 1 refused, 0 differs, 0 traceback, 0 not made." in page
    assert "| `qwen2_5_vl` | works |" in page
    assert "| `florence2` | refused: model.from: florence2 takes images" in page
