"""Text that torchtune's ``generate`` samples, with its KV cache."""

from typing import Any

import numpy as np
import torch
from torchtune.generation import generate, generate_next_token

from hestia_tune.config import GeneratedConfig

BATCH_SIZE = 32  # Sequences that are generated together. The generated text depends on it.


def generate_batch(
    model: Any, config: GeneratedConfig, number: int, vocab_size: int
) -> torch.Tensor:
    """Return the token ids (batch_size, seq_len) of a batch of generated text.

    The first token is random. The next 3 to 5 tokens are greedy, the same number in the whole
    batch. All further tokens are sampled. The result depends on the arguments only.

    Args:
        model: A model that torchtune builds, with KV caches for the batch.
        config: The options of the generated set.
        number: Number of the batch.
        vocab_size: The first token is below this number.
    """
    (state,) = np.random.SeedSequence([config.seed, number]).generate_state(1, np.uint64)
    device = model.tok_embeddings.weight.device
    rng = torch.Generator(device).manual_seed(int(state >> np.uint64(1)))
    first = torch.randint(vocab_size, (BATCH_SIZE, 1), generator=rng, device=device)
    num_greedy = int(torch.randint(3, 6, (), generator=rng, device=device))
    shared: Any = {"pad_id": -1, "rng": rng, "custom_generate_next_token": _next_token}
    model.reset_caches()
    start, _ = generate(model, first, max_generated_tokens=num_greedy, top_k=1, **shared)
    shared |= {"temperature": config.temperature, "top_k": None}
    model.reset_caches()
    rest = config.seq_len - start.shape[1]
    return generate(model, start, max_generated_tokens=rest, **shared)[0]


def _next_token(*args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Call torchtune's function, and drop the logits that `generate` would keep of every token."""
    tokens, logits = generate_next_token(*args, **options)
    return tokens, logits[:, :0]
