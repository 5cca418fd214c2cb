"""Chats in rows: which forms are recognized, and the messages that the chat template renders.

Files of chats come in a few forms, and every library names its columns a little differently. All of
them become the messages that transformers' chat templates expect: a list of mappings with ``role``
and ``content``, and tools beside it. Nothing here renders: the tokenizer does
(`hestia_tune.models.tokenizers`).
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hestia_tune.errors import InputError

# Columns that hold a list of messages, in order of preference.
_CONVERSATIONS = ("messages", "conversations", "conversation", "chat", "dialogue", "dialog")
# (prompt column, reply column) of rows with one exchange, in order of preference.
_PAIRS = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("instruction", "completion"),
    ("question", "answer"),
    ("question", "response"),
    ("query", "response"),
    ("query", "answer"),
    ("problem", "solution"),
    ("user", "assistant"),
    ("input", "output"),
)
# First column of a pair -> columns with a text that the user adds, one of which is read.
_FURTHER = {"instruction": ("input", "context"), "question": ("context",)}
_SYSTEM = ("system", "system_prompt")
RECOGNISED = (
    "messages (role, content), conversations (from, value), prompt and completion, instruction "
    "with input or context and output, question with context and answer"
)
# Role names of ShareGPT and its relatives -> roles of chat templates.
_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "ai": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "ipython": "tool",
}
_KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


@dataclass(frozen=True)
class Chat:
    """One conversation, ready for a chat template.

    Attributes:
        messages: The messages, with ``role`` and ``content``.
        trained: Whether each message is a reply to learn.
        tools: The tools that the model may call, as JSON schemas. None: no tools.
        options: Further variables of the chat template, such as ``enable_thinking``.
        is_plain: Whether the chat is a prompt and a completion that a tokenizer without a chat
            template can join.
        place: Where the row stands, for messages.
        date: The date that a template prints, as YYYY-MM-DD. None: the date of the tokenizer.
    """

    messages: list[dict[str, Any]]
    trained: list[bool]
    tools: list[Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    is_plain: bool = False
    place: str = ""
    date: str | None = None

    @property
    def num_characters(self) -> int:
        """Number of characters in the messages, about."""
        return sum(len(message.get("content") or "") for message in self.messages)


def chat_format(columns_or_row: Iterable[str] | Mapping[str, Any]) -> str | None:
    """Return the form of rows of chats, or None if they are plain text.

    Args:
        columns_or_row: The names of the columns, or a row. A row is judged by its values too: a
            column ``messages`` that holds a plain string is no chat.

    Returns:
        The columns that hold the chat, such as "messages" or "prompt + completion".
    """
    is_row = isinstance(columns_or_row, Mapping)
    names = list(columns_or_row)
    for name in _CONVERSATIONS:
        if name in names and (not is_row or _is_conversation(columns_or_row[name])):
            return name
    for pair in _PAIRS:
        if all(name in names and _is_side(columns_or_row, name, is_row) for name in pair):
            further = [name for name in _FURTHER.get(pair[0], ()) if name in names][:1]
            return " + ".join((pair[0], *further, pair[1]))
    return None


def _is_conversation(value: Any) -> bool:
    """Return whether a value is a list of messages, or the JSON text of one."""
    value = _from_json(value)
    return (
        isinstance(value, list | tuple)
        and bool(value)
        and all(isinstance(m, Mapping) and _key(m, "role", "from") is not None for m in value)
    )


def _is_side(row: Any, name: str, is_row: bool) -> bool:
    return not is_row or isinstance(row[name], str) or _is_conversation(row[name])


def _from_json(value: Any) -> Any:
    """Return the list or mapping that a JSON text holds, or the value itself."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _key(message: Mapping[str, Any], *names: str) -> str | None:
    """Return the first of the names that the message has."""
    return next((name for name in names if message.get(name) is not None), None)


def without_nulls(value: Any) -> Any:
    """Return a value without the keys that hold null, at any depth.

    Parquet files give every row the keys of all rows. A template must not see a key that its row
    does not have.
    """
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [without_nulls(item) for item in value]
    return value


def read_chat(row: Mapping[str, Any], column: str | None = None, place: str = "") -> Chat | None:
    """Return the chat in a row, or None if the row is empty.

    Args:
        row: The row.
        column: Name of the column that holds the messages. None: recognize the form.
        place: Where the row stands, for the messages of errors.

    Raises:
        InputError: If the row holds no chat, or a message has no known role or no text.
    """
    row = without_nulls(row)
    if not any(value not in ("", [], {}) for value in row.values()):
        return None
    if column is not None and column not in row:
        raise InputError(f"there is no column {column!r}; columns: {', '.join(row)}")
    form = column or chat_format(row)
    if form is None:
        empty = next((name for name in _CONVERSATIONS if row.get(name) == []), None)
        if empty:
            return None
        raise InputError(
            f"no chat is recognized in the columns {', '.join(row) or '(none)'}; recognized are "
            f"{RECOGNISED}; rename the columns, or name the column of messages in dataset.column"
        )
    options = _from_json(row.get("chat_template_kwargs")) or {}
    if not isinstance(options, Mapping):
        raise InputError(f"chat_template_kwargs must be a mapping; got {options!r:.100}")
    tools = _read_tools(row)
    names = form.split(" + ")
    if len(names) == 1:
        messages, trained = _read_messages(_from_json(row[form]), form)
        is_plain = False
    else:
        messages, trained, is_plain = _read_pair(row, names)
    system = next((row[name] for name in _SYSTEM if isinstance(row.get(name), str)), "")
    if system and messages[0]["role"] not in ("system", "developer"):
        messages = [{"role": "system", "content": system}, *messages]
        trained, is_plain = [False, *trained], False
    return Chat(messages, trained, tools, dict(options), is_plain, place)


