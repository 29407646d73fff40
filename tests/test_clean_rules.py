"""Optional cleaning rules: what each removes, drops and keeps, and that the ledger says so."""

import re
import sys
import sysconfig
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from artel.config import CleanConfig, DataConfig, Overrides
from artel.config.load import parse_run
from artel.errors import InputError
from artel.preparing.prepare import store_key
from artel.text import Ledger, read_documents
from artel.text.cleaning import quality
from artel.text.cleaning.quality import drop_reason, ngram_fractions, repeated_fraction, symbol_fraction
from artel.text.cleaning.rules import clean, drop_lines
from artel.text.dedup.exact import RepeatedUnits
from artel.text.formats.chat import build_record
from artel.text.records import Conversation, Message, Pair, Question, Record

GOPHER = {2: 0.2, 3: 0.18, 4: 0.16, 5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.1}
RECOMMENDED = {
    "symbols": {"symbols": 0.4},
    "repeated_lines": {"repeated_lines": 0.2},
    "repeated_paragraphs": {"repeated_paragraphs": 0.2},
    "repeated_ngrams": {"repeated_ngrams": GOPHER},
    "language": {"languages": ["ru"]},
}

PROSE = (
    "Все счастливые семьи похожи друг на друга, каждая несчастливая семья несчастлива по-своему. Всё смешалось в доме "
    "Облонских. Жена узнала, что муж был в связи с бывшею в их доме француженкою-гувернанткой, и объявила мужу, что не "
    "может жить с ним в одном доме. Положение это продолжалось уже третий день и мучительно чувствовалось и самими "
    "супругами, и всеми членами семьи, и домочадцами."
)
ENGLISH = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a "
    "wife. However little known the feelings or views of such a man may be on his first entering a neighbourhood."
)
CODE = (
    'def area(sides: list[float]) -> float:\n    """In m²."""\n    if len(sides) != 2:\n        raise ValueError(sides)'
)


def why(text, **rules):
    return drop_reason(Record(text, "file:1", "set"), CleanConfig.model_validate(rules))


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("end of a page\n\fNext page", "end of a page\n\nNext page"),  # pdftotext
        ("one page\fNext page", "one page\nNext page"),
        ("a line\vNext line", "a line\nNext line"),  # Word
        ("a line\x85Next line", "a line\nNext line"),
        ("a\x07b\x1bc", "abc"),
    ],
)
def test_control_characters_that_end_a_line_do_not_join_words(text, want):
    assert clean(text, CleanConfig()) == want


@pytest.mark.parametrize(
    ("reason", "rules", "dropped", "kept"),
    [
        ("too_long", {"maximum": 10}, "12345678901", "1234567890"),
        ("symbols", {"symbols": 0.4}, "| --- | *** | ___ |", CODE),
        ("document_filter", {"drop_documents": "(?i)^lorem ipsum"}, "Text\nLorem ipsum dolor", "the words lorem ipsum"),
        ("document_filter", {"drop_documents": r"\A(?![\s\S]*[а-я])"}, "latin\nonly", "latin\nи"),
        ("repeated_lines", {"repeated_lines": 0.2}, f"{PROSE}\n{ENGLISH}\n{ENGLISH}\n{ENGLISH}", f"{PROSE}\n{ENGLISH}"),
        ("repeated_paragraphs", {"repeated_paragraphs": 0.2}, f"{PROSE}\n\n{PROSE}", PROSE.replace(". ", ".\n\n")),
        ("repeated_ngrams", {"repeated_ngrams": GOPHER}, "buy cheap tea now " * 20, PROSE),
        ("repeated_ngrams", {"repeated_ngrams": {10: 0.1}}, f"{ENGLISH} So. {ENGLISH}", f"{ENGLISH} {PROSE}"),
        ("language", {"languages": ["ru", "uk"]}, ENGLISH, PROSE),
        ("language", {"languages": "en"}, PROSE, ENGLISH),
    ],
)
def test_each_rule_drops_one_text_and_keeps_another(reason, rules, dropped, kept):
    assert why(dropped, **rules) == reason
    assert why(kept, **rules) is None
    assert why(dropped) is None  # nothing is on by itself


