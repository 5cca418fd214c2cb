"""Tests that every causal language model of transformers is either right or refused.

The test is slow. It builds about 200 tiny models, each twice, in one to two minutes.
"""

import contextlib
import dataclasses
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from hestia_tune.models.decoder import hugging_face, model_on_meta
from hestia_tune.models.reference import check_logits

transformers = pytest.importorskip("transformers")

TOKENS = torch.randint(5, 200, (2, 16), generator=torch.Generator().manual_seed(0))
LARGEST = 8_000_000  # largest number of parameters of a tiny model
# Value -> the fields that get it, in the config of any model.
SIZES: dict[Any, str] = {
    264: "vocab_size vocab_size_per_layer_input unpadded_vocab_size",
    1024: "encoder_hash_byte_group_vocab",
    96: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim ffn_hidden_size dff n_inner "
    "feed_forward_size d_inner moe_intermediate_size shared_expert_intermediate_size "
    "moe_shared_expert_intermediate_size shared_intermediate_size dense_intermediate_size "
    "intermediate_size_mlp expert_ffn_hidden_size",
    64: "hidden_size n_embd d_model embedding_size word_embed_proj_dim emb_dim "
    "input_embedding_size output_embedding_size hidden_size_global max_position_embeddings "
    "n_positions n_ctx context_length max_seq_len",
    16: "head_dim d_head attention_head_size kv_channels swa_head_dim linear_head_dim kv_lora_rank "
    "q_lora_rank o_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim index_head_dim "
    "hidden_size_per_layer_input mamba_d_head mamba_head_dim mamba_d_state ssm_state_size "
    "chunk_size mamba_chunk_size linear_key_head_dim linear_value_head_dim",
    8: "rotary_dim mamba_n_heads mamba_num_heads",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads attention_heads "
    "decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads "
    "swa_num_attention_heads linear_num_heads linear_num_value_heads num_experts n_routed_experts "
    "num_local_experts moe_num_experts",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers "
    "num_encoder_layers num_decoder_layers num_key_value_heads num_kv_heads "
    "swa_num_key_value_heads linear_num_key_heads num_experts_per_tok num_experts_per_token "
    "moe_topk moe_k",
    1: "n_group topk_group num_expert_group first_k_dense_replace",
    0: "pad_token_id bos_token_id eos_token_id num_kv_shared_layers",
}
ATTENTION = ["sliding_attention", "full_attention"]
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# Model type -> the other fields that its config needs.
TWEAKS: dict[str, dict[str, Any]] = {
    "blt": {"patch_size": 4},
    "cohere_compass_text": {
        "layer_types": ATTENTION,
        "rope_parameters": dict.fromkeys(ATTENTION, ROPE),
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {"n_shared_experts": 1},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma3n_text": {"layer_types": ATTENTION},
    "gemma4_assistant": {
        "text_config": {
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
        }
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "reformer": {
        "axial_pos_embds_dim": (16, 48),
        "axial_pos_shape": (8, 8),
        "attn_layers": ("local", "local"),
    },
    "zamba": {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "hybrid"]},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}
NESTED = ("blt",)  # models whose parts have their own configs


def sizes(kind: type) -> dict[str, Any]:
    """Return small values for the fields of a config class that are sizes."""
    fields = {field.name for field in dataclasses.fields(kind)}
    small = {n: value for value, names in SIZES.items() for n in names.split() if n in fields}
    if "is_decoder" in fields:
        small["is_decoder"] = True
    if "kv_lora_rank" in fields:  # keys and values have as many heads as queries
        small["num_key_value_heads"] = small["num_attention_heads"]
    return small


def tiny_config(kind: type) -> Any:
    """Return a config of a class for a tiny decoder without an encoder."""
    options = sizes(kind)
    if kind.is_encoder_decoder:
        options["is_encoder_decoder"] = False
    if kind.model_type in NESTED:
        options |= {name: sizes(part) for name, part in kind.sub_configs.items()}
    return kind(**options | TWEAKS.get(kind.model_type, {}))


def outcome(kind: type, folder: Path) -> tuple[str, str]:
    """Return "right", "wrong", "refused" or "skipped" for a config class, and the reason."""
    auto = transformers.AutoModelForCausalLM
    try:
        tiny_config(kind).save_pretrained(folder)
    except Exception as error:  # this config class needs other values
        return "skipped", f"no tiny config: {error!r}"
    try:
        meta = model_on_meta(folder)
    except (ValueError, ImportError) as error:
        return "wrong" if "\n" in str(error) else "refused", str(error)
    count = sum(value.numel() for value in meta.parameters())
    if count > LARGEST:
        return "skipped", f"{count} parameters"
    torch.manual_seed(0)
    theirs = auto.from_config(transformers.AutoConfig.from_pretrained(folder)).float().eval()
    for value in theirs.parameters():
        torch.nn.init.normal_(value, float(value.mean()) if value.dim() == 1 else 0.0, 0.1)
    expected = theirs(input_ids=TOKENS, use_cache=False).logits
    state = theirs.state_dict()
    state = {name: state[name] for name in meta.state_dict()}
    try:
        check_logits(meta, state)
    except ValueError as error:
        return "wrong" if "\n" in str(error) else "refused", str(error)
    with contextlib.suppress(RuntimeError):  # some operators do not exist on this device
        meta.eval()(TOKENS.to("meta"))
    ours = hugging_face(str(folder)).eval()
    ours.load_state_dict(state)
    whole = ours(TOKENS)
    ours.set_num_output_chunks(3)
    for found in (whole, torch.cat(ours(TOKENS), 1)):
        error = float((found - expected).abs().max() / expected.abs().max())
        if not error < 1e-5:
            return "wrong", f"{type(theirs).__name__}: the logits differ by {error:.2g}"
    return "right", type(theirs).__name__


@pytest.mark.slow
@torch.no_grad()
def test_every_family_is_right_or_refused(tmp_path):
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for index, kind in enumerate(transformers.AutoModelForCausalLM._model_mapping):
        try:
            result, why = outcome(kind, tmp_path / str(index))
        except Exception as error:  # neither right nor refused in one line
            result, why = "wrong", repr(error)
        found[result][f"{kind.__name__} ({kind.model_type})"] = why
    for result in ("refused", "skipped", "wrong"):
        print(*(f"{result}: {name}: {why}" for name, why in found[result].items()), sep="\n")
    print({result: len(names) for result, names in found.items()})
    assert not found["wrong"]
    assert len(found["skipped"]) <= 3, found["skipped"]
    assert len(found["right"]) > 2 * len(found["refused"])
