"""Benchmarks are not learned: documents that share n-grams with them are dropped, each with the row it shares."""

import json
from pathlib import Path

import pytest

from artel.config import BenchmarkConfig, DataConfig
from artel.config.load import parse_run
from artel.errors import InputError
from artel.preparing import prepare
from artel.preparing.prepare import store_key
from artel.text import BenchmarkIndex, Ledger, read_documents, write_index
from artel.text.decontamination import Ngrams, simplified_words, simplify
from support.runs import refused, succeed, write_run
from support.stores import lines_with_repeats, run_of, stored, tree

QUESTION = "Какой русский писатель начал свой роман словами о том, что все счастливые семьи похожи друг на друга?"
ANSWER = (
    "Лев Николаевич Толстой, в романе о замужней женщине, которая полюбила блестящего офицера Вронского в Петербурге"
)
OTHER = "Совсем другой текст о том, как в лесу росла ёлочка, зимой и летом стройная и зелёная была она одна"


def rows_of(name, rows):
    Path(name).write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows), encoding="utf-8")
    return name


def lines_of(name, texts):
    Path(name).write_text("\n".join(texts), encoding="utf-8")
    return {"path": name, "document": "line"}


@pytest.fixture
def exam():
    rows = [{"id": 1, "q": "Сколько?", "a": "Два."}, {"id": 2, "q": QUESTION, "a": ANSWER}]
    return {"path": rows_of("exam.jsonl", rows), "query": "q", "label": "a"}


def listed(folder):
    return [json.loads(line) for line in (folder / "run" / "contaminated.jsonl").read_text().splitlines()]


def test_texts_are_simplified_as_datatrove_does():
    assert simplify("Ёлка, ЩЁЛК! 3,14 и 42") == "елка, щелк! 0 и 0"
    assert simplified_words("Café «naïve» 漢字 x_1") == ["cafe", "naive", "漢", "字", "x_0"]
    # Position by position as many n-grams as words allow.
    for text in ("one two three four five", "漢字 and words, with 3.5 numbers", "too short"):
        assert Ngrams(4).hashes([text])[0].size == max(0, len(simplified_words(text)) - 3)


def test_a_document_with_a_row_is_dropped_and_the_row_is_named(exam, tmp_path):
    copied = f"На экзамене спросили: «{QUESTION.upper().replace('Е', 'Ё')}» — и никто не ответил."
    answered = f"Ответ был такой: {ANSWER.replace(', ', ' - ')}!"
    short = " ".join(QUESTION.split()[:11])
    source = lines_of("texts.txt", [OTHER, copied, short, answered])
    documents, ledger = stored(tmp_path, data={"sources": [source], "decontaminate": [exam]})
    assert [document.text for document in documents] == [OTHER, short]
    assert ledger["documents"] == {"read": 4, "kept": 2, "dropped": {"contaminated": 2}}
    assert ledger["contamination"] == {"exam.jsonl": {"rows": 2, "too_short": 1, "rows_found": 1, "documents": 2}}
    assert "1 of 2 rows of exam.jsonl in 2 documents (1 rows are too short to be found)" in ledger["notes"][-1]
    first, second = listed(tmp_path)
    assert (first["origin"], first["rows"], first["benchmarks"]) == ("texts.txt:2", ["exam.jsonl:2"], ["exam.jsonl"])
    assert first["words"] == " ".join(simplified_words(QUESTION)[:12])
    assert second["words"] == " ".join(simplified_words(ANSWER)[:12])


def test_question_answer_and_what_lies_across_are_found_by_so_many_words(exam, tmp_path):
    across = f"{' '.join(QUESTION.split()[-6:])} {' '.join(ANSWER.split()[:6])}"
    source = lines_of("texts.txt", [OTHER, QUESTION, ANSWER, across])

    def kept(**more):
        documents, _ = stored(tmp_path, data={"sources": [source], "decontaminate": {"benchmarks": [exam], **more}})
        return [document.text for document in documents]

    assert kept() == [OTHER]
    assert kept(words=13) == [OTHER, across]


def kept_of(tmp_path, sources, benchmarks, **data):
    """(origins of the documents that are kept, the ContaminatedDocument of each other one) of sources of any kind."""
    config = DataConfig.model_validate({"sources": sources, "decontaminate": benchmarks, "validation": 0.0, **data})
    write_index(config, tmp_path / "index")
    index = BenchmarkIndex(tmp_path / "index", config.decontaminate.words)
    dropped = []
    ledger = Ledger(on_contaminated=dropped.append)
    kept = [document.record.origin for document in read_documents(config, ledger, benchmarks=index)]
    assert ledger.total.read == ledger.total.kept + ledger.total.dropped.total()
    return kept, [(item.origin, [index.origins[row] for row in item.benchmark_rows]) for item in dropped]


MESSAGES = [{"role": "user", "content": "Вопрос"}, {"role": "assistant", "content": "Ответ"}]
BAD_TURN = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "Не знаю"}]
ACROSS = [{"role": "user", "content": QUESTION[-40:]}, {"role": "assistant", "content": ANSWER[:60]}]
PREFERENCE = {"prompt": "Вопрос", "chosen": "Ответ", "rejected": "Нет"}