def test_shares_are_of_visible_characters():
    assert symbol_fraction("a1! \n\t") == 1 / 3
    assert symbol_fraction("") == symbol_fraction(" \n\u00ad") == 0.0
    assert symbol_fraction("हिन्दी") == 0.0  # its vowels are marks
    assert symbol_fraction("٣😀") == 0.5
    assert symbol_fraction("!?" + "a" * (3 << 20)) == 2 / (2 + (3 << 20))  # measured piece by piece


def test_repeated_share_counts_all_after_the_first():
    assert repeated_fraction(["aa", "bb", " aa", "", ""]) == 2 / 6
    assert repeated_fraction([]) == repeated_fraction([" "]) == 0.0


def test_ngram_shares_by_hand():
    assert ngram_fractions("a b c a b d a b".split(), [2, 3]) == {2: 6 / 8, 3: 0.0}
    assert ngram_fractions("ha ha ha ha".split(), [2]) == {2: 1.0}  # each character once
    # Equally frequent: the longest counts.
    assert ngram_fractions("x y long words x y long words".split(), [2])[2] == 2 * 9 / 22
    assert ngram_fractions("1 2 3 4 5 - 1 2 3 4 5".split(), [5, 6, 12]) == {5: 5 / 11, 6: 0.0, 12: 0.0}
    assert ngram_fractions([], [2]) == {2: 0.0}


@given(words=st.lists(st.sampled_from(["a", "bb", "ccc"]), max_size=30), length=st.integers(2, 7))
@settings(max_examples=300)
def test_ngram_shares_are_those_of_a_plain_count(words, length):
    places = range(len(words) - length + 1)
    grams = [tuple(words[place : place + length]) for place in places]
    if length >= 5:
        chosen = [place for place in places if grams[place] in grams[:place]]
    else:
        counts = Counter(grams)
        most = max(counts.values(), default=0)
        longest = max((sum(map(len, gram)) for gram in grams if counts[gram] == most), default=0)
        best = [gram for gram in grams if counts[gram] == most and sum(map(len, gram)) == longest]
        chosen = [place for place in places if most > 1 and grams[place] == best[0]]
    covered = {word for place in chosen for word in range(place, place + length)}
    total = sum(map(len, words))
    expected = sum(len(words[word]) for word in covered) / total if total else 0.0
    assert ngram_fractions(words, [length])[length] == pytest.approx(expected)


def test_what_is_too_short_to_be_judged_stays():
    assert why("да да да да да да да да", repeated_ngrams=GOPHER) is None
    assert why("}\n}\n}\n}", repeated_lines=0.0) is None
    assert why("Good morning.", languages=["ru"]) is None


def test_questions_are_never_dropped_by_the_new_rules_and_turns_are_looked_at_together():
    rules = CleanConfig.model_validate({"maximum": 10, "drop_documents": ["."], "languages": ["ru"]})
    fields = Question("1", ENGLISH, ENGLISH, ((0, 2),), "short")
    assert drop_reason(Record(ENGLISH, "file:1", "set", fields), rules) is None
    turns = Conversation((Message("user", "How are you?"), Message("assistant", "Buy now!")))
    record = build_record(turns, "file:1", "set")
    assert drop_reason(record, CleanConfig(drop_documents=["Buy"])) == "document_filter"
    assert drop_reason(record, CleanConfig(drop_documents=["Sell"])) is None


@pytest.mark.parametrize("encoding", ["windows-1251", "windows-1252", "latin-1"])
def test_mojibake_is_repaired_and_good_text_left(encoding):
    good = "Привет, мир! Как дела?"
    counted = Counter()
    once = clean(f"{PROSE}\n{good.encode().decode(encoding)}", CleanConfig(mojibake=True), counted)
    assert once == f"{PROSE}\n{good}"
    assert counted == {"mojibake_repaired": 1}
    counted.clear()
    for text in (PROSE, ENGLISH, "naïve café — Ångström", once):
        assert clean(text, CleanConfig(mojibake=True), counted) == text
    assert not counted


