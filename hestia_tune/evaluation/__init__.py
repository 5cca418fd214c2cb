"""Evaluates models on tasks of lm-evaluation-harness and by perplexity, and compares the results.

evaluator = Evaluator(EvalConfig(tasks=["hestia_zeroshot"]), tokenizer, max_seq_len=2048)
table = compare([evaluator.evaluate(name, model, {}, device) for name, model in models.items()])
print(table.markdown())
"""

from hestia_tune.evaluation.compare import ModelResult, compare
from hestia_tune.evaluation.evaluator import Evaluator, metrics_of, plain_outputs, versions

__all__ = ["Evaluator", "ModelResult", "compare", "metrics_of", "plain_outputs", "versions"]
