"""Streams of chats: samples, packing, masks, sources, and resuming after every sequence."""

import datetime
import itertools
import json
import logging
import pickle

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from chat_folders import TURNS, make_chats, make_tokenizer_folder, replies_of, write_chats
from streams import find_all
from torchdata.stateful_dataloader import StatefulDataLoader

from hestia_tune.data import DataStreamError, chat_dataset, streaming_chat_dataset
from hestia_tune.models import HuggingFaceTokenizer
from hestia_tune.training.loader import collate_samples

PAD = 2


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return HuggingFaceTokenizer(make_tokenizer_folder(tmp_path_factory.mktemp("t"), TURNS))


def listed(sample):
    return {key: torch.as_tensor(value).tolist() for key, value in sample.items()}


def chats_in(sample):
    """Return the (tokens, labels) of each chat of a sample, and its padding."""
    tokens, labels = (torch.as_tensor(sample[key]).tolist() for key in ("tokens", "labels"))
    ends = torch.as_tensor(sample.get("seq_lens", [len(tokens)])).cumsum(0).tolist()
    parts = [(tokens[a:b], labels[a:b]) for a, b in itertools.pairwise([0, *ends])]  # in order
    return [part for part in parts if set(part[0]) != {PAD}]


def expected_chats(tokenizer, rows, loss_on="replies"):
    from hestia_tune.data import read_chat

    encoded = tokenizer.encode_chats([read_chat(row) for row in rows], loss_on)
    return [
        (ids, [-100, *(i if has else -100 for i, has in zip(ids[1:], loss[1:], strict=True))])
        for ids, loss in encoded
    ]


@pytest.mark.parametrize("loss_on", ["replies", "all"])
@pytest.mark.parametrize(("packed", "masks"), [(True, True), (True, False), (False, True)])
def test_every_chat_comes_once_with_its_labels(tmp_path, tokenizer, packed, masks, loss_on):
    rows = make_chats(60)
    arguments = write_chats(tmp_path / "a.jsonl", rows)
    options = {"packed": packed, "document_masks": masks, "loss_on": loss_on}
    samples = list(chat_dataset(tokenizer, **arguments, **options, seq_len=160))
    wanted = expected_chats(tokenizer, rows, loss_on)
    if packed:
        assert all(len(sample["tokens"]) == 160 for sample in samples)
        used = sum(len(ids) for ids, _ in wanted)
        assert used / (160 * len(samples)) > 0.85  # little padding
    else:
        assert len(samples) == 60 and not any("seq_lens" in sample for sample in samples)
    if packed and not masks:
        assert set(samples[0]) == {"tokens", "labels"}
        tokens = [token for sample in samples for token in sample["tokens"] if token != PAD]
        assert sorted(tokens) == sorted(token for ids, _ in wanted for token in ids)
        with_loss = [label for sample in samples for label in sample["labels"] if label != -100]
        assert sorted(with_loss) == sorted(i for _, labels in wanted for i in labels if i != -100)
        return
    found = [chat for sample in samples for chat in chats_in(sample)]
    assert sorted(found) == sorted(wanted)


def test_packed_samples_have_positions_and_masks_of_their_chats(tmp_path, tokenizer):
    arguments = write_chats(tmp_path / "a.jsonl", make_chats(12))
    samples = list(chat_dataset(tokenizer, **arguments, seq_len=200))
    for sample in samples:
        lengths = sample["seq_lens"].tolist()
        assert sum(lengths) == 200
        positions = [position for length in lengths for position in range(length)]
        assert sample["input_pos"].tolist() == positions
    batch = collate_samples(samples[:2], PAD)
    assert batch["mask"].shape == (2, 200, 200)
    first = samples[0]["seq_lens"][0]
    assert not batch["mask"][0, first:, :first].any()  # the second chat does not see the first


def test_unpacked_chats_are_padded_to_the_longest(tmp_path, tokenizer):
    arguments = write_chats(tmp_path / "a.jsonl", make_chats(5))
    samples = list(chat_dataset(tokenizer, **arguments, seq_len=500, packed=False))
    batch = collate_samples(samples, PAD)
    longest = max(len(sample["tokens"]) for sample in samples)
    assert batch["tokens"].shape == batch["labels"].shape == (5, longest)
    for row, sample in zip(batch["labels"], samples, strict=True):
        assert (row[len(sample["tokens"]) :] == -100).all()


