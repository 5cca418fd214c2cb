"""Tokenizers of every kind give the ids of transformers, and no state of a file changes a text."""

import json
import shutil
from pathlib import Path

import pytest
import transformers
from chat_folders import TURNS, make_tokenizer_folder
from tokenizers import AddedToken, normalizers, pre_tokenizers, processors

from hestia_tune.data import text_dataset, write_token_shards
from hestia_tune.data.tokens import TokenizedSet
from hestia_tune.models import AutoTokenizer, HuggingFaceTokenizer

TEXTS = [
    "Plain words, 2 + 2 = 4.",
    "",
    " leading and trailing ",
    "déjà vu ﬁ Ⅳ 日本語 🙂",
    "a<eos>b <|start|>user <pad>\n\n<|end|>",
    "tool <tool>x</tool> <tool>",
    "long " * 60,
]


def set_truncation(tokenizer):
    tokenizer.enable_truncation(16)


def set_padding(tokenizer):
    tokenizer.enable_padding(length=40, pad_id=2, pad_token="<pad>")


def set_both(tokenizer):
    set_truncation(tokenizer)
    set_padding(tokenizer)


def set_left(tokenizer):
    tokenizer.enable_truncation(8, direction="left", stride=2)
    tokenizer.enable_padding(direction="left", pad_id=2, pad_token="<pad>")


def add_tokens(tokenizer):
    plain = AddedToken("<tool>", normalized=False, lstrip=True, rstrip=True)
    tokenizer.add_tokens([plain, AddedToken("words", normalized=True, single_word=True)])


def normalize(tokenizer):
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Lowercase(), normalizers.Strip()]
    )


def prefix_space(tokenizer):
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)


def metaspace(tokenizer):
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.ByteLevel(add_prefix_space=False), pre_tokenizers.Digits(True)]
    )


def sequence_of_processors(tokenizer):
    tokenizer.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=True), tokenizer.post_processor]
    )


def roberta(tokenizer):
    tokenizer.post_processor = processors.RobertaProcessing(("<eos>", 0), ("<bos>", 1))


def bert(tokenizer):
    tokenizer.post_processor = processors.BertProcessing(("<eos>", 0), ("<bos>", 1))


# Name -> the changes to a tokenizer folder.
KINDS = {
    "plain": {},
    "truncation": {"change": set_truncation},
    "padding": {"change": set_padding},
    "both": {"change": set_both},
    "both, left": {"change": set_left},
    "bos": {"bos": True},
    "eos": {"eos": True},
    "bos and eos": {"bos": True, "eos": True},
    "bos, eos and truncation": {"bos": True, "eos": True, "change": set_both},
    "sequence of processors": {"bos": True, "eos": True, "change": sequence_of_processors},
    "roberta": {"change": roberta},
    "bert": {"change": bert},
    "add_bos_token": {"add_bos_token": True},
    "add_bos_token over a post-processor": {"bos": True, "add_bos_token": False},
    "add_eos_token": {"add_bos_token": True, "add_eos_token": True},
    "added tokens": {"change": add_tokens},
    "normalizer": {"change": normalize},
    "prefix space": {"change": prefix_space},
    "add_prefix_space in the config": {"add_prefix_space": True},
    "digits": {"change": metaspace},
    "split_special_tokens": {"split_special_tokens": True},
    "clean_up_tokenization_spaces": {"clean_up_tokenization_spaces": True},
    "model_max_length": {"model_max_length": 8},
    "added_tokens_decoder": {
        "added_tokens_decoder": {
            "263": {"content": "<tool>", "special": False, "normalized": False, "lstrip": True,
                    "rstrip": False, "single_word": False},
        }
    },
    "tokens as mappings": {"eos_token": {"content": "<eos>", "__type": "AddedToken"}},
}  # fmt: skip


def without_end(ids, eos_id=0):
    """Return the ids of transformers without the EOS of a post-processor."""
    return ids[:-1] if ids[-1:] == [eos_id] else ids


