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
    num_sequences: int = option(low=1)  # sequences to generate
    seq_len: int = option(low=8)  # tokens of each, the random first one included
    cache_dir: str  # folder of the set, which is generated once
    temperature: float = option(1.0, low=1e-2, high=100)  # of the sampling
    top_k: int | None = option(None, low=1)  # samples from so many of the likeliest; null from all
    seed: int = option(0, low=0, high=2**63 - 1)  # of the sampling, and of the order in training
    batch_size: int = option(32, low=1)  # generated together; decides what is drawn
    epochs: int | None = option(1, low=1)  # passes over the set; null has no end


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
