"""The commands of classification, rewards, embeddings, reranking, texts for texts, names; the table: walks.py."""

from printed import inputs
from printed.walks import SHORT, STEPS, Step, Walk

OBJECTIVES = (
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
        "names and vectors from a masked model",
        (
            Step(
                "artel train ner-ru data.sources.0.path=names.jsonl model.from=runs/ruroberta-mlm/model",
                SHORT,
                leaves="runs/ner-ru/model",
            ),
            Step(
                "artel train embed-ru data.sources.0.path=matches.jsonl model.from=runs/ruroberta-mlm/model",
                f"{SHORT} embedding.matryoshka=[32,16]",
                leaves="runs/embed-ru/model/modules.json",
            ),
        ),
        needs=(inputs.names, inputs.matches, inputs.texts, inputs.roberta()),
        before=(f"artel train ruroberta-mlm 'data.sources.0.path=texts/*.txt' model.from=FOLDER {SHORT}",),
        long=True,
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
        long=True,
    ),
    Walk(
        "learning from rewards",
        (
            Step(
                "artel data show policy data.sources.0.path=prompts.jsonl model.from=FOLDER",
                says="sample 0",
            ),
            Step(
                "artel rewards try policy data.sources.0.path=prompts.jsonl model.from=FOLDER",
                "--prompts 2 data.block=64 policy.new_tokens=8 policy.rewards=[rewards.py:overlap]",
                says="different rewards",
            ),
            Step(
                "artel train policy data.sources.0.path=prompts.jsonl model.from=FOLDER",
                f"{STEPS} data.block=64 policy.new_tokens=8 policy.rewards=[rewards.py:overlap] validate.blocks=4",
                leaves="runs/policy/rollouts/000001.jsonl.zst",
            ),
            Step("artel evaluate runs/policy", says="reward"),
            Step('artel generate runs/policy --prompt "What is 3 and 1?"', "--max-new-tokens 8"),
            Step("artel watch runs/policy", says="signal"),
            Step("artel report runs/policy --html report.html", leaves="report.html"),
            Step("artel plan runs/policy", says="answers of"),
            Step(
                "artel serve FOLDER --reload-from runs/policy",
                instead="artel serve --help",
                why="it serves until Ctrl-C; tests/test_remote_engine.py trains with such a server",
            ),
            *(
                Step(command, instead="artel serve --help", why="vLLM is not installed here")
                for command in (
                    "VLLM_SERVER_DEV_MODE=1 vllm serve FOLDER",
                    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve FOLDER --enable-lora --max-lora-rank 16",
                )
            ),
        ),
        needs=(inputs.sums, inputs.written("docs/policy.md", "rewards.py"), inputs.chat_model()),
        long=True,
    ),
    Walk(
        "a task of reasoning-gym",
        (
            Step(
                "artel train policy run=runs/legs model.from=FOLDER 'policy.rewards=[gym:leg_counting]' "
                "'data.sources=[{format: gym, gym: {task: leg_counting, samples: 500, options: {max_animals: 3}}}]'",
                f"{STEPS} data.block=512 policy.new_tokens=8 'policy.rewards=[{{matches: о}}]' validate.blocks=4",
                leaves="runs/legs/rollouts/000001.jsonl.zst",
            ),
            Step("artel evaluate runs/legs", says="reward"),
        ),
        needs=(inputs.chat_model(),),
        package="reasoning_gym",
        long=True,
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
            Step("artel evaluate runs/embed-ru --data matches.jsonl --corpus texts.txt", says="queries"),
            Step("artel data mine runs/embed-ru matches.jsonl hard.jsonl --negatives 4", leaves="hard.jsonl"),
            Step(
                'artel generate runs/embed-ru --prompt "Where is the key to the cellar?" --context notes.txt',
                says="notes.txt:",
            ),
            Step(
                'artel generate runs/embed-ru --prompt "Where is the key to the cellar?" --context notes.txt --json',
                says='"hits"',
            ),
            Step(
                "artel train embed-ru data.sources.0.path=train.json model.from=FOLDER",
                f"{SHORT} embedding.matryoshka=[32,16] run=runs/questions",
                leaves="runs/questions/model",
            ),
        ),
        needs=(inputs.matches, inputs.squad("train.json"), inputs.novel("notes.txt"), inputs.bert()),
        long=True,
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
        long=True,
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
        long=True,
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
)