@pytest.mark.parametrize("kind", KINDS)
def test_ids_equal_those_of_transformers(tmp_path, kind):
    folder = make_tokenizer_folder(tmp_path, **KINDS[kind])
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ends = theirs("a")["input_ids"][-1:] == [0]
    for component in (HuggingFaceTokenizer, AutoTokenizer):
        ours = component(folder)
        for text in TEXTS:
            ids = theirs(text)["input_ids"]
            ids = without_end(ids) if ends else ids
            assert ours.encode(text, add_bos=False, add_eos=False) == ids, text
            assert ours.encode(text, add_bos=False, add_eos=True) == [*ids, 0]
            with_bos = ours.encode(text, add_bos=True, add_eos=False)
            assert with_bos == (ids if ids[:1] == [1] else [1, *ids])  # one BOS
            has_own = len(ids) > (ids[:1] == [1])
            assert ours.encode_batch([text, "x"])[0] == (ids if has_own else [])
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert (ours.eos_id, ours.pad_id, ours.bos_id) == (0, 2, 1)
        assert ours.vocab_size == len(theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_document_has_one_end(tmp_path, kind):
    """Training reads BOS if the folder's texts have it, the text, and one EOS."""
    folder = make_tokenizer_folder(tmp_path / "t", **KINDS[kind])
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    documents = ["abc", "déjà", "x" * 50]
    path = tmp_path / "a.txt"
    path.write_text("\n".join(documents))
    expected = []
    for text in documents:
        ids = theirs(text)["input_ids"]
        expected += ids if ids[-1] == 0 else [*ids, 0]
    options = {"source": "text", "data_files": str(path), "seq_len": len(expected)}
    data = text_dataset(AutoTokenizer(folder), **options)
    assert data.sequences.flatten().tolist() == expected


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_reads_what_training_reads(tmp_path, kind):
    lm = pytest.importorskip("hestia_tune.evaluation.lm")
    import torch

    tokenizer = AutoTokenizer(make_tokenizer_folder(tmp_path, **KINDS[kind]))
    model = torch.nn.Embedding(300, 300)
    evaluated = lm.DecoderLM(model, tokenizer, window=8)
    for text in TEXTS:
        if text:
            plain = tokenizer.tokenizer.encode(text, add_special_tokens=False).ids
            assert evaluated.tok_encode(text, add_special_tokens=False) == plain
            assert evaluated.tok_encode(text) == tokenizer.encode(text, False, False)


@pytest.mark.parametrize(
    ("content", "documents"),
    [
        (b"one\n\n\ntwo\n   \n\t\nthree", ["one", "two", "three"]),
        (b"\xef\xbb\xbfone\ntwo\n", ["one", "two"]),
        (b"\xef\xbb\xbfone\n\xef\xbb\xbftwo\n\xef\xbb\xbf\n", ["one", "two"]),
        (b"one\xef\xbb\xbf two", ["one two"]),  # files were joined without a line break
        (b"one\r\n\r\ntwo\r\n", ["one", "two"]),
        (b"one\rtwo", ["one", "two"]),
    ],
)
def test_text_files_give_no_empty_documents_and_no_marks(tmp_path, content, documents):
    tokenizer = HuggingFaceTokenizer(make_tokenizer_folder(tmp_path / "t"))
    (tmp_path / "a.txt").write_bytes(content)
    expected = [t for d in documents for t in tokenizer.encode(d, False, True)]
    arguments = {"source": "text", "data_files": str(tmp_path / "a.txt"), "seq_len": 1}
    found = text_dataset(tokenizer, **arguments).sequences.flatten().tolist()
    assert found == expected
    index = write_token_shards(tokenizer, tmp_path / "set", **arguments)
    assert index["num_documents"] == len(documents)


def test_empty_rows_give_no_documents(tmp_path):
    tokenizer = HuggingFaceTokenizer(make_tokenizer_folder(tmp_path / "t", change=normalize))
    rows = ["", "a", "  ", "\u00a0", "b"]  # the normalizer strips the last but one
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    data = text_dataset(tokenizer, source="json", data_files=str(path), seq_len=1)
    ids = [tokenizer.encode(text, False, True) for text in ("a", "b")]
    assert data.sequences.flatten().tolist() == ids[0] + ids[1]


def test_sets_of_a_tokenizer_with_such_state_are_made_again(tmp_path):
    """A set that an earlier version cut at 16 tokens is not the set of this tokenizer."""
    plain = HuggingFaceTokenizer(make_tokenizer_folder(tmp_path / "plain"))
    cutting = HuggingFaceTokenizer(make_tokenizer_folder(tmp_path / "cut", change=set_both))
    assert plain.neutralized == [] and cutting.neutralized == ["truncation", "padding"]
    ending = HuggingFaceTokenizer(make_tokenizer_folder(tmp_path / "end", eos=True))
    assert ending.neutralized == ["<eos>"]
    (tmp_path / "a.txt").write_text("some words\n" * 20)
    arguments = {"source": "text", "data_files": str(tmp_path / "a.txt"), "seq_len": 8}
    write_token_shards(plain, tmp_path / "set", **arguments)
    shards = {"source": "token_shards", "data_files": str(tmp_path / "set"), "seq_len": 8}
    from hestia_tune.config import StreamConfig

    assert len(TokenizedSet(plain, StreamConfig(**shards))) > 0
    why = "with the truncation and padding of tokenizer.json, which changed its texts; tokenize"
    with pytest.raises(ValueError, match=why):
        TokenizedSet(cutting, StreamConfig(**shards))


def test_the_end_token_may_be_missing(tmp_path):
    folder = Path(make_tokenizer_folder(tmp_path, eos_token=None))
    with pytest.raises(ValueError, match="names no eos_token; set tokenizer.eos_token"):
        HuggingFaceTokenizer(str(folder))
    assert HuggingFaceTokenizer(str(folder), eos_token="<|end|>").eos_id == 4
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 0]}))
    tokenizer = HuggingFaceTokenizer(str(folder))
    assert tokenizer.eos_id == 4 and tokenizer.stop_tokens == [4]