def _read_tools(row: Mapping[str, Any]) -> list[Any] | None:
    tools = _from_json(row.get("tools"))
    if isinstance(tools, list | tuple):
        tools = [_from_json(tool) for tool in tools]
    elif isinstance(tools, Mapping):
        tools = [tools]
    elif tools:
        raise InputError(f"tools must be a list of JSON schemas; got {tools!r:.100}")
    return tools or None


def _read_pair(
    row: Mapping[str, Any], names: Sequence[str]
) -> tuple[list[dict[str, Any]], list[bool], bool]:
    """Return the messages of a row with one exchange, which of them are trained, and `is_plain`."""
    prompt, reply = (_from_json_messages(row[name]) for name in (names[0], names[-1]))
    is_plain = isinstance(prompt, str) and isinstance(reply, str)
    before: list[dict[str, Any]] = []
    history = row.get("history")
    if isinstance(history, list):
        for exchange in history:
            if not (isinstance(exchange, list) and len(exchange) == 2):
                raise InputError(f"history must hold pairs of texts; got {exchange!r:.100}")
            sides = zip(("user", "assistant"), exchange, strict=True)
            before += [{"role": role, "content": str(text)} for role, text in sides]
    if isinstance(prompt, str):
        further = row.get(names[1]) if len(names) > 2 else None
        text = f"{prompt}\n{further}" if isinstance(further, str) and further.strip() else prompt
        is_plain = is_plain and text == prompt and not before
        before.append({"role": "user", "content": text})
    else:
        before += _read_messages(prompt, names[0])[0]
    if isinstance(reply, str):
        after, trained = [{"role": "assistant", "content": reply}], [True]
    else:
        after, trained = _read_messages(reply, names[-1])
    return before + after, [False] * len(before) + trained, is_plain


def _from_json_messages(value: Any) -> Any:
    """Return messages if the value is their JSON text. Other text stays text, also ``[1]``."""
    return _from_json(value) if _is_conversation(value) else value


def _read_messages(value: Any, column: str) -> tuple[list[dict[str, Any]], list[bool]]:
    """Return messages with roles and texts as chat templates expect them, and the trained ones."""
    if not isinstance(value, list | tuple) or not value:
        raise InputError(f"column {column!r} must hold a list of messages; got {value!r:.100}")
    messages, trained = [], []
    for number, given in enumerate(value, 1):
        where = f"message {number} of column {column!r}"
        if not isinstance(given, Mapping):
            raise InputError(f"{where} must be a mapping with role and content; got {given!r:.100}")
        role_key, text_key = _key(given, "role", "from"), _key(given, "content", "value", "text")
        if role_key is None:
            raise InputError(f"{where} has no role; it has {', '.join(given) or 'no keys'}")
        role = str(given[role_key]).lower()
        role = _ROLES.get(role, role)
        if role not in _KNOWN_ROLES:
            raise InputError(
                f"{where} has the role {given[role_key]!r}; roles are {', '.join(_KNOWN_ROLES)}, "
                "and human and gpt of ShareGPT"
            )
        calls = _read_calls(given.get("tool_calls"), where)
        if text_key is None and not calls:
            thought = _key(given, "reasoning_content", "reasoning", "thinking")
            if thought is None:
                raise InputError(f"{where} ({role}) has neither content nor tool_calls")
        content = "" if text_key is None else _text_of(given[text_key], where)
        weight = given.get("weight", given.get("train", given.get("training")))
        plain = ("weight", "train", "training", "tool_calls", role_key, text_key)
        message = {"role": role, "content": content}
        message |= {key: item for key, item in given.items() if key not in plain}
        message |= {"tool_calls": calls} if calls else {}
        messages.append(message)
        trained.append(role == "assistant" and (weight is None or bool(weight)))
    return messages, trained


def _read_calls(calls: Any, where: str) -> list[Any]:
    """Return tool calls with arguments as mappings, which templates turn into JSON themselves."""
    calls = _from_json(calls) or []
    if not isinstance(calls, list | tuple):
        raise InputError(f"{where}: tool_calls must be a list; got {calls!r:.100}")
    read = []
    for call in calls:
        call = dict(call) if isinstance(call, Mapping) else call
        inner = call.get("function") if isinstance(call, dict) else None
        if isinstance(inner, Mapping):
            arguments = _from_json(inner.get("arguments", {}))
            call["function"] = dict(inner) | {"arguments": arguments}
        elif isinstance(call, dict) and "arguments" in call:
            call["arguments"] = _from_json(call["arguments"])
        read.append(call)
    return read


