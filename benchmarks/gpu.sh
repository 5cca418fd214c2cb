#!/usr/bin/env bash
# Everything that only a GPU shows, stage by stage; results under OUT.
#   benchmarks/gpu.sh MODEL_FOLDER TRAIN VALIDATION_PARQUET OTHER_TEXT TASK_FOLDER OUT [STAGE...]
# MODEL_FOLDER is a Hugging Face folder of SmolLM2-135M; TRAIN is a parquet file with a column `text`, or a
# folder of `hestia_tokenize`; VALIDATION_PARQUET has a column `text`; OTHER_TEXT is a text file that is
# held out too; TASK_FOLDER holds YAML files of lm-eval tasks named *_local whose rows are local files.
# STAGE is one of tests, kernels, recipes, cost, budget, real, sensitivity; all of them unless told. The
# stage quick takes at most 12 minutes and can be cut off anywhere: the cost of a step where the host is
# the limit (quick_cost), a whole run of smollm2_135m+evening (quick_evening), and then the tests.
#
# A stage is made of steps. Each has a limit in seconds, a log OUT/STEP.txt and, once it has succeeded, a
# file OUT/STEP.done: the same command goes on with what is missing, training from its checkpoints. After
# every step OUT/results.tgz holds all that is small. What failed is named at the end.
set -uo pipefail
model=$1 train=$2 validation=$3 other=$4 tasks=$5 out=$6
shift 6
cd "$(dirname "$0")/.."
mkdir -p "$out"
export PYTHONUNBUFFERED=1
failed=()
if [[ -d $train ]]; then
  text=(dataset.source=token_shards dataset.data_files="$train")
else
  text=(dataset.source=parquet dataset.data_files="$train" dataset.split=train dataset.column=text)
fi
text+=(checkpointer.checkpoint_dir="$model")
held_out=(dataset_val._component_=hestia_tune.data.streaming_text_dataset
  dataset_val.source=parquet dataset_val.data_files="$validation" dataset_val.seq_len=1024
  dataset_val.max_tokens=100000)
paper=(--config smollm2_135m "${text[@]}" "${held_out[@]}" global_batch_size=128)

step() { # NAME SECONDS COMMAND...
  local name=$1 seconds=$2 status
  shift 2
  [[ -e $out/$name.done ]] && return
  timeout -s TERM -k 60 "$seconds" "$@" 2>&1 | tee "$out/$name.txt"
  status=${PIPESTATUS[0]}
  if ((status)); then failed+=("$name ($status)"); else touch "$out/$name.done"; fi
  (cd "$out" && find . \( -name '*.txt' -o -name '*.json' -o -name '*.jsonl' -o -name '*.png' \) \
    -size -4M -not -path '*/hard_model/*' | tar -czf results.tgz -T -)
  return "$status"
}

qat() { # NAME SECONDS OVERRIDE...
  local name=$1 seconds=$2 resume=False
  shift 2
  ls "$out/$name"/checkpoints/step_*/meta.json > /dev/null 2>&1 && resume=True
  step "$name" "$seconds" tune run hestia_qat "$@" output_dir="$out/$name" \
    resume_from_checkpoint=$resume
}

tests() {
  step pytest 590 pytest -n 8 -m gpu tests/gpu tests/tensors tests/test_functional.py tests/reconstruction \
    tests/training/test_recipe.py tests/training/test_reconstruct_recipe.py
}

kernels() {
  local shape=(--device cuda --rows 4096 --columns 14336)
  step quantizer_float32 300 python benchmarks/quantizer.py "${shape[@]}"
  step quantizer_bfloat16 300 python benchmarks/quantizer.py "${shape[@]}" --dtype bfloat16
  step distillation 300 python benchmarks/distillation.py --device cuda --batch 16 --seq-len 1024 \
    --vocabulary 128256
  step logits 300 python benchmarks/logits.py --device cuda --dtype bfloat16 --scale 1 --batch 8 \
    --seq-len 1024
  step inference 400 python benchmarks/inference.py --device cuda --models llama3_2_1b --threads 1
}

recipes() {
  local smollm2=(--config smollm2_135m output_dir="$out/smollm2" "${text[@]}")
  qat smollm2 500 "${paper[@]}" max_steps=30 sensitivity_estimation.curvature=fisher
  qat straight_through 300 "${paper[@]}" max_steps=30 schedule.rho=0 schedule.tau_init=0 \
    schedule.alpha=0 sensitivity=null
  step compare 60 python -m hestia_tune compare "$out/smollm2" "$out/straight_through"
  step convert 300 tune run hestia_convert "${smollm2[@]}" convert.formats=[torchao] \
    convert.overwrite=True
  step eval 500 tune run hestia_eval "${smollm2[@]}" eval.models=[pretrained,naive,trained,packed] \
    eval.limit=300 eval.include_path="$tasks" eval.tasks=[arc_easy_local]
  qat fairy2i 300 "${paper[@]}" quantizer._component_=hestia_tune.Fairy2iQATQuantizer \
    "~quantizer.group_size" convert.formats=[torchao] sensitivity=null max_steps=20
}

