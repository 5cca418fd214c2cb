"""Tokenizer components: for a ``tokenizer.json``, and for any tokenizer of transformers in Rust.

transformers reads the folder and renders its chat template, so ids and chats are those of
transformers. Two kinds of state in a ``tokenizer.json`` would change a text for good. Truncation
and padding are switched off, as transformers does for a plain text. A post-processor that ends
every text with a token loses this token: documents get their end from the data, and prompts must
not have one.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from pathlib import Path
from typing import Any

from tokenizers import Encoding, Tokenizer, processors

from hestia_tune.data.chats import Chat, reply_spans
from hestia_tune.errors import InputError, one_line
from hestia_tune.files import read_json
from hestia_tune.models.folder import import_optional, local_folder

# The tag of transformers around what the model generates.
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_DATES = re.compile(r"""strftime_now\(\s*["']([^"']*)["']\s*\)""")
_DATE_MACRO = "{%- macro strftime_now(form) -%}{{ dates_of_run[form] }}{%- endmacro -%}"
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


class HuggingFaceTokenizer:
    """The tokenizer of a Hugging Face folder, for torchtune's recipes and for ours.

    torchtune's datasets and its generate recipe call the tokenizer with messages. The tokenizer
    renders the chat template of the folder. Without a chat template it joins the texts of the
    messages, and a base model continues this text.

    Args:
        path: A Hugging Face folder with ``tokenizer.json`` and ``tokenizer_config.json``.
        eos_token: The token that ends a document. None: the ``eos_token`` in
            ``tokenizer_config.json``, which in instruct models ends a turn.
        max_seq_len: The longest sequence in tokens that torchtune's datasets make of a document.

    Attributes:
        tokenizer: The tokenizer of the tokenizers library. It adds BOS if the folder's does, and
            never EOS.
        of_transformers: The tokenizer of transformers, which renders the chats.
        bos_id: The id of BOS, or of EOS if there is no BOS (Qwen2.5 has none).
        eos_id: The id of the token that ends a document.
        stop_tokens: The ids that end a generation.
        pad_id: The id of the configured padding token, or the id of EOS if there is none.
        neutralized: The state of ``tokenizer.json`` that was switched off: "truncation", "padding",
            or the token that it appends.
        chat_template: The chat template. None if the folder has none.
        date: The date that chat templates print, as YYYY-MM-DD. A run that resumes sets it to the
            date of its start.

    Raises:
        InputError: If a file is missing or damaged, or if ``eos_token`` is not in the vocabulary.
    """

    def __init__(self, path: str, eos_token: str | None = None, max_seq_len: int | None = None):
        folder = Path(path)
        files = [folder / "tokenizer.json", folder / "tokenizer_config.json"]
        if missing := [file for file in files if not file.is_file()]:
            raise InputError(f"{missing[0]} does not exist; check tokenizer.path")
        read_json(files[1])
        kind = import_optional("transformers").PreTrainedTokenizerFast
        try:
            loaded = _load(kind, folder)
        except Exception as error:  # tokenizers raises plain exceptions
            raise InputError(f"{files[0]} is damaged ({one_line(error)}); get it again") from error
        self._adopt(loaded, folder, eos_token, max_seq_len)

    def _adopt(
        self, loaded: Any, folder: Path, eos_token: str | None, max_seq_len: int | None
    ) -> None:
        """Take over a tokenizer of transformers, and switch off the state that changes texts."""
        self.of_transformers, self.tokenizer = loaded, loaded.backend_tokenizer
        self.max_seq_len, self.neutralized = max_seq_len, []
        self.date = date.today().isoformat()
        for name in ("truncation", "padding"):
            if getattr(self.tokenizer, name) is not None:
                getattr(self.tokenizer, f"no_{name}")()
                self.neutralized.append(name)
        self._prefix, suffix = added_tokens(self.tokenizer)
        if suffix:
            names = [self.tokenizer.id_to_token(number) for number in (*self._prefix, *suffix)]
            self.neutralized += names[len(self._prefix) :]
            kept = list(zip(names, self._prefix, strict=False))
            self.tokenizer.post_processor = processors.TemplateProcessing(
                single=[*(name for name, _ in kept), "$A"], special_tokens=kept
            )
        turn_end = loaded.eos_token or _generation_end(folder, self.tokenizer)
        name = eos_token if eos_token is not None else turn_end
        if name is None:
            raise InputError(
                f"{folder} names no eos_token; set tokenizer.eos_token to the token that ends a "
                "document"
            )
        eos_id = self.tokenizer.token_to_id(name)
        if eos_id is None:
            file = folder / "tokenizer.json"
            raise InputError(f"tokenizer.eos_token {name!r} is not in {file}; check the token")
        self.eos_id = eos_id
        self.bos_id = loaded.bos_token_id
        if self.bos_id is None:
            self.bos_id = eos_id if turn_end is None else self.tokenizer.token_to_id(turn_end)
        self.pad_id = eos_id if loaded.pad_token_id is None else loaded.pad_token_id
        ends = {eos_id, None if turn_end is None else self.tokenizer.token_to_id(turn_end)}
        self.stop_tokens = sorted(ends - {None})
        template = loaded.chat_template
        self.chat_template = template.get("default") if isinstance(template, dict) else template

    @property
    def prints_date(self) -> bool:
        """Whether the chat template may print the date."""
        return "strftime_now" in (self.chat_template or "")

    @property
    def vocab_size(self) -> int:
        """The number of token ids, special tokens included."""
        return self.tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        """Return the token ids of a text.

        Args:
            text: The text.
            add_bos: Whether to begin with BOS. A folder whose texts begin with BOS always does.
            add_eos: Whether to end with EOS.
        """
        ids = self.tokenizer.encode(text).ids
        before = [self.bos_id] if add_bos and self.bos_id not in self._prefix else []
        return [*before, *ids, *([self.eos_id] if add_eos else [])]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode several texts at once, which is faster, without adding our BOS and EOS.

        A text without tokens of its own gives an empty list.
        """
        least = len(self._prefix)
        encodings = self.tokenizer.encode_batch_fast(list(texts))
        return [ids if len(ids := encoding.ids) > least else [] for encoding in encodings]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens."""
        return self.tokenizer.decode(list(token_ids))

    def render(
        self, chat: Chat, messages: list[dict[str, Any]] | None = None, prompt: bool = False
    ) -> str:
        """Return a chat as the text that the chat template makes of it.

        Args:
            chat: The chat.
            messages: The messages to render. None: all messages of the chat.
            prompt: Whether to add the prompt of the next reply.

        Raises:
            InputError: If there is no chat template, or it refuses the chat.
        """
        return self._apply(chat, messages, add_generation_prompt=prompt, tokenize=False)

    def _apply(self, chat: Chat, messages: Any = None, **how: Any) -> Any:
        if self.chat_template is None:
            raise InputError(
                "the tokenizer has no chat template; use the tokenizer of a chat model, or put "
                "its chat_template.jinja beside tokenizer.json"
            )
        try:
            template = self.of_transformers.get_chat_template(None, chat.tools)
            template, dates = with_date(template, chat.date or self.date)
            return self.of_transformers.apply_chat_template(
                chat.messages if messages is None else messages,
                tools=chat.tools,
                chat_template=template,
                **chat.options,
                **dates,
                **how,
            )
        except Exception as error:  # a template may fail in any way
            raise InputError(
                f"the chat template refuses this chat ({one_line(error)}); change the chat, or the "
                "template"
            ) from error

    def encode_chats(
        self, chats: Sequence[Chat], loss_on: str = "replies"
    ) -> list[tuple[list[int], list[bool]]]:
        """Return the token ids of chats, and whether each token has a loss.

        Replies are the tokens that the template has in ``{% generation %}``. If it has none, they
        are found by `hestia_tune.data.chats.reply_spans`. A reply includes the token that ends it.

        Args:
            chats: The chats.
            loss_on: "replies", or "all" for all tokens.

        Raises:
            InputError: If there is no chat template, or it refuses a chat, or does not show where
                the replies are. The message begins with the place of the chat.
        """
        encoded = []
        for chat in chats:
            try:
                encoded.append(self._encode_chat(chat, loss_on))
            except InputError as error:
                raise InputError(f"{chat.place}: {error}" if chat.place else str(error)) from error
        return encoded

    def _encode_chat(self, chat: Chat, loss_on: str) -> tuple[list[int], list[bool]]:
        if self.chat_template is None and chat.is_plain:
            prompt, reply = (str(message["content"]) for message in chat.messages)
            encoding, length = self.tokenizer.encode(prompt + reply), len(prompt + reply)
            mask = _overlaps(encoding, [(len(prompt), length)], length)
            ids, mask = [*encoding.ids, self.eos_id], [*mask, True]
            return ids, mask if loss_on == "replies" else [True] * len(ids)
        replies = [index for index, is_trained in enumerate(chat.trained) if is_trained]
        if loss_on == "all":
            ids = self._encode_rendered(self.render(chat)).ids
            return ids, [True] * len(ids)
        assistants = [m["role"] == "assistant" for m in chat.messages]
        if replies and _GENERATION.search(str(self.chat_template)):
            out = self._apply(chat, return_dict=True, return_assistant_tokens_mask=True)
            marked = [bool(value) for value in out["assistant_masks"]]
            if any(marked):
                if assistants != chat.trained:  # some replies have no loss
                    whole = self.render(chat)
                    own = _overlaps(out.encodings[0], self._spans(chat, replies, whole), len(whole))
                    marked = [both and one for both, one in zip(marked, own, strict=True)]
                return out["input_ids"], marked
        whole = self.render(chat)
        encoding = self._encode_rendered(whole)
        return encoding.ids, _overlaps(encoding, self._spans(chat, replies, whole), len(whole))

    def _spans(self, chat: Chat, replies: Sequence[int], whole: str) -> list[tuple[int, int]]:
        return reply_spans(
            lambda messages, prompt: self.render(chat, messages, prompt),
            chat.messages,
            replies,
            whole,
        )

    def _encode_rendered(self, text: str) -> Encoding:
        """Encode a rendered chat. The template has written BOS, if the model expects one."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def __call__(self, sample: Mapping[str, Any], inference: bool = False) -> dict[str, Any]:
        """Add the keys "tokens" and "mask" to a sample, as a transform of torchtune.

        Args:
            sample: A sample with the key "messages", a list of torchtune's ``Message``.
            inference: Whether the model will answer. An empty last message is then left out.

        Returns:
            The sample with the token ids, and with True in the mask for tokens without a loss.
        """
        messages: Sequence[Any] = sample["messages"]
        if inference and messages and not messages[-1].text_content:
            messages = messages[:-1]
        ids, has_loss = self._encode_messages(messages, inference)
        most = None if inference else self.max_seq_len
        ids, has_loss = ids[:most], has_loss[:most]
        return {**sample, "tokens": ids, "mask": [not value for value in has_loss]}

    def _encode_messages(
        self, messages: Sequence[Any], inference: bool
    ) -> tuple[list[int], list[bool]]:
        texts, trained = [m.text_content for m in messages], [not m.masked for m in messages]
        if self.chat_template is None:
            encoding, spans, end = self.tokenizer.encode("".join(texts)), [], 0
            for text, is_trained in zip(texts, trained, strict=True):
                begin, end = end, end + len(text)
                spans += [(begin, end)] if is_trained else []
            ids, has_loss = encoding.ids, _overlaps(encoding, spans, end)
            return (ids, has_loss) if inference else ([*ids, self.eos_id], [*has_loss, trained[-1]])
        roles = ["tool" if m.role == "ipython" else m.role for m in messages]
        rows = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=True)]
        chat = Chat(rows, [t and r == "assistant" for t, r in zip(trained, roles, strict=True)])
        if inference:
            encoding = self._encode_rendered(self.render(chat, prompt=True))
            return encoding.ids, [False] * len(encoding.ids)
        return self.encode_chats([chat], "all" if all(trained) else "replies")[0]


