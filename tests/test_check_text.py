"""scripts/check_text.py finds what it looks for: each check, in files with a fault of its kind."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "scripts"))
import check_text

FAULTS = {
    "tests_import_no_test_file": {"tests/test_a.py": "from test_b import x"},
    "tests_that_start_ranks_are_marked": {"tests/test_a.py": "def test_a():\n    run_ranks(2)"},
    "tests_do_not_depend_on_time": {
        "tests/a.py": "time.sleep(1)",
        "tests/b.py": "sleep(1)",
        "tests/c.py": "assert time.monotonic() - a < 3",
        "tests/d.py": "a = perf_counter() - b\nassert a < 3",
    },
    "tests_patch_no_private_name": {
        "tests/a.py": "monkeypatch.setattr('artel.x._Y', 1)",
        "tests/b.py": "from artel import x\nmonkeypatch.setattr(x, '_Y', 1)",
        "tests/c.py": "from artel import x\npatch.object(x, 'Y')",
        "tests/d.py": "from artel import x as z\nz._Y = 1",
        "tests/e.py": "from artel import x\nmonkeypatch.setitem(x._Y, 'cpu', 8)",
    },
    "names_are_compared_in_their_own_file_only": {
        "src/artel/a.py": "run.train.optimizer == 'adamw'",
        "src/artel/b.py": "'jsonl' in run.track",
        "src/artel/c.py": "match run.objective:\n    case 'causal': pass",
    },
    "names_are_listed_in_their_registry_only": {"src/artel/a.py": "{'causal': 1, 'masked': 2}[run.objective]"},
    "packages_ask_no_class": {
        "src/artel/a.py": "isinstance(objective, Causal)",
        "src/artel/b.py": "strategy.dims",
        "src/artel/c.py": "dims.pipeline",
        "src/artel/d.py": "PipelineParallel",
    },
    "converters_name_what_exists": {
        "src/artel/config/converters/a.py": "x = 'write train.lerning_rate: 3 instead'",
        "src/artel/config/converters/b.py": "x = 'write train.precision: fp99 instead'",
        "src/artel/config/converters/c.py": "x = 'write objective: causl instead'",
        "src/artel/config/converters/d.py": "x = 'run artel trian FOLDER instead'",
    },
    "links_lead_somewhere": {"docs/a.md": "[a](nowhere.md)"},
}


@pytest.mark.parametrize("check", FAULTS)
def test_each_fault_is_found_at_its_line(tmp_path, monkeypatch, check):
    for name, value in {"ROOT": "", "PACKAGE": "src/artel", "TESTS": "tests", "DOCS": "docs"}.items():
        monkeypatch.setattr(check_text, name, tmp_path / value)
    for name, code in FAULTS[check].items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(code)
    problems = [*getattr(check_text, check)()]
    assert FAULTS[check].keys() <= {problem.partition(":")[0] for problem in problems}
    assert getattr(check_text, check) in check_text.CHECKS
