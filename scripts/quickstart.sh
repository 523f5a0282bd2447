#!/usr/bin/env bash
# From a bare Debian or Ubuntu machine to a GPT-2 that has learned English spelling, in about 5 minutes on 2 cores:
# installs what is missing, builds, prepares two novels, trains on 2 pipeline stages x 2 replicas, repeats the training on one
# device, and says whether both are equal bit for bit. Writes loss.png.
#   scripts/quickstart.sh [TEXT_FILE]        train on your own text
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/mpi_env.sh

say() { printf '\n== %s\n' "$*"; }
python_with() { for p in python3 /usr/bin/python3; do "$p" -c "import $1" 2>/dev/null && { echo "$p"; return; }; done; }
final_line() { grep '^final step' "$1" | tail -1; }

say "installing what is missing"
scripts/install.sh build plot
say "building train_gpt2 (CPU device, fp32)"
make -s -j2 DEVICE=cpu train_gpt2

say "preparing the text"
dev/data/get_text.sh "$@"

runs=runs/quickstart
rm -rf "$runs"
mkdir -p "$runs"
model=(--train-data 'data/text/*train*.bin' --val-data 'data/text/*val*.bin' --vocab 256
       --layers 4 --channels 128 --heads 4 --seq-len 64 --micro-batch 8 --batch-tokens 2048
       --lr 3e-3 --lr-schedule cosine --lr-final 0.1 --warmup 30 --weight-decay 0.1 --val-batches 16
       --steps 500 --val-every 100)

say "training: mpirun -np 4, 2 pipeline stages x 2 replicas"
mpirun -np 4 ./train_gpt2 "${model[@]}" --pp 2 --zero 1 --sample-every 500 --sample-tokens 300 --temperature 0.8 \
  --report-every 100 --out "$runs/parallel" | tee "$runs/parallel.txt"

say "the same training on one device"
./train_gpt2 "${model[@]}" --sample-every 0 --out "$runs/one_device" >"$runs/one_device.txt"

say "compared bit for bit"
echo "one device:            $(final_line "$runs/one_device.txt")"
echo "2 stages x 2 replicas: $(final_line "$runs/parallel.txt")"
losses() { sed -E '/"pipeline"/d; s/,"(ms|tokens_per_second)":[^,}]*//g' "$1/metrics.jsonl"; }
if [ "$(final_line "$runs/one_device.txt")" = "$(final_line "$runs/parallel.txt")" ] &&
   cmp -s <(losses "$runs/one_device") <(losses "$runs/parallel"); then
  echo "EQUAL: every loss, every gradient norm and all parameters are the same bits"
else
  echo "DIFFERENT: this must not happen; compare the metrics.jsonl of $runs/one_device and $runs/parallel"
  exit 1
fi

"$(python_with matplotlib)" scripts/plot_loss.py loss.png "$runs/parallel" "$runs/one_device"
say "done: loss.png, and everything about the runs in $runs/"
