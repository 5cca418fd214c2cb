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
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hestia_tune.data.sequences import SequenceDataset, sequence_dataset

# Of the names' hashes, one class in nine is about a tenth of the characters and, spread over many
# short topics, of every kind of prose in the text.
_HASH_CLASSES = 9
_VALIDATION_CLASS = 1
# Shorter paragraphs ("See also:") recur everywhere and give nothing away.
_QUOTE_LENGTH = 40


def demo_documents(split: str) -> list[str]:
    """The help topics of this Python as documents, sorted by topic name.

    Args:
        split: "validation", whole topics with about a tenth of the characters; or "train", all
            other topics without the paragraphs that a validation topic holds too.

    Raises:
        ValueError: if ``split`` is another word.
        ModuleNotFoundError: if this Python was installed without its help topics.
    """
    if split not in ("train", "validation"):
        raise ValueError(
            f'split must be "train" or "validation"; got {split!r}; use one of the two'
        )
    from pydoc_data.topics import topics

    validation = [topics[name] for name in sorted(topics) if _is_validation(name)]
    if split == "validation":
        return validation
    train = [topics[name] for name in sorted(topics) if not _is_validation(name)]
    return without_quotes(train, validation)


def without_quotes(documents: Iterable[str], held_out: Iterable[str]) -> list[str]:
    """``documents`` without the paragraphs that also stand in ``held_out``.

    Paragraphs are parted by blank lines and compared without regard to line breaks and
    indentation; those of under 40 characters stay. Documents left with nothing are dropped.
    """
    quotable = {
        key
        for document in held_out
        for paragraph in document.split("\n\n")
        if len(key := _paragraph_key(paragraph)) >= _QUOTE_LENGTH
    }
    kept = (
        "\n\n".join(p for p in document.split("\n\n") if _paragraph_key(p) not in quotable)
        for document in documents
    )
    return [document for document in kept if document.strip()]


@functools.cache
def stdlib_docstrings() -> tuple[str, ...]:
    """The docstrings of each module of the standard library, one document per module.

    Reading and parsing the library takes some ten seconds, once per process.
    """
    stdlib = Path(sysconfig.get_path("stdlib"))
    documents = []
    for path in sorted(stdlib.rglob("*.py")):
        parts = path.relative_to(stdlib).with_suffix("").parts
        if parts[0] not in sys.stdlib_module_names or {"test", "tests", "idle_test"} & set(parts):
            continue
        docstrings = list(dict.fromkeys(_docstrings(path)))
        if docstrings:
            documents.append("\n\n".join(docstrings) + "\n")
    return tuple(documents)


def _docstrings(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except SyntaxError:  # some files of lib2to3 are deliberately not Python 3
        return
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, documented) and (docstring := ast.get_docstring(node)):
            yield inspect.cleandoc(docstring).strip()


def demo_dataset(
    tokenizer: Any, *, seq_len: int, split: str = "train", docstrings: bool = False
) -> SequenceDataset:
    """The prose of Python's own help topics, which every Python carries.

    Args:
        tokenizer: a torchtune tokenizer (``encode``, ``eos_id``).
        seq_len: tokens per sequence.
        split: "train" or "validation"; no help topic is in both.
        docstrings: adds the docstrings of the standard library, without what they share with the
            validation topics; about five times as much text as the topics have.
    """
    documents = demo_documents(split)
    if docstrings:
        documents += without_quotes(stdlib_docstrings(), demo_documents("validation"))
    return sequence_dataset(tokenizer, documents, seq_len=seq_len, source=f"demo ({split})")


def _is_validation(name: str) -> bool:
    return zlib.crc32(name.encode()) % _HASH_CLASSES == _VALIDATION_CLASS


def _paragraph_key(paragraph: str) -> str:
    return " ".join(paragraph.split())
