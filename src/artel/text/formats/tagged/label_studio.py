"""Label Studio's export: {"data": {"text": …}, "annotations": [{"result": [{"value": {"start", "end", "labels"}}]}]}.

Its places are those of JavaScript, which counts an emoji as two: where they do not fit the text that stands beside
them, they are counted so. https://labelstud.io/guide/export#Label-Studio-JSON-format-of-annotated-tasks
"""

from __future__ import annotations

from typing import Any

from artel.text.formats.tagged.spans import Span
from artel.text.records import BadRecord


def is_task(entry: dict[str, Any]) -> bool:
    """True for a row of the export; rows of JSON-MIN are read as other rows with spans are."""
    return isinstance(entry.get("data"), dict) and isinstance(entry.get("annotations"), list)


def annotated_spans(entry: dict[str, Any], field: str) -> tuple[str, list[Span] | None]:
    """(text, spans) of a task, by the annotation that is called ground truth, else the first that was not cancelled.

    Without an annotation spans are None. Raises BadRecord.
    """
    data = entry["data"]
    texts = [name for name, value in data.items() if isinstance(value, str)]
    name = field if field in texts else texts[0] if len(texts) == 1 else None
    if name is None:
        what = f"its data has {', '.join(data) or 'nothing'}"
        raise BadRecord("no_text", f"{what}; write field: NAME of the text")
    text = data[name]
    done = [each for each in entry["annotations"] if isinstance(each, dict) and not each.get("was_cancelled")]
    if not done:
        return text, None
    chosen = next((each for each in done if each.get("ground_truth")), done[0])
    results = enumerate(chosen.get("result") or [])
    return text, [span for number, result in results for span in _spans(result, text, f"result[{number}]")]


def _spans(result: Any, text: str, path: str) -> list[Span]:
    """The spans of a result; none of one that marks nothing (a relation, a choice for the whole text)."""
    value = result.get("value") if isinstance(result, dict) else None
    labels = value.get("labels") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(labels, list) or not labels:
        return []
    start, end, marked = value.get("start"), value.get("end"), value.get("text")
    if not isinstance(start, int) or not isinstance(end, int) or not all(isinstance(label, str) for label in labels):
        raise BadRecord("no_span", f"{path} has no start, end and labels; export it again as JSON")
    if isinstance(marked, str) and _said(text[start:end]) != _said(marked):
        start, end = _characters(text, start), _characters(text, end)
        if _said(text[start:end]) != _said(marked):
            what = f"{path} marks {marked[:40]!r}, and there stands {text[start:end][:40]!r}"
            raise BadRecord("span_outside", f"{what}; export the task again, or leave it out")
    return [(start, end, label) for label in labels]


def _said(text: str) -> str:
    """A text without its white space: the page that marks spans shows several spaces, and ends of lines, as one."""
    return "".join(text.split())


def _characters(text: str, units: int) -> int:
    """Characters in the first so many UTF-16 units of a text."""
    return len(text.encode("utf-16-le")[: 2 * units].decode("utf-16-le", "ignore"))
