"""Zero-shot tasks of lm-evaluation-harness, perplexity, and models compared.

    from hestia_tune.sections import EvalConfig
    from hestia_tune.evaluation import Evaluator, compare

    evaluator = Evaluator(EvalConfig(tasks=["hestia_zeroshot"]), tokenizer, max_seq_len=2048)
    table = compare([evaluator.evaluate(name, model) for name, model in models.items()])
    print(table.markdown())
    table.save("results.json")

Needs ``pip install 'hestia-tune[eval]'``.
"""

from hestia_tune.evaluation.compare import Comparison, ModelResult, compare
from hestia_tune.evaluation.evaluator import Evaluator, metrics_of, plain_outputs
from hestia_tune.evaluation.harness import evaluate_tasks, find_tasks, load_tasks, versions
from hestia_tune.evaluation.perplexity import perplexity, read_documents

__all__ = [
    "Comparison",
    "Evaluator",
    "ModelResult",
    "compare",
    "evaluate_tasks",
    "find_tasks",
    "load_tasks",
    "metrics_of",
    "perplexity",
    "plain_outputs",
    "read_documents",
    "versions",
]
