"""Personal data: what is found, what only looks like it, and what becomes of documents."""

import json
from collections import Counter
from pathlib import Path

import pytest

from artel.config import DataConfig, PiiConfig
from artel.errors import InputError
from artel.text import Ledger, read_documents
from artel.text.cleaning.pii import KINDS, find_pii, mask_pii

pytest.importorskip("phonenumbers")
ALL = list(KINDS)


def found(text, kinds=ALL):
    return [(kind, text[start:end]) for start, end, kind in find_pii(text, kinds)]


def with_luhn(digits):
    """The digits and their check digit, by the plainest way there is."""
    total = sum(int(digit) * (2 - place % 2) - 9 * (place % 2 == 0 and int(digit) > 4)
                for place, digit in enumerate(reversed(digits)))  # fmt: skip
    return digits + str(-total % 10)


MIR = with_luhn("220070012345678")


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("email", "Пишите на ivan.petrov+spam@mail.example.ru.", "ivan.petrov+spam@mail.example.ru"),
        ("email", "<anna@почта.рф>, не позднее пятницы", "anna@почта.рф"),
        ("email", "mailto:a_b@x-y.co.uk?subject=1", "a_b@x-y.co.uk"),
        ("phone", "Звоните: +7 (495) 123-45-67, доб. 3", "+7 (495) 123-45-67"),
        ("phone", "тел. 8 (812) 555-12-34", "8 (812) 555-12-34"),
        ("phone", "8-800-555-35-35 звонок бесплатный", "8-800-555-35-35"),
        ("phone", "моб. 89161234567", "89161234567"),
        ("phone", "(495) 123-45-67", "(495) 123-45-67"),
        ("phone", "Call +44 20 7946 0958 or write", "+44 20 7946 0958"),
        ("phone", "tel:+1-212-736-5000.", "+1-212-736-5000"),
        ("card", "карта 4111 1111 1111 1111, срок 12/27", "4111 1111 1111 1111"),
        ("card", "5555-5555-5555-4444", "5555-5555-5555-4444"),
        ("card", "Amex 3782 822463 10005", "3782 822463 10005"),
        ("card", f"МИР {MIR}", MIR),
        ("ip", "вошёл с 93.184.216.34 в полночь", "93.184.216.34"),
        ("ip", "host 2001:4860:4860:0:0:0:0:8888", "2001:4860:4860:0:0:0:0:8888"),
        ("snils", "СНИЛС 112-233-445 95", "112-233-445 95"),
        ("snils", "СНИЛС: 11223344595", "11223344595"),
        ("inn", "ИНН 500100732259", "500100732259"),
        ("inn", "ИНН/КПП: 7707083893/773601001", "7707083893"),
        ("passport", "паспорт серии 45 08 № 123456, выдан", "45 08 № 123456"),
        ("passport", "Паспорт: серия 45 09, номер 123456, выдан ОВД", "45 09, номер 123456"),
        ("passport", "Паспорт: 4508 123456", "4508 123456"),
    ],
)
def test_what_is_found(kind, text, expected):
    assert found(text) == [(kind, expected)]
    assert found(text, [other for other in ALL if other != kind]) == []


@pytest.mark.parametrize(
    "text",
    [
        "ISBN 978-5-17-080115-2, ISBN-10 5-17-080115-3",
        "ISSN 0378-5955, DOI 10.1000/182, УДК 821.161.1-31",
        "12.05.1995 14:30:00, 1995-05-12T14:30:00.123456Z, 31/12/2020 23:59:59",
        "В 1812 году, 26 августа; с 1861 по 1863 год; 1799–1837, 1828-1910",
        "10 000 000 рублей, 1 234 567,89, 299 792 458 м/с, 3.14159265358979",
        "пункт 4.2.1.3 и раздел 192.168.1.1 главы", "версия 121.0.6167.85", "1.2.3.4 Общие положения",
        "192.168.0.1, 10.0.0.7, 127.0.0.1, 999.1.1.1, 256.256.256.256",
        "std::vector<int> a::b; 12:30:45; aa:bb:cc; 2:30:40:50",
        "заказ 8123456789012, счёт 40817810099910004312, ОГРН 1027700132195, БИК 044525225",
        "карта 4111 1111 1111 1112", "4111.1111.1111.1111", "СНИЛС 112-233-445 96", "ИНН 500100732258",
        "7707083893", "500100732259 штук", "серия 45, номер 12", "паспорт 4550 123456", "0000 0000 0000 0000",
        "@dataclass\ndef f(x): return W@x", "user@localhost, a @ b, @handle", "C = A@B.T",
        "8 и 1234567890123, 89 дней 161234567", "матч закончился 8:1, счёт 11-9 11-7 11-5",
        "+1 балл, +10 очков, +7 градусов", "0123456789", "1234567890", "12345678901", "sha 4111111111111111a",
        "γ = 0,5772156649 0153286060 6512", "1.000.000.000.000", "(1812) 1813-1814", "стр. (123) 45-67",
    ],
)  # fmt: skip
def test_what_only_looks_like_it(text):
    assert found(text) == []


