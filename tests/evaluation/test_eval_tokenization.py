"""Special tokens as transformers puts them, whatever form the tokenizer has."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from hestia_tune.evaluation.tokenization import TextCodec


def make_tokenizer(adds_bos):
    vocab = {name: i for i, name in enumerate(["<unk>", "<s>", "</s>", "a", "b", "c"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    if adds_bos:
        tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


class Wrapped:
    """Of torchtune's form: its own ``encode`` knows no way to leave the file's BOS out."""

    eos_id, bos_id, vocab_size = 2, 1, 6

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def encode(self, text, add_bos=True, add_eos=True):
        return self.tokenizer.encode(text).ids

    def decode(self, ids):
        return self.tokenizer.decode(ids)


class Plain:
    """No tokenizer.json behind it, as with tiktoken and SentencePiece."""

    eos_id = 2

    def __init__(self, bos_id):
        self.bos_id = bos_id

    def encode(self, text, add_bos=True, add_eos=True):
        return [self.bos_id] * add_bos + [ord(c) for c in text] + [self.eos_id] * add_eos

    def decode(self, ids):
        return "".join(map(chr, ids))


@pytest.mark.parametrize("adds_bos", [True, False])
def test_bos_as_the_file_says(adds_bos):
    codec = TextCodec(Wrapped(make_tokenizer(adds_bos)))
    bos = [1] * adds_bos
    assert codec.encode("a b") == [*bos, 3, 4]
    assert codec.encode("a b", special=False) == [3, 4]
    assert codec.encode("a b", special=True) == [*bos, 3, 4]
    assert codec.encode("<s> a") == [1, 3]  # not a second one
    assert codec.prefix_id == 1 and codec.token_text(1) == "<s>"
    assert codec.decode([1, 3, 2]) == "a"


@pytest.mark.parametrize("adds_bos", [True, False])
def test_bos_as_the_caller_says(adds_bos):
    tokenizer = Wrapped(make_tokenizer(adds_bos))
    assert TextCodec(tokenizer, add_bos=True).encode("a") == [1, 3]
    assert TextCodec(tokenizer, add_bos=False).encode("a") == [3]
    assert TextCodec(tokenizer, add_bos=True).encode("a", special=False) == [3]


def test_padding_and_cutting_of_the_file_are_not_ours():
    tokenizer = make_tokenizer(False)
    tokenizer.enable_padding(length=8)
    tokenizer.enable_truncation(2)
    assert TextCodec(Wrapped(tokenizer)).encode("a b c a") == [3, 4, 5, 3]
    assert tokenizer.truncation is not None and tokenizer.padding is not None


def test_plain_tokenizers_start_with_their_bos():
    assert TextCodec(Plain(1)).encode("a") == [1, 97]
    assert TextCodec(Plain(1), add_bos=False).encode("a") == [97]
    assert TextCodec(Plain(2)).encode("a") == [97]  # BOS is EOS
    assert TextCodec(Plain(None)).encode("a") == [97]
    assert TextCodec(Plain(None)).prefix_id == 2
    assert TextCodec(Plain(1), prefix_token=5).prefix_id == 5
    with pytest.raises(ValueError, match="has no BOS"):
        TextCodec(Plain(None), add_bos=True)
