"""Networks of a few dozen weights, with their exact Hessians and Gauss-Newton matrices."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from hestia_tune.qat.select import select_layers
from hestia_tune.sensitivity import CalibrationBatch
from hestia_tune.sensitivity.curvature import double_backward_attention

VOCAB, DIM, HIDDEN = 7, 4, 3


class Block(nn.Module):
    """Causal attention and a gated MLP, both residual, in the dtype of the weights."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.output_proj = (
            nn.Linear(dim, dim, bias=False) for _ in range(4)
        )
        self.w1, self.w3 = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x, *, mask=None, input_pos=None):
        """Run x, (batch, seq_len, dim); True in mask, (batch, seq_len, seq_len), can be seen."""
        at = torch.arange(x.shape[1], device=x.device) if input_pos is None else input_pos
        x = x + 0.3 * torch.sin(at.to(x.dtype)).unsqueeze(-1)
        q, k, v = (p(x).unsqueeze(1) for p in (self.q_proj, self.k_proj, self.v_proj))
        mask = None if mask is None else mask.unsqueeze(1)
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.output_proj(seen.squeeze(1))
        return x + self.w2(F.silu(self.w1(x)) * self.w3(x))


class Decoder(nn.Module):
    """A decoder that is a chain: embeddings, layers, norm, output."""

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
    """The same network with its parts hidden in a submodule; it returns logits in chunks."""

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
    return {name: linear.weight for name, linear in select_layers(model).items()}


def batch(
    seed: int = 0, size: int = 2, seq_len: int = 5, ignored: int = 2, vocab: int = VOCAB
) -> CalibrationBatch:
    """Return random tokens and labels; ``ignored`` random labels do not count."""
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = torch.randint(0, vocab, (2, size, seq_len), generator=generator)
    labels.view(-1)[torch.randperm(labels.numel(), generator=generator)[:ignored]] = -100
    return CalibrationBatch(tokens=tokens, labels=labels)


def fitted_batches(model: nn.Module, num: int = 4) -> list[CalibrationBatch]:
    """Return batches labelled by the model itself, so that most traces are positive.

    The batches have different numbers of tokens, so they have different weights in the mean.
    """
    made = [batch(k, size=1 + k % 2, seq_len=4, ignored=k % 3) for k in range(num)]
    for data in made:
        has_label = data.labels != -100
        with torch.no_grad():
            data.labels[has_label] = model(data.tokens).argmax(-1)[has_label]
    return made


def logits_by(model: nn.Module, name: str, data: CalibrationBatch):
    """Return the function from weight ``name`` to the logits of the n labels, (n, vocabulary)."""

    def function(weight: torch.Tensor) -> torch.Tensor:
        changed = {f"{name}.weight": weight}
        out = torch.func.functional_call(model, changed, (data.tokens,), dict(data.model_inputs))
        out = torch.cat(out, 1) if isinstance(out, list) else out
        return out[data.labels != -100]

    return function


def dense_hessian(model: nn.Module, name: str, data: CalibrationBatch) -> torch.Tensor:
    """Return the Hessian, (d, d), of the mean of -log p(label) over all labels."""
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
    """Return the mean of J^T (diag(p) - p p^T) J, (d, d), with J the Jacobian of the logits."""
    logits, weight = logits_by(model, name, data), model.get_submodule(name).weight.detach()
    total = torch.zeros(weight.numel(), weight.numel(), dtype=weight.dtype)
    jacobians = torch.autograd.functional.jacobian(logits, weight).flatten(2)
    probabilities = logits(weight).softmax(1)
    for jacobian, p in zip(jacobians, probabilities, strict=True):
        total += jacobian.t() @ (torch.diag(p) - torch.outer(p, p)) @ jacobian
    return (total / len(probabilities)).detach()


def exact_traces(model, names, batches, dense=dense_hessian) -> dict[str, float]:
    """Return the exact traces for the mean loss over all labels of all batches."""
    counts = [int((data.labels != -100).sum()) for data in batches]
    return {
        name: math.fsum(
            count * float(dense(model, name, data).trace())
            for count, data in zip(counts, batches, strict=True)
        )
        / sum(counts)
        for name in names
    }
