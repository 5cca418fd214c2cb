"""What the replication scripts share: methods, runs that are kept, and where they stand."""

import contextlib
import json
import logging
import math
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import distributed as dist

from hestia_tune.config.run_config import RunConfig, load_config
from hestia_tune.evaluation import versions
from hestia_tune.files import write_atomically
from hestia_tune.generation import generate_missing
from hestia_tune.run import Run
from hestia_tune.stages import measure_sensitivity
from hestia_tune.torchtune.recipe import HestiaQATRecipe
from hestia_tune.training.outputs import HARD

DEMO = str(Path(__file__).resolve().parents[1] / "demo.yaml")  # the settings of the studies
TERNARY = {"_component_": "hestia_tune.HestiaQATQuantizer", "group_size": 128}
COMPLEX = {"_component_": "hestia_tune.Fairy2iQATQuantizer", "num_stages": 2}
STRAIGHT_THROUGH = {"rho": 0.0, "tau_init": 0.0, "alpha": 0.0}
ANNEALED = {"rho": 0.2, "tau_init": 0.3, "alpha": 0.4}


@dataclass(frozen=True)
class Method:
    """A way to train: a quantizer, a schedule, and the curvature that sets the temperatures."""

    name: str
    quantizer: Mapping[str, Any]
    schedule: Mapping[str, float]
    curvature: str | None = None

    def varied(self, name: str, **schedule: float) -> "Method":
        """The same method with other numbers in its schedule; alpha 0 needs no sensitivity."""
        changed = dict(self.schedule) | schedule
        curvature = self.curvature if changed["alpha"] else None
        return Method(name, self.quantizer, changed, curvature)

    def fitted(self, cfg: DictConfig) -> "Method":
        """The same method with the group size of a config: 64 where 128 does not divide."""
        if "group_size" not in self.quantizer or "group_size" not in cfg.quantizer:
            return self
        group_size = {"group_size": cfg.quantizer.group_size}
        return replace(self, quantizer=dict(self.quantizer) | group_size)


HESTIA = Method("Hestia", TERNARY, ANNEALED, "hessian")
FAIRY2I_H = Method("Fairy2i-H", COMPLEX, ANNEALED, "hessian")
METHODS = (
    Method("straight-through", TERNARY, STRAIGHT_THROUGH),
    HESTIA.varied("Hestia, uniform", alpha=0.0),
    HESTIA,
    Method("Hestia, per tensor", TERNARY | {"group_size": "tensor"}, ANNEALED, "hessian"),
    Method("Fairy2i", COMPLEX, STRAIGHT_THROUGH),
    FAIRY2I_H,
)


def slug(name: str) -> str:
    """A method's name as a folder's."""
    return "".join(c if c.isalnum() or c in ".-" else "_" for c in name)


def settings_of(config: str, overrides: list[str]) -> DictConfig:
    """Return a config without a teacher, with a command line's overrides.

    ``~key`` takes a key away.
    """
    cfg = load_config(config)
    cfg.pop("distillation", None)
    for key in (entry[1:] for entry in overrides if entry.startswith("~")):
        *parents, last = key.split(".")
        section = OmegaConf.select(cfg, ".".join(parents)) if parents else cfg
        if section is None or last not in section:
            raise ValueError(f"~{key}: the config {config} has no such key")
        del section[last]
    changes = [entry for entry in overrides if not entry.startswith("~")]
    return OmegaConf.merge(cfg, OmegaConf.from_dotlist(changes))


