"""Makes the demo's model: a Llama of 0.9M parameters and its tokenizer, from text in every CPython.

    python benchmarks/pretrain_demo.py --output hestia_tune/assets/demo

The tokenizer (byte-level BPE, 1024 ids) is trained on the training split of Python's help topics
(`hestia_tune.data.documents`); the model on those and on the docstrings of the standard library,
from which every row of a batch is drawn with the odds of `--topic-share`. The docstrings are there
because the topics alone, some 140,000 tokens, are memorised by even so small a model: its
validation loss turns up after 300 steps, at 3.9 instead of 3.1. The validation split of the topics
is held out from all of it, quotations included; it only served to choose the share and the number
of steps, at the last of which its loss was still falling slowly.

The weights are rounded to bfloat16 before the last measurement, so the losses printed at the end
are those of the files. Beside the model's own loss stands that of its naive ternarization (codes
and scales from the weights as they are, groups of 128), the gap that quantization-aware training
has to close. A run takes about ten minutes on one CPU core. The files in the package are of
CPython 3.11 with OMP_NUM_THREADS=1; another Python version has other text and gives other weights.
"""

import argparse
import copy
import json
import math
import time
from pathlib import Path

import torch
from safetensors.torch import save as serialize
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from torchtune.models import convert_weights

from hestia_tune.data.sequences import (
    SequenceDataset,
    demo_documents,
    stdlib_docstrings,
    without_quotes,
)
from hestia_tune.methods import TernaryMethod
from hestia_tune.models import llama

VOCAB_SIZE = 1024
SPECIAL_TOKEN = "<|endoftext|>"
ARCHITECTURE = {
    "vocab_size": VOCAB_SIZE,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 128,
    "intermediate_dim": 384,
    "max_seq_len": 256,
    "rope_base": 10_000,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
SEQ_LEN = ARCHITECTURE["max_seq_len"]


def train_tokenizer(documents: list[str]) -> Tokenizer:
    """Byte-level BPE, so every text has ids and decodes to itself; the special token has id 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[SPECIAL_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def build_model() -> nn.Module:
    """A fresh model; what writes to the residual stream starts smaller, by its number of terms."""
    model = llama(**ARCHITECTURE)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            std = 0.05 if "tok_embeddings" in name else parameter.shape[1] ** -0.5
            if name.endswith(("output_proj.weight", "w2.weight")):
                std /= math.sqrt(2 * ARCHITECTURE["num_layers"])
            nn.init.normal_(parameter, std=std)
    return model


def _loss(model: nn.Module, sequences: torch.Tensor) -> torch.Tensor:
    """Mean next-token cross-entropy (nats) of (batch, seq_len) token ids."""
    logits = model(sequences)[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), sequences[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: nn.Module, sequences: torch.Tensor) -> float:
    """Mean loss (nats per token) of (num_sequences, seq_len) token ids."""
    total = sum(_loss(model, rows).item() * len(rows) for rows in sequences.split(16))
    return total / len(sequences)


@torch.no_grad()
def naive_ternarization(model: nn.Module) -> nn.Module:
    """A copy whose block linears are replaced by scale times code, without any training."""
    model = copy.deepcopy(model)
    quantizer = TernaryMethod(group_size=128)
    for module in model.layers.modules():
        if isinstance(module, nn.Linear):
            module.weight.copy_(quantizer.hard(module.weight))
    return model


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Linear warmup to the peak, then linear decay to zero after the last step."""
    warmup = min(1.0, (step + 1) / max(1, args.warmup_steps))
    decay = (args.steps - step) / max(1, args.steps - args.warmup_steps)
    return args.lr * min(warmup, decay)


def sample(streams: list[torch.Tensor], shares: list[float], args, generator) -> torch.Tensor:
    """(batch_size, SEQ_LEN) token ids from random offsets of streams chosen by their shares."""
    odds = torch.tensor(shares)
    choices = torch.multinomial(odds, args.batch_size, replacement=True, generator=generator)
    rows = []
    for stream in (streams[choice] for choice in choices.tolist()):
        start = torch.randint(len(stream) - SEQ_LEN + 1, (), generator=generator).item()
        rows.append(stream[start : start + SEQ_LEN])
    return torch.stack(rows)


def train(model: nn.Module, streams, validation: torch.Tensor, args) -> None:
    """AdamW on random windows; prints training and validation loss on the way."""
    generator = torch.Generator().manual_seed(args.seed)
    shares = [args.topic_share, 1 - args.topic_share]
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() != 2]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": args.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
    )
    started, recent = time.monotonic(), []
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        loss = _loss(model, sample(streams, shares, args, generator))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        recent.append(loss.item())
        if (step + 1) % args.eval_every == 0 or step + 1 == args.steps:
            print(
                f"step {step + 1:5d}  train {sum(recent) / len(recent):.4f}  "
                f"validation {evaluate(model, validation):.4f}  "
                f"{time.monotonic() - started:.0f} s",
                flush=True,
            )
            recent = []