@pytest.mark.parametrize(
    ("format", "good", "bad"),
    [
        ("pairs", {"input": OTHER, "output": OTHER}, {"input": QUESTION, "output": "да"}),
        ("pairs", {"input": OTHER, "output": OTHER}, {"input": "да", "output": ANSWER}),
        ("chat", {"messages": MESSAGES}, {"messages": BAD_TURN}),
        ("chat", {"messages": MESSAGES}, {"messages": [*MESSAGES, *BAD_TURN]}),
        ("chat", {"messages": MESSAGES}, {"messages": ACROSS}),
        ("preference", PREFERENCE, PREFERENCE | {"prompt": QUESTION}),
        ("prompts", {"question": OTHER}, {"question": QUESTION}),
        ("preference", PREFERENCE, PREFERENCE | {"chosen": ANSWER}),
        ("preference", PREFERENCE, PREFERENCE | {"rejected": ANSWER}),
        ("preference", PREFERENCE, PREFERENCE | {"prompt": QUESTION[-40:], "rejected": ANSWER[:60]}),
    ],
)
def test_every_kind_of_record(exam, tmp_path, format, good, bad):
    source = {"path": rows_of("texts.jsonl", [good, bad]), "format": format}
    kept, dropped = kept_of(tmp_path, [source], [exam])
    assert kept == ["texts.jsonl:1"]
    assert dropped == [("texts.jsonl:2", ["exam.jsonl:2"])]


@pytest.mark.parametrize(
    ("benchmark", "place"),
    [
        ("exam.txt", "exam.txt:2"),
        ({"path": "exam.csv", "query": "q", "label": "a"}, "exam.csv:3"),
        ({"path": "nested.json", "query": "in.q", "label": "answers"}, "nested.json[1]"),
        ({"path": "pairs.jsonl", "format": "pairs"}, "pairs.jsonl:1"),
        ({"path": "chat.jsonl", "format": "chat"}, "chat.jsonl:1"),
        ({"path": "squad.json", "format": "squad"}, "squad.json:1 (2)"),
        ({"path": "*.parquet", "query": ["q", "a"]}, "exam.parquet[1]"),
    ],
)
def test_benchmarks_in_any_format(tmp_path, benchmark, place):
    Path("exam.txt").write_text(f"Первая строка\n{QUESTION}\n")
    Path("exam.csv").write_text(f'q,a,n\nСколько?,Два.,1\n"{QUESTION}","{ANSWER}",2\n')
    nested = [{"in": {"q": "Сколько?"}, "answers": ["1"]}, {"in": {"q": QUESTION}, "answers": ["нет", ANSWER]}]
    Path("nested.json").write_text(json.dumps(nested))
    rows_of("pairs.jsonl", [{"input": QUESTION, "output": ANSWER}])
    rows_of("chat.jsonl", [{"messages": [{"role": "user", "content": QUESTION}, *MESSAGES[1:]]}])
    questions = [{"id": str(number), "question": text, "answers": [{"text": "Первый", "answer_start": 0}]}
                 for number, text in enumerate(["?", "Что?", QUESTION])]  # fmt: skip
    paragraph = {"context": "Первый абзац.", "qas": questions}
    Path("squad.json").write_text(json.dumps({"version": "1.1", "data": [{"title": "t", "paragraphs": [paragraph]}]}))
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"q": ["Сколько?", QUESTION], "a": ["Два.", ANSWER]}), "exam.parquet")
    kept, dropped = kept_of(tmp_path, [lines_of("texts.txt", [OTHER, f"... {QUESTION} ..."])], [benchmark])
    assert kept == ["texts.txt:1"]
    assert [origin for origin, _ in dropped] == ["texts.txt:2"]
    assert place in dropped[0][1][0]


def test_given_validation_texts_are_kept(exam, tmp_path):
    """A benchmark may be what a run is judged by."""
    (tmp_path / "held.txt").write_text(QUESTION)
    sources = [lines_of("texts.txt", [OTHER, QUESTION])]
    kept, dropped = kept_of(tmp_path, sources, [exam], validation="held.txt")
    assert kept == ["held.txt:1", "texts.txt:1"]
    assert [origin for origin, _ in dropped] == ["texts.txt:2"]


def test_of_real_exam_questions_those_that_stand_in_a_text_are_found(shared_data, tmp_path):
    """925 questions of XQuAD: all found in their own passages, none in a novel."""
    squad = json.loads((shared_data / "qa" / "xquad.ru.first36.json").read_text())
    passages = [paragraph["context"] for entry in squad["data"] for paragraph in entry["paragraphs"]]
    novel = (shared_data / "literature" / "anna_karenina.txt").read_text().split("\n")[:3000]
    benchmark = {"path": str(shared_data / "qa" / "xquad.ru.first36.json"), "format": "squad"}
    sources = [lines_of("passages.txt", passages), {**lines_of("novel.txt", novel), "name": "novel"}]
    kept, dropped = kept_of(tmp_path, sources, [benchmark])
    assert {origin.partition(":")[0] for origin in kept} == {"novel.txt"}
    assert len(dropped) == len(set(passages))


