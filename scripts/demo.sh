#!/usr/bin/env bash
# artel's main job on a novel that comes with it: text to tokens, a tokenizer, a model, a report. Two cores, no network.
#   make demo                "Moby-Dick"
#   make demo LANGUAGE=ru    «Преступление и наказание»
# Every line that begins with artel is a command you can give yourself after `source .venv/bin/activate`; `artel recipes cat demo` shows the run file.
set -euo pipefail
export HF_HUB_OFFLINE=1 ARTEL_CACHE="${ARTEL_CACHE:-$PWD/runs/.cache}"
mkdir -p runs

case "${LANGUAGE:-en}" in
ru*)
    echo "== «Преступление и наказание» за 200 секунд становится моделью; сначала она пишет бессмыслицу"
    artel train demo-ru --restart --json > runs/demo-ru.json
    echo; echo "== Бит на байт глав, которых она не видела, рядом с архиватором"
    artel report runs/demo-ru --compressor
    echo; echo "== Модель, открытая заново, пишет сама"
    artel generate runs/demo-ru --prompt "Раскольников" --max-new-tokens 120
    echo; echo "== Отчёт: кривые, что она писала, откуда взят текст"
    artel report runs/demo-ru --html runs/demo-ru.html --language ru
    echo; echo "Модель лежит в runs/demo-ru/model: её открывает AutoModelForCausalLM.from_pretrained. То же со своим текстом:"
    echo "    source .venv/bin/activate   # здесь лежит команда artel"
    echo "    artel new run.yaml --text novel.txt --learn write --from scratch --time 15min && artel train run.yaml"
    ;;
*)
    echo "== \"Moby-Dick\" becomes a model in 200 seconds; what it writes at the start is noise"
    artel train demo --restart --json > runs/demo.json
    echo; echo "== Bits per byte of chapters it has not seen, beside a compressor's"
    artel report runs/demo --compressor
    echo; echo "== The model, opened again, goes on by itself"
    artel generate runs/demo --prompt "The whale" --max-new-tokens 120
    echo; echo "== The report: curves, what it wrote meanwhile, where the text went"
    artel report runs/demo --html runs/demo.html
    echo; echo "The model is in runs/demo/model: AutoModelForCausalLM.from_pretrained opens it. The same with a text of your own:"
    echo "    source .venv/bin/activate   # artel is installed there"
    echo "    artel new run.yaml --text novel.txt --learn write --from scratch --time 15min && artel train run.yaml"
    ;;
esac