def test_what_is_not_seen_is_removed_and_letters_keep_their_joiners():
    rules = CleanConfig(invisible=True)
    assert clean("сло\u00adво\u200b \u200eabc\u2060\u202e", rules) == "слово abc"
    assert clean("e\u200b\u0301", rules) == "é"  # what comes together is composed
    for text in ("می\u200cخواهم", "👩\u200d💻", "क\u094d\u200dष", "❤\ufe0f"):
        assert clean(text, rules) == text


def test_lines_are_dropped_by_expressions_and_counted():
    rules = CleanConfig(drop_lines=[r"^\d+$", "(?i)cookies"])
    counted = Counter()
    text = "First\n  12  \n\n\nWe use COOKIES here\n\nSecond 12"
    assert drop_lines(text, rules, counted) == "First\n\n\n\nSecond 12"
    assert counted == {"lines_dropped": 2}
    assert drop_lines("nothing\n to drop", rules, counted) == "nothing\n to drop"


@pytest.mark.parametrize(
    "text",
    [
        "    for name in names:\n        print(name)\n\n\n\n\n    return None",
        "Hard break,  \nsecond line.",
        "\tif ready:\n\t\tgo()",
        "table = [1,\n         2]   # three   spaces",
        "\n\n  indented",
        "a\u00a0b \u2003 c",
    ],
)
def test_a_text_is_kept_letter_by_letter(text):
    changed = Counter()
    assert clean(f"{text}\n", CleanConfig(), changed) == text
    assert changed == {}
    assert clean(f"{text} \t\n\n".replace("\n", "\r\n"), CleanConfig(), changed) == text
    assert changed == {"line_ends_unified": 1, "trailing_space_removed": 1}


def test_what_each_rule_changes_is_counted():
    changed = Counter()
    rules = CleanConfig(invisible=True)
    assert clean("e\u0301\x00\u00ad\ud800", rules, changed) == "é\ufffd"
    names = ["control_removed", "invisible_removed", "surrogates_replaced", "unicode_normalized"]
    assert changed == dict.fromkeys(names, 1)


@pytest.mark.parametrize("unit", ["line", "paragraph"])
def test_repeated_units_go_within_and_across_texts(unit):
    units, counted = RepeatedUnits(unit), Counter()
    gap = "\n" if unit == "line" else "\n\n"
    boilerplate = "Подпишитесь на нашу рассылку, чтобы ничего не пропустить"
    first = gap.join(["Да.", boilerplate, "Да.", PROSE, f"  {boilerplate} "])
    assert units.remove_repeats(first, counted) == gap.join(["Да.", boilerplate, "Да.", PROSE])
    assert units.remove_repeats(gap.join([ENGLISH, boilerplate]), counted) == ENGLISH
    assert units.remove_repeats(boilerplate, counted) == ""
    assert counted == {f"{unit}s_repeated": 3}
    untouched = f"One{gap}\n\n\nTwo"
    assert units.remove_repeats(untouched, counted) == untouched


def read(tmp_path, texts, **data):
    (tmp_path / "a.txt").write_text("\n\n".join(texts))
    source = {"path": str(tmp_path / "a.txt"), "document": "paragraph"}
    ledger = Ledger()
    config = DataConfig.model_validate({"sources": [source], "validation": 0.0, **data})
    kept = [document.record.text for document in read_documents(config, ledger)]
    ledger.check()
    return kept, ledger.to_json()


