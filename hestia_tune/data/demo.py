"""The demo's text.

It is the prose of Python's own help topics (``help("assert")`` and so on), because every CPython
carries it: the demo needs no download and ships no corpus. Topics are split by a hash of their
names, since Python versions differ in which topics they have and a split by position would move
between them. Some topics quote others ("compound" holds all of "while"), so paragraphs of a
validation topic are taken out of the training documents; without this the validation loss would
in part measure recall.

The cost: the text is small (about half a megabyte, a few milliseconds to split) and its wording
follows the Python version, so losses on it compare only within one version.
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

# Of the names' hashes, one class in nine is about a tenth of the characters and, spread over many
# short topics, of every kind of prose in the text.
_HASH_CLASSES, _VALIDATION_CLASS = 9, 1
# Shorter paragraphs ("See also:") recur everywhere and give nothing away.
_QUOTE_LENGTH = 40


def demo_documents(split: str) -> list[str]:
    """The help topics of this Python as documents, sorted by topic name.

    Args:
        split: "validation", with about a tenth of the characters, or "train".

    Raises:
        InputError: if ``split`` is another word.
        ModuleNotFoundError: if this Python was installed without its help topics.
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
    """``documents`` without the paragraphs that also stand in ``held_out``.

    Paragraphs are parted by blank lines and compared without regard to line breaks and
    indentation; those of under 40 characters stay. Documents left with nothing are dropped.
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
    """The docstrings of the standard library, a document per module; takes some ten seconds, once
    per process."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    documents = []
    for path in sorted(stdlib.rglob("*.py")):
        parts = path.relative_to(stdlib).with_suffix("").parts
        if parts[0] not in sys.stdlib_module_names or {"test", "tests", "idle_test"} & set(parts):
            continue
        try:
            nodes = ast.walk(ast.parse(path.read_bytes()))
        except SyntaxError:  # some files of lib2to3 are deliberately not Python 3
            continue
        found = [ast.get_docstring(node) for node in nodes if isinstance(node, documented)]
        docstrings = dict.fromkeys(inspect.cleandoc(text).strip() for text in found if text)
        if docstrings:
            documents.append("\n\n".join(docstrings) + "\n")
    return tuple(documents)


def demo_dataset(
    tokenizer: Any, *, seq_len: int, split: str = "train", docstrings: bool = False
) -> SequenceDataset:
    """The prose of Python's own help topics, which every Python carries.

    Args:
        tokenizer: a torchtune tokenizer (``encode``, ``eos_id``).
        seq_len: tokens per sequence.
        split: as of `demo_documents`.
        docstrings: adds the docstrings of the standard library, without what they share with the
            validation topics; about five times as much text as the topics have.
    """
    documents = demo_documents(split)
    if docstrings:
        documents += without_quotes(stdlib_docstrings(), demo_documents("validation"))
    encoded = encode_each(tokenizer, documents)
    return SequenceDataset((id_ for ids in encoded for id_ in [*ids, tokenizer.eos_id]), seq_len)