def test_what_is_wrong_with_benchmarks(exam, tmp_path):
    source = lines_of("texts.txt", [OTHER])
    lines_of("short.txt", ["мало слов"])

    def refusal(benchmarks):
        with pytest.raises(InputError) as error:
            prepare(run_of(tmp_path, data={"sources": [source], "decontaminate": benchmarks}))
        return str(error.value)

    both = refusal(["nowhere.txt", "none/*.jsonl"])
    assert "decontaminate.benchmarks.0" in both
    assert "there is no file nowhere.txt" in both
    assert "no file matches none/*.jsonl" in both
    unnamed = refusal(["exam.jsonl"])
    assert "exam.jsonl:1" in unnamed
    assert "has no field 'text' (it has: id, q, a)" in unnamed
    assert "query: question, label: answer" in unnamed
    assert "has no field 'question'" in refusal({**exam, "query": "question"})
    assert "no row of short.txt has 12 words" in refusal(["short.txt"])
    assert "needs either path or task" in refusal([{"query": "q"}])


def test_the_key_of_the_store_knows_the_benchmarks(exam, tmp_path):
    source = lines_of("texts.txt", [OTHER])

    def key(**data):
        return store_key(run_of(tmp_path, data={"sources": [source], **data}))

    keys = [key(), key(decontaminate=[exam]), key(decontaminate={"benchmarks": [exam], "words": 8})]
    assert key() == keys[0]
    Path("exam.jsonl").write_text(json.dumps({"q": QUESTION, "a": "-"}))
    keys.append(key(decontaminate=[exam]))
    assert len(set(keys)) == 4


@pytest.mark.processes
def test_parts_and_processes_do_not_show(exam, tmp_path):
    text = lines_with_repeats(400, 1).splitlines()
    text[11] = json.dumps({"text": f"раз {QUESTION} два", "set": "set 0"})
    text[301] = json.dumps({"text": ANSWER, "set": "set 1"})
    Path("texts.jsonl").write_text("\n".join(text))
    made = set()
    for name, prepare_keys in (("one", {"workers": 1}), ("many", {"workers": 3, "part": 5000})):
        (tmp_path / name).mkdir()
        data = {"sources": [{"path": "texts.jsonl"}], "max_bad": 0.1, "decontaminate": [exam],
                "dedup": {"lines": "line"}}  # fmt: skip
        run = run_of(tmp_path / name, data=data, prepare=prepare_keys, tokenizer={"train": {"vocab": 400}})
        made.add(tree(prepare(run).folder))
        assert [line["origin"] for line in listed(tmp_path / name)] == ["texts.jsonl:12", "texts.jsonl:302"]
    assert len(made) == 1


@pytest.mark.processes
def test_a_task_of_the_harness(tmp_path):
    """Multiple choice on a file of one's own: the answers are the right choices."""
    pytest.importorskip("lm_eval")
    Path("tasks").mkdir()
    lines = [{"question": "Count:", "choices": [" four", " river"], "answer": 0},
             {"question": QUESTION, "choices": [OTHER, ANSWER], "answer": 1}]  # fmt: skip
    rows_of("tasks/books.jsonl", lines)
    Path("tasks/books.yaml").write_text(
        f"task: books\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/tasks/books.jsonl}}}}\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{question}}'\ndoc_to_choice: choices\n"
        "doc_to_target: answer\nmetric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
    )
    sources = [lines_of("texts.txt", [OTHER, ANSWER, QUESTION])]
    data = {"sources": sources, "validation": 0, "decontaminate": ["tasks/books.yaml"]}
    file = write_run(tmp_path / "run.yaml", data=data, tokenizer={"train": {"vocab": 270}})
    env = {"HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "ARTEL_CACHE": str(tmp_path / "cache")}
    succeed("prepare", file, env=env)
    rows = [(line["origin"], line["rows"]) for line in listed(tmp_path)]
    assert rows == [("texts.txt:2", ["books[1]"]), ("texts.txt:3", ["books[1]"])]
    file = write_run(tmp_path / "run.yaml", data={"sources": sources, "decontaminate": ["tasks/boks.yaml"]})
    assert "there is no file tasks/boks.yaml" in refused("prepare", file, env=env).stderr


def test_a_name_alone_is_a_file_or_a_task():
    tree = {
        "run": "run",
        "data": {"sources": [{"path": "a.txt"}], "decontaminate": ["arc_easy", "b.jsonl", "c/d", "e/f.yaml"]},
    }
    run = parse_run(tree, {}, {(): "run.yaml"})
    assert run.data.decontaminate.benchmarks == [
        BenchmarkConfig(task="arc_easy"), BenchmarkConfig(path="b.jsonl"), BenchmarkConfig(path="c/d"),
        BenchmarkConfig(task="e/f.yaml"),
    ]  # fmt: skip
