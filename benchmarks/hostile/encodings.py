"""Encodings: bytes that are none, several in one file, names of encodings that are none, and other locales."""

from __future__ import annotations

from typing import Any

from hostile.case import Family, Place, Steps, check, ends, refused, small, works
from hostile.given import given
from hostile.results import ledger, prepared_texts, rejected

family = Family("encodings")

RUSSIAN = "Все счастливые семьи похожи друг на друга, каждая несчастливая семья несчастлива по-своему"
FRENCH = "Longtemps, je me suis couché de bonne heure, à peine ma bougie éteinte"


def lines(text: str, number: int) -> list[str]:
    return [f"{text}, {at}" for at in range(number)]


def reads(name: str, content: bytes, texts: list[str] | None, source_keys: dict[str, Any], place: Place) -> Steps:
    """Refused (`texts` is None), or read as these and no others."""
    place.write(name, content)
    run = place.run(small(name, **source_keys))
    if texts is None:
        yield refused("prepare", run)
        return
    yield works("prepare", run)
    check(prepared_texts(place) == texts, f"{prepared_texts(place)[:3]} is not {texts[:3]}")


def _add(name: str, content: bytes, texts: list[str] | None, file: str = "a.txt", **source_keys: Any) -> None:
    family.add(name, reads, file, content, texts, source_keys)


_LINES = lines(RUSSIAN, 40)
_TEXT = "\n".join(_LINES)
for _encoding in ("utf-8-sig", "utf-16-be", "utf-32", "cp1251", "koi8-r", "cp866"):
    marked = {"utf-16-le": b"\xff\xfe", "utf-16-be": b"\xfe\xff"}.get(_encoding, b"")
    _add(f"lines-of-{_encoding}", marked + _TEXT.encode(_encoding), _LINES, document="line")
_add("mark-alone", b"\xef\xbb\xbf", None)
_add("half-a-unit-of-utf-16", _TEXT.encode("utf-16")[:-1], None)
_add("utf-16-half-letters", b"\xff\xfe" + b"\x00\xd8a\x00" * 60, None)
_add("overlong-utf-8", b"words \xc0\xaf\xe0\x80\xaf of it " * 30, None, encoding="utf-8")
_add("cesu-8", b"words \xed\xa0\xbd\xed\xb8\x80 of it " * 30, None, encoding="utf-8")
_add("byte-of-no-letter", _TEXT.encode() + b"\xff", None)
_add("cut-in-a-letter", _TEXT.encode()[:-1] + "я".encode()[:1], None)
_add("mark-in-the-middle", b"\n".join([*(line.encode() for line in _LINES[:5]), "\ufeffwords".encode()]),
     [*_LINES[:5], "words"], document="line")  # fmt: skip
_add("control-characters-go", b"words\x1b[2J\x07\x08 of it\x00 again and again", ["words[2J of it again and again"],
     encoding="utf-8")  # fmt: skip
_add("signs-of-direction-stay", "words \u202eof it\u202c \u2066again\u2069".encode(),
     ["words \u202eof it\u202c \u2066again\u2069"])  # fmt: skip
_add("ten-thousand-marks-on-a-letter", ("a" + "\u0301" * 10_000).encode(), ["á" + "\u0301" * 9_999])
_add("binary-with-a-head-of-text", b"words of it\n" * 400 + bytes(range(256)) * 40, None)
_add("cp1251-called-utf-8", _TEXT.encode("cp1251"), None, encoding="utf-8")
_add("pages-that-lie", b"<meta charset=utf-7><p>" + b"words +ADw-script+AD4- of it",
     ["words +ADw-script+AD4- of it"], "a.html")  # fmt: skip
_add("page-of-an-encoding-of-no-text", b"<meta charset=zlib><p>words of it", ["words of it"], "a.html")
for _name in ("rot13", "idna", "unicode_escape", "hex", "undefined", "../utf_8", "\x1b[2J"):  # fmt: skip
    _add(f"called-{ascii(_name)[1:-1].replace('/', '-')}", b"print(1) words", None, encoding=_name)


