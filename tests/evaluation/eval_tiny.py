"""Provides tiny models, a tokenizer of bytes, lm-eval requests and slow references."""

import torch
from lm_eval.api.instance import Instance

from hestia_tune.models import llama

VOCAB = 264
WINDOW = 64
EOS = 256


class ByteTokenizer:
    """A tokenizer with one id per byte. 256 is EOS, 257 is BOS."""

    eos_id, bos_id, vocab_size = EOS, 257, 258

    def encode(self, text, add_bos=True, add_eos=True):
        return [self.bos_id] * add_bos + list(text.encode()) + [self.eos_id] * add_eos

    def decode(self, ids, skip_special_tokens=True):
        special = {256: "<eos>", 257: "<bos>"}
        parts = [bytes([i]) if i < 256 else special[i].encode() for i in ids if i < 258]
        if skip_special_tokens:
            parts = [bytes([i]) for i in ids if i < 256]
        return b"".join(parts).decode("utf-8", errors="replace")


class WholeModel(torch.nn.Module):
    """A wrapper with nothing but ``model(tokens)``: no norm, no positions, no caches."""

    def __init__(self, model):
        super().__init__()
        self.inner, self.calls = model, 0

    def forward(self, tokens):
        self.calls += 1
        return self.inner(tokens)


def tiny_model(seed=0, dtype=torch.float32, tie=True):
    torch.manual_seed(seed)
    model = llama(
        vocab_size=VOCAB,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        embed_dim=32,
        intermediate_dim=48,
        max_seq_len=WINDOW,
        tie_word_embeddings=tie,
    )
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.to(dtype)


def request(kind, *arguments, doc_id=0):
    return Instance(
        request_type=kind,
        doc={},
        arguments=arguments,
        idx=0,
        metadata=("some_task", doc_id, 1),
    )


def random_text(generator, low, high):
    length = int(torch.randint(low, high, (1,), generator=generator))
    return "".join(chr(97 + int(i)) for i in torch.randint(0, 26, (length,), generator=generator))


@torch.no_grad()
def reference_score(model, context, continuation, window=WINDOW):
    """Return a continuation's log-probability in a batch of one, and whether it is greedy."""
    tokens = (context + continuation)[-(window + 1) :]
    logp = model(torch.tensor([tokens[:-1]]))[0].double().log_softmax(-1)[-len(continuation) :]
    target = torch.tensor(continuation)
    greedy = bool((logp.argmax(-1) == target).all())
    return logp.gather(1, target[:, None]).sum().item(), greedy


@torch.no_grad()
def reference_generate(model, prompt, max_new):
    """Generate greedy tokens. Each token costs a forward of the whole sequence."""
    tokens = list(prompt)
    for _ in range(max_new):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
        if tokens[-1] == EOS:
            break
    return tokens[len(prompt) :]
