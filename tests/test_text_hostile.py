"""Texts that are damaged, mislabelled or made to take long: each gives its text, or a reason, and soon."""

import gzip
import random
import struct
import tracemalloc

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from artel.config import CleanConfig
from artel.errors import InputError
from artel.text import html_to_text
from artel.text.cleaning.rules import clean
from artel.text.reading.encodings import decode, detect_encoding, find_lines_in_other_encoding, make_line_check
from artel.text.records import BadRecord
from support.reading import checked, documents, items, read_in_spans, read_texts
from support.stores import stored


@pytest.mark.parametrize("upper", [False, True])
def test_single_sentences_in_three_encodings(shared_data, upper):
    lines = (shared_data / "sentences/ru_sentences.txt").read_text().split("\n")
    lines = [line.upper() if upper else line for line in lines if line.strip()]
    right = total = 0
    for line in random.Random(1).sample(lines, 200):
        for name in ("windows-1251", "koi8-r", "cp866"):
            data = line.encode(name, "ignore")
            if not data.isascii():
                total += 1
                right += decode(data) == data.decode(name)
    assert right >= 0.99 * total


@pytest.mark.parametrize("text", ["А я и ты", "Чта-а-а!!!", "ЧАСТЬ ПЕРВАЯ", "Война и мир", "Глава I"])
@pytest.mark.parametrize("name", ["windows-1251", "koi8-r", "cp866"])
def test_very_short_russian(text, name):
    assert decode(text.encode(name)) == text


@pytest.mark.parametrize("text", ["café au lait", "Füße müssen größer", "naïve Zoë", "“quoted” text"])
def test_western_text_is_not_taken_for_russian(text):
    assert decode(text.encode("cp1252")) == text


def test_a_novel_in_utf_8_with_one_bad_byte_is_named_and_not_guessed_at(shared_data, tmp_path):
    data = (shared_data / "literature/oblomov.txt").read_bytes()
    (tmp_path / "a.txt").write_bytes(data[:500_001] + b"\xff" + data[500_001:])
    with pytest.raises(InputError, match=r"a\.txt: is not utf-8: byte 0xff at 500001"):
        read_texts(tmp_path / "a.txt")
    (tmp_path / "cut.txt").write_bytes(data[:501])  # in the middle of a letter
    with pytest.raises(InputError, match=r"cut\.txt: is not utf-8"):
        read_texts(tmp_path / "cut.txt")


def test_an_encoding_that_is_given_is_taken_strictly(tmp_path):
    (tmp_path / "a.txt").write_bytes("Привет".encode("cp1251"))
    assert read_texts(tmp_path / "a.txt", encoding="windows-1251")[0] == ["Привет"]
    with pytest.raises(InputError, match=r"is not utf-8: byte 0xcf at 0"):
        read_texts(tmp_path / "a.txt", encoding="utf-8")
    for name in ("hex", "zlib", "undefined", "utf-8\0", "nonsense"):
        with pytest.raises(InputError, match=r"data\.sources\.0\.encoding: unknown encoding"):
            read_texts(tmp_path / "a.txt", encoding=name)


def test_a_late_line_in_another_encoding_is_rejected_alone(tmp_path):
    lines = [f"строка {number}" for number in range(60_000)]
    (tmp_path / "a.txt").write_bytes("\n".join(lines).encode() + "\nчужая\n".encode("koi8-r") + "конец".encode())
    texts, ledger = read_texts(tmp_path / "a.txt", document="line", max_bad=0.01)
    assert texts == [*lines, "конец"]
    assert ledger["rejected"][0]["origin"].endswith("a.txt:60001")


def test_json_lines_that_the_parser_refuses_are_told_by_their_reason(tmp_path):
    lines = [
        b'\xef\xbb\xbf{"text": "marked"}', b'{"text": "cr"}\r', b" \t", b"\x1c\xc2\xa0", b'{"text": "\xff"}',
        b'{"text": "a\rb"}', b'{"text":\r"between"}', b'{"text": "\\ud800"}', b'{"text": "last"}',
    ]  # fmt: skip
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    texts, ledger = read_texts(tmp_path / "a.jsonl", max_bad=1.0)
    assert texts == ["marked", "cr", "between", "last"]
    bad = [(each["origin"].rsplit(":", 1)[1], each["reason"]) for each in ledger["rejected"]]
    assert bad == [("5", "unreadable"), ("6", "bad_json"), ("8", "bad_json")]
    assert "byte 0xff at 10" in ledger["rejected"][0]["detail"]


