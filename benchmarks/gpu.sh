#!/usr/bin/env bash
# Everything that only a GPU shows, in one call; results under OUT.
#   benchmarks/gpu.sh MODEL_FOLDER TRAIN_PARQUET VALIDATION_PARQUET OUT
# MODEL_FOLDER is a Hugging Face folder of SmolLM2-135M; the parquet files have a column `text`.
set -euo pipefail
model=$1 train=$2 validation=$3 out=$4
cd "$(dirname "$0")/.."
mkdir -p "$out"
nvidia-smi | tee "$out/machine.txt"
pytest -m gpu | tee "$out/pytest.txt"
python benchmarks/quantizer.py --device cuda | tee "$out/quantizer_float32.txt"
python benchmarks/quantizer.py --device cuda --dtype bfloat16 | tee "$out/quantizer_bfloat16.txt"
tune run hestia_qat --config smollm2_135m output_dir="$out/smollm2" \
  checkpointer.checkpoint_dir="$model" gradient_accumulation_steps=4 max_steps_per_epoch=150 \
  dataset.source=parquet dataset.data_files="$train" dataset.split=train dataset.column=text \
  dataset.max_tokens=20000000 compare_straight_through=True \
  dataset_val._component_=hestia_tune.data.text_dataset dataset_val.source=parquet \
  dataset_val.data_files="$validation" dataset_val.seq_len=1024 dataset_val.max_tokens=100000 \
  2>&1 | tee "$out/smollm2.txt"
