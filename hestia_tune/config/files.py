"""Find packaged config files by name, and compose a config from several files.

A config may name another config under the key ``base``. It then has the keys of both configs, and
its own values win. NAME+OTHER lays the keys of OTHER over NAME, such as ``llama3_2_1b+evening``. A
key that is null in OTHER is removed.

`overridden` applies the overrides of a command line. Every process of a distributed run reads its
own arguments.
"""

import importlib.resources
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError, safe_load

from hestia_tune.config.section import nearest
from hestia_tune.errors import InputError, one_line


def packaged_configs() -> dict[str, Path]:
    """Return name -> path of every packaged config, bases included, sorted by name."""
    folder = importlib.resources.files("hestia_tune._configs")
    paths = (Path(str(entry)) for entry in folder.iterdir())
    return {path.stem: path for path in sorted(paths) if path.suffix == ".yaml"}


def config_path(name: str) -> Path:
    """Return the path of a packaged config, or ``name`` itself if such a file exists.

    Raises:
        InputError: If ``name`` is neither. The message lists the packaged configs.
    """
    known = packaged_configs()
    if name in known:
        return known[name]
    if Path(name).is_file():
        return Path(name)
    if Path(name).is_dir():
        raise InputError(f"{name} is a folder; give a YAML file, or the name of a packaged config")
    raise InputError(
        f"no config named {name!r}, and no such file{nearest(name, known)}; "
        f"packaged configs: {', '.join(known)}"
    )


def _names(name: str) -> list[str]:
    """Return the parts of NAME+OTHER. A path may contain a + itself."""
    cuts = [] if Path(name).is_file() else [i for i, sign in enumerate(name) if sign == "+"]
    for cut in cuts:
        if name[:cut] in packaged_configs() or Path(name[:cut]).is_file():
            return [name[:cut], *_names(name[cut + 1 :])]
    return [name]


def load_config(name: str) -> DictConfig:
    """Return the composed config of NAME or NAME+OTHER, bases included.

    Raises:
        InputError: If there is no such config, or it is not a YAML mapping.
    """
    first, *others = map(_read, _names(name))
    for other in others:
        _lay_over(first, other)
    return OmegaConf.create(first)


def _read(name: str) -> dict[str, Any]:
    """Return the keys of a config, laid over the keys of its base."""
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
    """Return whether two sections can be merged: both are options of the same component."""
    if not (isinstance(value, dict) and isinstance(before, dict)):
        return False
    return value.get("_component_", before.get("_component_")) == before.get("_component_")


def _lay_over(section: dict[str, Any], changes: Any, remove_nulls: bool = True) -> None:
    """Write changes into a section, in place. A null removes its key or becomes the value."""
    for key, value in changes.items():
        if value is None and remove_nulls:
            section.pop(key, None)
        elif _is_same_component(value, section.get(key)):
            _lay_over(section[key], value, remove_nulls)
        else:
            section[key] = value


def download_command(folder: str) -> str | None:
    """Return the command that fetches the model of a packaged config into its folder.

    Args:
        folder: A folder that a config names.

    Returns:
        The ``tune download`` line in the header of a packaged config with this folder, on one line.
        None if no packaged config names the folder.
    """
    for path in packaged_configs().values():
        header = re.sub(r" \\\n# +", " ", path.read_text(encoding="utf-8"))
        for line in re.findall(r"(?m)^# +(tune download .*)$", header):
            _, _, target = line.partition("--output-dir ")
            if target and Path(target.split()[0]) == Path(folder):
                return line
    return None


def text_of(name: str) -> str:
    """Return the YAML of NAME with its comments, or the composed YAML of NAME+OTHER, to edit.

    The copy gets an ``output_dir`` of its own and replaces no run, so that it and the original keep
    their results apart.
    """
    if len(_names(name)) == 1:
        text = config_path(name).read_text(encoding="utf-8")
    else:
        text = OmegaConf.to_yaml(load_config(name))
    text = re.sub(r"(?m)^overwrite_output: .*\n", "", text)
    own = r"output_dir: \1_copy   # of this copy; the original writes to \1\n"
    own += "overwrite_output: False   # True replaces an earlier run in output_dir"
    return re.sub(r"(?m)^output_dir: (\S+)$", own, text)


def overridden(config: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Return a copy of a config with the overrides of a command line.

    ``KEY=VALUE`` sets an option to a value of YAML. A word in place of a component replaces its
    ``_component_`` and keeps its options. ``~KEY`` deletes an option.

    Raises:
        InputError: If an override has another form, or a deleted key does not exist.
    """
    config = config.copy()
    for override in overrides:
        key, sign, text = override.partition("=")
        try:
            if override.startswith("~") and not sign:
                parent, _, last = key[1:].rpartition(".")
                section = OmegaConf.select(config, parent) if parent else config
                if not OmegaConf.is_dict(section) or last not in section:
                    near = nearest(last, section) if OmegaConf.is_dict(section) else ""
                    raise InputError(f"{override}: the config has no such key{near}")
                del section[last]
                continue
            if not sign or not key or override.startswith("~"):
                raise InputError(f"an override must be KEY=VALUE or ~KEY; got {override!r}")
            old = OmegaConf.select(config, key)
            is_component = OmegaConf.is_dict(old) and "_component_" in old
            inner = "._component_" if is_component and isinstance(safe_load(text), str) else ""
            config.merge_with_dotlist([f"{key}{inner}={text}"])
        except (YAMLError, OmegaConfBaseException) as error:
            raise InputError(f"{override}: {one_line(error)}; check the override") from error
    return config


def asset_path(name: str) -> str:
    """Return the folder of a packaged asset. YAML writes it as ``${hestia_asset:demo}``."""
    folder = Path(str(importlib.resources.files("hestia_tune"))) / "assets" / name
    if not folder.is_dir():
        raise InputError(f"the package has no asset {name!r}; check the name")
    return str(folder)


# omegaconf 2.4 renamed the function.
_register = getattr(OmegaConf, "register_resolver", None) or OmegaConf.register_new_resolver
_register("hestia_asset", asset_path, replace=True)
