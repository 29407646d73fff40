"""The commands of the README and of the pages of its tasks; how to read the table: walks.py."""

from printed import inputs
from printed.walks import SHORT, SMALL_GPT2, SMALL_MODERNBERT, STEPS, WINDOWS, Step, Walk
from printed.walks_objectives import OBJECTIVES

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
            Step("artel report runs/novel-small --html report.html --language ru", leaves="report.html"),
        ),
        needs=(inputs.novel(),),
    ),
    Walk(
        "the run file",
        (
            Step("artel recipes cp tolstoy-scratch run.yaml", leaves="run.yaml"),
            Step("artel config check run.yaml", says="no problems found"),
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
        long=True,
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
        long=True,
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
        long=True,
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
        long=True,
    ),
    *OBJECTIVES,
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
        long=True,
    ),
    Walk(
        "speed and memory",
        (
            Step("artel plan run.yaml", says="fits"),
            Step("artel doctor run.yaml", says="torch"),
            Step("artel train run.yaml profile=true", "train.steps=9", leaves="runs/run/profile/table.txt"),
        ),
        needs=(inputs.run_yaml(),),
        long=True,
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
