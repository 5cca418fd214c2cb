"""``hestia_tokenize``: write the config's stream of text once, as a tokenized set."""

from collections.abc import Mapping
from typing import Any

from hestia_tune.commands.launch import next_command
from hestia_tune.config.run import RunConfig
from hestia_tune.data import verify_token_shards, write_token_shards
from hestia_tune.errors import InputError
from hestia_tune.files import require_writable_dir
from hestia_tune.models import loading

_STREAM = "hestia_tune.data.streaming_text_dataset"


def run_tokenize(config: RunConfig | Mapping[str, Any]) -> int:
    """Write the tokens of the ``dataset`` section to output_dir/tokens and return the exit code.

    If the folder already holds the set of the same text, the set stays.

    Raises:
        InputError: If the dataset is not a stream of text, or the folder holds another set.
    """
    config = RunConfig.parse(config)
    section = dict(config.datasets[0])
    is_stream = len(config.datasets) == 1 and section.pop("_component_", None) == _STREAM
    if not is_stream or section.get("source") in (None, "token_shards"):
        raise InputError(
            f"dataset must be one {_STREAM} with a source of text, because hestia_tokenize writes "
            f"its tokens; got {config.dataset}"
        )
    folder = require_writable_dir(config.output_dir) / "tokens"
    tokenizer = loading.instantiate(config.tokenizer, "tokenizer")
    index = write_token_shards(tokenizer, folder, **section)
    verify_token_shards(folder)
    shards = ("dataset.source=token_shards", f"dataset.data_files={folder}")
    train = next_command("qat", *shards)
    print(
        f"{index['num_tokens']:,} tokens of {index['num_documents']:,} documents are in {folder}. "
        f"Next:\n  {train}"
    )
    return 0
