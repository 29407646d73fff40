"""How each printed command is run: which share a folder and in which order, what they read, how they are made small.

A command that is printed in several places is run once. Those that cannot run here name what runs in their place, and
why. A new command in a document needs a line here: the test says which has none.
"""

from __future__ import annotations

from dataclasses import dataclass

from printed import inputs
from printed.inputs import Make


@dataclass(frozen=True)
class Step:
    """One printed command."""

    text: str
    more: str = ""
    """What the test appends: overrides that make it small."""
    leaves: str = ""
    """A file or folder that is there afterwards."""
    says: str = ""
    """What stands in its output."""
    status: int = 0
    """Its exit status."""
    typed: str = ""
    """What is typed while it runs."""
    instead: str = ""
    """What runs in its place."""
    why: str = ""
    """Why the command itself does not run here."""


@dataclass(frozen=True)
class Walk:
    """Commands in the order they are printed, in one working folder."""

    name: str
    steps: tuple[Step, ...]
    needs: tuple[Make, ...] = ()
    """What a user has in the folder before."""
    hub: tuple[str, ...] = ()
    """Models that were downloaded before."""
    before: tuple[str, ...] = ()
    """Commands printed elsewhere whose results these use, as the test types them."""
    deepspeed: bool = False
    """Needs the extra `deepspeed`."""
    long: bool = False
    """Takes a minute or more."""


STEPS = "train.steps=2 train.batch=8 train.compile=off"
SMALL_TEXT = f"tokenizer.train.vocab=400 data.block=32 {STEPS}"
SMALL_GPT2 = f"model.config.n_layer=1 model.config.n_embd=32 model.config.n_head=2 {SMALL_TEXT}"
SMALL_MODERNBERT = (
    "model.config.hidden_size=32 model.config.num_hidden_layers=2 model.config.num_attention_heads=2 "
    f"model.config.intermediate_size=32 {STEPS}"
)
SHORT = f"data.block=128 {STEPS}"
WINDOWS = f"{SHORT} span_qa.stride=16"

