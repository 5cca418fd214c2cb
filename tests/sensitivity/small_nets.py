"""Networks of a few dozen weights, with their exact Hessians and Gauss-Newton matrices."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from hestia_tune.qat.linear import select_linears
from hestia_tune.sensitivity import CalibrationBatch
from hestia_tune.sensitivity.curvature import double_backward_attention

VOCAB, DIM, HIDDEN = 7, 4, 3


class Block(nn.Module):
    """Causal attention and a gated MLP, both residual, all in the dtype of the weights."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.output_proj = (
            nn.Linear(dim, dim, bias=False) for _ in range(4)
        )
        self.w1, self.w3 = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x, *, mask=None, input_pos=None):
        """x: (batch, seq_len, dim); mask: bool (batch, seq_len, seq_len), True may be seen."""
        at = torch.arange(x.shape[1], device=x.device) if input_pos is None else input_pos
        x = x + 0.3 * torch.sin(at.to(x.dtype)).unsqueeze(-1)
        q, k, v = (p(x).unsqueeze(1) for p in (self.q_proj, self.k_proj, self.v_proj))
        mask = None if mask is None else mask.unsqueeze(1)
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.output_proj(seen.squeeze(1))
        return x + self.w2(F.silu(self.w1(x)) * self.w3(x))


class Decoder(nn.Module):
    """Laid out as the library expects of a chain: embeddings, layers, norm, output."""

    def __init__(self, num_layers: int = 2, dim: int = DIM, hidden: int = HIDDEN):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, dim)
        self.layers = nn.ModuleList(Block(dim, hidden) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)
        self.output = nn.Linear(dim, VOCAB, bias=False)

    def forward(self, tokens, **model_inputs):
        hidden = self.tok_embeddings(tokens)
        for layer in self.layers:
            hidden = layer(hidden, **model_inputs)
        return self.output(self.norm(hidden))


class Wrapped(nn.Module):
    """The same network where nothing shows that it is a chain; gives its logits in chunks."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, tokens, **model_inputs):
        return list(self.inner(tokens, **model_inputs).split(2, dim=1))


def decoder(seed: int = 0, dtype: torch.dtype = torch.float64, **shape: int) -> Decoder:
    torch.manual_seed(seed)
    model = Decoder(**shape).double()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.6)
    return model.to(dtype)


def weights_of(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: linear.weight for name, linear in select_linears(model).items()}


def batch(
    seed: int = 0, size: int = 2, seq_len: int = 5, ignored: int = 2, vocab: int = VOCAB
) -> CalibrationBatch:
    """Random tokens and labels, of which the first ``ignored`` of a random order do not count."""
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = torch.randint(0, vocab, (2, size, seq_len), generator=generator)
    labels.view(-1)[torch.randperm(labels.numel(), generator=generator)[:ignored]] = -100
    return CalibrationBatch(tokens=tokens, labels=labels)


def fitted_batches(model: nn.Module, num: int = 4) -> list[CalibrationBatch]:
    """Batches whose labels the model finds likeliest, so that most traces are positive.

    They differ in their numbers of tokens, and so in their weights in the mean.
    """
    made = [batch(k, size=1 + k % 2, seq_len=4, ignored=k % 3) for k in range(num)]
    for data in made:
        counted = data.labels != -100
        with torch.no_grad():
            data.labels[counted] = model(data.tokens).argmax(-1)[counted]
    return made


def logits_by(model: nn.Module, name: str, data: CalibrationBatch):
    """weight of ``name`` -> logits (n, vocabulary) of the n positions that count."""

    def function(weight: torch.Tensor) -> torch.Tensor:
        changed = {f"{name}.weight": weight}
        out = torch.func.functional_call(model, changed, (data.tokens,), dict(data.model_inputs))
        out = torch.cat(out, 1) if isinstance(out, list) else out
        return out[data.labels != -100]

    return function


def dense_hessian(model: nn.Module, name: str, data: CalibrationBatch) -> torch.Tensor:
    """(d, d), of the mean over the counted positions of -log p(label)."""
    logits, labels = logits_by(model, name, data), data.labels[data.labels != -100]

    def loss(weight: torch.Tensor) -> torch.Tensor:
        out = logits(weight)
        picked = out.gather(1, labels.unsqueeze(1)).squeeze(1)
        return (out.logsumexp(1) - picked).mean()

    weight = model.get_submodule(name).weight.detach()
    with double_backward_attention():
        hessian = torch.autograd.functional.hessian(loss, weight)
    return hessian.reshape(weight.numel(), weight.numel())


def dense_gauss_newton(model: nn.Module, name: str, data: CalibrationBatch) -> torch.Tensor:
    """(d, d): mean over positions of J^T (diag(p) - p p^T) J, J the logits' Jacobian."""
    logits, weight = logits_by(model, name, data), model.get_submodule(name).weight.detach()
    total = torch.zeros(weight.numel(), weight.numel(), dtype=weight.dtype)
    jacobians = torch.autograd.functional.jacobian(logits, weight).flatten(2)
    probabilities = logits(weight).softmax(1)
    for jacobian, p in zip(jacobians, probabilities, strict=True):
        total += jacobian.t() @ (torch.diag(p) - torch.outer(p, p)) @ jacobian
    return (total / len(probabilities)).detach()


def exact_traces(model, names, batches, dense=dense_hessian) -> dict[str, float]:
    """Of the mean loss over all counted positions of all batches."""
    counts = [int((data.labels != -100).sum()) for data in batches]
    return {
        name: math.fsum(
            count * float(dense(model, name, data).trace())
            for count, data in zip(counts, batches, strict=True)
        )
        / sum(counts)
        for name in names
    }
