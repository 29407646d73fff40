"""Lines of metrics.jsonl that a resumed run drops before it goes on."""

import pytest

from artel.training.metrics.jsonl import drop_lines_after

ONE, TWO, THREE = (b'{"step":%d,"loss":1.5}\n' % step for step in (1, 2, 3))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (ONE + TWO + THREE, ONE + TWO),
        (ONE + TWO, ONE + TWO),
        (ONE + TWO + THREE[:9], ONE + TWO),  # torn by a kill
        (ONE + TWO[:-1], ONE + TWO),  # torn before its end of line
        (ONE + THREE + TWO, ONE + TWO),
        (ONE + b"no JSON\n" + TWO + THREE, ONE + TWO),
        (THREE, b""),
        (b"", b""),
    ],
)
def test_lines_after_the_step_and_torn_ones_are_dropped(tmp_path, before, after):
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(before)
    drop_lines_after(file, 2)
    assert file.read_bytes() == after


def test_what_stays_is_not_written_anew(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(ONE + TWO + THREE)
    number = file.stat().st_ino
    drop_lines_after(file, 2)
    assert file.stat().st_ino == number


def test_a_run_without_lines_has_none_to_drop(tmp_path):
    drop_lines_after(tmp_path / "metrics.jsonl", 2)
    assert not (tmp_path / "metrics.jsonl").exists()
