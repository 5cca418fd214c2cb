"""Products with the diagonal blocks of the Hessian, by double backward.

One forward and one backward build the graph of all gradients; each product is then a second
backward that reaches one weight alone. The attention kernel must be twice differentiable: fused
scaled-dot-product attention is not, so run the forward inside `double_backward_attention`.
"""

from collections.abc import Callable, Mapping

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


def double_backward_attention():
    """Context in which scaled-dot-product attention can be differentiated twice."""
    return sdpa_kernel(SDPBackend.MATH)


def hessian_matvecs(
    loss: torch.Tensor, weights: Mapping[str, torch.Tensor]
) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """name -> (v -> H v), H the block of the loss's Hessian that belongs to that weight.

    Args:
        loss: a scalar whose graph is alive; it is kept until the functions are dropped.
        weights: the weights, float32 (bfloat16 has too few digits for a second derivative).
    """
    gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)

    def product(weight: torch.Tensor, gradient: torch.Tensor):
        def matvec(v: torch.Tensor) -> torch.Tensor:
            (result,) = torch.autograd.grad(gradient, weight, v.view_as(weight), retain_graph=True)
            return result.flatten()

        return matvec

    return {
        name: product(weight, gradient)
        for (name, weight), gradient in zip(weights.items(), gradients, strict=True)
    }
