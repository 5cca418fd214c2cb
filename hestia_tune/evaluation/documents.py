"""Documents for perplexity from a text file, a parquet column or a Hugging Face dataset."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from hestia_tune.config import nearest
from hestia_tune.evaluation.tasks import hub_errors


def read_documents(
    source: str | Path,
    *,
    column: str = "text",
    name: str | None = None,
    split: str = "test",
    limit: int | None = None,
    join: str | None = None,
) -> list[str]:
    """The documents of a source.

    Args:
        source: path of a text file (one document), of a ``.parquet`` file (one per row), or
            anything that ``datasets.load_dataset`` takes: a folder, or an id on the hub.
        column: that holds the text, in parquet files and datasets.
        name: configuration of a dataset, such as "wikitext-2-raw-v1".
        split: of a dataset.
        limit: number of documents from the beginning; None is all.
        join: text put between the documents to make one of them all; None keeps them apart.

    Raises:
        FileNotFoundError: if the file does not exist.
        ConnectionError: if the dataset is on a hub that cannot be reached.
        ValueError: if a column or split is missing (those that exist are named), a text is not
            UTF-8 or not text, there is no text at all, or ``limit`` is not positive.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1 document; got {limit}; use null for all")
    path = Path(source)
    if path.is_file():
        if path.suffix in (".json", ".jsonl", ".csv", ".gz", ".zst"):
            raise ValueError(
                f"{source} would be scored with its markup; use a text file, parquet, or a folder "
                "that datasets reads"
            )
        texts = _parquet(path, column) if path.suffix == ".parquet" else [_text(path)]
    elif path.suffix in (".txt", ".md", ".parquet", ".json", ".jsonl") or path.is_absolute():
        if not path.is_dir():
            raise FileNotFoundError(f"{source} does not exist; check the path")
        texts = _dataset(str(source), column, name, split)
    else:
        texts = _dataset(str(source), column, name, split)
    documents = list(_checked(texts if limit is None else texts[:limit], source, column))
    if join is not None:
        documents = [join.join(documents)]
    if not any(documents):
        raise ValueError(f"{source} holds no text; there is nothing to measure")
    return documents


def _text(path: Path) -> str:
    data = path.read_bytes()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 (byte {error.start}: {error.reason}); convert it, e.g. with "
            "iconv -t utf-8"
        ) from None


def _parquet(path: Path, column: str) -> Sequence[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            _require_column(column, file.schema_arrow.names, path)
            return file.read(columns=[column]).column(column).to_pylist()
    except (pyarrow.ArrowInvalid, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as parquet with UTF-8 text: {error}") from None


def _dataset(source: str, column: str, name: str | None, split: str) -> Sequence[str]:
    import datasets

    with hub_errors(f"dataset {source}"):
        try:
            rows = datasets.load_dataset(source, name, split=split)
        except ValueError as error:
            raise ValueError(
                f"dataset {source} (name {name!r}, split {split!r}) cannot be loaded: {error}; "
                "check name and split"
            ) from error
    _require_column(column, rows.column_names, source)
    return rows[column][:]


def _require_column(column: str, known: Iterable[str], source: object) -> None:
    known = list(known)
    if column not in known:
        raise ValueError(
            f"{source} has no column {column!r}{nearest(column, known)}; columns: "
            f"{', '.join(known)}"
        )


def _checked(texts: Iterable[str], source: object, column: str) -> Iterable[str]:
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(
                f"row {index} of column {column!r} of {source} is {text!r}, not text; drop such "
                "rows or name another column"
            )
        yield text