@pytest.mark.parametrize(("pack", "most"), [(gzip.compress, 20_000_000), (zstandard.compress, 300_000_000)])
def test_a_line_that_unpacks_to_more_than_a_document_may_have_stops_the_reading(tmp_path, pack, most):
    file = tmp_path / ("a.jsonl.gz" if pack is gzip.compress else "a.jsonl.zst")
    file.write_bytes(pack(b'{"text": "one"}\n' + b" " * 400_000_000))
    tracemalloc.start()
    with pytest.raises(InputError, match=r"a\.jsonl\.\w+:2: the line is over 1,000,000 bytes"):
        items(file, max_document=1_000_000)
    assert tracemalloc.get_traced_memory()[1] < most
    tracemalloc.stop()


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_the_encoding_of_a_packed_file_is_judged_by_what_is_not_ascii(tmp_path, suffix):
    pack = gzip.compress if suffix == "gz" else zstandard.compress
    lines = [f"line {number}" for number in range(50_000)]
    content = "\n".join([*lines, FOREIGN[0]]).encode("koi8-r")
    (tmp_path / f"a.txt.{suffix}").write_bytes(pack(content))
    assert read_texts(tmp_path / f"a.txt.{suffix}", document="line")[0][-1] == FOREIGN[0]


RUSSIAN = [f"Строка {number}: берег молчит, и никто об этом не спрашивал до самого вечера." for number in range(150)]
ASCII = "".join(f"log {number:06d} worker {number % 7} has finished its part\n" for number in range(26_000))


@pytest.mark.parametrize("encoding", ["windows-1251", "koi8-r", "cp866", "utf-8"])
@pytest.mark.parametrize("kind", ["line", "paragraph", "file", "jsonl", "csv", "spans"])
def test_an_encoding_that_shows_late_is_found(tmp_path, encoding, kind):
    """1.1 MB of ASCII come first: they say nothing about the encoding, and 0.6 % of lost lines would not be refused."""
    late = "\n".join(RUSSIAN)
    content, source = ASCII + late, {"document": kind}
    if kind in ("jsonl", "csv"):
        rows = [*ASCII.splitlines(), *RUSSIAN]
        quoted = (f'{{"text": "{row}"}}' if kind == "jsonl" else f'"{row}"' for row in rows)
        content, source = "\n".join(["text"] * (kind == "csv") + [*quoted]), {"format": kind}
    file = tmp_path / f"a.{'txt' if 'document' in source else kind}"
    file.write_bytes(content.encode(encoding))
    if kind == "spans":
        entries, spans = read_in_spans(file, 200_000, document="line")
        assert (spans, [text for _, text, _, _ in entries[-150:]]) == (6, RUSSIAN)
        return
    texts, ledger = read_texts(file, max_bad=0.01, **source)
    assert ledger["documents"]["dropped"] == {}
    assert "\n".join(texts[-150:]).endswith(late)
    assert ledger["encodings"] == {str(file): {encoding: 1}}


def test_marks_in_the_middle_and_utf_16_without_one(tmp_path):
    two, one = ("\n".join(lines).encode("utf-8-sig") for lines in (RUSSIAN[:2], RUSSIAN[2:3]))
    (tmp_path / "joined.txt").write_bytes(two + b"\n" + one)
    assert read_texts(tmp_path / "joined.txt", document="line")[0] == RUSSIAN[:3]
    (tmp_path / "joined.csv").write_bytes("\ufefftext\na\n\ufeffb\n".encode())
    assert read_texts(tmp_path / "joined.csv", format="csv")[0] == ["a", "b"]
    for encoding in ("utf-16-le", "utf-16-be"):
        for lines in (RUSSIAN, ASCII.splitlines()[:50], ["café “quoted” naïve — text"]):
            (tmp_path / "a.txt").write_bytes("\n".join(lines).encode(encoding))
            assert read_texts(tmp_path / "a.txt", document="line")[0] == lines
    with pytest.raises(BadRecord, match="binary"):
        detect_encoding(struct.pack("<600h", *range(-300, 300)))


@pytest.mark.parametrize(
    ("head", "content_type"),
    [(b"<meta charset=undefined>", ""), (b"<meta charset=hex>", ""), (b"<meta charset=utf-16>", ""),
     (b"", "text/html; charset=idna"), (b"", "text/html; charset=utf-8")],
)  # fmt: skip
def test_a_page_that_lies_about_its_encoding(head, content_type):
    page = head + "<p>Анна Каренина</p>".encode("cp1251")
    assert html_to_text(page, content_type) == "Анна Каренина"


@pytest.mark.parametrize(
    ("page", "text"),
    [
        # Latin-1 means what browsers mean by it.
        (b'<meta http-equiv="Content-Type" content="text/html; charset=iso-8859-1">\x93word\x94 \x96 caf\xe9',
         "“word” – café"),
        (b"<svg><script>a</script><svg><style>b</style></svg></svg><object><object>c</object></object><p>text" * 500,
         "\n".join(["text"] * 500)),
    ],
    ids=["latin-1", "machinery"],
)  # fmt: skip
def test_pages_as_browsers_read_them(page, text):
    assert html_to_text(page) == text


