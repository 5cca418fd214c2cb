"""Model builders that torchtune lacks."""

from torchtune.models.llama3_2 import llama3_2
from torchtune.modules import TransformerDecoder


def llama(
    vocab_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    embed_dim: int,
    intermediate_dim: int,
    max_seq_len: int,
    rope_base: float = 10_000,
    norm_eps: float = 1e-5,
    tie_word_embeddings: bool = True,
) -> TransformerDecoder:
    """A Llama with plain (unscaled) RoPE and tied or separate embeddings, such as SmolLM2.

    torchtune's Llama 2 and 3 builders cannot tie embeddings, and its Llama 3.2 builder stretches
    RoPE; with a stretch factor of 1 the latter is what is wanted.

    Args:
        vocab_size, num_layers, num_heads, num_kv_heads, max_seq_len: as in torchtune.
        embed_dim: hidden size, a multiple of num_heads.
        intermediate_dim: width of the MLP.
        rope_base: ``rope_theta`` of a Hugging Face config.
        norm_eps: ``rms_norm_eps`` of a Hugging Face config.
        tie_word_embeddings: whether the output head shares the embedding's weight.

    Raises:
        ValueError: if heads do not divide the hidden size or the key-value heads the heads.
    """
    if embed_dim % num_heads or num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads {num_heads} must divide embed_dim {embed_dim}, and num_kv_heads "
            f"{num_kv_heads} must divide num_heads"
        )
    return llama3_2(
        vocab_size=vocab_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        embed_dim=embed_dim,
        max_seq_len=max_seq_len,
        intermediate_dim=intermediate_dim,
        rope_base=rope_base,
        norm_eps=norm_eps,
        scale_factor=1,
        tie_word_embeddings=tie_word_embeddings,
    )
