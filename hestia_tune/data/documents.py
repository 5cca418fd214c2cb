"""The demo's text, and the cutting of any text into token sequences.

The text is the prose of Python's own help topics (``help("assert")`` and so on), because every
CPython carries it: the demo needs no download and ships no corpus. Topics are split by a hash of
their names, since Python versions differ in which topics they have and a split by position would
move between them. Some topics quote others ("compound" holds all of "while"), so paragraphs of a
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
from array import array
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

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


def chunk_tokens(
    documents: Iterable[str], encode: Callable[[str], list[int]], eos_id: int, seq_len: int
) -> tuple[torch.Tensor, int]:
    """Joins the tokens of all documents, EOS after each, and cuts them into sequences.

    Documents are taken one at a time, so an iterable may make them as it goes.

    Args:
        documents: texts.
        encode: the token ids of one text, without special tokens.
        eos_id: id put after each document.
        seq_len: tokens per sequence.

    Returns:
        The sequences, int64 (num_sequences, seq_len), in the order of the text; and how many
        tokens at its end did not fill a sequence and were dropped.

    Raises:
        ValueError: if ``seq_len`` is not positive.
    """
    if seq_len < 1:
        raise ValueError(f"seq_len must be at least 1; got {seq_len}; use 128 or more")
    stream = array("q")
    for document in documents:
        stream.extend(encode(document))
        stream.append(eos_id)
    num_sequences, dropped = divmod(len(stream), seq_len)
    if num_sequences == 0:
        return torch.empty(0, seq_len, dtype=torch.int64), dropped
    tokens = torch.frombuffer(stream, dtype=torch.int64)
    return tokens[: num_sequences * seq_len].view(num_sequences, seq_len), dropped


def _is_validation(name: str) -> bool:
    return zlib.crc32(name.encode()) % _HASH_CLASSES == _VALIDATION_CLASS


def _paragraph_key(paragraph: str) -> str:
    return " ".join(paragraph.split())
