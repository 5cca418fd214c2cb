"""A tokenizer component for models that come with a ``tokenizer.json``."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment
from torchtune.data import Message
from torchtune.modules.transforms.tokenizers import HuggingFaceBaseTokenizer

from hestia_tune.errors import InputError, one_line
from hestia_tune.files import read_json


class HuggingFaceTokenizer(HuggingFaceBaseTokenizer):
    """torchtune's Hugging Face tokenizer with what its datasets and collators also ask for.

    Called with messages, as torchtune's generate recipe does, it renders the folder's chat template
    if there is one, and otherwise joins their texts, which is what a base model continues.

    Args:
        path: a Hugging Face folder with ``tokenizer.json`` and ``tokenizer_config.json``.
        eos_token: the token that ends a document, if it is not the configured ``eos_token`` (the
            one that ends a turn, in instruct models).
        max_seq_len: longest sequence that torchtune's datasets make of one document.

    Attributes:
        stop_tokens: ids that end a generation.
        pad_id: id of the configured padding token, or of EOS if there is none.
        vocab_size: number of token ids, special ones included.

    Raises:
        InputError: if the folder lacks a file, which the message names; or if ``eos_token`` is no
            token of the vocabulary.
    """

    def __init__(self, path: str, eos_token: str | None = None, max_seq_len: int | None = None):
        folder = Path(path)
        files = [folder / "tokenizer.json", folder / "tokenizer_config.json"]
        if missing := [file for file in files if not file.is_file()]:
            raise InputError(f"{missing[0]} does not exist; check tokenizer.path")
        read_json(files[1])
        try:
            super().__init__(str(files[0]), tokenizer_config_json_path=str(files[1]))
        except Exception as error:  # of its own, without a type
            raise InputError(f"{files[0]} is damaged ({one_line(error)}); get it again") from error
        self.max_seq_len = max_seq_len
        if eos_token is not None:
            self.eos_id = self.tokenizer.token_to_id(eos_token)
            if self.eos_id is None:
                raise InputError(f"tokenizer.eos_token {eos_token!r} is not in {files[0]}")
        pad, turn_end = (self._special_token(f"{key}_token") for key in ("pad", "eos"))
        found = None if pad is None else self.tokenizer.token_to_id(pad)
        self.pad_id = self.eos_id if found is None else found
        self.stop_tokens = sorted({self.eos_id, self.tokenizer.token_to_id(turn_end)})
        template = folder / "chat_template.jinja"
        self.chat_template: str | None = self.config.get("chat_template")
        if isinstance(self.chat_template, list):  # several by name, as older folders have them
            named = {one["name"]: one["template"] for one in self.chat_template}
            self.chat_template = named.get("default")
        if template.is_file():
            self.chat_template = template.read_text(encoding="utf-8")

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """``encode`` of each text, without BOS and EOS of ours; at once, which is faster."""
        return [encoding.ids for encoding in self.tokenizer.encode_batch_fast(list(texts))]

    def _special_token(self, key: str) -> str | None:
        return super()._get_token_from_config(self.config, key) if self.config.get(key) else None

    def __call__(self, sample: Mapping[str, Any], inference: bool = False) -> dict[str, Any]:
        """torchtune's transform: ``{"messages": [...]}`` to ``{"tokens": [...]}``; of ``inference``
        the last message is empty and to be generated."""
        messages: Sequence[Message] = sample["messages"]
        if inference and messages and not messages[-1].text_content:
            messages = messages[:-1]
        if self.chat_template is None:
            text = "".join(message.text_content for message in messages)
            # A BOS only where the model saw one of its own at the start of texts.
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
        """Models without a BOS token (Qwen2.5) have EOS in its place."""
        missing_bos = key == "bos_token" and config.get(key) is None
        return super()._get_token_from_config(config, "eos_token" if missing_bos else key)

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.get_vocab_size(with_added_tokens=True)
