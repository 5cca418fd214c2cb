"""Sensitivity three ways: as the paper's authors do it, adaptively, and by Fisher traces.

    python benchmarks/sensitivity.py --config smollm2_135m --layers 12 \
        --settings num_samples=8 --overrides device=cpu checkpointer.checkpoint_dir=DIR \
        dataset.source=parquet dataset.data_files=train.parquet dataset.split=train \
        dataset.column=text dataset.seq_len=128 dataset.max_tokens=40000

The authors' way: for every layer and batch a new forward and backward, then Hutch++ with the fixed
counts (rank 10, 20 probes, hence 40 products). All three see the same weights and samples. Prints
seconds (wall clock, and of all cores, which other work on the machine disturbs less), the scores of
each way, and how they differ. Scores are over the chosen layers.
"""

import argparse
import json
import logging
import time
from pathlib import Path

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from tqdm import tqdm

from hestia_tune.config.run_config import RunConfig, load_config
from hestia_tune.models import loading
from hestia_tune.run import Run
from hestia_tune.sensitivity import EstimationConfig, SensitivityArtifact, estimate_sensitivity
from hestia_tune.sensitivity.curvature import (
    double_backward_attention,
    hutchpp,
    logits_of,
    mean_loss,
)
from hestia_tune.training.loader import calibration_batches

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "output_proj", "w1", "w2", "w3")


def spread(names: list[str], count: int) -> list[str]:
    """``count`` layers, evenly over the blocks, each of the next projection (0: all)."""
    blocks = sorted({int(name.split(".")[1]) for name in names})
    if not 0 < count < len(names):
        return names
    chosen = []
    for k in range(count):
        block = blocks[round(k * (len(blocks) - 1) / max(1, count - 1))]
        ending = PROJECTIONS[k % len(PROJECTIONS)]
        chosen += [n for n in names if n.startswith(f"layers.{block}.") and n.endswith(ending)]
    return list(dict.fromkeys(chosen))


def authors_way(model, weights, batches, settings) -> SensitivityArtifact:
    """Per layer and batch: forward, backward with a graph, Hutch++ with fixed counts."""
    tokens = [batch.num_predicted for batch in batches]
    generator = torch.Generator().manual_seed(0)
    traces, errors = {}, {}
    for name, weight in tqdm(weights.items(), desc="the authors' way"):
        for parameter in model.parameters():
            parameter.requires_grad_(parameter is weight)
        trace, variance = 0.0, 0.0
        for batch, count in zip(batches, tokens, strict=True):
            with double_backward_attention():
                loss = mean_loss(logits_of(model, batch), batch.labels)
                (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)

            def products(vectors, gradient=gradient, weight=weight):
                for vector in vectors:
                    v = vector()
                    (product,) = torch.autograd.grad(
                        gradient, weight, v.view_as(weight), retain_graph=True
                    )
                    yield v, product.flatten()

            trace_of_batch, error, probes = hutchpp(
                lambda vectors: (product for _, product in products(vectors)),
                lambda vectors: [float(v @ product) for v, product in products(vectors)],
                weight.detach(),
                rank=settings.rank,
                num_probes=settings.num_probes,
                generator=generator,
            )
            trace += count / sum(tokens) * trace_of_batch
            variance += (count / sum(tokens) * error) ** 2
        traces[name], errors[name] = trace, variance**0.5
    return SensitivityArtifact(
        traces=traces,
        standard_errors=errors,
        probes=dict.fromkeys(traces, probes * len(batches)),
        model_fingerprint="",
    )


