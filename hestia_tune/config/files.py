"""Config files: finding packaged ones by name, and composing one from several.

A config may name another one under the key ``base``: it then has the keys of that config and its
own; its own win. NAME+OTHER is NAME with the keys of OTHER laid over it, such as
``llama3_2_1b+evening``; what is null in OTHER is taken away.

torchtune's parser opens whatever follows ``--config`` as a file. `resolved` swaps a name for the
path of the composed config before the parser looks. It runs in every process of a distributed run,
since each process parses its own arguments.
"""

import contextlib
import importlib.resources
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from hestia_tune.config.section import nearest
from hestia_tune.errors import InputError, one_line


def packaged_configs() -> dict[str, Path]:
    """Return name -> path of every config in the package, sorted by name, bases included."""
    folder = importlib.resources.files("hestia_tune._configs")
    paths = (Path(str(entry)) for entry in folder.iterdir())
    return {path.stem: path for path in sorted(paths) if path.suffix == ".yaml"}


def config_path(name: str) -> Path:
    """Return the path of a packaged config, or ``name`` itself if such a file exists.

    Raises:
        InputError: If ``name`` is neither; the message lists the packaged configs.
    """
    known = packaged_configs()
    if name in known:
        return known[name]
    if Path(name).is_file():
        return Path(name)
    raise InputError(
        f"no config named {name!r}, and no such file{nearest(name, known)}; "
        f"packaged configs: {', '.join(known)}"
    )


def _names(name: str) -> list[str]:
    """Return NAME and OTHER of NAME+OTHER; a path may have a + of its own."""
    cuts = [] if Path(name).is_file() else [i for i, sign in enumerate(name) if sign == "+"]
    for cut in cuts:
        if name[:cut] in packaged_configs() or Path(name[:cut]).is_file():
            return [name[:cut], *_names(name[cut + 1 :])]
    return [name]


def load_config(name: str) -> DictConfig:
    """Return the composed config of NAME or NAME+OTHER, bases included.

    Raises:
        InputError: If there is no such config, or it is no YAML mapping.
    """
    first, *others = map(_read, _names(name))
    for other in others:
        _lay_over(first, other)
    return OmegaConf.create(first)


def _read(name: str) -> dict[str, Any]:
    """Return the keys of a config, laid over those of its base."""
    path = config_path(name)
    try:
        keys: Any = OmegaConf.to_container(OmegaConf.load(path))
    except (YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as YAML: {one_line(error)}") from error
    if not isinstance(keys, dict):
        raise InputError(f"{path} must be a mapping of options; got {type(keys).__name__}")
    if (base := keys.pop("base", None)) is None:
        return keys
    whole: Any = OmegaConf.to_container(load_config(str(base)))
    _lay_over(whole, keys, remove_nulls=False)
    return whole


def _is_same_component(value: Any, before: Any) -> bool:
    """Return whether two sections can be merged: the options of another component mean nothing."""
    if not (isinstance(value, dict) and isinstance(before, dict)):
        return False
    return value.get("_component_", before.get("_component_")) == before.get("_component_")


def _lay_over(section: dict[str, Any], changes: Any, remove_nulls: bool = True) -> None:
    for key, value in changes.items():
        if value is None and remove_nulls:
            section.pop(key, None)
        elif _is_same_component(value, section.get(key)):
            _lay_over(section[key], value, remove_nulls)
        else:
            section[key] = value


def text_of(name: str) -> str:
    """Return the YAML of NAME with its comments, or the composed YAML of NAME+OTHER."""
    if len(_names(name)) == 1:
        return config_path(name).read_text(encoding="utf-8")
    return OmegaConf.to_yaml(load_config(name))


@contextlib.contextmanager
def resolved(argv: list[str]) -> Iterator[list[str]]:
    """Give ``argv`` with the path of the composed config, a temporary file, after ``--config``."""
    with tempfile.TemporaryDirectory() as folder:

        def composed(name: str) -> str:
            OmegaConf.save(load_config(name), path := Path(folder, "config.yaml"))
            return str(path)

        found = list(argv)
        for index, argument in enumerate(argv):
            if argument == "--config" and index + 1 < len(argv):
                found[index + 1] = composed(argv[index + 1])
            elif argument.startswith("--config="):
                found[index] = f"--config={composed(argument.removeprefix('--config='))}"
        yield found


def asset_path(name: str) -> str:
    """Folder of a packaged asset; in YAML ``${hestia_asset:demo}``."""
    folder = Path(str(importlib.resources.files("hestia_tune"))) / "assets" / name
    if not folder.is_dir():
        raise InputError(f"the package has no asset {name!r}")
    return str(folder)


# omegaconf 2.4 renamed the function.
_register = getattr(OmegaConf, "register_resolver", None) or OmegaConf.register_new_resolver
_register("hestia_asset", asset_path, replace=True)