README = (
    Walk(
        "a first run",
        (
            Step("artel recipes ls", says="novel-small"),
            Step("artel train novel-small data.sources.0.path=novel.txt", SMALL_GPT2, leaves="runs/novel-small/model"),
            Step("artel report runs/novel-small", says="loss"),
            Step("artel report runs/novel-small --html report.html", leaves="report.html"),
            Step(
                'artel generate runs/novel-small --prompt "Все счастливые семьи" --max-new-tokens 150',
                says="Все счастливые семьи",
            ),
            Step(
                'artel generate novel-small data.sources.0.path=novel.txt --untrained --prompt "Все"',
                SMALL_GPT2,
                says="Все",
            ),
            Step("artel new run.yaml --text novel.txt --learn write --from scratch --time 15min", leaves="run.yaml"),
            Step("artel train run.yaml", f"model.config.model_type=gpt2 {SMALL_GPT2}", leaves="runs/run/model"),
        ),
        needs=(inputs.novel(),),
    ),
    Walk(
        "the run file",
        (
            Step("artel recipes cp tolstoy-scratch run.yaml", leaves="run.yaml"),
            Step("artel config check run.yaml", says="learning_rate"),
            Step("artel config explain train", says="train.learning_rate"),
            Step(
                "artel train run.yaml train.learning_rate=3e-4 model.config.n_layer=4",
                SMALL_GPT2,
                leaves="runs/tolstoy-scratch/model",
            ),
        ),
    ),
    Walk(
        "your own texts",
        (Step("artel prepare run.yaml", says="tokens"),),
        needs=(inputs.run_yaml(),),
    ),
    Walk(
        "masked models",
        (
            Step(
                "artel train ruroberta-mlm 'data.sources.0.path=texts/*.txt' model.from=FOLDER --nproc 2",
                SHORT,
                leaves="runs/ruroberta-mlm/model",
            ),
            Step('artel generate runs/ruroberta-mlm --prompt "Все счастливые<mask> похожи друг на друга."', says="Все"),
            Step("artel export runs/ruroberta-mlm exported --to onnx", leaves="exported/model.onnx"),
        ),
        needs=(inputs.texts, inputs.roberta()),
    ),
    Walk(
        "commas",
        (
            Step(
                "artel train comma-restoration data.sources.0.path=sentences.txt",
                f"{SMALL_MODERNBERT} tokenizer.train.vocab=400 data.block=96",
                leaves="runs/comma-restoration/model",
            ),
            Step('artel generate runs/comma-restoration --prompt "Он сказал что не придёт но пришёл."'),
        ),
        needs=(inputs.sentences,),
    ),
    Walk(
        "the script for CPUs",
        (Step("artel train masked_lm_cpu.json", SHORT),),
        needs=(inputs.masked_lm_json,),
    ),
    Walk(
        "questions",
        (
            Step(
                "artel train nq-dummy", f"data.sources.0.documents=200 {SMALL_MODERNBERT}", leaves="runs/nq-dummy/model"
            ),
            Step(
                'artel generate runs/nq-dummy --prompt "where is Anna ?" '
                '--context "news : Boris sings by the river . Anna is in the forest ."',
                says="class:",
            ),
            Step(
                "artel train squad-ru data.sources.0.path=train.json data.validation=dev.json model.from=FOLDER",
                WINDOWS,
                leaves="runs/squad-ru/model",
            ),
            Step(
                "artel train nq-bert data.sources.0.path=simplified-nq-train.jsonl --nproc 8",
                f"{WINDOWS} --nproc 2",
                leaves="runs/nq-bert/model",
            ),
            Step("artel config convert neuro_test_bert.cfg > run.yaml", leaves="run.yaml"),
        ),
        needs=(
            inputs.squad("train.json", "dev.json"),
            inputs.natural_questions("simplified-nq-train.jsonl"),
            inputs.neuro_cfg,
            inputs.bert(),
        ),
        hub=("google-bert/bert-base-uncased",),
    ),
    Walk(
        "chat",
        (
            Step("artel data show chat-lora data.sources.0.path=conversations.jsonl model.from=FOLDER", says="⟦"),
            Step(
                "artel train chat-lora data.sources.0.path=conversations.jsonl model.from=FOLDER",
                STEPS,
                leaves="runs/chat-lora/model/adapter_config.json",
            ),
            Step("artel chat runs/chat-lora", typed="Who are you?\n/set new_tokens 3\nYes?\n", says="new_tokens = 3"),
            Step("artel chat runs/chat-lora --script questions.txt --json", says='"answers"'),
            Step("artel chat runs/chat-lora --script questions.txt --tools functions.py", says="> "),
            Step(
                "artel generate runs/chat-lora --prompts questions.txt --out answers.jsonl --max-new-tokens 20",
                leaves="answers.jsonl",
            ),
            Step("artel export runs/chat-lora merged --merge", leaves="merged/config.json"),
            Step("artel config convert impruver.yaml > run.yaml", leaves="run.yaml"),
        ),
        needs=(
            inputs.conversations,
            inputs.chat_model(tools=True),
            inputs.impruver,
            inputs.written("docs/chat.md", "functions.py"),
        ),
    ),
    Walk(
        "multimodal",
        (
            Step(
                "artel train chat-lora data.sources.0.path=conversations.jsonl model.from=VLM run=runs/vlm",
                STEPS,
                leaves="runs/vlm/model/adapter_config.json",
            ),
            Step("artel chat runs/vlm", typed="Who are you?\n"),
            Step("artel export runs/vlm whole --merge", leaves="whole/config.json"),
            Step(
                "artel train chat-lora data.sources.0.path=conversations.jsonl model.from=VLM model.lora=null "
                "run=runs/vlm-full",
                STEPS,
                leaves="runs/vlm-full/model/config.json",
            ),
        ),
        needs=(inputs.conversations, inputs.image_model("VLM")),
    ),
    Walk(
        "longer context",
        (
            Step(
                "artel train chat-lora data.sources.0.path=conversations.jsonl model.from=FOLDER model.rope.type=yarn "
                "model.rope.factor=4 run=runs/long",
                STEPS,
                leaves="runs/long/model/base_config.json",
            ),
            Step("artel export runs/long long --merge", leaves="long/config.json"),
        ),
        needs=(inputs.conversations, inputs.chat_model()),
    ),
    Walk(
        "preferences",
        (
            Step(
                "artel train dpo data.sources.0.path=preferences.jsonl model.from=FOLDER",
                f"{SHORT} train.micro_batch=8",
                leaves="runs/dpo/model",
            ),
            Step(
                "artel train dpo data.sources.0.path=rated.jsonl model.from=FOLDER preference.loss=kto",
                f"{SHORT} train.micro_batch=8 run=runs/kto",
                leaves="runs/kto/model",
            ),
        ),
        needs=(inputs.preferences, inputs.chat_model()),
    ),
    Walk(
        "classification",
        (
            Step(
                "artel train classify-ru data.sources.0.path=reviews.csv model.from=FOLDER",
                SHORT,
                leaves="runs/classify-ru/model",
            ),
            Step(
                "artel train classify-ru data.sources.0.path=reviews.csv model.from=runs/ruroberta-mlm/model",
                f"{SHORT} run=runs/after-masked",
                leaves="runs/after-masked/model",
            ),
            Step(
                "artel train classify-ru data.sources.0.path=topics.jsonl model.from=FOLDER "
                "checkpoint.best=tuned_macro_f1",
                f"{SHORT} run=runs/topics",
                leaves="runs/topics/model/thresholds.json",
            ),
            Step(
                "artel train classify-ru data.sources.0.path=pairs.csv data.sources.0.second=other model.from=FOLDER",
                f"{SHORT} run=runs/pairs",
                leaves="runs/pairs/model",
            ),
            Step('artel generate runs/classify-ru --prompt "Прекрасный фильм, смотрел два раза."', says="хорошо"),
            Step("artel evaluate runs/classify-ru --data test.csv", says="macro f1"),
            Step("artel report runs/classify-ru", says="true labels and predicted ones"),
        ),
        needs=(inputs.reviews, inputs.texts, inputs.roberta()),
        before=(f"artel train ruroberta-mlm 'data.sources.0.path=texts/*.txt' model.from=FOLDER {SHORT}",),
    ),
    Walk(
        "rewards",
        (
            Step(
                "artel train reward data.sources.0.path=preferences.jsonl model.from=FOLDER",
                SHORT,
                leaves="runs/reward/model",
            ),
            Step(
                "artel train reward data.sources.0.path=rated.jsonl model.from=FOLDER checkpoint.best=outcome_accuracy",
                f"{SHORT} run=runs/outcomes",
                leaves="runs/outcomes/model",
            ),
            Step('artel generate runs/reward --prompt "What is 3 and 1?" --context "It is 4."'),
            Step(
                'artel generate runs/chat-lora --prompt "What is 3 and 1?" --best-of 4 --reward runs/reward',
                "--max-new-tokens 8",
                says="the best of 4",
            ),
            Step(
                "artel generate runs/chat-lora --prompts questions.txt --out best.jsonl --best-of 4 --reward "
                "runs/reward",
                "--max-new-tokens 8",
                leaves="best.jsonl",
            ),
        ),
        needs=(inputs.preferences, inputs.conversations, inputs.chat_model()),
        before=(f"artel train chat-lora data.sources.0.path=conversations.jsonl model.from=FOLDER {STEPS}",),
    ),
    Walk(
        "embeddings",
        (
            Step(
                "artel train embed-ru data.sources.0.path=matches.jsonl model.from=FOLDER",
                f"{SHORT} embedding.matryoshka=[32,16]",
                leaves="runs/embed-ru/model/modules.json",
            ),
            Step('artel generate runs/embed-ru --prompt "Where is Anna?" --json', says="embedding"),
            Step("artel evaluate runs/embed-ru", says="ndcg"),
            Step("artel data mine runs/embed-ru matches.jsonl hard.jsonl --negatives 4", leaves="hard.jsonl"),
            Step(
                "artel train embed-ru data.sources.0.path=train.json model.from=FOLDER",
                f"{SHORT} embedding.matryoshka=[32,16] run=runs/questions",
                leaves="runs/questions/model",
            ),
        ),
        needs=(inputs.matches, inputs.squad("train.json"), inputs.bert()),
    ),
    Walk(
        "reranking",
        (
            Step(
                "artel train rerank data.sources.0.path=matches.jsonl model.from=FOLDER",
                SHORT,
                leaves="runs/rerank/model",
            ),
            Step(
                "artel train rerank data.sources.0.path=train.json model.from=FOLDER rerank.loss=listwise",
                f"{SHORT} run=runs/listwise",
                leaves="runs/listwise/model",
            ),
            Step('artel generate runs/rerank --prompt "where is Anna ?" --context "Anna is in the forest ."'),
            Step("artel evaluate runs/rerank", says="ndcg"),
        ),
        needs=(inputs.matches, inputs.squad("train.json"), inputs.bert()),
    ),
    Walk(
        "texts for texts",
        (
            Step(
                "artel train spelling-ru data.sources.0.path=pairs.csv model.from=FOLDER",
                f"{SHORT} seq2seq.target=24 seq2seq.generate=2 seq2seq.beams=1",
                leaves="runs/spelling-ru/model",
            ),
            Step(
                "artel train spelling-ru data.sources.0.path=pairs.csv model.from=FOLDER model.lora.rank=16 "
                "train.learning_rate=5e-4",
                f"{SHORT} seq2seq.target=24 seq2seq.generate=1 seq2seq.beams=1 run=runs/adapter",
                leaves="runs/adapter/model/adapter_config.json",
            ),
            Step('artel generate runs/spelling-ru --prompt "Он пошол домой"'),
            Step('artel generate runs/spelling-ru --prompt "Он пошол домой" --beams 8'),
            Step("artel generate runs/spelling-ru --prompts texts.txt --out written.jsonl", leaves="written.jsonl"),
            Step("artel evaluate runs/spelling-ru", says="chrf"),
            Step(
                "artel new mine.yaml --text pairs.csv --learn rewrite --from scratch --time 10min", leaves="mine.yaml"
            ),
            Step(
                "artel train mine.yaml tokenizer.train.vocab=400",
                f"{SHORT} train.budget=null seq2seq.target=24 seq2seq.generate=2",
                leaves="runs/mine/model",
            ),
        ),
        needs=(inputs.labeled("pairs.csv"), inputs.inputs_alone("texts.txt"), inputs.t5()),
    ),
    Walk(
        "names and tags",
        (
            Step(
                "artel train ner-ru data.sources.0.path=names.jsonl model.from=FOLDER",
                SHORT,
                leaves="runs/ner-ru/model",
            ),
            Step('artel generate runs/ner-ru --prompt "Анна Каренина приехала в Москву."'),
            Step('artel generate runs/ner-ru --prompt "Анна Каренина приехала в Москву." --json', says='"entities"'),
            Step("artel evaluate runs/ner-ru", says="macro f1"),
            Step("artel data show runs/ner-ru --count 1", says="→PER⟧"),
            Step(
                "artel train ner-ru data.sources.0.path=train.conll data.sources.0.format=conll "
                "data.validation=dev.conll model.from=FOLDER",
                f"{SHORT} run=runs/conll",
                leaves="runs/conll/model",
            ),
            Step(
                "artel train ner-ru data.sources.0.path=ru.conllu data.sources.0.format=conll "
                "data.sources.0.kind=words checkpoint.best=accuracy model.from=FOLDER",
                f"{SHORT} run=runs/words",
                leaves="runs/words/model",
            ),
        ),
        needs=(inputs.names, inputs.bert()),
    ),
    Walk(
        "evaluating models",
        (
            Step("artel evaluate runs/tolstoy runs/tolstoy-finetune --data novel.txt", says="runs/tolstoy-finetune"),
            Step("artel evaluate runs/squad-ru --data dev.json --predictions answers.json", leaves="answers.json"),
            Step(
                "artel evaluate runs/tolstoy --tasks lambada_openai --json",
                "--task-folder tasks",
                says="lambada_openai",
            ),
            Step("artel evaluate runs/tolstoy --tasks counting.yaml", says="counting: acc"),
        ),
        needs=(
            inputs.novel(),
            inputs.own_task,
            inputs.run_yaml(),
            inputs.squad("train.json", "dev.json"),
            inputs.bert(),
            inputs.gpt2("GPT2"),
            inputs.task,
        ),
        before=(
            "artel train run.yaml run=runs/tolstoy",
            f"artel train tolstoy-finetune data.sources.0.path=novel.txt data.sources.0.document=line model.from=GPT2 "
            f"{STEPS} data.block=32",
            f"artel train squad-ru data.sources.0.path=train.json model.from=FOLDER {WINDOWS}",
        ),
    ),
    Walk(
        "speed and memory",
        (
            Step("artel plan run.yaml", says="fits"),
            Step("artel doctor run.yaml", says="torch"),
            Step(
                "artel bench train",
                "--steps 1 --rounds 1 --batch 1 --length 16 --time-limit 1",
                says="tokens/s",
            ),
            Step("artel train run.yaml profile=true", "train.steps=9", leaves="runs/run/profile/table.txt"),
        ),
        needs=(inputs.run_yaml(),),
    ),
    Walk(
        "several processes",
        (
            Step("artel train run.yaml --nproc 2", leaves="runs/run/model"),
            Step(
                "artel train run.yaml --nproc 8 parallel.data=fsdp parallel.tensor=2",
                "--nproc 2 run=runs/split",
                leaves="runs/split/model",
            ),
        ),
        needs=(inputs.run_yaml(),),
    ),
    Walk(
        "a layout beside one process",
        (Step("artel doctor run.yaml --parallel --nproc 4 parallel.pipeline=2", "--nproc 2"),),
        needs=(inputs.run_yaml(),),
    ),
    Walk(
        "other launchers and several hosts",
        (
            Step(
                "torchrun --nproc-per-node 2 -m artel train run.yaml", "run=runs/torchrun", leaves="runs/torchrun/model"
            ),
            Step(
                "artel train run.yaml --nnodes 1:4 --rdzv-endpoint node1:29500 --max-restarts 3",
                "--rdzv-endpoint 127.0.0.1:{port} run=runs/hosts",
                leaves="runs/hosts/model",
            ),
            Step("artel launch slurm run.yaml --nodes 2 --gpus 8 --time 12:00:00 --dry-run", says="#SBATCH --nodes=2"),
        ),
        needs=(inputs.run_yaml(),),
    ),
)
