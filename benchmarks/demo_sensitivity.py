"""Makes the demo model's sensitivity.json: Hutch++ with the paper's settings (Appendix B).

    python benchmarks/demo_sensitivity.py --output hestia_tune/assets/demo/sensitivity.json

50 sequences of the demo's training text, sketch rank 10, 20 probes, kappa 1, epsilon 1e-8, for the
28 linears of the blocks; some ten minutes on one core.
"""

import argparse

import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from safetensors.torch import load_file
from torchtune import config
from torchtune.models.convert_weights import hf_to_tune
from tqdm import tqdm

from hestia_tune.data import demo_dataset
from hestia_tune.selection import select_linears
from hestia_tune.sensitivity import SensitivityArtifact, model_fingerprint, sensitivity_scores
from hestia_tune.sensitivity.hutchpp import hutchpp
from hestia_tune.sensitivity.hvp import double_backward_attention, hessian_matvecs
from hestia_tune.training.configs import asset_path, config_path
from hestia_tune.training.tokenizers import HuggingFaceTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", required=True)
    parser.add_argument("--rank", type=int, default=10)
    parser.add_argument("--num-probes", type=int, default=20)
    parser.add_argument("--num-samples", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    folder = asset_path("demo")
    model = config.instantiate(OmegaConf.load(config_path("demo")).model)
    state = load_file(f"{folder}/model.safetensors")
    model.load_state_dict(
        {
            name: value.float()
            for name, value in hf_to_tune(state, num_heads=4, num_kv_heads=2, dim=128).items()
        }
    )
    tokenizer = HuggingFaceTokenizer(folder)
    sequences = demo_dataset(tokenizer, seq_len=128).sequences
    generator = torch.Generator().manual_seed(options.seed)
    chosen = torch.randperm(len(sequences), generator=generator)[: options.num_samples]
    tokens = sequences[chosen]

    weights = {name: linear.weight for name, linear in select_linears(model).items()}
    with double_backward_attention():
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        matvecs = hessian_matvecs(loss, weights)
        estimates = {
            name: hutchpp(
                matvec,
                weights[name].numel(),
                rank=options.rank,
                num_probes=options.num_probes,
                generator=generator,
            )
            for name, matvec in tqdm(matvecs.items())
        }
    traces = {name: estimate.trace for name, estimate in estimates.items()}
    scores = sensitivity_scores(traces)
    artifact = SensitivityArtifact(
        traces=traces,
        standard_errors={name: e.standard_error for name, e in estimates.items()},
        scores=scores,
        model_fingerprint=model_fingerprint(weights),
        estimator={
            "method": "hutch++",
            "curvature": "hessian",
            "rank": options.rank,
            "num_probes": options.num_probes,
            "num_samples": len(tokens),
            "seq_len": tokens.shape[1],
            "kappa": 1.0,
            "epsilon": 1e-8,
            "seed": options.seed,
        },
    )
    artifact.save(options.output)
    for name, estimate in estimates.items():
        print(
            f"{name:<28} trace {estimate.trace:10.4f} +- {estimate.standard_error:8.4f}  "
            f"score {scores[name]:.3f}"
        )


if __name__ == "__main__":
    main()
