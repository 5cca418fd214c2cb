"""Make a random Llama of about 50,000 parameters in a folder, and run the recipe on it."""

import builtins
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import psutil
import torch
from omegaconf import DictConfig, OmegaConf
from ranks import end_job
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch._dynamo.utils import counters
from torch.utils.data import get_worker_info
from torchtune.models.convert_weights import tune_to_hf
from torchtune.training.metric_logging import DiskLogger

from hestia_tune.data import SequenceDataset
from hestia_tune.models import llama
from hestia_tune.qat.linear import local_rows
from hestia_tune.torchtune.recipe import HestiaQATRecipe
from hestia_tune.training import loader

SHAPE = {
    "vocab_size": 264,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 64,
    "intermediate_dim": 96,
    "max_seq_len": 64,
}
NUM_QUANTIZED = 7 * SHAPE["num_layers"]


def make_model_dir(folder: Path, seed: int = 0, **shape: int) -> Path:
    """Write a randomly initialized Llama with a byte-level tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = SHAPE | shape
    torch.manual_seed(seed)
    model = llama(**shape)
    torch.nn.init.normal_(model.tok_embeddings.weight, std=0.05)
    heads, kv_heads, dim = shape["num_heads"], shape["num_kv_heads"], shape["embed_dim"]
    state = tune_to_hf(model.state_dict(), num_heads=heads, num_kv_heads=kv_heads, dim=dim)
    save_file({k: v.contiguous() for k, v in state.items()}, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": dim,
        "intermediate_size": shape["intermediate_dim"],
        "num_hidden_layers": shape["num_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": shape["max_seq_len"],
        "vocab_size": shape["vocab_size"],
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # llama.cpp loads no BPE without merges. This merge is of bytes that no test has.
    merge = ("\u0100", "\u0101")
    vocab = {token: index for index, token in enumerate(["<eos>", *alphabet, "".join(merge)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[merge]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast"}
    names |= dict.fromkeys(("bos_token", "eos_token", "pad_token"), "<eos>")
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


def random_dataset(tokenizer, *, num: int, seq_len: int = 16, seed: int = 0) -> SequenceDataset:
    """Return sequences with some structure: a token mostly follows from the token before it."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(1, 200, (num, 1), generator=generator)
    noise = torch.randint(0, 3, (num, seq_len), generator=generator)
    tokens = 1 + (start + 5 * torch.arange(seq_len) + noise) % 200
    return SequenceDataset(tokens.flatten().tolist(), seq_len)


class _HalfIgnored(SequenceDataset):
    """A dataset whose samples have no token to predict, in every second group of four."""

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        if index // 4 % 2:
            sample["labels"] = [-100] * len(sample["labels"])
        return sample


def half_ignored_dataset(tokenizer, *, num: int, seed: int = 0) -> SequenceDataset:
    """Return a `random_dataset` where half the batches of 4 are ignored."""
    return _HalfIgnored(
        random_dataset(tokenizer, num=num, seed=seed).sequences.flatten().tolist(), 16
    )


class _AllIgnored(SequenceDataset):
    def __getitem__(self, index):
        sample = super().__getitem__(index)
        return sample | {"labels": [-100] * len(sample["labels"])}


def all_ignored_dataset(tokenizer, *, num: int, seed: int = 0) -> SequenceDataset:
    """Return a `random_dataset` with no token to predict."""
    return _AllIgnored(
        random_dataset(tokenizer, num=num, seed=seed).sequences.flatten().tolist(), 16
    )


class SignallingLogger(DiskLogger):
    """A logger that sends a signal when a given step is logged, once.

    It sends the signal to this process, its whole group, its parent, or all processes of its
    parent (the whole job, under torchrun).
    """

    def __init__(self, log_dir: str, at_step: int, signal_name: str, to: str = "self"):
        super().__init__(log_dir)
        self._at_step, self._signal, self._to = at_step, getattr(signal, signal_name), to

    def log_dict(self, payload, step):
        super().log_dict(payload, step)
        if step == self._at_step and "loss" in payload:
            parent = psutil.Process(os.getppid())
            job = [one.pid for one in [*parent.children(recursive=True), parent]]
            targets = {"self": [os.getpid()], "group": [0], "parent": [parent.pid], "job": job}
            for target in targets[self._to]:
                os.kill(target, self._signal)  # 0 means the group


def signal_at(step: int, name: str, to: str = "self") -> tuple[str, ...]:
    """Return overrides that make a run send a signal when ``step`` is logged."""
    return (
        "metric_logger._component_=tiny.SignallingLogger",
        f"metric_logger.at_step={step}",
        f"metric_logger.signal_name={name}",
        f"metric_logger.to={to}",
    )


class FailingDataset(SequenceDataset):
    """A dataset whose 13th sample never comes in a data worker, or ends the worker."""

    how = ""

    def __getitem__(self, index):
        if index == 12 and get_worker_info() is not None:
            if self.how == "sleep":
                time.sleep(1000)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def failing_dataset(tokenizer, *, num: int, how: str) -> SequenceDataset:
    """Return a `random_dataset` whose worker fails. The wait for a hanging worker is 3 seconds."""
    loader.DATALOADER_TIMEOUT = 3
    dataset = FailingDataset(random_dataset(tokenizer, num=num).sequences.flatten().tolist(), 16)
    dataset.how = how
    return dataset


class _OddRows(SequenceDataset):
    """A dataset whose 13th sample is not a conversation."""

    error: type[Exception] = KeyError

    def __getitem__(self, index):
        if index == 12:
            raise self.error("messages")
        return super().__getitem__(index)


