r"""The paper's dead zones, measured while straight-through, uniform and Hestia QAT run.

    OMP_NUM_THREADS=1 python benchmarks/replication/dead_zones.py \
        --small runs/replication/small --out runs/replication/dead_zones --overrides compile=True

After `small.py`, whose best learning rates it takes. A weight is in a boundary zone if
||w|/gamma - 1/2| is below ``--zone``; its code can change only there. Every ``--every`` steps: the
share of weights in the zones, the mean |gradient| that reaches latent weights inside and outside of
them, and the share of codes that this step's update changes (the others are in the dead zone of
Eq. 4). Writes `dead_zones.png` and prints a table.
"""

import argparse
import json
import logging
from pathlib import Path

import torch
from common import METHODS, Study, settings_of
from small import HARD, Small
from torch import distributed as dist

from hestia_tune.qat import full_tensor, quantized_linears
from hestia_tune.training.recipe import HestiaQATRecipe

_COLORS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple")
_NEVER = 1e-7  # where a logarithmic axis puts "none"


class ObservedRecipe(HestiaQATRecipe):
    """Also keeps, every ``every`` steps, what gradients and codes do in and out of the zones."""

    zone, every = 0.1, 10

    def setup(self, cfg):
        super().setup(cfg)
        self.observed: list[dict[str, float]] = []
        self._first, self._ever = self._codes(), 0
        self._last = self._first

    def _layers(self):
        for layer in quantized_linears(self._model).values():
            yield layer, layer.weight_fake_quantizer.quantizer

    @torch.no_grad()
    def _codes(self) -> torch.Tensor:
        """Codes of all layers, flat."""
        found = [q.codes(full_tensor(layer.weight))[0].flatten() for layer, q in self._layers()]
        return torch.cat(found)

    def _is_due(self) -> bool:
        return self.global_step % self.every == 0

    @torch.no_grad()
    def _clip_gradients(self) -> float | None:
        """Between backward and the optimizer's step."""
        if self._is_due():
            inside, gradients = [], []
            for layer, quantizer in self._layers():
                distance, _ = quantizer.normalized(full_tensor(layer.weight))
                inside.append((distance - 0.5).abs() < self.zone)
                gradients.append(full_tensor(layer.weight.grad).abs().flatten())
            inside, gradients = torch.cat(inside), torch.cat(gradients).double()
            self.observed.append(
                {
                    "step": self.global_step,
                    "zone": float(inside.double().mean()),
                    "gradient_inside": float(gradients[inside].mean()),
                    "gradient_outside": float(gradients[~inside].mean()),
                }
            )
        return super()._clip_gradients()

    def _train_step(self, batches, stop, progress) -> bool:
        is_due = self._is_due()
        before = self._codes() if is_due else None
        stopping = super()._train_step(batches, stop, progress)
        if is_due:
            after = self._codes()
            self._ever = self._ever | (after != self._first) | (before != self._first)
            self.observed[-1] |= {
                "flips": float((before != after).double().mean()),
                "moved": float((after != self._first).double().mean()),
                "ever": float(self._ever.double().mean()),
            }
        return stopping

    def _finish(self) -> None:
        super()._finish()
        (self.output_dir / "observed.json").write_text(json.dumps(self.observed, indent=1))


def draw(found: dict[str, tuple[list[dict], list[dict]]], path: Path) -> None:
    """What codes, gradients and the two losses did over training, by method."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7), layout="constrained")
    flips, zone, gradients, moved, gap, loss = figure.subplots(2, 3, sharex=True).flat
    for (name, (observed, rows)), color in zip(found.items(), _COLORS, strict=False):
        steps = [row["step"] for row in observed]
        style = {"color": color, "label": name}
        flips.semilogy(steps, [max(row["flips"], _NEVER) for row in observed], **style)
        zone.plot(steps, [row["zone"] for row in observed], **style)
        gradients.semilogy(steps, [row["gradient_inside"] for row in observed], **style)
        outside = [row["gradient_outside"] for row in observed]
        gradients.semilogy(steps, outside, "--", color=color)
        moved.plot(steps, [row["moved"] for row in observed], **style)
        checked = [row for row in rows if "val_loss_hard" in row]
        differences = [row["val_loss_hard"] - row["val_loss_relaxed"] for row in checked]
        gap.plot([row["step"] for row in checked], differences, marker="o", **style)
        hard = [row["val_loss_hard"] for row in checked]
        loss.plot([row["step"] for row in checked], hard, marker="o", **style)
    flips.set_title(f"codes changed by one step ({_NEVER:g}: none)")
    zone.set_title("share of weights in the boundary zones")
    gradients.set_title("mean |gradient| inside (-) and outside (--)")
    gradients.set_ylim(bottom=1e-12)
    moved.set_title("share of codes that differ from the first ones")
    gap.set_title("validation loss, hard - relaxed")
    gap.set_yscale("symlog", linthresh=1e-2)
    loss.set_title("validation loss, hard")
    for axis in (moved, gap, loss):
        axis.set_xlabel("step")
    moved.legend()
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="demo")
    parser.add_argument("--small", default="runs/replication/small")
    parser.add_argument("--out", default="runs/replication/dead_zones")
    parser.add_argument("--lrs", nargs="+", type=float, default=[5e-4, 1e-3, 2e-3, 4e-3])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3])
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--zone", type=float, default=ObservedRecipe.zone)
    parser.add_argument("--every", type=int, default=ObservedRecipe.every)
    parser.add_argument("--overrides", nargs="*", default=[], help="of the config")
    options = parser.parse_args()
    logging.disable(logging.INFO)
    torch._dynamo.config.recompile_limit = 64
    ObservedRecipe.zone, ObservedRecipe.every = options.zone, options.every
    base = settings_of(
        options.config,
        ["run_val_every_n_steps=25", "log_every_n_steps=25", *options.overrides],
    )
    study = Study(base, Path(options.out), ObservedRecipe)
    best = Small(Study(base, Path(options.small)), options.lrs, options.seeds, options.steps)
    found, seed = {}, options.seeds[1]
    for method in METHODS[:3]:
        lr = best.best_lr(method)
        changes = {"optimizer__lr": lr, "seed": seed, "max_steps_per_epoch": options.steps}
        record = study.run(method, f"seed{seed}", **changes)
        path = study.folder(method, f"seed{seed}") / "observed.json"
        found[method.name] = (json.loads(path.read_text(encoding="utf-8")), record)
    draw({k: (o, r["rows"]) for k, (o, r) in found.items()}, study.out / "dead_zones.png")
    columns = ("zone", "gradient inside", "outside", "changed by a step", "differ now", "ever did")
    print(f"\n| method | at step | {' | '.join(columns)} |\n|---|---:|{'---:|' * len(columns)}")
    for name, (observed, _) in found.items():
        for row in (observed[0], observed[len(observed) // 2], observed[-1]):
            print(
                f"| {name} | {row['step']} | {row['zone']:.3f} | {row['gradient_inside']:.1e} "
                f"| {row['gradient_outside']:.1e} | {row['flips']:.5f} | {row['moved']:.3f} "
                f"| {row['ever']:.3f} |"
            )
    for name, (_, record) in found.items():
        last = [row for row in record["rows"] if "val_loss_hard" in row][-1]
        gap = last["val_loss_hard"] - last["val_loss_relaxed"]
        print(f"{name}: hard {record['validation_loss'][HARD]:.4f}, gap at the end {gap:.5f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
