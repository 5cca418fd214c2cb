"""Text that the pretrained model samples from itself, written before the run that trains on it.

torchtune's ``generate`` makes it batch by batch, with its KV cache, each from random numbers of its
own. So ranks deal the batches out, any number of ranks writes the same set, and what was stopped
makes only what is missing. Until the set is whole, batches are files in ``cache_dir.DIGEST``.

Every rank that generates holds the whole model in the run's dtype, and the KV cache of a batch.
Later runs load no model for it; the first rank reads the model's files for their checksum.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torchtune import training, utils
from torchtune.generation import generate, generate_next_token

from hestia_tune.data.tokens import GeneratedConfig, write_set
from hestia_tune.distributed import on_first_rank, progress_bar, together
from hestia_tune.files import checksum, remove, staged
from hestia_tune.models import build
from hestia_tune.models.checkpoints import digest
from hestia_tune.models.load import load_model

SELF_GENERATED = "hestia_tune.data.self_generated_dataset"


def generate_missing(cfg: DictConfig, tokenizer: Any, section: DictConfig) -> None:
    """Writes what is missing of the set that a section names, if anything is. Collective.

    Raises:
        ValueError: if ``cache_dir`` holds anything else, or the model takes no such sequences.
    """
    config = GeneratedConfig.parse({k: v for k, v in section.items() if k != "_component_"})
    folder = Path(cfg.checkpointer.checkpoint_dir)

    def digest_of_model() -> str:  # of the weights and the config, all of which it reads
        files = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
        return digest([(path.name, checksum(path)) for path in files])

    model = on_first_rank(digest_of_model)
    source: Any = {"self_generated": True, "model": model} | dataclasses.asdict(config)
    del source["cache_dir"], source["epochs"]
    parts = Path(f"{config.cache_dir}.{digest(source)}")
    paths = [parts / f"{n}.npy" for n in range(-(-config.num_sequences // config.batch_size))]

    def find_missing() -> list[int]:
        made = Path(config.cache_dir)
        if made.is_file() or any(made.glob("*")):  # the set, or what `write_set` refuses
            return []
        return [number for number, path in enumerate(paths) if not path.exists()]

    def join() -> None:
        lists = (np.load(path, allow_pickle=False).flatten().tolist() for path in paths)
        max_tokens = config.num_sequences * config.seq_len
        write_set(tokenizer, config.cache_dir, source, lists, max_tokens)
        remove(parts)

    own = (on_first_rank(find_missing) or [])[dist.get_rank() :: dist.get_world_size()]
    with together():
        if own:
            _generate_batches(cfg, tokenizer, config, {n: paths[n] for n in own})
    on_first_rank(join, share=False)


def _generate_batches(
    cfg: DictConfig, tokenizer: Any, config: GeneratedConfig, paths: dict[int, Path]
) -> None:
    device = utils.get_device(cfg.device)
    dtype = training.get_dtype(cfg.dtype, device)
    model: Any = load_model("pretrained", cfg, device=device, dtype=dtype)[0]
    build.check_model_options(cfg, model)
    with device:
        model.setup_caches(config.batch_size, dtype, decoder_max_seq_len=config.seq_len)
    vocab_size = getattr(tokenizer, "vocab_size", None) or model.tok_embeddings.num_embeddings
    with progress_bar(total=len(paths), unit="batch") as progress:
        for number, path in paths.items():
            tokens = generate_batch(model, config, number, vocab_size)
            with staged(path) as temporary, open(temporary, "wb") as file:
                np.save(file, tokens.numpy(force=True))
            progress.update()


def generate_batch(
    model: Any, config: GeneratedConfig, number: int, vocab_size: int
) -> torch.Tensor:
    """Token ids (batch_size, seq_len): what the model, the options and the batch's number make.

    A first token below ``vocab_size``, 3 to 5 greedy ones (as many in all of the batch), then
    sampled ones. ``model`` is torchtune's, with KV caches for them.
    """
    (state,) = np.random.SeedSequence([config.seed, number]).generate_state(1, np.uint64)
    device = model.tok_embeddings.weight.device
    rng = torch.Generator(device).manual_seed(int(state >> np.uint64(1)))
    first = torch.randint(vocab_size, (config.batch_size, 1), generator=rng, device=device)
    num_greedy = int(torch.randint(3, 6, (), generator=rng, device=device))
    shared: Any = {"pad_id": -1, "rng": rng, "custom_generate_next_token": _next_token}
    model.reset_caches()
    start, _ = generate(model, first, max_generated_tokens=num_greedy, top_k=1, **shared)
    shared |= {"temperature": config.temperature, "top_k": config.top_k}
    model.reset_caches()
    rest = config.seq_len - start.shape[1]
    return generate(model, start, max_generated_tokens=rest, **shared)[0]


def _next_token(*args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """torchtune's, without the logits, which `generate` would keep of every token."""
    tokens, logits = generate_next_token(*args, **options)
    return tokens, logits[:, :0]
