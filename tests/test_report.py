"""`artel report` on metrics as runs leave them, and as they are found: torn, damaged, of another program."""

import json
import sys

import pytest

from artel.cli.main import main

LINES = b'{"step": 1, "loss": 3.5}\n{"step": 2, "loss": null}\n{"step": 2, "validation": {"loss": 3.25, "f1": null}}\n'


@pytest.fixture
def report(tmp_path, monkeypatch, capfd):
    def run(content: bytes) -> tuple[int, str, str]:
        (tmp_path / "metrics.jsonl").write_bytes(content)
        monkeypatch.setattr(sys, "argv", ["artel", "report", str(tmp_path), "--json"])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), *capfd.readouterr()

    return run


def test_a_last_line_that_was_torn_is_left_out_and_said(report):
    whole = report(LINES)
    assert (whole[0], json.loads(whole[1])["validation"]) == (0, {"loss": 3.25, "f1": None})
    assert "validation: loss 3.2500 · f1 NaN" in whole[2]
    for torn in (b"{", b'{"step": 3, "lo', b'{"step": 3, "loss": 1}'):
        status, out, err = report(LINES + torn)
        assert (status, out) == whole[:2]
        assert "metrics.jsonl:4: the last line is incomplete" in err
    assert report(b"")[0] == 0


@pytest.mark.parametrize(
    "line",
    [b"x", b"[1]", b"3", b"{}", b'{"step": "x"}', b'{"step": -1}', b'{"step": 1, "loss": "low"}', b"\xff", b"",
     b'{"step": 1, "validation": 3}', b'{"step": 1, "validation": {"f1": [1]}}', b'{"step": 1, "loss": 1e300}',
     b"[" * 100_000],
)  # fmt: skip
def test_a_line_that_no_run_writes_is_named(report, line):
    status, out, err = report(LINES + line + b"\n" + LINES)
    assert (status, out) == (2, "")
    assert "metrics.jsonl:4: is not a line of a run" in err
    assert "fault" not in err