def test_long_chats_keep_a_reply_or_are_left_out(tmp_path, tokenizer, caplog):
    def chat(question, reply):
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
        return {"messages": turns}

    rows = [chat("q", "r" * 500), chat("q" * 500, "r"), chat("q", "short")]
    arguments = write_chats(tmp_path / "a.jsonl", rows)
    with caplog.at_level(logging.WARNING):
        samples = list(chat_dataset(tokenizer, **arguments, seq_len=60, packed=False))
    assert [len(sample["tokens"]) for sample in samples][0] == 60 and len(samples) == 2
    ids, labels = samples[0]["tokens"], samples[0]["labels"]
    [reply] = replies_of(tokenizer, ids, [label != -100 for label in labels])
    assert reply == "r" * len(reply) and len(reply) > 20
    assert "1 of 2 chats are left out, because their first 60 tokens hold no reply" in caplog.text
    with pytest.raises(DataStreamError, match="no sequence of 3 tokens; raise dataset.seq_len"):
        next(iter(streaming_chat_dataset(tokenizer, **arguments, seq_len=3)))


@pytest.mark.parametrize("kind", ["parquet", "array", "jsonl.gz"])
def test_other_files_give_the_same_chats(tmp_path, tokenizer, kind):
    import gzip

    rows = make_chats(9)
    plain = write_chats(tmp_path / "a.jsonl", rows)
    path = tmp_path / f"b.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif kind == "array":
        path = tmp_path / "b.json"
        path.write_text(json.dumps(rows, indent=1))
    else:
        path.write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    source = "parquet" if kind == "parquet" else "json"
    wanted = [listed(s) for s in chat_dataset(tokenizer, **plain, seq_len=90)]
    found = chat_dataset(tokenizer, source=source, data_files=str(path), seq_len=90)
    assert [listed(sample) for sample in found] == wanted


def test_lines_may_have_any_mix_of_keys(tmp_path, tokenizer):
    """Arrow could not give these lines one type."""
    user = {"role": "user", "content": "a?"}
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    rows = [
        {"messages": [user, {"role": "assistant", "content": "b"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a?"}]},
                      {"role": "assistant", "content": "b", "tool_calls": [call]}]},
        {"messages": [user, {"role": "assistant", "content": "b"}], "tools": [{"name": "f"}]},
        {"conversations": [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "b"}]},
    ]  # fmt: skip
    path = tmp_path / "a.jsonl"
    lines = "\r\n\r\n".join(map(json.dumps, rows))
    path.write_bytes(b"\xef\xbb\xbf" + lines.encode() + b"\n")
    options = {"source": "json", "data_files": str(path), "seq_len": 90, "packed": False}
    samples = chat_dataset(tokenizer, **options)
    assert len(samples) == 4 and all(s == samples[0] for s in samples)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"messages": []}'], "holds no rows"),
        (['{"text": "x"}'], "row 1: no chat is recognized in the columns text"),
        (['{"messages": [{"role": "user", "content": "a"}]}', "{"], "row 2: Expecting property"),
        (['{"a": 1}', "[1]"], "row 1: no chat is recognized"),
        (['{"messages": [{"role": "x", "content": "a"}]}'], "row 1: message 1 .* has the role 'x'"),
    ],
)
def test_the_first_rows_are_checked_at_once(tmp_path, tokenizer, lines, message):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=message):
        streaming_chat_dataset(tokenizer, source="json", data_files=str(path), seq_len=50)


def test_a_wrong_row_later_is_named(tmp_path, tokenizer):
    rows = [*make_chats(70), {"messages": [{"role": "x", "content": "a"}]}]
    arguments = write_chats(tmp_path / "a.jsonl", rows)
    stream = streaming_chat_dataset(tokenizer, **arguments, seq_len=90, shuffle_buffer=8)
    with pytest.raises(DataStreamError, match=r"a.jsonl cannot be read \(row 71: message 1"):
        list(stream)


def test_wrong_options_are_refused(tmp_path, tokenizer):
    arguments = write_chats(tmp_path / "a.jsonl", make_chats(3)) | {"seq_len": 50}
    for options, message in (
        ({"loss_on": "reply"}, "loss_on must be one of replies, all"),
        ({"source": "text"}, "source text holds no chats"),
        ({"column": "body"}, "there is no column 'body'; columns: messages"),
        ({"packing": True}, "unknown key dataset.packing; did you mean packed"),
    ):
        with pytest.raises(ValueError, match=message):
            streaming_chat_dataset(tokenizer, **arguments | options)
    with pytest.raises(ValueError, match="has no chat template; use .* tokenizer._component_="):
        streaming_chat_dataset(object(), **arguments)
    with pytest.raises(ValueError, match="must end; give epochs or max_tokens"):
        chat_dataset(tokenizer, **arguments, epochs=None)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("shuffle_buffer", [0, 12])
