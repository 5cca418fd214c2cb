"""The tokenization recipe: the config's stream of text written once as a tokenized set."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from torchtune import config

from hestia_tune.data import verify_token_shards, write_token_shards
from hestia_tune.files import require_writable_dir
from hestia_tune.training.options import Run

_STREAM = "hestia_tune.data.streaming_text_dataset"


def run_tokenize(cfg: DictConfig | Run) -> int:
    """Writes the tokens of the ``dataset`` section, unless the folder holds them already.

    Raises:
        ValueError: if the dataset is no stream of text, or another set is in the folder.
    """
    run = Run.of(cfg)
    cfg, options = run.cfg, run.options.tokenize
    section: Any = OmegaConf.to_container(cfg.dataset, resolve=True)
    is_one = isinstance(section, dict) and section.pop("_component_", None) == _STREAM
    if not is_one or section.get("source") in (None, "token_shards"):
        raise ValueError(
            f"hestia_tokenize writes what one {_STREAM} reads from the text of its source; got "
            f"{OmegaConf.to_container(cfg.dataset)}"
        )
    require_writable_dir(Path(options.output).parent)
    section["max_tokens"] = options.max_tokens or section.get("max_tokens")
    index = write_token_shards(config.instantiate(cfg.tokenizer), options.output, **section)
    if options.verify:
        verify_token_shards(options.output)
    print(
        f"{index['num_tokens']:,} tokens of {index['num_documents']:,} documents in "
        f"{options.output}; train on them with dataset.source=token_shards "
        f"dataset.data_files={options.output}"
    )
    return 0