def _text_of(content: Any, where: str) -> str:
    """Return the text of a message: a string, or a list of parts that are text."""
    if isinstance(content, str):
        return content
    if isinstance(content, Mapping):
        content = [content]
    if not isinstance(content, list | tuple):
        raise InputError(f"{where}: content must be text; got {content!r:.100}")
    texts = []
    for part in content:
        text = part
        if isinstance(part, Mapping):
            text = part.get("text", part.get("content"))
            if part.get("type", "text") not in ("text", "input_text", "output_text"):
                text = None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise InputError(
                f"{where} has a part of type {kind!r}; only text can be trained on; remove the row"
            )
        texts.append(text)
    return "".join(texts)


# Stands for the text of a reply. The characters are for private use, so no text has them.
_MARKER = "\ue000reply\uf8ff"
Render = Callable[[list[dict[str, Any]], bool], str]


def reply_spans(
    render: Render, messages: list[dict[str, Any]], wanted: Iterable[int], whole: str
) -> list[tuple[int, int]]:
    """Find the replies in a rendered chat, for templates that do not mark them.

    A reply begins where the generation prompt ends, and ends with the token that ends the turn.
    If the whole chat begins with the chat up to a reply, rendered alone, these places are exact.
    Some templates change earlier turns when later ones follow; Qwen3 drops their thoughts, for
    example. The chat is then rendered with a marker in place of the reply. What differs is the
    reply.

    Args:
        render: Function of messages, and whether to add a generation prompt, that returns text.
        messages: The messages of the chat.
        wanted: Numbers of the replies to find.
        whole: The whole chat, rendered.

    Returns:
        (begin, end) of each reply, in characters of the rendered chat.

    Raises:
        InputError: If a reply cannot be found.
    """
    spans = []
    for index in wanted:
        prompt = _try(render, messages[:index], True)
        is_last = index + 1 == len(messages)
        upto = whole if is_last else _try(render, messages[: index + 1], False)
        begin = len(prompt) if prompt is not None and whole.startswith(prompt) else None
        end = len(upto) if upto is not None and whole.startswith(upto) else None
        if begin is None or end is None or end < begin:
            begin, end = _marked(render, messages, index, whole, prompt, begin)
        else:
            # The text may begin before the reply, in a thought that the prompt has opened.
            text = str(messages[index].get("content") or "").strip()
            found = whole.rfind(text, 0, end)
            if found < 0:  # the template has dropped the thought
                text = text.rpartition("</think>")[2].strip()
                found = whole.rfind(text, 0, end)
            text_end = found + len(text)
            if found >= 0 and begin < text_end:
                end = text_end + len(_turn_end(whole[text_end:end]))
        spans.append((begin, end))
    return spans


def _try(render: Render, messages: list[dict[str, Any]], prompt: bool) -> str | None:
    """Return a part of a chat, rendered, or None if the template refuses it."""
    try:
        return render(messages, prompt) if messages else None
    except InputError:
        return None


def _turn_end(tail: str) -> str:
    """Return what ends a turn, without the white space behind it, which is never generated."""
    return tail.rstrip() or tail


def _common(one: str, other: str) -> int:
    """Return the length of the common beginning of two texts."""
    same, different = 0, min(len(one), len(other)) + 1
    while different - same > 1:
        middle = (same + different) // 2
        if one[:middle] == other[:middle]:
            same = middle
        else:
            different = middle
    return same


def _marked(
    render: Render,
    messages: list[dict[str, Any]],
    index: int,
    whole: str,
    prompt: str | None,
    begin: int | None,
) -> tuple[int, int]:
    """Return the place of a reply by rendering the chat with a marker in its place."""

    def fail() -> InputError:
        return InputError(
            f"the chat template does not show where the reply in message {index + 1} begins and "
            "ends; put {% generation %} and {% endgeneration %} around replies in the template, or "
            "set dataset.loss_on=all"
        )

    replaced = messages[index] | {"content": _MARKER}
    marked = _try(render, [*messages[:index], replaced, *messages[index + 1 :]], False)
    upto = _try(render, [*messages[:index], replaced], False)
    if marked is None or marked.count(_MARKER) != 1:
        raise fail()
    before, after = marked.split(_MARKER)
    content_end = len(whole) - len(after)
    if not whole.endswith(after):
        raise fail()
    if begin is None:
        header = 0 if prompt is None else _common(prompt, before)
        least = len(_try(render, messages[:index], False) or "")
        begin = header if header and header >= least else len(before)
        if whole[:begin] != before[:begin]:
            raise fail()
    if content_end < begin:
        raise fail()
    tail = after
    if upto is not None and upto.count(_MARKER) == 1:
        tail = after[: _common(after, upto.split(_MARKER)[1])]
    elif index + 1 < len(messages):
        raise fail()
    return begin, content_end + len(_turn_end(tail))
