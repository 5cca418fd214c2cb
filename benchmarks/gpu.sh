#!/usr/bin/env bash
# Everything that only a GPU shows, stage by stage; results under OUT.
#   benchmarks/gpu.sh MODEL_FOLDER TRAIN_PARQUET VALIDATION_PARQUET OTHER_TEXT TASK_FOLDER OUT [STAGE...]
# MODEL_FOLDER is a Hugging Face folder of SmolLM2-135M; the parquet files have a column `text`;
# OTHER_TEXT is a text file that is held out too; TASK_FOLDER holds YAML files of lm-eval tasks named
# *_local whose rows are local files. STAGE is one of tests, kernels, recipes, cost, budget, real; all of them
# unless told. A stage that fails is named at the end, and the others run.
set -uo pipefail
model=$1 train=$2 validation=$3 other=$4 tasks=$5 out=$6
shift 6
cd "$(dirname "$0")/.."
mkdir -p "$out"
text=(dataset.source=parquet dataset.data_files="$train" dataset.split=train dataset.column=text
  checkpointer.checkpoint_dir="$model")
held_out=(dataset_val._component_=hestia_tune.data.streaming_text_dataset
  dataset_val.source=parquet dataset_val.data_files="$validation" dataset_val.seq_len=1024
  dataset_val.max_tokens=100000)

tests() {
  pytest -m gpu | tee "$out/pytest.txt"
}

kernels() {
  python benchmarks/quantizer.py --device cuda | tee "$out/quantizer_float32.txt" &&
    python benchmarks/quantizer.py --device cuda --dtype bfloat16 | tee "$out/quantizer_bfloat16.txt"
}

recipes() {
  # 12 layers, each way: the authors', adaptive, Fisher.
  python benchmarks/sensitivity.py --config smollm2_135m+paper --layers 12 \
    --settings num_samples=16 batch_size=2 --output-dir "$out/sensitivity" \
    --overrides "${text[@]}" dataset.seq_len=512 | tee "$out/sensitivity.txt" || return
  tune run hestia_qat --config smollm2_135m+paper output_dir="$out/smollm2" "${text[@]}" "${held_out[@]}" \
    gradient_accumulation_steps=4 max_steps=30 sensitivity_estimation.curvature=fisher \
    2>&1 | tee "$out/smollm2.txt" &&
    tune run hestia_qat --config smollm2_135m+paper output_dir="$out/straight_through" "${text[@]}" \
      "${held_out[@]}" gradient_accumulation_steps=4 max_steps=30 schedule.rho=0 \
      schedule.tau_init=0 schedule.alpha=0 sensitivity=null 2>&1 | tee "$out/straight_through.txt" &&
    python -m hestia_tune compare "$out/smollm2" "$out/straight_through" | tee "$out/compare.txt" &&
    tune run hestia_qat --config smollm2_135m+paper output_dir="$out/fairy2i" "${text[@]}" \
      "${held_out[@]}" quantizer._component_=hestia_tune.Fairy2iQATQuantizer ~quantizer.group_size \
      sensitivity=null gradient_accumulation_steps=4 max_steps=20 2>&1 | tee "$out/fairy2i.txt" &&
    tune run hestia_convert --config smollm2_135m+paper output_dir="$out/smollm2" "${text[@]}" \
      2>&1 | tee "$out/convert.txt" &&
    tune run hestia_eval --config smollm2_135m+paper output_dir="$out/smollm2" "${text[@]}" \
      eval.models=[pretrained,naive,trained,packed] eval.include_path="$tasks" \
      eval.tasks=[arc_easy_local] 2>&1 | tee "$out/eval.txt"
}

# Step time and memory against plain fine-tuning, 16 x 1024 tokens a step; random weights.
cost() {
  local shape=(--config llama3_2_1b --overrides compile=True batch_size=4
    gradient_accumulation_steps=4)
  python benchmarks/replication/cost.py --out "$out/cost" "${shape[@]}" | tee "$out/cost.txt" &&
    python benchmarks/replication/cost.py --out "$out/profile" --rounds 1 --profile "${shape[@]}" \
      2>&1 | tee "$out/profile.txt"
}

# 20M tokens for each of four methods; those that are done are kept, should the time run out.
real() {
  python benchmarks/replication/real.py --config smollm2_135m --out "$out/real" --steps 150 \
    --curvature fisher --texts "validation=$validation,column=text" "other=$other" \
    --tasks arc_easy_local arc_challenge_local hellaswag_local piqa_local winogrande_local \
    --tasks-path "$tasks" --overrides "${text[@]}" "${held_out[@]}" \
    gradient_accumulation_steps=4 | tee "$out/real.txt"
}

# A small budget: the config as it is (2.5M tokens of reconstruction, and as many of the whole model
# towards the pretrained predictions), 300 distilled steps; and the five tasks.
budget() {
  local common=(--config smollm2_135m output_dir="$out/budget" "${text[@]}" "${held_out[@]}")
  tune run hestia_qat "${common[@]}" gradient_accumulation_steps=4 max_steps=300 \
    2>&1 | tee "$out/budget.txt" &&
    tune run hestia_eval "${common[@]}" eval.limit=300 eval.include_path="$tasks" \
      eval.models=[pretrained,"$out/budget/reconstruction/hard_model",trained] \
      eval.tasks=[arc_easy_local,arc_challenge_local,hellaswag_local,piqa_local,winogrande_local] \
      2>&1 | tee "$out/budget_eval.txt"
}

stages=(tests kernels recipes cost budget real)
(($#)) || set -- "${stages[@]}"
for stage in "$@"; do
  if [[ " ${stages[*]} " != *" $stage "* ]]; then
    echo "STAGE is one of ${stages[*]}; got $stage" >&2
    exit 2
  fi
done
failed=()
nvidia-smi | tee "$out/machine.txt" || failed+=(nvidia-smi)
for stage in "$@"; do
  "$stage" || failed+=("$stage")
done
if ((${#failed[@]})); then
  echo "failed: ${failed[*]}" >&2
  exit 1
fi
