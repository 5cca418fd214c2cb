"""Model builders that torchtune lacks."""

from torchtune.models.llama3_2 import llama3_2
from torchtune.modules import TransformerDecoder


def llama(
    rope_base: float = 10_000,
    norm_eps: float = 1e-5,
    tie_word_embeddings: bool = True,
    **sizes: int,
) -> TransformerDecoder:
    """A Llama with plain (unscaled) RoPE and tied or separate embeddings, such as SmolLM2.

    torchtune's Llama 2 and 3 builders cannot tie embeddings, and its Llama 3.2 builder stretches
    RoPE; with a stretch factor of 1 the latter is what is wanted.

    Args:
        rope_base, norm_eps: ``rope_theta`` and ``rms_norm_eps`` of a Hugging Face config.
        sizes: vocab_size, num_layers, num_heads, num_kv_heads, embed_dim, intermediate_dim and
            max_seq_len, as in torchtune.

    Raises:
        InputError: on a size that is missing, unknown or does not divide another.
    """
    return llama3_2(
        rope_base=rope_base,
        norm_eps=norm_eps,
        tie_word_embeddings=tie_word_embeddings,
        scale_factor=1,
        **sizes,
    )
