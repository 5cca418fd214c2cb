"""What lm-eval's requests are called, in messages and among themselves."""

from typing import Any


def generation_key(request: Any) -> tuple[str, str]:
    """What tells a generation request from others: its prompt and its settings."""
    context, gen_kwargs = request.args
    return context, repr(sorted(gen_kwargs.items()))


def request_name(request: Any) -> str:
    """Where a request comes from and the ends of its texts."""
    texts = [_shortened(text) for text in request.args if isinstance(text, str)]
    where = f"{request.task_name} document {request.doc_id}" if request.task_name else "a request"
    return f"{where} ({' -> '.join(map(repr, texts))})"


def _shortened(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:40]} ... {text[-40:]}"
