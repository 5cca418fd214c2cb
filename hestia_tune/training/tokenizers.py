"""A tokenizer component for models that come with a ``tokenizer.json``."""

import json
from pathlib import Path

from torchtune.modules.transforms.tokenizers import HuggingFaceBaseTokenizer


class HuggingFaceTokenizer(HuggingFaceBaseTokenizer):
    """torchtune's Hugging Face tokenizer with what its datasets and collators also ask for.

    Args:
        path: a Hugging Face folder with ``tokenizer.json`` and ``tokenizer_config.json``.
        eos_token: the token that ends a document, if it is not the configured ``eos_token`` (the
            one that ends a turn, in instruct models).
        max_seq_len: longest sequence that torchtune's datasets make of one document; None is
            unlimited.

    Attributes:
        pad_id: id of the configured padding token, or of EOS if there is none.
        vocab_size: number of token ids, special ones included.

    Raises:
        FileNotFoundError: naming the file that the folder lacks.
        ValueError: if ``eos_token`` is no token of the vocabulary.
    """

    def __init__(self, path: str, eos_token: str | None = None, max_seq_len: int | None = None):
        folder = Path(path)
        files = [folder / "tokenizer.json", folder / "tokenizer_config.json"]
        for file in files:
            if not file.is_file():
                raise FileNotFoundError(
                    f"tokenizer file {file} does not exist; check tokenizer.path"
                )
        super().__init__(str(files[0]), tokenizer_config_json_path=str(files[1]))
        self.max_seq_len = max_seq_len
        if eos_token is not None:
            self.eos_id = self.tokenizer.token_to_id(eos_token)
            if self.eos_id is None:
                raise ValueError(f"tokenizer.eos_token {eos_token!r} is not in {files[0]}")
        pad = json.loads(files[1].read_text(encoding="utf-8")).get("pad_token")
        pad = pad["content"] if isinstance(pad, dict) else pad
        self.pad_id = self.eos_id if pad is None else self.tokenizer.token_to_id(pad)

    def _get_token_from_config(self, config, key):
        """Models without a BOS token (Qwen2.5) have EOS in its place."""
        missing_bos = key == "bos_token" and config.get(key) is None
        return super()._get_token_from_config(config, "eos_token" if missing_bos else key)

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.get_vocab_size(with_added_tokens=True)