@dataclass
class Study:
    """Runs of one config in one folder, each kept as soon as it is done.

    Args:
        base: the config that all runs share.
        out: the folder; a run that has left its `record.json` there is not run again.
        recipe: the class that trains.
        options: what else a run's result depends on.
    """

    base: DictConfig
    out: Path
    recipe: type[HestiaQATRecipe] = HestiaQATRecipe
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        self._artifacts: set[Path] = set()

    def sensitivity(self, method: Method) -> str | None:
        """The path of the artifact of the method's curvature; the recipe reuses none but that.

        One for all quantizers: they take the same layers.
        """
        if method.curvature is None:
            return None
        path = self.out / "sensitivity" / f"{method.curvature}.json"
        if path not in self._artifacts:
            cfg = OmegaConf.merge(self.base, {"output_dir": str(path.parent / path.stem)})
            cfg.quantizer = dict(method.quantizer)
            cfg.sensitivity = None
            estimation = {"curvature": method.curvature, "output": str(path)}
            cfg = OmegaConf.merge(cfg, {"sensitivity_estimation": estimation})
            measure_sensitivity(Run.of(cfg))
            self._artifacts.add(path)
        return str(path)

    def config(self, method: Method, changes: Mapping[str, Any]) -> DictConfig:
        """The config of one run, without the paths of what it reads and writes below `out`."""
        cfg = OmegaConf.merge(self.base, {"output_dir": "", "overwrite_output": True})
        cfg.quantizer = dict(method.quantizer)
        cfg.schedule = dict(method.schedule)
        cfg.sensitivity = method.curvature
        for key, value in changes.items():
            OmegaConf.update(cfg, key.replace("__", "."), value, merge=False)
        return cfg

    def folder(self, method: Method, label: str) -> Path:
        """Where a run is kept."""
        return self.out / slug(method.name) / label

    def run(self, method: Method, label: str, **changes: Any) -> dict[str, Any]:
        """The record of one run, from its file if it was made before.

        A run that diverges (a loss that is not finite) is kept with an infinite loss.

        Args:
            method: what to train.
            label: folder of the run, below the method's.
            changes: config keys, with ``__`` for a dot.

        Raises:
            ValueError: if the file is of a run with other settings.
        """
        folder = self.folder(method, label)
        path = folder / "record.json"
        cfg = self.config(method, changes)
        settings = OmegaConf.to_container(cfg) | dict(self.options)
        if path.is_file():
            record = json.loads(path.read_text(encoding="utf-8"))
            require_same(record["settings"], settings, path)
            return record
        started = time.perf_counter()
        cfg.output_dir, cfg.sensitivity = str(folder), self.sensitivity(method)
        generate_missing(Run.of(RunConfig.parse(cfg)))
        recipe = self.recipe(cfg)
        recipe.setup(recipe.config)
        try:
            recipe.train()
            if not recipe.finished:
                raise KeyboardInterrupt
        except FloatingPointError as error:
            print(f"{method.name}, {label}: {error}", flush=True)
            recipe.validation_losses[HARD] = math.inf
        record = {
            "method": method.name,
            "settings": settings,
            "validation_loss": recipe.validation_losses,
            "rows": recipe.history.rows,
            "tokens": recipe.tokens_seen,
            "steps": recipe.total_steps,
            "seconds": round(time.perf_counter() - started, 1),
            "versions": versions(),
        }
        recipe.release()
        # A study makes many runs; what it compares is in the record.
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        write_atomically(path, json.dumps(record, indent=1) + "\n")
        print(f"{method.name}, {label}: {recipe.table()}", flush=True)
        return record


def require_same(found: Mapping[str, Any], wanted: Mapping[str, Any], path: Path) -> None:
    """Refuses the record of a run with other settings."""
    keys = sorted(k for k in found.keys() | wanted.keys() if found.get(k) != wanted.get(k))
    if keys:
        told = "; ".join(f"{k} {found.get(k)} there, {wanted.get(k)} here" for k in keys)
        raise ValueError(f"{path} is of a run with other settings: {told}. Take another --out")


@contextlib.contextmanager
def many_runs() -> Iterator[None]:
    """For scripts that train in their own process: quiet, and with one group for all runs."""
    logging.disable(logging.INFO)
    torch._dynamo.config.recompile_limit = 64  # runs of all methods share one process
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