def save(model: nn.Module, tokenizer: Tokenizer, output: Path) -> None:
    """Writes a Hugging Face folder; the weights in bfloat16."""
    output.mkdir(parents=True, exist_ok=True)
    weights = convert_weights.tune_to_hf(
        model.state_dict(),
        num_heads=ARCHITECTURE["num_heads"],
        num_kv_heads=ARCHITECTURE["num_kv_heads"],
        dim=ARCHITECTURE["embed_dim"],
    )
    weights = {name: w.to(torch.bfloat16).contiguous() for name, w in weights.items()}
    content = serialize(weights, metadata={"format": "pt"})
    (output / "model.safetensors").write_bytes(content)
    tokenizer.save(str(output / "tokenizer.json"))
    special_id = tokenizer.token_to_id(SPECIAL_TOKEN)
    special_ids = {f"{role}_token_id": special_id for role in ("bos", "eos", "pad")}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": ARCHITECTURE["embed_dim"],
        "intermediate_size": ARCHITECTURE["intermediate_dim"],
        "num_hidden_layers": ARCHITECTURE["num_layers"],
        "num_attention_heads": ARCHITECTURE["num_heads"],
        "num_key_value_heads": ARCHITECTURE["num_kv_heads"],
        "head_dim": ARCHITECTURE["embed_dim"] // ARCHITECTURE["num_heads"],
        "max_position_embeddings": SEQ_LEN,
        "hidden_act": "silu",
        "rms_norm_eps": ARCHITECTURE["norm_eps"],
        "rope_theta": float(ARCHITECTURE["rope_base"]),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        **special_ids,
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKEN,
        "eos_token": SPECIAL_TOKEN,
        "pad_token": SPECIAL_TOKEN,
        "model_max_length": SEQ_LEN,
        "clean_up_tokenization_spaces": False,
    }
    _write_json(output / "config.json", config)
    _write_json(output / "tokenizer_config.json", tokenizer_config)
    _write_json(output / "generation_config.json", special_ids)


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--embed-dim", type=int, default=ARCHITECTURE["embed_dim"])
    parser.add_argument("--intermediate-dim", type=int, default=ARCHITECTURE["intermediate_dim"])
    parser.add_argument("--num-layers", type=int, default=ARCHITECTURE["num_layers"])
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--batch-size", type=int, default=16, help="sequences of 256 tokens")
    parser.add_argument("--lr", type=float, default=4e-3, help="peak learning rate")
    parser.add_argument("--warmup-steps", type=int, default=50)
    parser.add_argument("--weight-decay", type=float, default=0.2)
    parser.add_argument(
        "--topic-share", type=float, default=0.25, help="odds of a topic row; the rest: docstrings"
    )
    parser.add_argument("--eval-every", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    for key in ("embed_dim", "intermediate_dim", "num_layers"):
        ARCHITECTURE[key] = getattr(args, key)
    torch.manual_seed(args.seed)
    topics, held_out = demo_documents("train"), demo_documents("validation")
    tokenizer = train_tokenizer(topics)
    eos_id = tokenizer.token_to_id(SPECIAL_TOKEN)

    def tokens(documents: list[str], seq_len: int) -> torch.Tensor:
        ids = (id_ for text in documents for id_ in [*tokenizer.encode(text).ids, eos_id])
        return SequenceDataset(ids, seq_len).sequences

    docstrings = without_quotes(stdlib_docstrings(), held_out)
    streams = [tokens(documents, 1).flatten() for documents in (topics, docstrings)]
    validation = tokens(held_out, SEQ_LEN)
    model = build_model()
    print(
        f"parameters {sum(p.numel() for p in model.parameters())}, tokens: topics "
        f"{len(streams[0])}, docstrings {len(streams[1])}, validation {validation.numel()}"
    )
    train(model, streams, validation, args)
    with torch.no_grad():  # parameters alone: the RoPE cache has to stay in float32
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    print(f"pretrained: validation {evaluate(model, validation):.4f}")
    naive = evaluate(naive_ternarization(model), validation)
    print(f"naive ternarization: validation {naive:.4f}")
    save(model, tokenizer, args.output)


if __name__ == "__main__":
    main()
