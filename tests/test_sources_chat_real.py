"""Conversations and preferences of real data sets."""

import orjson

from artel.text.formats.chat import read_chat
from artel.text.formats.preferences import read_preferences
from support.reading import documents, read, sides, turns


def test_alpaca_rows_of_a_real_file(shared_data):
    file = shared_data / "chat/identity.json"
    rows = orjson.loads(file.read_bytes())
    records = read(read_chat, file, format="chat", fill={"name": "Artel", "author": "the crew"})
    assert len(records) == len(rows) == 91
    for number, (item, row) in enumerate(zip(records, rows, strict=True)):
        answer = row["output"].replace("{{name}}", "Artel").replace("{{author}}", "the crew")
        assert turns(item) == [("user", row["instruction"]), ("assistant", answer)]
        assert item.origin == f"identity.json[{number}]"
    assert not any("{{" in item.text for item in records)
    assert sum("Artel" in item.text for item in records) > 50


def test_messages_of_a_real_file(shared_data):
    file = shared_data / "chat/messages_demo.jsonl"
    rows = [orjson.loads(line) for line in file.read_bytes().splitlines()]
    records = read(read_chat, file, format="chat")
    assert len(records) == len(rows) == 500
    for number, (item, row) in enumerate(zip(records, rows, strict=True), 1):
        assert [(m.role, m.content, m.trained) for m in item.fields.messages] == [
            (m["role"], "".join(part["value"] for part in m["content"]), m["loss_weight"] > 0) for m in row["messages"]
        ]
        assert item.origin == f"messages_demo.jsonl:{number}"


def test_trees_of_a_real_file(shared_data):
    file = shared_data / "chat/oasst_en_100_trees.jsonl"
    records = read(read_chat, file, format="chat")
    expected = []
    for line in file.read_bytes().splitlines():
        branch, level = [], [orjson.loads(line)["prompt"]]
        while level:
            branch.append(sorted(level, key=lambda reply: reply.get("rank", 99))[0])
            level = branch[-1]["replies"]
        while branch and branch[-1]["role"] == "prompter":
            branch.pop()
        expected.append([m["text"] for m in branch])
    assert [[text for _, text in turns(item)] for item in records] == expected
    assert len(records) == 100
    assert max(map(len, expected)) > 2


def test_russian_instructions_of_a_real_file(shared_data):
    file = shared_data / "chat/ru_instructions.jsonl"
    rows = [orjson.loads(line) for line in file.read_bytes().splitlines()]
    expected = [(row["instruction"], case) for row in rows for case in row["instances"]]
    records = read(read_chat, file, format="chat")
    assert len(records) == len(expected) == 137
    for item, (instruction, case) in zip(records, expected, strict=True):
        question = f"{instruction}\n\n{case['input']}" if case["input"].strip() else instruction
        assert turns(item) == [("user", question), ("assistant", case["output"])]


def test_preferences_of_a_real_file(shared_data):
    file = shared_data / "chat/preferences_demo.json"
    rows = orjson.loads(file.read_bytes())
    records = read(read_preferences, file, format="preference")
    assert len(records) == len(rows) == 300
    roles = {"human": "user", "gpt": "assistant", "system": "system"}
    for item, row in zip(records, rows, strict=True):
        prompt = [(roles[turn["from"]], turn["value"]) for turn in row["conversations"]]
        assert sides(item) == (prompt, row["chosen"]["value"], row["rejected"]["value"])
        assert item.group == "\n\n".join(text for _, text in prompt)
        assert item.text == f"{item.group}\n\n{row['chosen']['value']}\n\n{row['rejected']['value']}"


def test_the_ledger_of_real_files_adds_up(shared_data):
    folder = shared_data / "chat"
    sources = [
        {"path": str(folder / "identity.json"), "format": "chat", "fill": {"name": "Artel", "author": "the crew"}},
        {"path": str(folder / "messages_demo.jsonl"), "format": "chat", "rows": "[:20%]"},
        {"path": str(folder / "oasst_en_100_trees.jsonl"), "format": "chat"},
        {"path": str(folder / "preferences_demo.json"), "format": "preference", "name": "pairs"},
    ]
    kept, ledger = documents(sources=sources, validation=0.2, max_bad=0.2)
    assert ledger.total.read == 91 + 100 + 100 + 300
    assert ledger.total.kept == len(kept) > 500
    assert ledger.sets["pairs"].read == 300
    parts = {}
    for document in kept:
        assert document.split == parts.setdefault(document.record.group, document.split)
    assert set(parts.values()) == {"train", "validation"}
