"""The tables of docs/convert.md: which keys of a run file each key of another tool decides.

They are made by converting the configurations of tests/support/foreign_configs.py, which have the keys that are carried
over, so that a table says what the converter does.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from artel.config.converters.tools import convert
from support import foreign_configs as configs

MARK = "<!-- python scripts/make_docs.py -->"
TOOLS = {
    "axolotl": (
        configs.AXOLOTL_QLORA,
        configs.AXOLOTL_DPO,
        configs.AXOLOTL_PRETRAIN,
        configs.AXOLOTL_MORE,
        configs.AXOLOTL_GRPO,
    ),
    "LLaMA-Factory": (configs.LLAMA_FACTORY_LORA, configs.LLAMA_FACTORY_DPO, configs.LLAMA_FACTORY_MORE),
    "TRL": (configs.TRL_GRPO, configs.TRL_GRPO_LORA),
    "run_clm.py and run_mlm.py": (configs.RUN_CLM, configs.RUN_MLM, configs.RUN_CLM_MORE),
}


def with_tables(page: str) -> str:
    """The page with its tables made anew, below the mark."""
    beginning = page.partition(MARK)[0]
    return f"{beginning}{MARK}\n" + "".join(f"\n## {tool}\n\n{table_of(tool)}" for tool in TOOLS)


def table_of(tool: str) -> str:
    """The keys of a tool by what they decide, in the order of their names."""
    decided: dict[str, set[str]] = {}
    for text in TOOLS[tool]:
        for key, dotted in convert(text, "-").carried.items():
            decided.setdefault(_numberless(key), set()).update(map(_numberless, dotted))
    rows = [f"| `{key}` | {', '.join(f'`{name}`' for name in sorted(decided[key]))} |\n" for key in sorted(decided)]
    return f"| {tool} | run file |\n|---|---|\n" + "".join(rows)


def _numberless(key: str) -> str:
    """`datasets[].path` of datasets.0.path."""
    return re.sub(r"\.\d+\b", "[]", key)
