"""Packaged configs: finding them by name, and letting torchtune's parser take a name for a path.

torchtune's parser opens whatever follows ``--config`` as a file. `resolved` swaps the name of a
packaged config for its path before the parser looks; it runs in every process of a distributed
run, since each parses its own arguments. NAME+OTHER is a config with what another one says laid
over it, such as ``llama3_2_1b+paper``.
"""

import ast
import contextlib
import importlib.resources
import importlib.util
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from hestia_tune.config import nearest


def packaged_configs() -> dict[str, Path]:
    """Name -> path of every config in the package, sorted by name."""
    folder = importlib.resources.files("hestia_tune._configs")
    paths = (Path(str(entry)) for entry in folder.iterdir())
    return {path.stem: path for path in sorted(paths) if path.suffix == ".yaml"}


def packaged_recipes() -> dict[str, str]:
    """Name -> what it does, of every recipe that ``tune run`` finds."""
    folder = Path(str(importlib.util.find_spec("hestia_qat").origin)).parent
    texts = {path.stem: path.read_text("utf-8") for path in sorted(folder.glob("hestia_*.py"))}
    docstrings = {name: ast.get_docstring(ast.parse(text)) or "" for name, text in texts.items()}
    return {name: text.partition(": ")[2] for name, text in docstrings.items()}


def listing() -> str:
    """What ``python -m hestia_tune configs`` prints."""
    lines = ["recipes, for `tune run RECIPE --config CONFIG`:"]
    lines += [f"  {name:<22}{text.rstrip('.')}" for name, text in packaged_recipes().items()]
    lines += ["configs:"]
    for name, path in packaged_configs().items():
        first = path.read_text(encoding="utf-8").partition("\n")[0].strip("# .")
        lines.append(f"  {name:<22}{re.split('[:;.] ', first)[0]}")
    return "\n".join(lines)


def config_path(name: str) -> Path:
    """The path of a packaged config, or ``name`` itself if such a file exists.

    Raises:
        ValueError: listing the packaged configs, if ``name`` is neither.
    """
    known = packaged_configs()
    if name in known:
        return known[name]
    if Path(name).is_file():
        return Path(name)
    raise ValueError(
        f"no config named {name!r}, and no such file{nearest(name, known)}; "
        f"packaged configs: {', '.join(known)}"
    )


def _names(name: str) -> list[str]:
    """Of NAME+OTHER both; a path may have a + of its own."""
    cuts = [] if Path(name).is_file() else [i for i, sign in enumerate(name) if sign == "+"]
    for cut in cuts:
        if name[:cut] in packaged_configs() or Path(name[:cut]).is_file():
            return [name[:cut], *_names(name[cut + 1 :])]
    return [name]


def load_config(name: str) -> DictConfig:
    """The config of NAME; of NAME+OTHER with the keys of OTHER in place of its own, and without
    those that are null there.

    Raises:
        ValueError: as `config_path`.
    """
    first, *others = (OmegaConf.load(config_path(part)) for part in _names(name))
    merged: Any = OmegaConf.to_container(first)
    for other in others:
        _lay_over(merged, OmegaConf.to_container(other))
    return OmegaConf.create(merged)


def _lay_over(section: dict[str, Any], changes: Any) -> None:
    for key, value in changes.items():
        if value is None:
            section.pop(key, None)
        elif isinstance(value, dict) and isinstance(section.get(key), dict):
            _lay_over(section[key], value)
        else:
            section[key] = value


def text_of(name: str) -> str:
    """The YAML of NAME, with its comments, or of NAME+OTHER, without."""
    if len(_names(name)) == 1:
        return config_path(name).read_text(encoding="utf-8")
    return OmegaConf.to_yaml(load_config(name))


@contextlib.contextmanager
def resolved(argv: list[str]) -> Iterator[list[str]]:
    """``argv`` with a path as the value of ``--config``; of NAME+OTHER the file is temporary."""
    with tempfile.TemporaryDirectory() as folder:

        def path_of(name: str) -> Path:
            if len(_names(name)) == 1:
                return config_path(name)
            OmegaConf.save(load_config(name), path := Path(folder, "config.yaml"))
            return path

        found = list(argv)
        for index, argument in enumerate(argv):
            if argument == "--config" and index + 1 < len(argv):
                found[index + 1] = str(path_of(argv[index + 1]))
            elif argument.startswith("--config="):
                found[index] = f"--config={path_of(argument.removeprefix('--config='))}"
        yield found


def asset_path(name: str) -> str:
    """Folder of a packaged asset; in YAML ``${hestia_asset:demo}``."""
    folder = Path(str(importlib.resources.files("hestia_tune"))) / "assets" / name
    if not folder.is_dir():
        raise ValueError(f"the package has no asset {name!r}")
    return str(folder)


# omegaconf 2.4 renamed the function.
_register = getattr(OmegaConf, "register_resolver", None) or OmegaConf.register_new_resolver
_register("hestia_asset", asset_path, replace=True)