def odd_rows_dataset(tokenizer, *, num: int, error: str = "KeyError") -> SequenceDataset:
    """Return a `random_dataset` with a row that its component cannot read."""
    dataset = _OddRows(random_dataset(tokenizer, num=num).sequences.flatten().tolist(), 16)
    dataset.error = getattr(builtins, error)
    return dataset


class InfiniteLaterLoss(torch.nn.CrossEntropyLoss):
    """A loss that is infinite from the third gradient on."""

    count = 0

    def forward(self, logits, labels):
        self.count += torch.is_grad_enabled()
        return super().forward(logits, labels) * (float("inf") if self.count > 2 else 1.0)


class InfiniteLaterGradient(InfiniteLaterLoss):
    """A loss with an infinite gradient. The loss itself does not change."""

    def forward(self, logits, labels):
        loss = super().forward(logits, labels)
        if self.count > 2:
            loss = torch.nn.CrossEntropyLoss.forward(self, logits, labels)
            loss.register_hook(lambda grad: grad * float("inf"))
        return loss


class FailingLogger(DiskLogger):
    """A logger that cannot log step 2."""

    def log_dict(self, payload, step):
        if step == 2:
            raise ConnectionError("the service is away")
        super().log_dict(payload, step)


class InfiniteTrainingLoss(torch.nn.CrossEntropyLoss):
    """A loss that is infinite as soon as it needs a gradient."""

    def forward(self, logits, labels):
        loss = super().forward(logits, labels)
        return loss * float("inf") if torch.is_grad_enabled() else loss


class PoisoningSGD(torch.optim.SGD):
    """An optimizer that writes infinity into the first weight of the first MLP's shape."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        parameters = [p for group in self.param_groups for p in group["params"]]
        local_rows(next(p for p in parameters if p.shape == (96, 64)))[0, 0] = float("inf")


class GraphCountingLogger(DiskLogger):
    """A logger that notes how many graphs the compiler has made at a step, without validation."""

    counts: ClassVar[dict[int, int]] = {}

    def log_dict(self, payload, step):
        super().log_dict(payload, step)
        if "loss" in payload:
            self.counts[step] = counters["stats"]["unique_graphs"]


def make_config(model_dir: Path, output_dir: Path, *overrides: str) -> DictConfig:
    """Return a config of a short run. ``overrides`` are written as on the command line."""
    base = {
        "output_dir": str(output_dir),
        "device": "cpu",
        "dtype": "fp32",
        "seed": 3,
        "model": {"_component_": "hestia_tune.models.llama", **SHAPE},
        "tokenizer": {
            "_component_": "hestia_tune.models.HuggingFaceTokenizer",
            "path": str(model_dir),
        },
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": str(model_dir),
            "checkpoint_files": ["model.safetensors"],
            "model_type": "LLAMA3_2",
            "output_dir": "${output_dir}",
        },
        "quantizer": {"_component_": "hestia_tune.HestiaQATQuantizer", "group_size": 32},
        "dataset": {"_component_": "tiny.random_dataset", "num": 24},
        "dataset_val": {"_component_": "tiny.random_dataset", "num": 7, "seed": 1},
        "batch_size": 4,
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 3e-3, "weight_decay": 0.1},
        "lr_scheduler": {
            "_component_": "hestia_tune.get_wsd_schedule",
            "warmup_ratio": 0.2,
        },
        "metric_logger": {
            "_component_": "torchtune.training.metric_logging.DiskLogger",
            "log_dir": "${output_dir}/logs",
        },
        "clip_grad_norm": 1.0,
    }
    return OmegaConf.merge(base, OmegaConf.from_dotlist(list(overrides)))


def run(
    cfg: DictConfig, before_cleanup: Callable[[HestiaQATRecipe], None] = lambda recipe: None
) -> HestiaQATRecipe:
    """Run the recipe in this process and return it, with the process group closed."""
    try:
        recipe = HestiaQATRecipe(cfg)
        recipe.setup(recipe.config)
        recipe.train()
        before_cleanup(recipe)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return recipe


def tune_process(
    *arguments: str, torchrun: Sequence[str] = (), recipe: str = "hestia_qat"
) -> subprocess.Popen:
    """Start ``tune run [torchrun] RECIPE ARGUMENTS`` with one thread a rank.

    It has its own process group, so that ending the group ends its ranks and workers.
    """
    folder = Path(__file__).parent
    paths = [str(folder), str(folder / "simulated_cuda"), os.environ.get("PYTHONPATH")]
    path = os.pathsep.join(filter(None, paths))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    tune = str(Path(sys.executable).with_name("tune"))
    return subprocess.Popen(
        [tune, "run", *torchrun, recipe, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def tune_run(
    *arguments: str, torchrun: Sequence[str] = (), recipe: str = "hestia_qat"
) -> subprocess.CompletedProcess:
    """Run `tune_process` to its end, and raise an error if it does not end."""
    process = tune_process(*arguments, torchrun=torchrun, recipe=recipe)
    try:
        out, err = process.communicate(timeout=600)
    except subprocess.TimeoutExpired:
        end_job(process)
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def write_config(cfg: DictConfig, path: Path) -> str:
    """Save a config as a YAML file and return its path."""
    OmegaConf.save(cfg, path)
    return str(path)


def logged(output_dir: Path, key: str = "loss") -> dict[int, float]:
    """Return step -> value of every row of metrics.jsonl that has ``key``."""
    rows = map(json.loads, (Path(output_dir) / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row[key] for row in rows if key in row}
