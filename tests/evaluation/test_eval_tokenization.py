"""Tests that special tokens equal transformers for every kind of tokenizer."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

pytest.importorskip("lm_eval", reason="evaluation on tasks needs lm-eval")

from eval_tiny import VOCAB, WholeModel  # noqa: E402

from hestia_tune.evaluation.lm import DecoderLM  # noqa: E402


def make_tokenizer(adds_bos):
    vocab = {name: i for i, name in enumerate(["<unk>", "<s>", "</s>", "a", "b", "c"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    if adds_bos:
        tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


class Wrapped:
    """A tokenizer in torchtune's form whose ``encode`` cannot leave out the file's BOS."""

    eos_id, bos_id, vocab_size = 2, 1, 6

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def encode(self, text, add_bos=True, add_eos=True):
        return self.tokenizer.encode(text).ids

    def decode(self, ids):
        return self.tokenizer.decode(ids)


class Plain:
    """A tokenizer without tokenizer.json, like tiktoken and SentencePiece."""

    eos_id = 2

    def __init__(self, bos_id):
        self.bos_id = bos_id

    def encode(self, text, add_bos=True, add_eos=True):
        return [self.bos_id] * add_bos + [ord(c) for c in text] + [self.eos_id] * add_eos

    def decode(self, ids):
        return "".join(map(chr, ids))


def make_lm(tokenizer):
    return DecoderLM(WholeModel(torch.nn.Embedding(VOCAB, VOCAB)), tokenizer, window=8)


@pytest.mark.parametrize("adds_bos", [True, False])
def test_bos_follows_the_file(adds_bos):
    lm = make_lm(Wrapped(make_tokenizer(adds_bos)))
    bos = [1] * adds_bos
    assert lm.tok_encode("a b") == [*bos, 3, 4]
    assert lm.tok_encode("a b", add_special_tokens=False) == [3, 4]
    assert lm.tok_encode("a b", add_special_tokens=True) == [*bos, 3, 4]
    assert lm.tok_encode("<s> a") == [1, 3]  # there is no second BOS
    assert lm.prefix_token_id == 1 and lm.tok_decode([1], skip_special_tokens=False) == "<s>"
    assert lm.tok_decode([1, 3, 2]) == "a"


def test_padding_and_truncation_of_the_file_are_not_used():
    tokenizer = make_tokenizer(False)
    tokenizer.enable_padding(length=8)
    tokenizer.enable_truncation(2)
    lm = make_lm(Wrapped(tokenizer))
    assert lm.tok_encode("a b c a") == [3, 4, 5, 3]
    assert lm.tok_encode("a b c a", add_special_tokens=False) == [3, 4, 5, 3]
    assert tokenizer.truncation is not None and tokenizer.padding is not None


def test_plain_tokenizers_start_with_bos():
    assert make_lm(Plain(1)).tok_encode("a") == [1, 97]
    assert make_lm(Plain(1)).tok_encode("a", add_special_tokens=False) == [97]
    assert make_lm(Plain(2)).tok_encode("a") == [97]  # here BOS is EOS
    assert make_lm(Plain(None)).tok_encode("a") == [97]
    assert make_lm(Plain(None)).prefix_token_id == 2
    lm = make_lm(Plain(1))
    assert lm.tok_decode([1, 97, 2]) == "a" and lm.tok_decode(2) == "<|2|>"
