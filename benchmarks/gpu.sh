#!/usr/bin/env bash
# Everything that only a GPU shows, in one call; results under OUT.
#   benchmarks/gpu.sh MODEL_FOLDER TRAIN_PARQUET VALIDATION_PARQUET TASK_FOLDER OUT
# MODEL_FOLDER is a Hugging Face folder of SmolLM2-135M; the parquet files have a column `text`;
# TASK_FOLDER holds YAML files of lm-eval tasks named *_local whose rows are local files.
set -euo pipefail
model=$1 train=$2 validation=$3 tasks=$4 out=$5
cd "$(dirname "$0")/.."
mkdir -p "$out"
nvidia-smi | tee "$out/machine.txt"
pytest -m gpu | tee "$out/pytest.txt"
python benchmarks/quantizer.py --device cuda | tee "$out/quantizer_float32.txt"
python benchmarks/quantizer.py --device cuda --dtype bfloat16 | tee "$out/quantizer_bfloat16.txt"
text=(dataset.source=parquet dataset.data_files="$train" dataset.split=train dataset.column=text
  checkpointer.checkpoint_dir="$model")
# 12 layers, each way: the authors', adaptive, Fisher; one probe at a time and eight.
for vectors in 1 8; do
  python benchmarks/sensitivity.py --config smollm2_135m --layers 12 \
    --settings num_samples=16 batch_size=2 vectors_at_once=$vectors \
    --output-dir "$out/sensitivity_$vectors" \
    --overrides "${text[@]}" dataset.seq_len=512 | tee "$out/sensitivity_$vectors.txt"
done
held_out=(dataset_val._component_=hestia_tune.data.streaming_text_dataset
  dataset_val.source=parquet dataset_val.data_files="$validation" dataset_val.seq_len=1024
  dataset_val.max_tokens=100000)
tune run hestia_qat --config smollm2_135m output_dir="$out/smollm2" "${text[@]}" "${held_out[@]}" \
  gradient_accumulation_steps=4 max_steps=150 sensitivity_estimation.curvature=fisher \
  compare_straight_through=True 2>&1 | tee "$out/smollm2.txt"
tune run hestia_qat --config smollm2_135m output_dir="$out/fairy2i" "${text[@]}" "${held_out[@]}" \
  quantizer._component_=hestia_tune.Fairy2iQATQuantizer ~quantizer.group_size sensitivity=null \
  gradient_accumulation_steps=4 max_steps=100 2>&1 | tee "$out/fairy2i.txt"
tune run hestia_convert --config smollm2_135m output_dir="$out/smollm2" "${text[@]}" \
  2>&1 | tee "$out/convert.txt"
tune run hestia_eval --config smollm2_135m output_dir="$out/smollm2" "${text[@]}" \
  eval.models=[pretrained,naive,trained,packed] eval.include_path="$tasks" eval.tasks=[arc_easy_local] \
  2>&1 | tee "$out/eval.txt"
