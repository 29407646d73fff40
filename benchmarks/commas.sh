#!/usr/bin/env bash
# Commas learned from novels, then from other sentences; F1 beside the rule baseline of the same held-out part.
#   bash benchmarks/commas.sh FOLDER_WITH_NOVELS SENTENCES.txt
set -euo pipefail
novels="$1" sentences="$2"
export HF_HUB_OFFLINE=1
artel train comma-restoration "data.sources.0.path=$novels/*.txt" data.block=128 data.validation=0.02 \
    'model.config={model_type: modernbert, hidden_size: 192, num_hidden_layers: 4, num_attention_heads: 4, intermediate_size: 384}' \
    train.epochs=2 validate.every=200 validate.blocks=400 validate.patience=null run=runs/commas-novels --restart --json
artel train comma-restoration "data.sources.0.path=$sentences" data.block=128 \
    model.from=runs/commas-novels/model tokenizer.train=null \
    train.epochs=4 train.learning_rate=3e-4 train.muon_learning_rate=5e-3 run=runs/commas-sentences --restart --json
