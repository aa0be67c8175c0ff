#!/usr/bin/env bash
# One run on one GPU, in under five minutes: a synthetic checkpoint of about 1.2 billion parameters with both Adam moments
# in float32 (14 GB) in two formats, verified against each other, then the recomputation policies and the largest batch.
#
#     benchmarks/gpu_verify.sh [FOLDER]
#
# FOLDER (a new one in TMPDIR unless given) takes two copies of the checkpoint, and is emptied again of them. Needs a Python
# with ckptctl[verify]: PYTHON=... names it. SIZE, DEVICE, ROWS and COLUMNS change what is run; DEVICE=cpu SIZE=250MB ROWS=1
# COLUMNS=16 tries the script without a GPU. Figures for docs/performance.md come at the end, as lines of a table, with
# the card's name; the documents they are from stay in FOLDER.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3} size=${SIZE:-14GB} device=${DEVICE:-cuda} rows=${ROWS:-4} columns=${COLUMNS:-512}
made=
work=${1:-}
if [ -z "$work" ]; then work=$(mktemp -d) made=1; fi
mkdir -p "$work"
trap 'rm -rf "$work/a" "$work/b"; [ -z "$made" ] || rm -rf "$work"' EXIT
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
ckptctl() { "$python" -m ckptctl "$@"; }
took() { printf '%s took %s s\n' "$1" "$((SECONDS - $2))" >&2; }

began=$SECONDS
"$python" benchmarks/make_synthetic.py "$work/a" --size "$size" --ranks 2 >&2
took "making it" "$began"; began=$SECONDS
config=$work/a/config
ckptctl convert "$work/a/ckpt" "$work/b" --to deepspeed --dp 2 --model-config "$config" --memory 4GiB --quiet
took "converting it to DeepSpeed" "$began"; began=$SECONDS
more=()
[ "$device" = cpu ] || more=(--find-max-batch)
common=(--model-config "$config" --device "$device" --batch-size "$rows" --seq-len "$columns" --memory 4GiB --json)
status=0
ckptctl verify "$work/a/ckpt" "$work/b" "${common[@]}" >"$work/verify.json" || status=$?
took "verifying both" "$began"; began=$SECONDS
ckptctl verify "$work/a/ckpt" "${common[@]}" --dtype bf16 --no-optimizer \
  --recompute none,full,every=2,selective "${more[@]}" >"$work/recompute.json" || status=$?
took "recomputing" "$began"
"$python" benchmarks/gpu_figures.py "$work/verify.json" "$work/recompute.json"
exit "$status"
