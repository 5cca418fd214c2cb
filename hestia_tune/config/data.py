"""The YAML's ``dataset`` section, if its component is one of this package's.

Options of other components, such as torchtune's datasets, are passed on as they are.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from hestia_tune.config.section import Section, option


@dataclass(frozen=True, kw_only=True)
class StreamConfig(Section):
    """The options of ``hestia_tune.data.streaming_text_dataset`` and ``text_dataset``."""

    section: ClassVar[str] = "dataset"
    source: str
    """First argument of `datasets.load_dataset`: a hub name, or "parquet", "json" or "text" with
    data_files (.gz, .zst and .bz2 too; a line of a text file is a document). Or "token_shards", a
    tokenized set, with its folder as data_files."""
    seq_len: int = option(low=1)
    """Tokens per sequence."""
    column: str = "text"
    """Column that holds the text."""
    data_files: Any = None
    """Paths, globs or URLs, or a mapping with one of these for each split."""
    name: str | None = None
    """Configuration of a hub dataset. null: the dataset has none."""
    split: str = "train"
    """Split to read."""
    revision: str | None = None
    """Commit or branch of a hub dataset; to resume, the one that the run began with. null: the
    newest."""
    shuffle_buffer: int = option(1000, low=0)
    """Documents that are shuffled together; 0 keeps the order. In a tokenized set every number
    above 0 shuffles all sequences."""
    seed: int = option(0, low=0)
    """Seed of the shuffles, together with the number of the epoch."""
    max_tokens: int | None = option(None, low=1)
    """Tokens of all ranks together, rounded down to whole sequences on each rank. The data are read
    again, in a new order, if they hold less. null: no limit."""
    epochs: int | None = option(None, low=1)
    """Passes over the data. null: no limit. The length of a text in epochs is not known before."""
    document_masks: bool = False
    """Whether tokens see only their own document, as torchtune's packed datasets do."""

    @property
    def files(self) -> str:
        """What is read, for messages."""
        return str(self.data_files or self.source)


@dataclass(frozen=True, kw_only=True)
class GeneratedConfig(Section):
    """The options of ``hestia_tune.data.self_generated_dataset``.

    `hestia_tune.training.generation` writes the set before a run that names it.
    """

    section: ClassVar[str] = "dataset"
    num_sequences: int = option(low=1)
    """Sequences to generate."""
    seq_len: int = option(low=8)
    """Tokens of each sequence, the random first one included."""
    cache_dir: str
    """Folder of the set, which is generated once."""
    temperature: float = option(1.0, low=1e-2, high=100)
    """Temperature of the sampling."""
    seed: int = option(0, low=0, high=2**63 - 1)
    """Seed of the sampling, and of the order in training."""
    epochs: int | None = option(1, low=1)
    """Passes over the set. null: no limit."""
