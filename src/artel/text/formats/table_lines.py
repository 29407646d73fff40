"""Lines of a .csv or .tsv file to rows of cells. An unclosed quote never swallows the rows after it.

In .csv a quote at the beginning of a cell quotes it (RFC 4180), as in `csv`, pandas and datasets. Files of .tsv are
written in two ways: like .csv (pandas), or without quoting, where a quote is an ordinary character (GLUE, translation
corpora, `csv.QUOTE_NONE`). `is_quoted` detects which.
"""

from __future__ import annotations

import csv
from collections import deque
from collections.abc import Callable, Iterator

from artel.errors import InputError
from artel.text.records import BadRecord

Cells = list[str] | BadRecord
_FIX = 'close the quote; a quote inside of a text is written twice: ""'
_CHECK_EVERY = 64
"""A row is checked after this many lines, so that an open quote does not read to the end of the file."""
_MAX_READS = 8
"""Maximum average number of times that a line is read. After that a row may have only _CHECK_EVERY lines."""


class TableRows:
    """Iterate over (number of the first line of a row, its cells or a BadRecord). Skips empty lines.

    The first row is the header, with the number of cells of a row. `trusts_quotes()` decides about a quoted text whose
    lines look like rows: True accepts it as a text, like other texts of the file.
    """

    def __init__(
        self,
        lines: Iterator[str],
        origin: str,
        delimiter: str,
        max_characters: int,
        trusts_quotes: Callable[[], bool] = lambda: False,
    ) -> None:
        self._lines = lines
        self._origin = origin
        self._delimiter = delimiter
        self._max_characters = max_characters
        self._trusts_quotes = trusts_quotes
        self._pushed_back: deque[str] = deque()
        self._num_read = self._num_read_again = 0
        self._width = 0
        self.num_quoted = self.num_literal = 0
        """Number of rows that can be read only with quoting, and only without it."""

    def __iter__(self) -> Iterator[tuple[int, Cells]]:
        while (line := self._next_line()) is not None:
            line_number = self._num_read
            if '"' in line:
                for offset, cells in enumerate(self._read_quoted_row(line)):
                    yield line_number + offset, cells
            elif line.strip("\r\n"):
                yield line_number, self._split_cells(line)

    def without_quoting(self) -> Iterator[tuple[int, Cells]]:
        """Yield the rows with quotes as ordinary characters: one row per line."""
        while (line := self._next_line()) is not None:
            if line.strip("\r\n"):
                yield self._num_read, self._split_cells(line)

    def _next_line(self) -> str | None:
        self._num_read_again += bool(self._pushed_back)
        line = self._pushed_back.popleft() if self._pushed_back else next(self._lines, None)
        self._num_read += line is not None
        return line

    def _split_cells(self, line: str) -> list[str]:
        cells = line.rstrip("\r\n").split(self._delimiter)
        self._width = self._width or len(cells)
        return cells

    def _read_quoted_row(self, line: str) -> list[Cells]:
        """Return the row that begins with `line`, or a BadRecord for each lost line."""
        first_line = self._num_read
        row_lines: list[str] = []
        num_like_rows = 0
        is_cut = False

        def are_rows() -> bool:
            # Most lines of this row look like rows: an open quote swallowed them.
            return self._width > 1 and num_like_rows > 1 and 2 * num_like_rows > len(row_lines)

        def lines() -> Iterator[str]:
            nonlocal num_like_rows, is_cut
            next_line: str | None = line
            while next_line is not None:
                row_lines.append(next_line)
                num_like_rows += self._is_row(next_line)
                if len(row_lines) % _CHECK_EVERY == 0:
                    too_often = self._num_read_again > _MAX_READS * (self._num_read + len(self._pushed_back))
                    is_cut = too_often or (are_rows() and not self._trusts_quotes())
                if is_cut:
                    return
                yield next_line
                next_line = self._next_line()

        cells: list[str] = []
        problem = ""
        try:
            cells = next(csv.reader(lines(), delimiter=self._delimiter, strict=True))
        except csv.Error as error:
            problem = str(error)
        if "field limit" in problem:
            origin = f"{self._origin}:{first_line}"
            raise too_long_error(origin, "the row that begins here", self._max_characters) from None
        last_line = first_line + len(row_lines) - 1
        is_swallowing = is_cut or are_rows()
        if problem and is_swallowing:
            self._pushed_back.extendleft(reversed(row_lines[1:]))
            self._num_read = first_line
            self.num_literal += 1
            return [BadRecord("open_quote", f"opens a quote that is never closed; {_FIX}")]
        if is_swallowing and not self._trusts_quotes():
            self.num_literal += 1
            what = f"its quote is closed in line {last_line} only, and the lines up to there are rows"
            return [BadRecord("open_quote", f"line {first_line}: {what}; {_FIX}")] * len(row_lines)
        if "end of data" in problem:
            raise InputError.at(f"{self._origin}:{first_line}", "a quote is opened in this row and never closed", _FIX)
        if problem:
            self.num_literal += len(row_lines) == 1 and self._is_row(line)
            span = f"lines {first_line} to {last_line}: " if last_line > first_line else ""
            what = f"{span}is not csv: {problem}"
            bad_row = BadRecord("bad_row", f'{what}; a quote inside of a text is written twice: ""')
            # With one column, each line may have been a row.
            return [bad_row] * (len(row_lines) if self._width == 1 else 1)
        self._width = self._width or len(cells)
        self.num_quoted += len(cells) == self._width and self._needs_quoting(row_lines, cells)
        return [cells]

    def _is_row(self, line: str) -> bool:
        """True if a line has all cells. A comma in prose is followed by a space, a comma of a table is not."""
        cells = line.rstrip("\r\n").split(self._delimiter)
        return len(cells) == self._width and not any(cell.startswith(" ") for cell in cells[1:])

    def _needs_quoting(self, lines: list[str], cells: list[str]) -> bool:
        literal = self._split_cells(lines[0])
        return len(lines) > 1 or len(literal) != len(cells) or any('"' in cell for cell in cells if cell not in literal)


def is_quoted(rows: TableRows) -> bool:
    """True unless more rows can be read only without quoting than only with it. Reads all rows.

    Only with quoting: quoted cells with a delimiter, line feed or doubled quote. Only without: rows with quotes that
    stay open or are closed in the middle of a cell.
    """
    try:
        for _ in rows:
            pass
    except InputError:  # an open quote at the end, reported by reading
        rows.num_literal += 1
    return rows.num_quoted >= rows.num_literal


def too_long_error(origin: str, subject: str, max_characters: int) -> InputError:
    """Return the error for a line or row that is too long for memory."""
    fix = "close or double the quote, or write a larger data.max_document"
    what = f"{subject} is over {max_characters:,} characters (data.max_document), or its quote is never closed"
    return InputError.at(origin, what, fix)