def test_nothing_takes_quadratic_time():
    """A fraction of a second; when quadratic hours, which the limit of a test ends."""
    assert html_to_text(b"<!-- " * 100_000 + b"text").endswith("text")
    assert html_to_text(b"<!-- x -->" * 100_000 + b"text") == "text"
    assert len(clean("a" + " " * 1_000_000 + "b\n", CleanConfig())) == 1_000_002
    assert len(clean("a" + "\n \n" * 300_000 + "b\n \n", CleanConfig())) == 900_002


def test_paths_that_cannot_be(tmp_path):
    for path in ("a" * 5000, "nul\0byte.txt", str(tmp_path / "x.txt" / "deeper")):
        with pytest.raises(InputError, match=r"data\.sources\.0\.path"):
            read_texts(path)


FOREIGN = [
    "Все счастливые семьи похожи друг на друга", "каждая несчастливая семья несчастлива по-своему",
    "Всё смешалось в доме Облонских", "жена узнала, что муж был в связи с бывшею в их доме француженкой",
]  # fmt: skip
FOUR = ["windows-1251", "koi8-r", "cp866", "utf-8"]


def four_encodings(count, main="windows-1251"):
    """Lines, and those of them that are not in the encoding of half of them, by number."""
    lines, foreign = [], {}
    for number in range(1, count + 1):
        encoding = main if number % 2 else FOUR[number // 2 % 4]
        lines.append(f"{FOREIGN[number % 4]}, {number}".encode(encoding))
        if encoding != main:
            foreign[number] = encoding
    return b"\n".join(lines), foreign


@pytest.mark.parametrize("main", FOUR[:3])
@pytest.mark.parametrize("kind", ["line", "jsonl", "csv", "paragraph"])
def test_lines_that_are_not_in_the_encoding_of_their_file_are_counted_and_listed(tmp_path, main, kind):
    content, foreign = four_encodings(300, main)
    if kind == "jsonl":
        content = b"\n".join(b'{"text": "%s"}' % line for line in content.split(b"\n"))
    elif kind == "csv":
        content = b"text\n" + b"\n".join(b'"%s"' % line for line in content.split(b"\n"))
    elif kind == "paragraph":
        content = content.replace(b"\n", b"\n\n")
    source = {"line": {"document": "line"}, "paragraph": {"document": "paragraph"}, "csv": {"format": "csv"}}.get(kind)
    file = tmp_path / {"jsonl": "a.jsonl", "csv": "a.csv"}.get(kind, "a.txt")
    file.write_bytes(content)
    texts, ledger = read_texts(file, max_bad=1.0, **source or {})
    assert texts == [f"{FOREIGN[number % 4]}, {number}" for number in range(1, 301) if number not in foreign]
    assert ledger["documents"]["dropped"] == {"other_encoding": len(foreign)}
    assert ledger["encodings"] == {str(file): {main: 1}}
    line = {"csv": lambda number: number + 1, "paragraph": lambda number: 2 * number - 1}.get(kind, int)
    expected = [(f"{file}:{line(number)}", f"is {encoding}, but the file is {main}; convert it")
                for number, encoding in foreign.items()]  # fmt: skip
    assert [(each["origin"], each["detail"]) for each in ledger["rejected"]] == expected
    with pytest.raises(InputError, match=r"of 300 records .* cannot be used, more than data\.max_bad"):
        read_texts(file, **source or {})


def test_a_document_with_a_line_in_another_encoding_is_named(tmp_path):
    lines = [f"{text}\n".encode("koi8-r") for text in FOREIGN]
    (tmp_path / "a.txt").write_bytes(b"".join([*lines, FOREIGN[0].encode("cp866"), b"\n", *lines]))
    with pytest.raises(InputError, match=r"a\.txt: its line 5 is cp866, but the file is koi8-r; convert it"):
        read_texts(tmp_path / "a.txt")
    assert len(read_texts(tmp_path / "a.txt", encoding="koi8-r")[0]) == 1  # as the message says: it overrules


@pytest.mark.parametrize("encoding", [*FOUR[:3], "windows-1252"])
def test_no_line_of_a_novel_is_taken_for_another_encodings(shared_data, tmp_path, encoding):
    text = (shared_data / "literature/a_hero_of_our_time.txt").read_text()
    if encoding == "windows-1252":
        text = "naïve Zoë “quoted” café – Füße müssen größer, à peine, señor; © ® Ã× · «oui»\n" * 100
    lines = [line.encode(encoding, "ignore") for line in text.split("\n")]
    assert [line for line in lines if make_line_check(encoding)(line)] == []
    short = "— Ф-фу!|Жжжжж|ъъъъъ ъъъъъ|ХХХ|ХХХV|Хэ-хэ-хэ!|Фу, цыц, эй!|Жжжжжжжжжжжжжжжжжж! Ж-ж-ж…"
    if encoding == "windows-1252":
        short = "the café…”|Il est tombé…”|né»…|café”—|«né»…"
    ukrainian = "Вони наділені розумом і совістю. Її ґанок. ЄС і США підписали угоду"
    for line in (*short.split("|"), ukrainian):
        assert make_line_check(encoding)(line.encode(encoding, "ignore")) == "", line


@pytest.mark.parametrize("encoding", [*FOUR[:3], "windows-1252"])
@pytest.mark.parametrize("end", [b"\n", b""])
def test_a_block_has_the_foreign_lines_that_are_found_one_by_one(encoding, end):
    chance = random.Random(encoding)
    words = [*" ".join(FOREIGN).split(), "Ёж", "café", "2024", "", "—", "«ЧАСТЬ»"]
    lines = [
        " ".join(chance.choices(words, k=chance.randrange(8))).encode(chance.choice([*FOUR, encoding]), "ignore")
        for _ in range(2000)
    ]
    expected = {number: other for number, line in enumerate(lines) if (other := make_line_check(encoding)(line))}
    assert len(expected) > 100
    assert find_lines_in_other_encoding(b"\n".join(lines) + end, encoding) == expected


def test_guessed_encodings_are_counted_by_source(tmp_path):
    for name, encoding in (("a.txt", "utf-8"), ("b.txt", "koi8-r"), ("c.txt", "utf-16"), ("d.jsonl", "cp866")):
        text = f'{{"text": "{FOREIGN[0]}"}}' if name == "d.jsonl" else FOREIGN[3]
        (tmp_path / name).write_bytes(text.encode(encoding))
    data = {"sources": [{"path": str(tmp_path / "*.txt"), "name": "texts"},
                        {"path": str(tmp_path / "*.*"), "name": "all"},
                        {"path": str(tmp_path / "b.txt"), "name": "given", "encoding": "koi8-r"},
                        {"path": str(tmp_path / "d.jsonl"), "name": "rows", "rows": "[50%:]"}]}  # fmt: skip
    encodings = documents(**data)[1].to_json()["encodings"]
    assert encodings == {
        "texts": {"koi8-r": 1, "utf-16": 1, "utf-8": 1}, "all": {"cp866": 1, "koi8-r": 1, "utf-16": 1, "utf-8": 1},
        "rows": {"cp866": 1},
    }  # fmt: skip
    (tmp_path / "out").mkdir()
    _, ledger = stored(tmp_path / "out", data={**data, "validation": 0.0})
    assert ledger["encodings"] == encodings


def test_a_tag_of_countless_attributes_is_not_parsed():
    for separator in (b" ", b"/", b"\n"):
        page = b"<p>a<i " + separator.join(b"a%d=1" % number for number in range(200_000)) + b">b"
        with pytest.raises(BadRecord, match=r"has a tag with 200,00\d attributes"):
            html_to_text(page)
    picture = b"<p>a<img class=x src='data:image/png;base64," + b"AB/+ " * 100_000 + b"'>b" + b" word" * 20_000
    assert html_to_text(picture).startswith("ab word word")


@pytest.mark.parametrize("name", ["script", "STYLE"])
def test_what_stands_in_a_script_is_no_tag(name):
    script = "for(i=0;i<n;i++){}" + "'word' , " * 24_000
    for page in (script + "<" * 1_000_001, script):
        assert html_to_text(f"<p>a<{name} type=x>{page}</{name}\n>b<p>c<{name}>x<y</{name}>".encode()) == "ab\nc"


def test_a_window_that_takes_too_much_memory_is_named(tmp_path):
    parameters = zstandard.ZstdCompressionParameters(window_log=31, compression_level=1, write_content_size=0)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    (tmp_path / "a.txt.zst").write_bytes(packer.compress(b"hello\n" * 1000) + packer.flush())
    for source in ({"document": "line"}, {"document": "file"}, {"format": "warc"}):
        with pytest.raises(InputError, match="is packed with a window of over 128 MB; pack it again"):
            read_texts(tmp_path / "a.txt.zst", **source)


@pytest.mark.parametrize("format", ["parquet", "chat", "preference"])
def test_two_columns_of_one_name_are_told_before_anything_is_read(tmp_path, format):
    columns = [pyarrow.array(["a"]), pyarrow.array(["b"])]
    table = pyarrow.Table.from_arrays(columns, names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"a\.parquet has 2 columns 'text'; rename them"):
        checked(tmp_path / "a.parquet", format=format)
