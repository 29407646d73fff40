#!/usr/bin/env bash
# The main job on this machine's own text: Python's language reference and standard library. No network, two cores.
# Every line here is a command you can give yourself; `artel recipes cat demo` shows the run file.
set -euo pipefail
export HF_HUB_OFFLINE=1 ARTEL_CACHE="${ARTEL_CACHE:-$PWD/runs/.cache}"
mkdir -p runs

echo "== Before training: the model of recipe 'demo' writes noise"
artel generate demo --untrained --prompt def --max-new-tokens 60

echo; echo "== Training"
artel train demo --restart --json > runs/demo.json

echo; echo "== The loss, and bits per byte beside a compressor's on the same text"
artel report runs/demo --compressor

echo; echo "== After training: the saved folder, opened again"
artel generate runs/demo --prompt def --max-new-tokens 150
artel generate runs/demo --prompt 'The "for" statement' --max-new-tokens 80

echo; echo "The model is in runs/demo/model: AutoModelForCausalLM.from_pretrained opens it."
