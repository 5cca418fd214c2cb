"""Sequences that the model has sampled from itself (LLM-QAT, arXiv 2305.17888), a tokenized set.

Each is a random token, a few tokens that follow greedily, of which the model is sure, and sampled
ones. A sequence that ends a document goes on with another, as those of a text stream do. The
set is written by `hestia_tune.training.generation`, before a run that names it; it is read here.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from hestia_tune.config import Section, option
from hestia_tune.data.rows import StreamConfig
from hestia_tune.data.tokens import TokenizedSet


@dataclass(frozen=True, kw_only=True)
class GeneratedConfig(Section):
    """The YAML's ``dataset`` section, if its component is ``self_generated_dataset``."""

    section: ClassVar[str] = "dataset"
    num_sequences: int = option(text="sequences to generate", low=1)
    seq_len: int = option(text="tokens of each, the random first one included", low=8)
    cache_dir: str = option(text="folder of the set, which is generated once")
    temperature: float = option(1.0, "of the sampling", low=1e-2, high=100)
    top_k: int | None = option(None, "samples from so many of the likeliest; null from all", low=1)
    seed: int = option(0, "of the sampling, and of the order in training", low=0, high=2**63 - 1)
    batch_size: int = option(32, "generated together; decides what is drawn", low=1)
    epochs: int | None = option(1, "passes over the set; null has no end", low=1)


def self_generated_dataset(tokenizer: Any, **options: Any) -> TokenizedSet:
    """The sequences that the pretrained model has sampled, shuffled by the seed.

    Args:
        tokenizer: that of the set.
        options: those of `GeneratedConfig`.

    Raises:
        TypeError, ValueError: on an option out of range, or if the folder holds no such set.
    """
    config = GeneratedConfig.parse(options)
    read = {key: getattr(config, key) for key in ("seq_len", "seed", "epochs")}
    stream = StreamConfig(source="token_shards", data_files=config.cache_dir, **read)
    return TokenizedSet(tokenizer, stream)
