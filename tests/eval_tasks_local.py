"""Writes a folder with a small multiple-choice task and a rolling task on local files."""

import json

MULTIPLE_CHOICE = """
task: tiny_choice
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/rows.jsonl, train: FOLDER/rows.jsonl}}
output_type: multiple_choice
training_split: train
test_split: test
fewshot_split: train
doc_to_text: "Question: {{question}} Answer:"
doc_to_target: answer
doc_to_choice: "{{choices}}"
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
metadata: {version: 3.0}
"""
ROLLING = """
task: tiny_rolling
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/rows.jsonl}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: question
metric_list:
  - {metric: word_perplexity}
  - {metric: bits_per_byte}
metadata: {version: 1.0}
"""


def make_task_folder(folder, num=13, official=()):
    """Write the tasks ``tiny_choice`` and ``tiny_rolling``, and return the folder.

    Args:
        folder: The folder to write.
        num: The number of rows.
        official: Names of lm-eval's tasks. ``tiny_choice`` is also written under these names.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "question": f"{i * 37 % 101} and {'ab' * (i % 5)}",
            "choices": ["x", f"yes {i}", "no"],
            "answer": i % 3,
        }
        for i in range(num)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = {"choice": MULTIPLE_CHOICE, "rolling": ROLLING}
    texts |= {name: MULTIPLE_CHOICE.replace("tiny_choice", name) for name in official}
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text.replace("FOLDER", str(folder)))
    return folder


def make_manager(folder):
    """Return a task manager with these tasks alone, which is fast to make."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=str(folder), include_defaults=False)