def test_the_ledger_accounts_for_what_was_dropped_and_changed(tmp_path):
    mojibake = "Привет, мир!".encode().decode("windows-1251", "replace")
    texts = [PROSE, f"Page 7\n{ENGLISH}", "#$%^&*", mojibake, f"{PROSE}\nnew", "Page 8", f"{ENGLISH}\n#"]
    clean_rules = {"symbols": 0.5, "mojibake": True, "drop_lines": r"^Page \d+$"}
    kept, ledger = read(tmp_path, texts, clean=clean_rules, dedup={"lines": "line"})
    assert kept == [PROSE, ENGLISH, "Привет, мир!", "new", "#"]
    assert ledger["documents"] == {"read": 7, "kept": 5, "dropped": {"empty": 1, "symbols": 1}}
    assert ledger["changed"] == {"lines_dropped": 1, "lines_repeated": 2, "mojibake_repaired": 1}
    assert ledger["parts"]["train"]["characters"] == sum(map(len, kept))
    kept, ledger = read(tmp_path, [*texts, f"{PROSE}\n."], clean={"minimum": 5}, dedup={"lines": "paragraph"})
    assert ledger["documents"]["kept"] == 8  # its paragraphs are the documents: none is repeated
    kept, ledger = read(tmp_path, [PROSE, f"{PROSE}\n."], clean={"minimum": 5}, dedup={"lines": "line"})
    assert kept == [PROSE]
    assert ledger["documents"]["dropped"] == {"repeated": 1}
    assert ledger["changed"] == {}  # of kept documents only


def test_pairs_keep_their_lines(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"input": "one\\ndrop", "output": "two\\ndrop"}\n')
    sources = [{"path": str(file), "format": "pairs"}]
    rules = {"clean": {"drop_lines": "drop"}, "dedup": {"lines": "line"}}
    data = DataConfig.model_validate({"sources": sources, "validation": 0.0, **rules})
    assert [document.record.fields for document in read_documents(data, Ledger())] == [Pair("one\ndrop", "two\ndrop")]


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("drop_lines", "['fine', '(open']", "data.clean.drop_lines.1: '(open' is not a valid regular expression: "),
        ("drop_documents", "'a**'", "at character 3"),
        ("drop_documents", "''", "an empty regular expression matches everything"),
        ("symbols", "40", "data.clean.symbols"),
        ("repeated_ngrams", "{1: 0.5}", "1 is not a valid n"),
        ("repeated_ngrams", "{2: 1.5}", "data.clean.repeated_ngrams"),
    ],
)
def test_wrong_values_are_told_when_the_run_file_is_read(key, value, expected):
    tree = {"data": {"sources": [{"path": "a.txt"}]}}
    with pytest.raises(InputError, match=re.escape(expected)):
        parse_run(tree, Overrides.parse([f"data.clean.{key}={value}"]), {(): "run.yaml"})


def test_ngram_limits_come_back_from_a_written_run(tmp_path):
    from artel.config import dump_run, load_run

    tree = {"data": {"sources": [{"path": "a.txt"}], "clean": {"repeated_ngrams": GOPHER, "drop_lines": r"^\s*\*"}}}
    run = parse_run(tree, {}, {(): "run.yaml"})
    (tmp_path / "run.yaml").write_text(dump_run(run))
    assert load_run(str(tmp_path / "run.yaml")).data == run.data
    assert run.data.clean.repeated_ngrams == GOPHER


def test_a_language_nobody_knows_is_told(tmp_path):
    with pytest.raises(InputError, match=r"data\.clean\.languages: klingon: unknown language") as error:
        read(tmp_path, [PROSE], clean={"languages": ["ru", "klingon"]})
    assert "uk" in error.value.problems[0].fix


@pytest.mark.parametrize(
    ("package", "rules", "extra"),
    [("ftfy", {"mojibake": True}, "mojibake"), ("py3langid.langid", {"languages": ["ru"]}, "languages")],
)
def test_a_package_that_is_not_there_is_named_with_its_extra(monkeypatch, tmp_path, package, rules, extra):
    monkeypatch.setitem(sys.modules, package, None)  # what makes Python raise ImportError
    quality._load_identifier.cache_clear()
    with pytest.raises(InputError, match=rf"data\.clean\.{extra}: needs .*\n.*artel-lm\[{extra}\]"):
        read(tmp_path, [PROSE], clean=rules)