def test_novels_have_none(shared_data):
    """Thirteen megabytes of novels, their years, verse numbers and footnotes: nothing at all is found."""
    texts = {file.name: file.read_text(encoding="utf-8", errors="replace")
             for file in sorted((shared_data / "literature").glob("*.txt"))}  # fmt: skip
    assert sum(map(len, texts.values())) > 5_000_000
    assert {name: found(text) for name, text in texts.items() if found(text)} == {}


def test_masks_are_counted_and_masking_twice_is_masking_once():
    text = "Анна, anna@example.com, 8 (812) 555-12-34; Пётр, petr@example.com."
    changed = Counter()
    masked = mask_pii(text, PiiConfig(mask=ALL), changed)
    assert masked == "Анна, [EMAIL], [PHONE]; Пётр, [EMAIL]."
    assert changed == {"pii_email": 2, "pii_phone": 1}
    assert mask_pii(masked, PiiConfig(mask=ALL), Counter()) == masked
    assert mask_pii(text, PiiConfig(mask=["card"]), Counter()) is text


MAIL = "a.b@example.com"
THOUGHT = {"role": "assistant", "content": f"<think>{MAIL}</think>да"}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "send", "arguments": {"to": [MAIL], "copies": 1}}}]}


@pytest.mark.parametrize(
    ("format", "row", "texts"),
    [
        ("jsonl", {"text": f"пишите {MAIL}"}, ["пишите [EMAIL]"]),
        ("pairs", {"input": f"in {MAIL}", "output": f"out {MAIL}"}, ["in [EMAIL]", "out [EMAIL]"]),
        ("chat", {"messages": [{"role": "user", "content": MAIL}, THOUGHT]}, ["[EMAIL]", "[EMAIL]", "да"]),
        ("chat", {"messages": [{"role": "user", "content": MAIL}, CALL]},
         ["[EMAIL]", "'to': ['[EMAIL]'], 'copies': 1"]),
        ("preference", {"prompt": MAIL, "chosen": f"да {MAIL}", "rejected": f"нет {MAIL}"},
         ["[EMAIL]", "да [EMAIL]", "нет [EMAIL]"]),
    ],
)  # fmt: skip
def test_every_kind_of_record(tmp_path, format, row, texts):
    Path("rows.jsonl").write_text(json.dumps(row))

    def read(pii):
        ledger = Ledger()
        clean = {"pii": pii} if pii else {}
        data = {"sources": [{"path": "rows.jsonl", "format": format}], "clean": clean, "validation": 0.0}
        return [str(document.record) for document in read_documents(DataConfig.model_validate(data), ledger)], ledger

    (plain,), _ = read(None)
    assert MAIL in plain
    (masked,), ledger = read({"mask": True})
    assert MAIL not in masked
    assert all(text in masked for text in texts)
    assert ledger.changes["pii_email"] == len([text for text in texts if "EMAIL" in text])
    (kept,), _ = read({"drop": "card"})
    assert kept == plain
    with pytest.raises(InputError, match="1 pii"):
        read({"mask": "card", "drop": ["email", "phone"]})


def test_what_is_wrong_is_said():
    for pii, says in [({"mask": "all", "drop": "ip"}, "ip cannot be both"), ({}, "mask: all"),
                      ({"mask": "name"}, "'email', 'phone', 'card'")]:  # fmt: skip
        with pytest.raises(ValueError, match=says):
            DataConfig.model_validate({"clean": {"pii": pii}})
