"""Rows of every form become the messages of a chat template, and replies are found exactly."""

import json

import pytest
import transformers
from chat_folders import TEMPLATES, TURNS, UNSTABLE, make_tokenizer_folder, replies_of

from hestia_tune.data import chat_format, read_chat
from hestia_tune.models import AutoTokenizer, HuggingFaceTokenizer

USER, REPLY = {"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}
SYSTEM = {"role": "system", "content": "s"}
# Form -> (row, messages, numbers of the trained messages).
ROWS = {
    "messages": ({"messages": [USER, REPLY], "id": 3}, [USER, REPLY], [1]),
    "messages as JSON": ({"messages": json.dumps([USER, REPLY])}, [USER, REPLY], [1]),
    "conversations": (
        {
            "conversations": [
                {"from": "system", "value": "s"},
                {"from": "human", "value": "a?"},
                {"from": "gpt", "value": "b"},
            ]
        },
        [SYSTEM, USER, REPLY],
        [2],
    ),
    "conversations with roles": ({"conversations": [USER, REPLY]}, [USER, REPLY], [1]),
    "conversation": ({"conversation": [USER, REPLY]}, [USER, REPLY], [1]),
    "system column": ({"system": "s", "messages": [USER, REPLY]}, [SYSTEM, USER, REPLY], [2]),
    "a system message wins": (
        {"system": "t", "messages": [SYSTEM, USER, REPLY]},
        [SYSTEM, USER, REPLY],
        [2],
    ),
    "prompt + completion": ({"prompt": "a?", "completion": "b"}, [USER, REPLY], [1]),
    "prompt + completion as messages": (
        {"prompt": [SYSTEM, USER, REPLY, USER], "completion": [REPLY]},
        [SYSTEM, USER, REPLY, USER, REPLY],
        [4],
    ),
    "prompt + response": ({"prompt": "a?", "response": "b"}, [USER, REPLY], [1]),
    "question + answer": ({"question": "a?", "answer": "b"}, [USER, REPLY], [1]),
    "instruction + output": ({"instruction": "a?", "output": "b"}, [USER, REPLY], [1]),
    "instruction + input + output": (
        {"instruction": "do", "input": "it", "output": "b"},
        [{"role": "user", "content": "do\nit"}, REPLY],
        [1],
    ),
    "an empty input": ({"instruction": "a?", "input": "", "output": "b"}, [USER, REPLY], [1]),
    "history": (
        {"instruction": "a?", "output": "b", "history": [["x", "y"]]},
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}, USER, REPLY],
        [3],
    ),
    "parts of text": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a?"}]}, REPLY]},
        [USER, REPLY],
        [1],
    ),
    "weights of replies": (
        {"messages": [USER, REPLY | {"weight": 0}, USER, REPLY | {"weight": 1}]},
        [USER, REPLY, USER, REPLY],
        [3],
    ),
    "nulls of parquet": (
        {"messages": [USER | {"tool_calls": None}, REPLY | {"name": None}], "prompt": None},
        [USER, REPLY],
        [1],
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_becomes_messages(name):
    row, messages, trained = ROWS[name]
    chat = read_chat(row)
    assert chat.messages == messages
    assert [index for index, value in enumerate(chat.trained) if value] == trained


def test_tool_calls_have_arguments_as_mappings():
    function = {"name": "f", "arguments": '{"x": 1, "y": null}'}
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}
    tools = json.dumps([{"type": "function", "function": {"name": "f"}}])
    chat = read_chat({"messages": [USER, call, {"role": "tool", "content": "3"}], "tools": tools})
    assert chat.messages[1]["tool_calls"][0]["function"]["arguments"] == {"x": 1, "y": None}
    assert chat.messages[1]["content"] == "" and chat.trained == [False, True, False]
    assert chat.tools == [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("given", "form"),
    [
        (["text", "id"], None),
        (["prompt", "text"], None),
        (["title", "prompt", "chosen", "rejected"], None),
        (["messages", "text"], "messages"),
        (["id", "conversations"], "conversations"),
        (["completion", "prompt"], "prompt + completion"),
        (["instruction", "input", "output"], "instruction + input + output"),
        (["instruction", "context", "response"], "instruction + context + response"),
        (["question", "context", "answer"], "question + context + answer"),
        (["prompt", "context", "response"], "prompt + response"),
        ({"messages": "a plain text"}, None),
        ({"text": "x", "chat": [USER]}, "chat"),
        ({"question": "x", "answer": 3}, None),
        ({"prompt": [USER], "completion": [REPLY]}, "prompt + completion"),
    ],
)
def test_the_form_of_rows_is_recognized(given, form):
    assert chat_format(given) == form


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"body": "x"}, "no chat is recognized in the columns body; recognized are messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "has the role 'wizard'; roles are"),
        ({"messages": [{"role": "user"}]}, r"message 1 .* \(user\) has neither content nor"),
        ({"messages": [{"role": "user", "content": 3}]}, "content must be text; got 3"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "a part of type 'image_url'; only text",
        ),
        ({"messages": [USER, REPLY], "tools": "f"}, "tools must be a list of JSON schemas"),
        ({"messages": [USER, REPLY], "chat_template_kwargs": "x"}, "must be a mapping"),
        ({"instruction": "x", "output": "y", "history": ["z"]}, "history must hold pairs"),
        (
            {"prompt": "x", "completion": [{"role": "wizard", "content": "y"}]},
            "column .completion. has the role 'wizard'",
        ),
    ],
)
def test_a_wrong_row_is_refused(row, message):
    with pytest.raises(ValueError, match=message):
        read_chat(row)


