"""A pretrained Llama through torchtune's names and through transformers' own: losses, and training.

    python benchmarks/routes.py MODEL_FOLDER TEXT_PARQUET [--tokens 256] [--steps 2]

MODEL_FOLDER is that of the config `smollm2_135m`. Float32, on the CPU; the same tokens, the same
method and schedule. Prints the loss of the pretrained model and of each training step.
"""

import argparse
import time

import torch
from torch.nn.functional import cross_entropy

from hestia_tune.annealing import AnnealingSchedule
from hestia_tune.config.run_config import RunConfig, load_config
from hestia_tune.data import text_dataset
from hestia_tune.models import loading, sources
from hestia_tune.models.folder import SafetensorsFolder
from hestia_tune.qat.linear import quantized_linears
from hestia_tune.qat.schedule import ScheduleDriver


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("text")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()
    plain = load_config("smollm2_135m")
    plain.checkpointer.checkpoint_dir = args.folder
    other = load_config("smollm2_135m")
    del other["checkpointer"]
    other.tokenizer = {"eos_token": "<|endoftext|>"}
    other.model = {"_component_": "hestia_tune.models.hugging_face", "path": args.folder}
    for name, cfg in (("torchtune", plain), ("transformers", other)):
        config, started = RunConfig.parse(cfg), time.perf_counter()
        model = loading.plain_on_meta(config.model)
        folder = sources.pretrained_folder(config)
        weights = sources.folder_tensors(config.model_type, SafetensorsFolder(folder))
        model.load_state_dict({key: value.float() for key, value in weights}, assign=True)
        loading.build_buffers(model, "cpu")
        data = text_dataset(
            loading.instantiate(config.tokenizer, "tokenizer"),
            source="parquet",
            data_files=args.text,
            split="train",
            column="text",
            seq_len=args.tokens,
            max_tokens=args.tokens * (args.steps + 1),
        )

        def loss(index: int, data=data, model=model) -> torch.Tensor:
            tokens = torch.as_tensor(data[index]["tokens"])[None]
            return cross_entropy(model(tokens)[0, :-1].float(), tokens[0, 1:])

        with torch.no_grad():
            print(f"{name}: pretrained {loss(0):.6f}", flush=True)
        loading.instantiate(config.quantizer, "quantizer").prepare(model)
        schedule = AnnealingSchedule(args.steps, rho=0.0, tau_init=0.3)
        driver = ScheduleDriver(schedule, quantized_linears(model), None)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
        for step in range(args.steps):
            driver.set_step(step)
            value = loss(step + 1)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"{name}: step {step + 1} {value:.6f}", flush=True)
        print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
