"""The tokenization recipe: the config's stream written once as token shards, for many runs."""

from typing import Any

from omegaconf import DictConfig, OmegaConf
from torchtune import config, utils

from hestia_tune.data import verify_token_shards, write_token_shards
from hestia_tune.files import require_writable_dir
from hestia_tune.training.options import Run

log = utils.get_logger("DEBUG")

_STREAM = "hestia_tune.data.streaming_text_dataset"
# What decides the tokens; the rest of the section is about how a run reads them.
_SOURCE_KEYS = ("data_files", "column", "name", "split", "revision", "skip_bad_rows", "max_retries")


def run_tokenize(cfg: DictConfig | Run) -> int:
    """Writes the shards of the ``dataset`` section; goes on where it was stopped.

    Raises:
        ValueError: if the dataset is no stream of text, or other shards are in the folder.
    """
    run = Run.of(cfg)
    cfg, options = run.cfg, run.options.tokenize
    section: dict[str, Any] = OmegaConf.to_container(cfg.dataset, resolve=True)
    if section.get("_component_") != _STREAM or section["source"] == "token_shards":
        raise ValueError(
            f"hestia_tokenize writes what {_STREAM} reads from text; the dataset is "
            f"{section.get('_component_')} with source {section.get('source')}"
        )
    folder = require_writable_dir(options.output)
    index = write_token_shards(
        config.instantiate(cfg.tokenizer),
        folder,
        source=section["source"],
        seed=section.get("seed", 0),
        max_tokens=options.max_tokens or section.get("max_tokens"),
        shard_tokens=options.shard_tokens,
        **{key: section[key] for key in _SOURCE_KEYS if key in section},
    )
    if options.verify:
        verify_token_shards(folder)
    print(
        f"{index['num_tokens']:,} tokens of {index['num_documents']:,} documents in {folder} "
        f"({index['skipped_rows']:,} rows skipped); "
        f"train on them with dataset.source=token_shards dataset.data_files={folder}"
    )
    return 0
