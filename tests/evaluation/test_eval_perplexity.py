"""Tests perplexity against a slow reference, its windows, and the sources of text."""

import math
import re
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn

pytest.importorskip("lm_eval", reason="perplexity needs lm-eval's scoring")

from hestia_tune.config import TextConfig  # noqa: E402
from hestia_tune.evaluation.evaluator import perplexity  # noqa: E402
from hestia_tune.evaluation.evaluator import read_documents as documents_of  # noqa: E402
from hestia_tune.evaluation.lm import DecoderLM  # noqa: E402
from hestia_tune.models import llama  # noqa: E402


def read_documents(source, **options):
    return documents_of(TextConfig(source=str(source), **options))


class Bytes:
    """A tokenizer with one id per byte. 256 is EOS, and there is no BOS."""

    eos_id, vocab_size = 256, 257

    def encode(self, text, add_bos=True, add_eos=True):
        assert not add_bos and not add_eos
        return list(text.encode())

    def decode(self, ids):
        return bytes(i for i in ids if i < 256).decode()


def make_model(seed, dtype=torch.float32):
    torch.manual_seed(seed)
    model = llama(
        vocab_size=257,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        embed_dim=16,
        intermediate_dim=24,
        max_seq_len=64,
    )
    nn.init.normal_(model.tok_embeddings.weight, std=0.5)
    return model.to(dtype)


class BytesWithBos(Bytes):
    bos_id = 255


def measure(model, texts, batch_size="auto", tokenizer=None, **options):
    tokenizer = tokenizer or Bytes()
    lm = DecoderLM(model, tokenizer, window=64, batch_size=batch_size, device="cpu")
    return perplexity(lm, texts, **options)


def make_texts(seed, lengths):
    generator = torch.Generator().manual_seed(seed)
    letters = "abcdef gh\n"
    return [
        "".join(letters[int(i)] for i in torch.randint(0, 10, (n,), generator=generator))
        for n in lengths
    ]


@torch.no_grad()
def one_token_at_a_time(model, text, window, stride, prefix=256):
    """Sum the negative log-likelihood, one token at a time after the context in its window.

    The prefix EOS (256) begins the document, and the prefix BOS every window.
    """
    inputs = [prefix, *text.encode()]
    total = 0.0
    for i in range(len(text.encode())):
        steps = max(math.ceil((i + 1 - window) / stride), 0)
        end = min(window + steps * stride, len(inputs) - 1)
        begin = max(end - window, 0)
        seen = inputs[begin : i + 1]
        if prefix != 256:
            seen = [prefix, *seen[1:]]
        logp = model(torch.tensor([seen]))[0, -1].double().log_softmax(0)
        total -= logp[inputs[i + 1]].item()
    return total


@pytest.mark.parametrize(("window", "stride"), [(8, 8), (8, 3), (8, 1), (1, 1), (64, 10)])
@pytest.mark.parametrize("batch_size", ["auto", 1, 4])
@pytest.mark.parametrize(("tokenizer", "prefix"), [(Bytes(), 256), (BytesWithBos(), 255)])
def test_equals_one_token_at_a_time(window, stride, batch_size, tokenizer, prefix):
    for seed in range(2):
        model = make_model(seed)
        texts = make_texts(seed, [1, 7, 8, 9, 16, 30, 0])
        result = measure(model, texts, batch_size, tokenizer, window=window, stride=stride)
        expected = sum(one_token_at_a_time(model, text, window, stride, prefix) for text in texts)
        assert result["nll"] == pytest.approx(expected, rel=1e-5)
        assert (result["tokens"], result["documents"], result["bytes"]) == (71, 6, 71)
        assert result["words"] == sum(len(re.split(r"\s+", text)) for text in texts if text)
        assert (result["window"], result["stride"]) == (window, stride)


@pytest.mark.parametrize(("window", "stride"), [(8, 8), (8, 7), (8, 3), (64, 64)])
def test_a_tokenizer_may_begin_texts_with_two_tokens(window, stride):
    """GLM's does. Every window has both, so it holds a token less of the text."""
    letters = {chr(i): i for i in range(97, 123)} | {"[a]": 254, "[b]": 255, "[end]": 256}
    tokenizer = SimpleNamespace(tokenizer=Tokenizer(models.WordLevel(letters, "[end]")), eos_id=256)
    tokenizer.tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.tokenizer.post_processor = processors.TemplateProcessing(
        single="[a] [b] $A", special_tokens=[("[a]", 254), ("[b]", 255)]
    )
    model, text = make_model(0), "abcdefghijklmnopqrst"
    found = measure(model, [text], tokenizer=tokenizer, window=window, stride=stride)
    step, expected = min(stride, window - 1), 0.0
    for i, target in enumerate(text.encode()):
        moves = max(math.ceil((i + 1 - (window - 1)) / step), 0)
        end = min(window - 1 + moves * step, len(text))
        seen = [254, 255, *text.encode()[max(end - (window - 1), 0) : i]]
        with torch.no_grad():
            expected -= model(torch.tensor([seen]))[0, -1].double().log_softmax(0)[target].item()
    assert found["tokens"] == 20 and found["nll"] == pytest.approx(expected, rel=1e-5)


