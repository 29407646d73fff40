"""Count the commands that README, docs and recipes print, and how each is run by the tests: benchmarks/printed.md.

python benchmarks/printed.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from printed.table import page

if __name__ == "__main__":
    (Path(__file__).parent / "printed.md").write_text(page(), encoding="utf-8")
