"""Load the text of the demo: the help topics of Python, and the docstrings of its standard library.

Every CPython contains the help topics (``help("assert")`` and so on). So the demo needs no
download, and the package contains no corpus. A hash of the topic's name decides whether a topic is
for training or for validation. A split by position would move, because Python versions have
different topics. Some topics quote others: "compound" contains all of "while". So the training
documents lose every paragraph that is also in a validation topic. Otherwise the validation loss
would partly measure recall.

The cost: the text is small (about half a megabyte, a few milliseconds to split), and its wording
depends on the Python version. So losses on it compare only within one version.
"""

import ast
import functools
import inspect
import sys
import sysconfig
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hestia_tune.data.sequences import SequenceDataset, encode_each
from hestia_tune.errors import InputError

# The hashes of the names have nine classes. One class is for validation: about a tenth of the
# characters. It is spread over many short topics, so it has every kind of prose in the text.
_HASH_CLASSES, _VALIDATION_CLASS = 9, 1
# Shorter paragraphs, such as "See also:", are everywhere and give nothing away.
_QUOTE_LENGTH = 40


def demo_documents(split: str) -> list[str]:
    """Return the help topics of this Python as documents, sorted by topic name.

    Args:
        split: "validation", about a tenth of the characters, or "train", the others.

    Raises:
        InputError: If ``split`` is another word.
        ModuleNotFoundError: If this Python was installed without its help topics.
    """
    from pydoc_data.topics import topics

    if split not in ("train", "validation"):
        raise InputError(f'split must be "train" or "validation"; got {split!r}')
    train, held_out = [], []
    for name in sorted(topics):
        is_held_out = zlib.crc32(name.encode()) % _HASH_CLASSES == _VALIDATION_CLASS
        (held_out if is_held_out else train).append(topics[name])
    return held_out if split == "validation" else without_quotes(train, held_out)


def without_quotes(documents: Iterable[str], held_out: Iterable[str]) -> list[str]:
    """Return ``documents`` without the paragraphs that are also in ``held_out``.

    Blank lines separate paragraphs. Line breaks and indentation do not count in the comparison.
    Paragraphs with fewer than 40 characters stay. Documents without any paragraph left are dropped.

    Args:
        documents: The documents to clean.
        held_out: Documents that must not be quoted.

    Returns:
        The cleaned documents, in order.
    """

    def key(paragraph: str) -> str:
        return " ".join(paragraph.split())

    paragraphs = (key(part) for document in held_out for part in document.split("\n\n"))
    quotable = {paragraph for paragraph in paragraphs if len(paragraph) >= _QUOTE_LENGTH}
    kept = (
        "\n\n".join(part for part in document.split("\n\n") if key(part) not in quotable)
        for document in documents
    )
    return [document for document in kept if document.strip()]


@functools.cache
def stdlib_docstrings() -> tuple[str, ...]:
    """Return the docstrings of the standard library, one document per module.

    This takes some ten seconds, once per process.
    """
    stdlib = Path(sysconfig.get_path("stdlib"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    documents = []
    for path in sorted(stdlib.rglob("*.py")):
        parts = path.relative_to(stdlib).with_suffix("").parts
        if parts[0] not in sys.stdlib_module_names or {"test", "tests", "idle_test"} & set(parts):
            continue
        try:
            nodes = ast.walk(ast.parse(path.read_bytes()))
        except SyntaxError:  # Some files of lib2to3 are deliberately not Python 3.
            continue
        texts = [ast.get_docstring(node) for node in nodes if isinstance(node, documented)]
        docstrings = dict.fromkeys(inspect.cleandoc(text).strip() for text in texts if text)
        if docstrings:
            documents.append("\n\n".join(docstrings) + "\n")
    return tuple(documents)


def demo_dataset(
    tokenizer: Any, *, seq_len: int, split: str = "train", docstrings: bool = False
) -> SequenceDataset:
    """Return the help topics of this Python as sequences of tokens, for the demo.

    Args:
        tokenizer: A torchtune tokenizer (``encode``, ``eos_id``).
        seq_len: Number of tokens per sequence.
        split: "train" or "validation".
        docstrings: Whether to add the docstrings of the standard library, without the paragraphs
            that are also in the validation topics. They are about five times as long as the topics.

    Returns:
        The sequences.

    Raises:
        InputError: If ``split`` is another word.
        ModuleNotFoundError: If this Python was installed without its help topics.
    """
    documents = demo_documents(split)
    if docstrings:
        documents += without_quotes(stdlib_docstrings(), demo_documents("validation"))
    encoded = encode_each(tokenizer, documents)
    return SequenceDataset((id_ for ids in encoded for id_ in [*ids, tokenizer.eos_id]), seq_len)