# Step time and memory against plain fine-tuning, 2 x 16 x 1024 tokens a step; random weights.
cost() {
  local shape=(--config llama3_2_1b)
  step cost_profile 590 python benchmarks/replication/cost.py --out "$out/profile" --rounds 1 --profile \
    --methods plain straight-through "Hestia, uniform" "${shape[@]}" --overrides global_batch_size=32
  step cost 1200 python benchmarks/replication/cost.py --out "$out/cost" "${shape[@]}" \
    --overrides global_batch_size=32
}

# A small budget: the config as it is (2.5M tokens of reconstruction, and as many of the whole model
# towards the pretrained predictions), 60 distilled steps of 131 thousand tokens; and the five tasks.
budget() {
  local common=(--config smollm2_135m+evening "${text[@]}" "${held_out[@]}")
  step reconstruct 590 tune run hestia_reconstruct "${common[@]}" output_dir="$out/budget"
  [[ -e $out/reconstruct.done ]] || return
  qat budget 590 "${common[@]}" global_batch_size=128 max_steps=60 optimizer.lr=1e-3
  step budget_eval 590 tune run hestia_eval "${common[@]}" output_dir="$out/budget" eval.limit=300 \
    eval.models=[pretrained,"$out/budget/reconstruction/hard_model",trained] \
    eval.include_path="$tasks" \
    eval.tasks=[arc_easy_local,arc_challenge_local,hellaswag_local,piqa_local,winogrande_local]
}

# 20M tokens for each of four methods; those that are done are kept, should the time run out.
real() {
  step real 3600 python benchmarks/replication/real.py --config smollm2_135m --out "$out/real" \
    --steps 150 --curvature fisher --limit 1000 \
    --texts "validation=$validation,column=text" "other=$other" \
    --tasks arc_easy_local arc_challenge_local hellaswag_local piqa_local winogrande_local \
    --tasks-path "$tasks" --overrides "${text[@]}" "${held_out[@]}" global_batch_size=128
}

# Four layers, each way: the authors', adaptive, Fisher.
sensitivity() {
  step sensitivity 590 python benchmarks/sensitivity.py --config smollm2_135m --layers 4 \
    --settings num_samples=4 batch_size=2 --output-dir "$out/sensitivity" \
    --overrides "${text[@]}" dataset.seq_len=512
}

# Prefixes every line with the seconds since the start, so that a log says where the time went.
timed() {
  "$@" 2>&1 | python -c 'import sys, time
start = time.time()
for line in iter(sys.stdin.readline, ""):
    print(f"{time.time() - start:7.1f} {line}", end="", flush=True)'
  return "${PIPESTATUS[0]}"
}
export -f timed

quick() {
  quick_cost
  quick_evening
  step quick_tests 60 pytest -n 8 -q -m gpu tests/gpu tests/training/test_recipe.py
}

quick_cost() {
  local small=(--rounds 1 --steps 5 --overrides batch_size=4 gradient_accumulation_steps=4)
  step quick_smollm2 150 python benchmarks/replication/cost.py --config smollm2_135m --out "$out/cost_smollm2" \
    --methods bare "bare, graphed" plain Hestia "${small[@]}"
  step quick_eager 90 python benchmarks/replication/cost.py --config smollm2_135m --out "$out/cost_eager" \
    --methods plain Hestia "${small[@]}" cuda_graphs=False
  step quick_llama 120 python benchmarks/replication/cost.py --config llama3_2_1b --out "$out/cost_llama" \
    --methods "bare, graphed" plain Hestia "${small[@]}"
}

quick_evening() {
  local evening=(--config smollm2_135m+evening "${text[@]}" "${held_out[@]}" dataset_val.max_tokens=20000)
  step quick_evening 480 bash -c 'timed "$@"' timed tune run hestia_qat "${evening[@]}" \
    output_dir="$out/evening" reconstruct.num_samples=800 run_val_every_n_steps=100 save_every_n_steps=150 'convert.formats=[torchao]'
}

stages=(tests kernels recipes cost budget real sensitivity)
short=(quick quick_cost quick_evening)
(($#)) || set -- "${stages[@]}"
for stage in "$@"; do
  if [[ " ${stages[*]} ${short[*]} " != *" $stage "* ]]; then
    echo "STAGE is one of ${stages[*]} ${short[*]}; got $stage" >&2
    exit 2
  fi
done
step machine 30 nvidia-smi
for stage in "$@"; do
  "$stage"
done
if ((${#failed[@]})); then
  printf 'failed: %s\n' "${failed[@]}" >&2
  exit 1
fi