def test_default_stride_and_measures():
    model, texts = make_model(0), make_texts(0, [40])
    values = measure(model, texts, window=8)
    assert values == measure(model, texts, window=8, stride=8)
    nll, words = values["nll"], values["words"]
    assert values["token_perplexity"] == pytest.approx(math.exp(nll / 40))
    assert values["word_perplexity"] == pytest.approx(math.exp(nll / words)) and 1 < words < 40
    assert values["byte_perplexity"] == pytest.approx(math.exp(nll / 40))
    assert values["bits_per_byte"] == pytest.approx(nll / 40 / math.log(2))
    long = measure(model, ["é" * 20], window=8)
    assert long["bytes"] == long["tokens"] == 40 and long["words"] == 1
    with torch.no_grad():
        model.tok_embeddings.weight *= 300
    assert measure(model, ["abcdefgh" * 30], window=8)["word_perplexity"] == math.inf


def test_a_smaller_stride_gives_more_context():
    """The model knows only the first letter of the window, so it is right if the context has it."""

    class Counter(nn.Module):
        def forward(self, tokens):
            places = torch.arange(tokens.shape[1]).expand_as(tokens)
            return nn.functional.one_hot(places.clamp(max=256), 257).float()

    text = bytes(range(1, 31)).decode()
    for stride in (1, 2, 5):
        found = measure(Counter(), [text], window=5, stride=stride)
        expected = one_token_at_a_time(Counter(), text, 5, stride)
        assert found["nll"] == pytest.approx(expected, rel=1e-6)


def test_max_tokens_scores_the_beginning():
    model, texts = make_model(1), make_texts(1, [10, 20, 30])
    cut = measure(model, texts, window=8, max_tokens=17)
    short = measure(model, [texts[0], texts[1][:7]], window=8)
    assert cut == short
    assert measure(model, texts, window=8, max_tokens=99)["tokens"] == 60


def test_wrong_values_are_refused():
    model = make_model(0)
    with pytest.raises(ValueError, match="window must be in"):
        measure(model, ["a"], window=65)
    with pytest.raises(AssertionError):  # from lm-eval; our own check is in the eval section
        measure(model, ["a"], window=8, stride=9)
    with torch.no_grad():
        model.tok_embeddings.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="NaN in the logits"):
        measure(model, ["abc"], window=8)


def test_text_file_is_one_document(tmp_path):
    file = tmp_path / "text.txt"
    file.write_bytes("one\r\ntwo é\n".encode())
    assert read_documents(file) == ["one\r\ntwo é\n"]
    file.write_bytes(b"\xef\xbb\xbfone\n\xef\xbb\xbftwo")
    assert read_documents(file) == ["one\ntwo"]
    file.write_bytes(b"good \xff bad")
    with pytest.raises(ValueError, match="text.txt is not UTF-8 .*position 5"):
        read_documents(file)
    file.write_bytes(b"")
    with pytest.raises(ValueError, match="it is empty"):
        read_documents(file)
    for missing in (tmp_path / "other", "other.txt", "other.parquet"):
        with pytest.raises(ValueError, match="other"):
            read_documents(missing)


def test_parquet_column(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "rows.parquet"
    table = pyarrow.table({"text": ["a", "", "b"], "n": [1, 2, 3], "holes": ["x", None, "y"]})
    pyarrow.parquet.write_table(table, file)
    assert read_documents(file) == ["a", "", "b"]
    assert read_documents(str(file), join="\n\n") == ["a\n\n\n\nb"]
    with pytest.raises(ValueError, match="no column 'txt'; it has .'text', 'n'"):
        read_documents(file, column="txt")
    for column in ("n", "holes"):
        with pytest.raises(ValueError, match=f"column '{column}'.*or holds other values"):
            read_documents(file, column=column)
    file.write_bytes(b"not parquet")
    with pytest.raises(ValueError, match="not a parquet file"):
        read_documents(file)


def test_dataset(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "test.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    assert read_documents(folder) == read_documents(folder / "test.jsonl") == ["a", "b"]
    with pytest.raises(ValueError, match="no column 'body'; it has .'text'"):
        read_documents(folder, column="body")
    with pytest.raises(ValueError, match="nowhere.*Should be one of"):
        read_documents(folder, split="nowhere")
