"""The commands of the start page, the tutorials and "coming from", a page a walk; how to read the table: walks.py."""

from __future__ import annotations

from printed import inputs
from printed.walks import SHORT, SMALL_GPT2, SMALL_MODERNBERT, STEPS, WINDOWS, Step, Walk

_NOVEL = "data.sources.0.path=novel.txt run=runs/novel"
_CHAT = "data.sources.0.path=answers.jsonl model.from=Qwen/Qwen3-0.6B"
_SQUAD = "data.sources.0.path=squad.json model.from=DeepPavlov/rubert-base-cased run=runs/answers"
_MASKED = f"{SMALL_MODERNBERT} tokenizer.train.vocab=400 data.block=96 train.threads=1"

TUTORIALS = (
    Walk(
        "start here",
        (
            Step("artel new my.yaml --text novel.txt --learn write --from scratch --time 5min", leaves="my.yaml"),
            Step("artel plan my.yaml", f"model.config.model_type=gpt2 {SMALL_GPT2}", says="fits"),
            Step("artel train my.yaml", f"model.config.model_type=gpt2 {SMALL_GPT2}", leaves="runs/my/model"),
            Step("artel report runs/my", says="loss"),
            Step('artel generate runs/my --prompt "Все счастливые" --max-new-tokens 100', says="Все счастливые"),
        ),
        needs=(inputs.novel(),),
    ),
    Walk(
        "a tutorial: LoRA and chat",
        (
            Step(f"artel data show chat-lora {_CHAT}", says="⟦"),
            Step(f"artel plan chat-lora {_CHAT} --hardware rtx-4090", says="fits"),
            Step(f"artel train chat-lora {_CHAT} run=runs/helper", STEPS, leaves="runs/helper/model"),
            Step("artel chat runs/helper", typed="Who are you?\n/set new_tokens 3\nYes?\n", says="new_tokens = 3"),
            Step("artel chat runs/helper --script questions.txt --json", says='"answers"'),
            Step("artel export runs/helper merged-helper --merge", leaves="merged-helper/config.json"),
        ),
        needs=(inputs.answers,),
        hub=("Qwen/Qwen3-0.6B",),
    ),
    Walk(
        "a tutorial: a masked model",
        (
            Step("artel config check masked.yaml", says="no problems found"),
            Step("artel train masked.yaml --nproc 2", _MASKED, leaves="runs/masked/model"),
            Step("artel doctor masked.yaml --parallel --nproc 2", says="loss"),
            Step("artel report runs/masked", says="commonest"),
            Step('artel generate runs/masked --prompt "Все счастливые<mask> похожи друг на друга."', says="Все"),
            Step(
                "artel train ruroberta-mlm 'data.sources.0.path=texts/*.txt' model.from=ai-forever/ruRoberta-large "
                "run=runs/further --nproc 2",
                SHORT,
                leaves="runs/further/model",
            ),
            Step(
                "artel train classify-ru data.sources.0.path=reviews.csv model.from=runs/further/model",
                SHORT,
                leaves="runs/classify-ru/model",
            ),
            Step(
                "artel train ner-ru data.sources.0.path=names.jsonl model.from=runs/further/model",
                SHORT,
                leaves="runs/ner-ru/model",
            ),
            Step(
                "artel train embed-ru data.sources.0.path=matches.jsonl model.from=runs/further/model",
                f"{SHORT} embedding.matryoshka=[32,16]",
                leaves="runs/embed-ru/model/modules.json",
            ),
            Step('artel generate runs/classify-ru --prompt "Скучно, ушли до конца."'),
            Step('artel generate runs/ner-ru --prompt "Анна приехала в Москву."'),
            Step("artel export runs/classify-ru exported-labels --to onnx", leaves="exported-labels/model.onnx"),
        ),
        needs=(
            inputs.texts,
            inputs.reviews,
            inputs.names,
            inputs.matches,
            inputs.written("docs/tutorials/masked.md", "masked.yaml"),
        ),
        hub=("ai-forever/ruRoberta-large",),
    ),
    Walk(
        "a tutorial: a novel",
        (
            Step(f"artel prepare novel-small {_NOVEL}", SMALL_GPT2, says="tokens"),
            Step("artel recipes cat novel-small", says="novel.txt"),
            Step(f"artel data show novel-small {_NOVEL}", SMALL_GPT2, says="sample 0"),
            Step(f"artel train novel-small {_NOVEL}", SMALL_GPT2, leaves="runs/novel/model"),
            Step("artel report runs/novel", says="loss"),
            Step("artel report runs/novel --compressor", says="xz"),
            Step('artel generate runs/novel --prompt "Было утро" --max-new-tokens 100', says="Было утро"),
            Step("artel recipes cp novel-small novel.yaml", leaves="novel.yaml"),
            Step(
                "artel train novel.yaml data.sources.0.path=novel.txt run=runs/wider model.config.n_embd=512 "
                "model.config.n_head=8",
                SMALL_GPT2,
                leaves="runs/wider/model",
            ),
            Step("artel evaluate runs/novel runs/wider", says="runs/wider"),
        ),
        needs=(inputs.novel(),),
    ),
    Walk(
        "a tutorial: The Pile",
        (
            Step("artel prepare mixture.yaml", SMALL_GPT2, says="tokens"),
            Step("artel data show mixture.yaml", SMALL_GPT2, says="sample 0"),
            Step("artel train mixture.yaml", SMALL_GPT2, leaves="runs/mixture/model"),
            Step("artel report runs/mixture", says="loss"),
            Step(
                "artel plan pile-125m 'data.sources.0.path=pile/*.jsonl.zst' --hardware h100-80gb:8 --price 2.50",
                SMALL_GPT2,
                says="fits",
            ),
        ),
        needs=(inputs.pile, inputs.written("docs/tutorials/pile.md", "mixture.yaml")),
    ),
    Walk(
        "a tutorial: questions and answers",
        (
            Step(
                "artel train nq-dummy run=runs/made-up",
                f"data.sources.0.documents=200 {SMALL_MODERNBERT}",
                leaves="runs/made-up/model",
            ),
            Step(
                'artel generate runs/made-up --prompt "where is Anna ?" '
                '--context "news : Boris sings by the river . Anna is in the forest ."',
                says="class:",
            ),
            Step(f"artel config check squad-ru {_SQUAD}", says="no problems found"),
            Step(f"artel data show squad-ru {_SQUAD}", WINDOWS, says="sample 0"),
            Step(f"artel train squad-ru {_SQUAD}", WINDOWS, leaves="runs/answers/model"),
            Step(
                "artel evaluate runs/answers --data squad.json --predictions predictions.json",
                leaves="predictions.json",
            ),
            Step(
                'artel generate runs/answers --prompt "Кто увидел письмо?" '
                '--context "Старый князь увидел письмо, когда стемнело."',
            ),
        ),
        needs=(inputs.squad("squad.json"),),
        hub=("DeepPavlov/rubert-base-cased",),
    ),
    Walk(
        "coming from axolotl",
        (
            Step("artel config convert axolotl.yaml > qwen.yaml", leaves="qwen.yaml"),
            Step("artel config check qwen.yaml", says="no problems found"),
            Step("artel plan qwen.yaml --hardware rtx-4090", says="fits"),
            Step("artel train qwen.yaml", STEPS, leaves="runs/qwen/model/adapter_config.json"),
        ),
        needs=(inputs.answers, inputs.written("docs/coming-from/axolotl.md", "axolotl.yaml")),
        hub=("Qwen/Qwen3-0.6B",),
    ),
    Walk(
        "coming from LLaMA-Factory",
        (
            Step("artel config convert identity.yaml > adapter.yaml", leaves="adapter.yaml"),
            Step("artel config check adapter.yaml", says="no problems found"),
            Step("artel train adapter.yaml", STEPS, leaves="runs/identity/model/adapter_config.json"),
        ),
        needs=(
            lambda folder: (folder / "data").mkdir(),
            inputs.instructions("data/identity.json"),
            inputs.written("docs/coming-from/llama-factory.md", "identity.yaml"),
        ),
        hub=("Qwen/Qwen3-0.6B",),
    ),
    Walk(
        "coming from Trainer",
        (
            Step("artel config convert run_clm.sh > texts.yaml", leaves="texts.yaml"),
            Step("artel config check texts.yaml", says="no problems found"),
            Step("artel train texts.yaml --nproc 2", f"{STEPS} data.block=32", leaves="runs/gpt2-texts/model"),
        ),
        needs=(inputs.novel("texts.txt"), inputs.written("docs/coming-from/trainer.md", "run_clm.sh")),
        hub=("openai-community/gpt2",),
    ),
)