def _load(kind: Any, folder: Path) -> Any:
    """Return the tokenizer of a folder, without special tokens that its vocabulary lacks.

    transformers would give them new ids, for which the model has no embedding.
    """
    file, settings = folder / "tokenizer.json", folder / "tokenizer_config.json"
    lacking = {}
    if file.is_file() and settings.is_file():
        config, content = read_json(settings), file.read_bytes()
        tables = [content, repr(config.get("added_tokens_decoder")).encode()]
        for key in _SPECIAL:
            token = config.get(key)
            token = token.get("content") if isinstance(token, dict) else token
            # Tokens are written as they are, or with escapes.
            forms = {token, ascii(token)[1:-1]} if isinstance(token, str) else set()
            if forms and not any(form.encode() in table for form in forms for table in tables):
                lacking[key] = None
    name = "transformers.tokenization_utils_base"
    logger, level = logging.getLogger(name), logging.getLogger(name).level
    logger.setLevel(logging.ERROR)  # no warning that the class differs: the file says it all
    try:
        return kind.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, **lacking
        )
    finally:
        logger.setLevel(level)


def with_date(template: str, day: str | None) -> tuple[str, dict[str, Any]]:
    """Return a chat template that prints a given date, and the variables that it needs.

    Templates print today's date by ``strftime_now``. A run that resumes on another day must render
    its chats as before.

    Args:
        template: The template.
        day: The date, as YYYY-MM-DD. None: today.
    """
    forms = set(_DATES.findall(template))
    if day is None or len(_DATES.findall(template)) != template.count("strftime_now("):
        return template, {}
    if not forms:
        return template, {}
    then = datetime.fromisoformat(day)
    return _DATE_MACRO + template, {"dates_of_run": {form: then.strftime(form) for form in forms}}


