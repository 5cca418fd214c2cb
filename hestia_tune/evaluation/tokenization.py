"""Text to ids and back as lm-eval's own `hf` backend does it, for tokenizers of torchtune's form.

A torchtune tokenizer's ``encode`` decides about BOS by its own flags; a ``tokenizer.json`` may add
it by a post-processor whatever the flags say. lm-eval's scores rest on what the tokenizer does by
default, so for a tokenizer that wraps a `tokenizers.Tokenizer` (``.tokenizer``) that one is asked.
"""

from typing import Any

from hestia_tune.config import require_number


class TextCodec:
    """A tokenizer seen through the questions that an evaluation asks.

    Args:
        tokenizer: has ``encode(text, add_bos=..., add_eos=...) -> list[int]``,
            ``decode(ids) -> str`` and ``eos_id``; perhaps ``bos_id``, ``vocab_size`` and
            ``tokenizer``, a `tokenizers.Tokenizer`.
        add_bos: whether a text starts with BOS. None: as the ``tokenizer.json`` says; for a
            tokenizer without one (tiktoken, SentencePiece), if it has a BOS that is not EOS.
        prefix_token: id that an otherwise empty context consists of; None is BOS, or EOS if there
            is no BOS.

    Attributes:
        eos_id, prefix_id: token ids.
        vocab_size: number of ids, or None if the tokenizer does not tell.

    Raises:
        TypeError: naming what the tokenizer lacks.
        ValueError: if BOS is wanted and there is none.
    """

    def __init__(
        self, tokenizer: Any, *, add_bos: bool | None = None, prefix_token: int | None = None
    ):
        missing = [name for name in ("encode", "decode", "eos_id") if not hasattr(tokenizer, name)]
        if missing:
            raise TypeError(
                f"a tokenizer needs encode, decode and eos_id; {type(tokenizer).__name__} lacks "
                f"{', '.join(missing)}; use a torchtune tokenizer or "
                "hestia_tune.models.HuggingFaceTokenizer"
            )
        self._tokenizer = tokenizer
        self._inner = _without_padding(getattr(tokenizer, "tokenizer", None))
        self._bos_id = getattr(tokenizer, "bos_id", None)
        self.eos_id: int = tokenizer.eos_id
        if add_bos and self._bos_id is None:
            raise ValueError("add_bos is True but the tokenizer has no BOS; leave it None")
        if add_bos is None and self._inner is None:
            add_bos = self._bos_id is not None and self._bos_id != self.eos_id
        self.add_bos = add_bos
        self.prefix_id: int = prefix_token
        if prefix_token is None:
            self.prefix_id = self.eos_id if self._bos_id is None else self._bos_id
        self._prefix_text = self.token_text(self.prefix_id)
        self.vocab_size: int | None = getattr(tokenizer, "vocab_size", None)
        if self.vocab_size is not None:
            require_number(
                "prefix_token", self.prefix_id, 0, self.vocab_size - 1, "use an id of the tokenizer"
            )

    def encode(self, text: str, special: bool | None = None) -> list[int]:
        """The ids of ``text``.

        Args:
            special: whether special tokens are put around the text; None is the tokenizer's
                default, but not a second time before a text that starts with the prefix token.
        """
        if special is None and self._prefix_text and text.startswith(self._prefix_text):
            special = False
        wanted = self.add_bos if special is None else special
        if self._inner is None:
            ids = list(self._tokenizer.encode(text, add_bos=False, add_eos=False))
            return [self._bos_id, *ids] if wanted and self.add_bos else ids
        ids = self._inner.encode(text, add_special_tokens=wanted is not False).ids
        if wanted and self.add_bos and ids[:1] != [self._bos_id]:
            ids.insert(0, self._bos_id)
        return ids

    def decode(self, ids: list[int]) -> str:
        """The text of ``ids``, without special tokens."""
        if self._inner is None:
            return self._tokenizer.decode(ids)
        return self._inner.decode(ids, skip_special_tokens=True)

    def token_text(self, token: int) -> str:
        """The text of one token, special or not; empty if the tokenizer does not tell it."""
        if self._inner is not None:
            return self._inner.decode([token], skip_special_tokens=False)
        try:
            return self._tokenizer.decode([token], skip_special_tokens=False)
        except TypeError:
            return self._tokenizer.decode([token])


def _without_padding(inner: Any) -> Any:
    """The `tokenizers.Tokenizer` itself, or a copy that neither cuts nor fills; None if none."""
    if not (hasattr(inner, "token_to_id") and hasattr(inner, "no_truncation")):
        return None
    if inner.truncation is not None or inner.padding is not None:
        inner = type(inner).from_str(inner.to_str())
        inner.no_truncation()
        inner.no_padding()
    return inner