def spearman(a: list[float], b: list[float]) -> float:
    """Rank correlation (no ties)."""
    ranks = [torch.tensor(v, dtype=torch.float64).argsort().argsort().double() for v in (a, b)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="demo")
    parser.add_argument("--layers", type=int, default=12, help="0 takes all")
    parser.add_argument("--settings", nargs="*", default=[], help="of sensitivity_estimation")
    parser.add_argument("--overrides", nargs="*", default=[], help="of the config")
    parser.add_argument("--output-dir", default="runs/benchmark_sensitivity")
    parser.add_argument("--skip-authors", action="store_true")
    parser.add_argument(
        "--targets",
        nargs="*",
        type=float,
        default=[],
        help="target_standard_error of the adaptive way, each",
    )
    options = parser.parse_args()
    logging.disable(logging.INFO)

    settings = OmegaConf.to_container(OmegaConf.from_dotlist(options.settings))
    cfg = OmegaConf.merge(
        load_config(options.config),
        OmegaConf.from_dotlist([*options.overrides, f"output_dir={options.output_dir}"]),
        {"sensitivity_estimation": settings, "sensitivity": None},
    )
    planned = Run.of(RunConfig.parse(cfg).changed(dtype="fp32"))
    config, estimation = planned.config, planned.config.sensitivity_estimation
    sizes = (estimation.num_samples, estimation.batch_size)
    drawn = calibration_batches(config, planned.tokenizer, *sizes)
    batches = [batch.to(planned.device) for batch in drawn]
    model = loading.load_on_all_ranks(
        config.model, planned.pretrained.read(planned, planned.undecided), planned.device
    )
    names = spread(planned.layers, options.layers)
    weights = {name: model.get_submodule(name).weight for name in names}

    def run(**changes) -> SensitivityArtifact:
        chosen = EstimationConfig.parse(settings | changes)
        return estimate_sensitivity(model, weights, batches, chosen)

    ways = {"fisher": lambda: run(curvature="fisher"), "adaptive": lambda: run()}
    for target in options.targets:
        ways[f"adaptive {target:g}"] = lambda t=target: run(target_standard_error=t)
    if not options.skip_authors:
        ways["authors"] = lambda: authors_way(
            model, weights, batches, EstimationConfig.parse({"rank": 10} | settings)
        )
    results, wall, cores = {}, {}, {}
    for label, way in ways.items():
        started, busy = time.perf_counter(), time.process_time()
        results[label] = way()
        wall[label] = time.perf_counter() - started
        cores[label] = time.process_time() - busy
        worst = max(results[label].score_standard_errors.values())
        print(
            f"\n{label}: {wall[label]:.1f} s ({cores[label]:.1f} core seconds), scores known to "
            f"+-{worst:.4f}, unresolved: {results[label].unresolved or 'none'}",
            flush=True,
        )

    predicted = sum(batch.num_predicted for batch in batches)
    print(f"\n{cfg.model}\n{len(names)} layers, {len(batches)} batches, {predicted} tokens\n")
    print(f"| layer | {' | '.join(f'{label}: score (probes)' for label in results)} |")
    print(f"|---|{'---|' * len(results)}")
    for name in names:
        cells = [f"{r.scores[name]:.3f} ({r.probes[name]})" for r in results.values()]
        print(f"| {name} | {' | '.join(cells)} |")
    adaptive = [label for label in results if label.startswith("adaptive")]
    pairs = [("fisher", "adaptive")]
    if "authors" in results:
        pairs += [(label, "authors") for label in (*adaptive, "fisher")]
    for other, reference in pairs:
        a, b = (list(results[label].scores.values()) for label in (other, reference))
        differences = [abs(x - y) for x, y in zip(a, b, strict=True)]
        print(
            f"{other} against {reference}: {wall[reference] / wall[other]:.1f} times fewer seconds "
            f"({cores[reference] / cores[other]:.1f} of core seconds), scores differ by "
            f"{sum(differences) / len(differences):.4f} on average and {max(differences):.4f} at "
            f"most, Spearman {spearman(a, b):.3f}"
        )
    record = {
        label: {
            "seconds": wall[label],
            "core_seconds": cores[label],
            "scores": r.scores,
            "score_standard_errors": r.score_standard_errors,
        }
        for label, r in results.items()
    }
    Path(options.output_dir, "benchmark.json").write_text(json.dumps(record, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
