#!/usr/bin/env bash
# Makes the mini model anew: mini/flux-mini. `mini/README.md` says what it is and how long each step takes.
#   scripts/make-mini.sh PYTHON     a Python with what tools/fixtures/requirements.txt lists
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:?a Python with torch, diffusers and transformers}
bin=target/debug

$bin/draw-scenes runs/scenes
$bin/draw-deck runs/deck
rm -rf runs/mini
$python tools/mini.py runs/mini runs/scenes runs/deck
$bin/train-vae runs/mini runs/scenes runs/deck
$bin/pipeline run recipes/mini-pretrain.toml
$bin/pipeline run recipes/mini-finish.toml

checkpoint=$(ls -d runs/mini-finish/train/epoch_*_step_* | sort -t_ -k4 -n | tail -1)
rm -rf mini/flux-mini
mkdir -p mini/flux-mini
cp -rL "$checkpoint"/{model_index.json,scheduler,text_encoder,text_encoder_2,tokenizer,tokenizer_2,transformer,vae} mini/flux-mini/
chmod -R u+w mini/flux-mini
du -sh mini/flux-mini
