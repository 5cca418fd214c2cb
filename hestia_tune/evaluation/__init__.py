"""Zero-shot tasks of lm-evaluation-harness, perplexity, and models compared.

    from hestia_tune.evaluation import ModelResult, compare, evaluate_tasks, perplexity

    results = []
    for name, model in models.items():
        found = evaluate_tasks(model, tokenizer, ["hestia_zeroshot"], window=2048)
        results.append(ModelResult(name=name, tasks=found))
    table = compare(results)
    print(table.markdown())
    table.save("results.json")

Tasks need ``pip install 'hestia-tune[eval]'``; perplexity and comparisons do not.
"""

from hestia_tune.evaluation.comparison import Comparison, ModelResult, compare
from hestia_tune.evaluation.documents import read_documents
from hestia_tune.evaluation.evaluate import evaluate_tasks
from hestia_tune.evaluation.perplexity import PerplexityResult, perplexity
from hestia_tune.evaluation.tasks import GROUPS, check_tasks, expand_groups, make_task_manager

__all__ = [
    "GROUPS",
    "Comparison",
    "ModelResult",
    "PerplexityResult",
    "check_tasks",
    "compare",
    "evaluate_tasks",
    "expand_groups",
    "make_task_manager",
    "perplexity",
    "read_documents",
]