@family.case
def four_in_one_file(place: Place) -> Steps:
    parts = [("utf-8", RUSSIAN), ("cp1251", RUSSIAN), ("koi8-r", RUSSIAN), ("cp1252", FRENCH)]
    content = b"".join("".join(f"{line}\n" for line in lines(text, 75)).encode(of) for of, text in parts)
    place.write("a.txt", content)
    done = yield ends({0, 2}, "prepare", place.run(small("a.txt", document="line"), {"data": {"max_bad": 0.9}}))
    if done.status == 0:
        kept = set(prepared_texts(place))
        right = {line for of, text in parts for line in lines(text, 75)}
        check(kept <= right, f"{len(kept - right)} of {len(kept)} lines are none of the file's")
        check(len(rejected(place)) + ledger(place)["kept"] >= 150, ledger(place))


@family.case
def two_thirds_of_utf_8(place: Place) -> Steps:
    good, bad = lines(RUSSIAN, 200), lines(RUSSIAN, 100)
    place.write("a.txt", b"\n".join([*(each.encode() for each in good), *(each.encode("koi8-r") for each in bad)]))
    done = yield ends({0, 2}, "prepare", place.run(small("a.txt", document="line")))
    if done.status == 0:
        check(prepared_texts(place) == good, prepared_texts(place)[-2:])
        check(len(rejected(place)) == 100, len(rejected(place)))


def _one_rejected(place: Place) -> None:
    check(len(rejected(place)) == 1, rejected(place))


def _only_russian(place: Place) -> None:
    check(prepared_texts(place) == [RUSSIAN], prepared_texts(place))


family.table(
    one_line_of_another=given(
        works("prepare", "run.yaml"), run=[small("a.txt", document="line")], then=_one_rejected,
        files={"a.txt": b"\n".join([*(each.encode() for each in lines(RUSSIAN, 200)), FRENCH.encode("cp1252")])},
    ),
    table_of_cp1251_with_a_byte_of_none=given(
        works("prepare", "run.yaml"), run=[small("a.csv", format="csv")], kept=1, then=_only_russian,
        files={"a.csv": b"id,text\n" + b"\n".join(f'{at},"{RUSSIAN}"'.encode("cp1251") for at in range(99))},
    ),
)  # fmt: skip


def in_locale(environment: dict[str, str | None], place: Place) -> Steps:
    """Russian names and texts where Python's own encoding is another."""
    place.write("слова.txt", _TEXT)
    run = place.run(small("слова.txt", document="line"), name="запуск.yaml")
    done = yield ends({0, 2}, "prepare", run, environment=environment, fresh=True)
    if done.status == 0:
        check(prepared_texts(place) == _LINES, prepared_texts(place)[:2])
    yield refused("prepare", place.run(small("нет.txt")), environment=environment, fresh=True)


family.each("locale-{}", in_locale, {
    "c": {"PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"},
    "posix-ascii": {"PYTHONUTF8": "0", "LC_ALL": "POSIX", "PYTHONIOENCODING": "ascii"},
    "latin-1": {"PYTHONUTF8": "0", "PYTHONIOENCODING": "latin-1"},
    "of-no-land": {"PYTHONUTF8": None, "LC_ALL": "xx_YY.nonsense", "LANG": "\x1b[2J"},
})  # fmt: skip


def half_letter(data: bytes, place: Place) -> Steps:
    """A command line that is no UTF-8."""
    place.take("model")
    yield ends({0, 2}, "generate", "model", "--prompt", data.decode("utf-8", "surrogateescape"), "--max-new-tokens", 3)


family.each("prompt-of-{}", half_letter, {"half-a-letter": b"\xd0", "a-surrogate": b"\xed\xa0\x80",
    "escapes": b"\x1b[2J\x1b]0;x\x07", "a-bell-and-a-forged-line": b"\x07\nartel: FORGED"})  # fmt: skip


family.table(
    standard_input_that_is_no_text=given(
        ends({0, 2}, "generate", "model", "--prompt", "-", "--max-new-tokens", 3, stdin=bytes(range(256))),
        make=lambda place: place.take("model"), run=None,
    )
)  # fmt: skip
for _encoding in ("cp1251", "koi8-r"):
    late = [f"{'a line of the log, ' * 25}{at}" for at in range(2500)]
    _add(f"lines-of-{_encoding}-after-a-megabyte-of-ascii", "\n".join([*late, *_LINES]).encode(_encoding),
         [*late, *_LINES], document="line")  # fmt: skip