def added_tokens(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the ids that a tokenizer puts before and behind every text."""
    for text in ("a", "1", " ", "."):
        plain = tokenizer.encode(text, add_special_tokens=False).ids
        whole = tokenizer.encode(text).ids
        for begin in range(len(whole) - len(plain) + 1 if plain else 0):
            if whole[begin : begin + len(plain)] == plain:
                return whole[:begin], whole[begin + len(plain) :]
    return [], []


def _generation_end(folder: Path, tokenizer: Tokenizer) -> str | None:
    """Return the token that ends a generation, from generation_config.json or config.json."""
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        number = read_json(file).get("eos_token_id") if file.is_file() else None
        number = number[0] if isinstance(number, list) and number else number
        if isinstance(number, int) and not isinstance(number, bool):
            return tokenizer.id_to_token(number)
    return None


def _overlaps(encoding: Encoding, spans: Sequence[tuple[int, int]], length: int) -> list[bool]:
    """Return whether each token has a character of one of the spans.

    Args:
        encoding: The tokens.
        spans: (begin, end) in characters.
        length: Number of characters of the text.
    """
    mask = [False] * len(encoding.ids)

    def first_token(begin: int, end: int) -> int | None:
        tokens = map(encoding.char_to_token, range(begin, end))
        return next((token for token in tokens if token is not None), None)

    for begin, end in spans:
        first = first_token(begin, end)
        if first is None:  # white space that the tokenizer drops
            continue
        # A character may have several tokens, and a token may go on behind the span.
        following = first_token(end, length)
        last = len(mask) if following is None else following
        last = max(last, _last_token(encoding, begin, end) + 1)
        mask[first:last] = [True] * (last - first)
    return mask


def _last_token(encoding: Encoding, begin: int, end: int) -> int:
    """Return the first token of the last character of a span that has a token."""
    tokens = map(encoding.char_to_token, range(end - 1, begin - 1, -1))
    return next(token for token in tokens if token is not None)


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
            loaded = _load(transformers.AutoTokenizer, folder)
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise InputError(f"no tokenizer in {folder} can be loaded: {error}") from error
        if not loaded.is_fast:
            raise InputError(
                f"the tokenizer must be of the tokenizers library (Rust); {folder} has a "
                f"{type(loaded).__name__}; convert it to tokenizer.json"
            )
        self._adopt(loaded, folder, eos_token, max_seq_len)