@pytest.mark.parametrize("question", ["instruction", "question"])
@pytest.mark.parametrize(
    ("context", "text"), [("Some passage.", "Why?\nSome passage."), (" ", "Why?"), (None, "Why?")]
)
def test_a_passage_belongs_to_the_question(question, context, text):
    answer = "answer" if question == "question" else "response"
    chat = read_chat({question: "Why?", "context": context, answer: "So.", "category": "qa"})
    assert [m["content"] for m in chat.messages] == [text, "So."]


def test_empty_rows_are_no_chats():
    assert read_chat({"messages": []}) is None
    assert read_chat({"prompt": "", "completion": ""}) is None
    assert read_chat({"messages": None}) is None


THOUGHT = "<think>\nhm\n</think>\n\nb"
CHAT = [USER, REPLY | {"content": THOUGHT}, {"role": "user", "content": "c?"}, REPLY]
TOOLS = [{"type": "function", "function": {"name": "f"}}]
# Template -> replies of CHAT, without and with tools.
FOUND = {
    "turns": [f"{THOUGHT}<|end|>", "b<|end|>"],
    "marked": [f"{THOUGHT}<|end|>", "b<|end|>"],
    "thinking": ["b<|end|>", "<think>\n\n</think>\n\nb<|end|>"],
    "instruct": [f" {THOUGHT}<eos>", " b<eos>"],
    "opened": [THOUGHT.removeprefix("<think>\n") + "<|end|>", "b<|end|>"],
    "moving": [f"{THOUGHT}<eos>", "b<eos>"],
}


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("name", TEMPLATES)
def test_replies_are_found_and_rendering_is_that_of_transformers(tmp_path, name, tools):
    folder = make_tokenizer_folder(tmp_path / name, TEMPLATES[name])
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for kind in (HuggingFaceTokenizer, AutoTokenizer):
        tokenizer = kind(folder)
        chat = read_chat({"messages": CHAT, "tools": tools})
        [(ids, has_loss)] = tokenizer.encode_chats([chat])
        assert ids == theirs.apply_chat_template(CHAT, tools=tools)["input_ids"]
        assert ids.count(1) == ("bos_token" in TEMPLATES[name])  # never a second BOS
        assert replies_of(tokenizer, ids, has_loss) == FOUND[name]
        [(again, all_loss)] = tokenizer.encode_chats([chat], "all")
        assert again == ids and all(all_loss)


@pytest.mark.parametrize("name", TEMPLATES)
def test_only_trained_replies_have_a_loss(tmp_path, name):
    tokenizer = HuggingFaceTokenizer(make_tokenizer_folder(tmp_path / name, TEMPLATES[name]))
    for trained in (0, 1):
        rows = [dict(message) for message in CHAT]
        rows[3 - 2 * trained]["weight"] = 0
        [(ids, has_loss)] = tokenizer.encode_chats([read_chat({"messages": rows})])
        assert replies_of(tokenizer, ids, has_loss) == [FOUND[name][trained]]