@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (1, 2)])
def test_a_stream_of_chats_resumes_after_every_sequence(
    tmp_path, tokenizer, packed, shuffle_buffer, rank, world_size
):
    arguments = write_chats(tmp_path / "a.jsonl", make_chats(50))
    options = {"seq_len": 120, "shuffle_buffer": shuffle_buffer, "packed": packed}

    def make():
        dataset = streaming_chat_dataset(tokenizer, **arguments, **options)
        dataset.rank, dataset.world_size = rank, world_size
        return dataset

    dataset, states, expected = make(), [], []
    states.append(dataset.state_dict())
    for sample in itertools.islice(dataset, 120):
        expected.append(listed(sample))
        states.append(json.loads(json.dumps(dataset.state_dict())))
    assert states[-1]["epoch"] >= 1
    resumed = make()
    for step in range(0, 110, 9):
        resumed.load_state_dict(states[step])
        found = [listed(sample) for sample in itertools.islice(resumed, 9)]
        assert found == expected[step : step + 9]
    assert len(pickle.dumps(states[-1])) < 1000
    with pytest.raises(ValueError, match="is from another stream"):
        other = streaming_chat_dataset(tokenizer, **arguments, **options | {"loss_on": "all"})
        other.rank, other.world_size = rank, world_size
        other.load_state_dict(states[3])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_data_loader_of_chats_resumes(tmp_path, tokenizer, num_workers):
    arguments = write_chats(tmp_path / "a.jsonl", make_chats(60))

    def loader():
        dataset = streaming_chat_dataset(
            tokenizer, **arguments, seq_len=120, shuffle_buffer=9, max_tokens=2 * 120 * 42
        )
        dataset.rank, dataset.world_size, dataset.batch_size = 1, 2, 3
        collate = lambda samples: [listed(sample) for sample in samples]  # noqa: E731
        return StatefulDataLoader(
            dataset, batch_size=3, num_workers=num_workers, collate_fn=collate
        )

    whole, batches, states = loader(), [], []
    for batch in whole:
        batches.append(batch)
        states.append(whole.state_dict())
    assert len(batches) == 14
    for stop in (0, 5, 12):
        resumed = loader()
        resumed.load_state_dict(states[stop])
        assert list(resumed) == batches[stop + 1 :]
        assert len(list(find_all(states[stop], "carry"))) == max(num_workers, 1)


def test_ranks_share_the_chats(tmp_path, tokenizer):
    rows = make_chats(40)
    arguments = write_chats(tmp_path / "a.jsonl", rows)
    found = []
    for rank in range(3):
        dataset = streaming_chat_dataset(tokenizer, **arguments, seq_len=200, epochs=1)
        dataset.rank, dataset.world_size = rank, 3
        found += [chat for sample in dataset for chat in chats_in(sample)]
    assert sorted(found) == sorted(expected_chats(tokenizer, rows))


def test_the_example_shows_the_replies(tmp_path, tokenizer):
    arguments = write_chats(tmp_path / "a.jsonl", make_chats(2))
    dataset = streaming_chat_dataset(tokenizer, **arguments, seq_len=120)
    shown = "<|start|>user\n0?<|end|>\n<|start|>assistant\n⟦0.0<|end|>⟧\n"
    assert dataset.example() == shown


DATED = "{{ strftime_now('%d %B %Y') }}" + TURNS


def test_a_resumed_stream_keeps_the_date_of_its_start(tmp_path):
    """The date of another day would have another number of tokens."""
    dated = HuggingFaceTokenizer(make_tokenizer_folder(tmp_path / "t", DATED))
    arguments = write_chats(tmp_path / "a.jsonl", make_chats(40)) | {"seq_len": 160}
    stream = streaming_chat_dataset(dated, **arguments)
    today = datetime.date.today().strftime("%d %B %Y")
    assert stream.example().startswith(f"{today}<|start|>user")
    samples = iter(stream)
    for _ in range(5):
        next(samples)
    state = stream.state_dict()
    expected = [listed(sample) for sample in itertools.islice(samples, 20)]

    dated.date = "2031-09-01"
    other = streaming_chat_dataset(dated, **arguments)
    assert other.example().startswith("01 September 2031<|start|>user")
    other.load_state_dict(state)
    assert [listed(sample) for sample in itertools.islice(other, 20)] == expected
