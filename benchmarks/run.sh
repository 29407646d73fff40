#!/usr/bin/env bash
# The figures of benchmarks/results.md, printed anew: the novel's bits per byte beside compressors', and a second prepare.
#   make bench TEXT=path/to/novel.txt        (a UTF-8 text, a paragraph a line)
set -euo pipefail
text="${TEXT:-../shared/data/literature/anna_karenina.txt}"
[ -f "$text" ] || { echo "no text at $text; give one: make bench TEXT=novel.txt" >&2; exit 2; }
export HF_HUB_OFFLINE=1
size=$(wc -c < "$text")
bits() { awk -v packed="$1" -v size="$size" 'BEGIN { printf "%.3f", packed * 8 / size }'; }
echo "bits per byte of the whole novel: xz -9 $(bits "$(xz -9 -c "$text" | wc -c)"), bzip2 -9 $(bits "$(bzip2 -9 -c "$text" | wc -c)")"
artel train novel-small data.sources.0.path="$text" run=runs/bench-novel --restart --json
artel report runs/bench-novel --compressor
artel generate runs/bench-novel --prompt "Все счастливые семьи" --max-new-tokens 100
echo "a second prepare of the same text:"
time artel prepare novel-small data.sources.0.path="$text" run=runs/bench-novel