def test_a_reply_of_tool_calls_has_a_loss(tmp_path):
    tokenizer = HuggingFaceTokenizer(make_tokenizer_folder(tmp_path, TEMPLATES["thinking"]))
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    rows = [USER, call, {"role": "tool", "content": "3"}, REPLY, USER, REPLY]
    [(ids, has_loss)] = tokenizer.encode_chats([read_chat({"messages": rows, "tools": TOOLS})])
    assert replies_of(tokenizer, ids, has_loss) == [
        '\n<call>{"name": "f", "arguments": {}}<|end|>',
        "b<|end|>",
        "<think>\n\n</think>\n\nb<|end|>",
    ]


def test_variables_of_the_template_come_from_the_row(tmp_path):
    tokenizer = HuggingFaceTokenizer(make_tokenizer_folder(tmp_path, TEMPLATES["thinking"]))
    row = {"messages": [USER, REPLY], "chat_template_kwargs": {"enable_thinking": False}}
    [(ids, has_loss)] = tokenizer.encode_chats([read_chat(row)])
    assert replies_of(tokenizer, ids, has_loss) == ["b<|end|>"]


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (UNSTABLE, CHAT, r"row 7: the chat template does not show .* set dataset.loss_on=all"),
        (TEMPLATES["instruct"], [SYSTEM, *CHAT], "row 7: .*no system message is allowed"),
        (None, CHAT, "row 7: the tokenizer has no chat template"),
        ("{{ nothing.at.all }}", CHAT, "row 7: the chat template refuses this chat"),
    ],
)
def test_a_chat_that_cannot_be_rendered_is_refused(tmp_path, template, messages, message):
    tokenizer = HuggingFaceTokenizer(make_tokenizer_folder(tmp_path, template))
    with pytest.raises(ValueError, match=message):
        tokenizer.encode_chats([read_chat({"messages": messages}, place="row 7")])


def test_without_a_template_a_prompt_and_its_completion_are_joined(tmp_path):
    tokenizer = HuggingFaceTokenizer(make_tokenizer_folder(tmp_path, None, bos=True))
    row = {"prompt": "2 + 2 =", "completion": " 4"}
    [(ids, has_loss)] = tokenizer.encode_chats([read_chat(row)])
    text = tokenizer.tokenizer.decode(ids, skip_special_tokens=False)
    assert text == "<bos>2 + 2 = 4<eos>"
    assert replies_of(tokenizer, ids, has_loss) == [" 4<eos>"]
    with_system = read_chat(row | {"system": "Be brief."})
    assert with_system.trained == [False, False, True]
    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        tokenizer.encode_chats([with_system])


def test_a_reply_that_quotes_its_question_is_found(tmp_path):
    tokenizer = HuggingFaceTokenizer(make_tokenizer_folder(tmp_path, TURNS))
    same = {"role": "assistant", "content": "a?"}
    [(ids, has_loss)] = tokenizer.encode_chats([read_chat({"messages": [USER, same, USER, same]})])
    assert replies_of(tokenizer, ids, has_loss) == ["a?<|end|>"] * 2


def test_a_thought_that_the_template_drops_trains_nothing_of_the_next_turn(tmp_path):
    """The reply is not in the rendered chat as it stands in the row."""
    shown = TURNS.replace("m['content']", "m['content'].split('</think>')[-1]")
    tokenizer = HuggingFaceTokenizer(make_tokenizer_folder(tmp_path, shown))
    long = {"role": "assistant", "content": f"<think>{'so ' * 40}</think>4"}
    [(ids, has_loss)] = tokenizer.encode_chats([read_chat({"messages": [USER, long, USER, long]})])
    assert replies_of(tokenizer, ids, has_loss) == ["4<|end|>"] * 2


def test_masks_have_all_tokens_of_a_reply_that_ends_in_a_wide_character(tmp_path):
    """An emoji has four tokens here, which share one character."""
    plain = HuggingFaceTokenizer(make_tokenizer_folder(tmp_path, None))
    row = {"prompt": "日?🙂", "completion": "🙂 本🙂"}
    [(ids, has_loss)] = plain.encode_chats([read_chat(row)])
    assert replies_of(plain, ids, has_loss) == ["🙂 本🙂<eos>"]
    assert sum(has_loss) == len("🙂 本🙂".encode()) + 1