def test_rules_are_part_of_what_a_store_is_found_by():
    def key(**rules):
        return store_key(parse_run({"data": {"sources": [{"format": "dummy"}], "clean": rules}}, {}, {(): "run.yaml"}))

    rules = [{}, {"repeated_ngrams": {2: 0.2}}, {"repeated_ngrams": {3: 0.2}}, {"symbols": 0.4}, {"drop_lines": "a"}]
    assert len({key(**each) for each in rules}) == len(rules)


RULES = {
    "mojibake": {"mojibake": True},
    "mojibake alone": {"mojibake": True, "unicode": "none"},
    "invisible": {"invisible": True},
    "invisible NFKC": {"invisible": True, "unicode": "NFKC"},
    "all": {"mojibake": True, "invisible": True, "unicode": "NFKC", "drop_lines": ["^a", "Ð"]},
    "lines": {"drop_lines": [r"^\W*$", "^a", "b$"]},
}
# Pieces that rules act upon, and that come together when one between them goes.
PIECES = st.sampled_from(
    [*"ab \n\t\r.7é!Ã©Ð\x9f\u00ad\u200b\u0301™\x00\ud83dﬁ\u3000😀", "\n\n", "â€", "Привет".encode().decode("cp1251")]
)


@pytest.mark.parametrize("name", RULES)
@given(text=st.one_of(st.text(alphabet=st.characters(), max_size=80), st.lists(PIECES, max_size=25).map("".join)))
@settings(max_examples=250)
@example(text="a0\nÂ 0")  # without its first line, ftfy sees mojibake in the second
def test_any_text_is_cleaned_and_cleaning_twice_is_cleaning_once(name, text):
    rules = CleanConfig.model_validate(RULES[name])
    once = drop_lines(clean(text, rules), rules, Counter())
    again = Counter()
    assert drop_lines(clean(once, rules, again), rules, again) == once
    assert not again


@given(text=st.one_of(st.text(alphabet=st.characters(), max_size=200), st.lists(PIECES, max_size=200).map(" ".join)))
@settings(max_examples=200)
def test_any_text_is_judged_the_same_twice(text):
    for reason, rules in {**RECOMMENDED, "document_filter": {"drop_documents": [r"\d", "x$"]}}.items():
        result = why(text, **rules)
        assert result in (None, "empty", reason)
        assert why(text, **rules) == result


UNITS = st.sampled_from(["x", PROSE, ENGLISH, "\n", "\n\n", " \n \n"])


@pytest.mark.parametrize("unit", ["line", "paragraph"])
@given(texts=st.lists(st.lists(UNITS, max_size=9).map("".join)))
@settings(max_examples=100)
def test_every_unit_of_the_texts_is_still_there_once(unit, texts):
    units = RepeatedUnits(unit)
    gap = r"\n" if unit == "line" else r"\n(?:[^\S\n]*\n)+"
    result = [piece.strip() for text in texts for piece in re.split(gap, units.remove_repeats(text, Counter()))]
    there = {piece.strip() for text in texts for piece in re.split(gap, text)}
    long = [piece for piece in result if len(piece) >= 30]
    assert len(long) == len(set(long))
    assert {piece for piece in there if piece} <= set(result)


@pytest.mark.slow
def test_novels_and_code_stay(shared_data):
    """Measured of 18,450 paragraphs: 36 by symbols (rows of dots), at most 8 by any other rule.

    Of 168 files of Python's library: 25 by n-grams, 9 by repeated lines. A third of each is tried here.
    """
    files = sorted(file for file in (shared_data / "literature").glob("*.txt") if "cp1251" not in file.name)
    parts = [part for file in files for part in re.split(r"\n\s*\n", file.read_text()) if part.strip()]
    paragraphs = [clean(part, CleanConfig()) for part in parts[::3]]
    library = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    code = [file.read_text(errors="replace") for file in library[::3]]
    for reason, rules in RECOMMENDED.items():
        of_code = rules | ({"languages": ["en"]} if "languages" in rules else {})
        assert sum(why(text, **rules) == reason for text in paragraphs) < 0.005 * len(paragraphs), reason
        assert sum(why(text, **of_code) == reason for text in code) < 0.25 * len(code), reason