def test_a_token_that_the_vocabulary_lacks_has_no_id(tmp_path):
    """transformers would give it an id for which the model has no embedding."""
    folder = make_tokenizer_folder(tmp_path, pad_token="[PAD]")
    for component in (HuggingFaceTokenizer, AutoTokenizer):
        tokenizer = component(folder)
        assert tokenizer.pad_id == tokenizer.eos_id == 0 and tokenizer.vocab_size == 264


STORIES = Path(__file__).parents[3] / "shared" / "models" / "stories260K"


@pytest.mark.skipif(not STORIES.is_dir(), reason="needs ../shared/models/stories260K")
def test_a_real_folder_reads_as_in_transformers(tmp_path):
    folder = shutil.copytree(STORIES, tmp_path / "m")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = AutoTokenizer(str(folder))
    for text in TEXTS[:1] + TEXTS[2:4]:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text, False, False) == ids


def test_messages_have_the_mask_of_torchtune(tmp_path):
    from torchtune.data import Message

    chat = HuggingFaceTokenizer(make_tokenizer_folder(tmp_path / "a", TURNS))
    messages = [Message("user", "hi", masked=True), Message("assistant", "yo")]
    sample = chat({"messages": messages})
    pairs = zip(sample["tokens"], sample["mask"], strict=True)
    shown = [chat.tokenizer.decode([i], skip_special_tokens=False) for i, m in pairs if not m]
    assert "".join(shown) == "yo<|end|>"
    both = [Message("user", "hi"), Message("assistant", "yo")]
    assert not any(chat({"messages": both})["mask"])
    plain = HuggingFaceTokenizer(make_tokenizer_folder(tmp_path / "b", None), max_seq_len=4)
    sample = plain({"messages": messages})
    assert sample["mask"] == [True, True, False, False] and len(sample["tokens"]) == 4
    asked = plain({"messages": [*messages[:1], Message("assistant", "")]}, inference=True)
    assert plain.decode(asked["tokens"]) == "hi" and all(asked["mask"])
