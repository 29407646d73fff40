"""The commands in the headers of recipes; how to read the table: walks.py."""

from __future__ import annotations

from printed import inputs
from printed.walks import SMALL_GPT2, SMALL_MODERNBERT, STEPS, WINDOWS, Step, Walk

_GPT2 = "model.config.model_type=gpt2"  # instead of one that artel chooses
_MODERNBERT = f"{SMALL_MODERNBERT} tokenizer.train.vocab=400 data.block=96"
_STUDENT = f"model.config.n_layer=1 model.config.n_embd=32 model.config.n_head=2 {STEPS}"
_EXPERTS = (
    "model.config.num_hidden_layers=2 model.config.hidden_size=32 model.config.num_attention_heads=2 "
    "model.config.num_key_value_heads=2 model.config.head_dim=16 model.config.num_experts=4 "
    "model.config.num_experts_per_tok=2 model.config.moe_intermediate_size=32 model.config.vocab_size=600"
)

RECIPES = (
    Walk(
        "chat-qlora",
        (
            Step("pip install 'artel-lm[quantize]'", "--dry-run --no-index", says="Requirement already satisfied"),
            Step(
                "artel train chat-qlora data.sources.0.path=conversations.jsonl model.from=FOLDER",
                STEPS,
                leaves="runs/chat-qlora/model/adapter_config.json",
            ),
        ),
        needs=(inputs.conversations, inputs.chat_model()),
    ),
    Walk(
        "comma-restoration",
        (
            Step(
                "artel train comma-restoration data.sources.0.path=labeled.csv data.sources.0.format=pairs "
                "data.sources.0.pairs=none",
                _MODERNBERT,
                leaves="runs/comma-restoration/model",
            ),
            Step(
                "artel train comma-restoration data.sources.0.path=sentences.txt "
                "tokenizer.train=null "
                "model.from=ai-forever/ruRoberta-large train.optimizer=adamw train.learning_rate=3e-5",
                f"{STEPS} data.block=96 run=runs/pretrained",
                leaves="runs/pretrained/model",
            ),
        ),
        needs=(inputs.sentences, inputs.labeled("labeled.csv")),
        hub=("ai-forever/ruRoberta-large",),
    ),
    Walk(
        "distillation",
        (
            Step("artel train novel-small data.sources.0.path=book.txt", SMALL_GPT2, leaves="runs/novel-small/model"),
            Step(
                "artel train distill-small data.sources.0.path=book.txt",
                f"{_STUDENT} data.block=32",
                leaves="runs/distill-small/model",
            ),
            Step("artel evaluate runs/distill-small", says="agreement"),
            Step(
                "artel train rugpt-distill 'data.sources.0.path=texts/*.txt'",
                f"{_STUDENT} data.block=64",
                leaves="runs/rugpt-distill/model",
            ),
            Step(
                "artel train rugpt-distill 'data.sources.0.path=texts/*.txt' distill.top_k=null",
                f"{_STUDENT} data.block=64 run=runs/beside",
                leaves="runs/beside/model",
            ),
            Step(
                "artel generate runs/novel-small --prompts questions.txt --out answers.jsonl",
                "--max-new-tokens 4",
                leaves="answers.jsonl",
            ),
        ),
        needs=(inputs.novel("book.txt"), inputs.texts, inputs.conversations),
        hub=("ai-forever/rugpt3large_based_on_gpt2",),
    ),
    Walk("demo", (Step("artel train demo", f"{_GPT2} {SMALL_GPT2}", leaves="runs/demo/model"),)),
    Walk("demo-ru", (Step("artel train demo-ru", f"{_GPT2} {SMALL_GPT2}", leaves="runs/demo-ru/model"),)),
    Walk(
        "nanogpt-30m",
        (
            Step(
                "artel train nanogpt-30m data.sources.0.path=train.jsonl",
                f"{STEPS} model.config.n_layer=1 model.config.n_embd=32 model.config.n_head=2",
                leaves="runs/nanogpt-30m/model",
            ),
            Step(
                "artel train nanogpt-30m data.sources.0.path=train.jsonl tokenizer.from=null "
                "tokenizer.train.vocab=16384",
                f"{SMALL_GPT2} data.block=256 run=runs/own",
                leaves="runs/own/model",
            ),
        ),
        needs=(inputs.instructions("train.jsonl"),),
        hub=("ai-forever/rugpt3small_based_on_gpt2",),
    ),
    Walk(
        "nq-bert",
        (
            Step(
                "artel train nq-bert data.sources.0.path=simplified-nq-train.jsonl.gz --nproc 8",
                f"{WINDOWS} --nproc 1",
                leaves="runs/nq-bert/model",
            ),
        ),
        needs=(inputs.natural_questions("simplified-nq-train.jsonl.gz"),),
        hub=("google-bert/bert-base-uncased",),
    ),
    Walk(
        "nq-dummy",
        (
            Step(
                "artel train nq-dummy --nproc 2",
                f"data.sources.0.documents=200 {SMALL_MODERNBERT}",
                leaves="runs/nq-dummy/model",
            ),
        ),
    ),
    Walk(
        "The Pile",
        (
            Step("artel train pile-125m --nproc 8", f"{SMALL_GPT2} --nproc 1", leaves="runs/pile-125m/model"),
            Step(
                "artel train pile-235b --nproc 8 --nnodes 32 --rdzv-endpoint node1:29500",
                f"{_EXPERTS} {STEPS} data.block=32 --nnodes 1 --nproc 2 --rdzv-endpoint 127.0.0.1:{{port}} "
                "parallel.expert=2 parallel.offload=cpu",
                leaves="runs/pile-235b/model",
            ),
            Step(
                "artel train pile-235b --nproc 8 --nnodes 32 --rdzv-endpoint node1:29500 "
                "'parallel={deepspeed: ds_config.json}'",
                instead="artel config check pile-235b 'parallel={deepspeed: ds_config.json}'",
                why="32 hosts of eight GPUs",
            ),
            Step("artel train pile --nproc 8", f"{SMALL_GPT2} --nproc 1", leaves="runs/pile/model"),
        ),
        needs=(inputs.pile, inputs.ds_config),
        hub=("Qwen/Qwen3-235B-A22B",),
    ),
    Walk(
        "rugpt35-13b-lora",
        (
            Step(
                "artel train rugpt35-13b-lora data.sources.0.path=train.jsonl",
                f"{STEPS} data.block=256",
                leaves="runs/rugpt35-13b-lora/model/adapter_config.json",
            ),
            Step(
                "artel train rugpt35-13b-lora data.sources.0.path=train.jsonl model.quantize=nf4",
                f"{STEPS} data.block=256 run=runs/nf4",
                leaves="runs/nf4/model/adapter_config.json",
            ),
        ),
        needs=(inputs.instructions("train.jsonl"),),
        hub=("ai-forever/ruGPT-3.5-13B",),
    ),
    Walk(
        "Tolstoy",
        (
            Step(
                "artel train tolstoy-fast data.sources.0.path=novel.txt data.sources.0.document=auto data.block=256 "
                "tokenizer.train.vocab=4096 model.config.n_layer=4 model.config.n_embd=192 "
                "model.config.n_head=6 train.steps=200",
                SMALL_GPT2,
                leaves="runs/tolstoy-fast/model",
            ),
            Step(
                "artel train tolstoy-finetune 'data.sources.0.path=texts/*.txt' model.from=FOLDER",
                f"{STEPS} data.block=32",
                leaves="runs/tolstoy-finetune/model",
            ),
            Step(
                "artel train tolstoy-scratch 'data.sources.0.path=texts/*.txt' model.config.n_layer=4",
                SMALL_GPT2,
                leaves="runs/tolstoy-scratch/model",
            ),
        ),
        needs=(inputs.texts, inputs.novel(), inputs.gpt2()),
    ),
)
