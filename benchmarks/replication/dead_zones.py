r"""The paper's dead zones, measured while straight-through, uniform and Hestia QAT run.

    OMP_NUM_THREADS=1 python benchmarks/replication/dead_zones.py --lr 1e-3 \
        --out runs/replication/dead_zones --overrides compile=True

One learning rate for all methods, since it decides how far a step goes. A weight is in a boundary
zone if ||w|/gamma - 1/2| is below ``--zone``. After every step: the share of codes that it changed
(the other weights are in the dead zone of Eq. 6), and of those that have ever differed from the
first. Every ``--every`` steps also the share of weights in the zones, and the mean |gradient| of
latent weights inside and outside of them, before clipping. At the end the validation losses of the
last training step's weights, relaxed as that step had them and hard. Writes a picture and
prints a table.
"""

import argparse
import json
from pathlib import Path

import torch
from common import DEMO, HARD, METHODS, Study, many_runs, settings_of

from hestia_tune.files import write_atomically
from hestia_tune.methods.groups import block_view
from hestia_tune.qat.linear import full_tensor, quantized_linears
from hestia_tune.torchtune.recipe import HestiaQATRecipe

_COLORS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple")
_NEVER = 1e-7  # where a logarithmic axis puts "none"


class ObservedRecipe(HestiaQATRecipe):
    """Also keeps, every ``every`` steps, what gradients and codes do in and out of the zones."""

    zone, every = 0.1, 10

    def setup(self, cfg):
        super().setup(cfg)
        self.observed: list[dict[str, float]] = []
        self._begin()

    def _begin(self) -> None:
        self._first = self._last = self._codes()
        self._ever = torch.zeros_like(self._first, dtype=torch.bool)

    def _layers(self):
        for layer in quantized_linears(self.model).values():
            yield layer, layer.weight_fake_quantizer.method

    @torch.no_grad()
    def _codes(self) -> torch.Tensor:
        """Codes of all layers, flat."""
        found = [q.codes(full_tensor(layer.weight))[0].flatten() for layer, q in self._layers()]
        return torch.cat(found)

    @torch.no_grad()
    def clip_gradients(self) -> float | None:
        """Between backward and the optimizer's step."""
        if self.global_step % self.every == 0:
            inside, gradients = [], []
            for layer, quantizer in self._layers():
                weight = full_tensor(layer.weight)
                blocks = block_view(weight, quantizer.group_size).abs()
                distance = (blocks / quantizer.codes(weight)[1].unsqueeze(-1)).flatten()
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
        return super().clip_gradients()

    def train_step(self, batches):
        step = self.global_step
        result = super().train_step(batches)
        codes = self._codes()
        self._ever |= codes != self._first
        if step % self.every == 0:
            self.observed[-1] |= {
                "flips": float((codes != self._last).double().mean()),
                "moved": float((codes != self._first).double().mean()),
                "ever": float(self._ever.double().mean()),
            }
        self._last = codes
        return result

    def train(self) -> None:
        super().train()
        if not self.finished:
            return
        self.driver.set_step(self.total_steps - 1)
        found = {"relaxed": self.evaluate()}
        with self.driver.hard():
            found["hard"] = self.evaluate()
        found = {"steps": self.observed, "end": found}
        write_atomically(self.output_dir / "observed.json", json.dumps(found, indent=1))


def draw(found: dict[str, tuple[list[dict], list[dict]]], path: Path, title: str) -> None:
    """What codes, gradients and the two losses did over training, by method."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7.3), layout="constrained")
    figure.suptitle(title)
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
    parser.add_argument("--config", default=DEMO)
    parser.add_argument("--out", default="runs/replication/dead_zones")
    parser.add_argument("--lr", type=float, default=1e-3, help="of all methods")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--zone", type=float, default=ObservedRecipe.zone)
    parser.add_argument("--every", type=int, default=ObservedRecipe.every)
    parser.add_argument("--overrides", nargs="*", default=[], help="of the config")
    options = parser.parse_args()
    ObservedRecipe.zone, ObservedRecipe.every = options.zone, options.every
    base = settings_of(
        options.config,
        ["run_val_every_n_steps=25", "log_every_n_steps=25", *options.overrides],
    )
    observation = {"zone": options.zone, "every": options.every}
    study = Study(base, Path(options.out), ObservedRecipe, observation)
    label = f"lr{options.lr:g}_seed{options.seed}"
    changes = {"optimizer__lr": options.lr, "seed": options.seed}
    changes |= {"max_steps_per_epoch": options.steps}
    found, ends = {}, {}
    with many_runs():
        for method in METHODS[:3]:
            record = study.run(method, label, **changes)
            path = study.folder(method, label) / "observed.json"
            observed = json.loads(path.read_text(encoding="utf-8"))
            found[method.name] = (observed["steps"], record["rows"])
            ends[method.name] = (record["validation_loss"][HARD], observed["end"])
    draw(found, study.out / f"dead_zones_lr{options.lr:g}.png", f"learning rate {options.lr:g}")
    columns = (
        "zone",
        "gradient inside",
        "outside",
        "changed by a step",
        "differ now",
        "ever differed",
    )
    print(f"\n| method | at step | {' | '.join(columns)} |\n|---|---:|{'---:|' * len(columns)}")
    for name, (observed, _) in found.items():
        for row in (observed[0], observed[len(observed) // 2], observed[-1]):
            print(
                f"| {name} | {row['step']} | {row['zone']:.3f} | {row['gradient_inside']:.1e} "
                f"| {row['gradient_outside']:.1e} | {row['flips']:.5f} | {row['moved']:.3f} "
                f"| {row['ever']:.3f} |"
            )
    for name, (trained, end) in ends.items():
        gap = end["hard"] - end["relaxed"]
        print(f"{name}: hard {trained:.4f}; hard - relaxed at the last training step {gap:.6f}")


if __name__ == "__main__":
    main()
