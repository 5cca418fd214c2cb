"""Tokenizer components: for a ``tokenizer.json``, and for any tokenizer of transformers in Rust."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment
from torchtune.data import Message
from torchtune.modules.transforms.tokenizers import HuggingFaceBaseTokenizer

from hestia_tune.errors import InputError, one_line
from hestia_tune.files import read_json
from hestia_tune.models.folder import import_optional, local_folder


class HuggingFaceTokenizer(HuggingFaceBaseTokenizer):
    """torchtune's Hugging Face tokenizer with what torchtune's datasets and collators need besides.

    torchtune's generate recipe calls the tokenizer with messages. The tokenizer renders the chat
    template of the folder. Without a chat template it joins the texts of the messages, and a base
    model continues this text.

    Args:
        path: A Hugging Face folder with ``tokenizer.json`` and ``tokenizer_config.json``.
        eos_token: The token that ends a document. None: the ``eos_token`` in
            ``tokenizer_config.json``, which in instruct models ends a turn.
        max_seq_len: The longest sequence in tokens that torchtune's datasets make of a document.

    Attributes:
        stop_tokens: The ids that end a generation.
        pad_id: The id of the configured padding token, or the id of EOS if there is none.

    Raises:
        InputError: If a file is missing or damaged, or if ``eos_token`` is not in the vocabulary.
    """

    def __init__(self, path: str, eos_token: str | None = None, max_seq_len: int | None = None):
        folder = Path(path)
        files = [folder / "tokenizer.json", folder / "tokenizer_config.json"]
        if missing := [file for file in files if not file.is_file()]:
            raise InputError(f"{missing[0]} does not exist; check tokenizer.path")
        read_json(files[1])
        try:
            super().__init__(str(files[0]), tokenizer_config_json_path=str(files[1]))
        except Exception as error:  # tokenizers raises plain exceptions
            raise InputError(f"{files[0]} is damaged ({one_line(error)}); get it again") from error
        self.max_seq_len = max_seq_len
        if eos_token is not None:
            self.eos_id = self.tokenizer.token_to_id(eos_token)
            if self.eos_id is None:
                raise InputError(f"tokenizer.eos_token {eos_token!r} is not in {files[0]}")
        pad = self._special_token("pad_token")
        pad_id = None if pad is None else self.tokenizer.token_to_id(pad)
        self.pad_id = self.eos_id if pad_id is None else pad_id
        turn_end = self.tokenizer.token_to_id(self._special_token("eos_token"))
        self.stop_tokens = sorted({self.eos_id, turn_end})
        self.chat_template: str | None = self.config.get("chat_template")
        if isinstance(self.chat_template, list):  # older folders have several templates with names
            templates = {entry["name"]: entry["template"] for entry in self.chat_template}
            self.chat_template = templates.get("default")
        if (template := folder / "chat_template.jinja").is_file():
            self.chat_template = template.read_text(encoding="utf-8")

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode several texts at once, which is faster, without adding our BOS and EOS."""
        return [encoding.ids for encoding in self.tokenizer.encode_batch_fast(list(texts))]

    def _special_token(self, key: str) -> str | None:
        return super()._get_token_from_config(self.config, key) if self.config.get(key) else None

    def __call__(self, sample: Mapping[str, Any], inference: bool = False) -> dict[str, Any]:
        """Add the key "tokens" to a sample, as a transform of torchtune.

        Args:
            sample: A sample with the key "messages".
            inference: Whether the model will answer. An empty last message is then left out.
        """
        messages: Sequence[Message] = sample["messages"]
        if inference and messages and not messages[-1].text_content:
            messages = messages[:-1]
        if self.chat_template is None:
            text = "".join(message.text_content for message in messages)
            # Add BOS only if the model was trained with BOS at the start of texts.
            add_bos = self.config.get("add_bos_token") is True
            tokens = self.encode(text, add_bos=add_bos, add_eos=not inference)
        else:
            environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
            text = environment.from_string(self.chat_template).render(
                messages=[{"role": m.role, "content": m.text_content} for m in messages],
                add_generation_prompt=inference,
                bos_token=self._special_token("bos_token") or "",
                eos_token=self._special_token("eos_token") or "",
            )
            tokens = self.tokenizer.encode(text, add_special_tokens=False).ids
        return {**sample, "tokens": tokens}

    def _get_token_from_config(self, config, key):
        """Return a configured token, and EOS in place of a missing BOS (Qwen2.5 has none)."""
        missing_bos = key == "bos_token" and config.get(key) is None
        return super()._get_token_from_config(config, "eos_token" if missing_bos else key)

    @property
    def vocab_size(self) -> int:
        """Return the number of token ids, special tokens included."""
        return self.tokenizer.get_vocab_size(with_added_tokens=True)


class AutoTokenizer(HuggingFaceTokenizer):
    """The tokenizer of a model, as transformers' AutoTokenizer loads it.

    Args:
        path: A Hugging Face folder, or the name of a repository.
        eos_token: The token that ends a document; see `HuggingFaceTokenizer`.
        max_seq_len: The longest sequence of a document; see `HuggingFaceTokenizer`.

    Raises:
        InputError: If transformers has no tokenizer for the folder, or none in Rust; or if
            `HuggingFaceTokenizer` raises it.
    """

    def __init__(self, path: str, eos_token: str | None = None, max_seq_len: int | None = None):
        transformers, folder = import_optional("transformers"), local_folder(path)
        try:
            loaded = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise InputError(f"no tokenizer in {folder} can be loaded: {error}") from error
        if not loaded.is_fast:
            raise InputError(
                f"the tokenizer must be of the tokenizers library (Rust); {folder} has a "
                f"{type(loaded).__name__}; convert it to tokenizer.json"
            )
        with tempfile.TemporaryDirectory() as copy:
            loaded.save_pretrained(copy)
            try:
                super().__init__(copy, eos_token, max_seq_len)
            except ValueError as error:
                raise InputError(str(error).replace(copy, str(folder))) from error
