"""Switch the temperature off in the config of a method that has none."""

import pydoc

from omegaconf import DictConfig, OmegaConf

from hestia_tune.errors import InputError

# Section -> options that set a temperature.
_TEMPERATURES = {"schedule": ("tau_init", "alpha", "hard_fraction"), "reconstruct": ("tau_init",)}


def drop_temperatures(given: DictConfig) -> None:
    """Set the temperatures of a config to 0 if its method has no temperature.

    Raises:
        InputError: If the config sets a temperature that nothing would read.
    """
    name = OmegaConf.select(given, "quantizer._component_", default=None)
    # If the component does not exist, building it raises a better error than this function could.
    component = pydoc.locate(name) if isinstance(name, str) else None
    if getattr(component, "has_temperature", True):
        return
    read_by_none = f"is read by methods with a temperature, and {name} has none"
    for key, options in _TEMPERATURES.items():
        if not OmegaConf.is_dict(section := given.get(key) or OmegaConf.create()):
            return  # parsing refuses such a section
        for unread in options:
            if (value := section.get(unread, 0)) != 0:
                raise InputError(
                    f"{key}.{unread}={value} {read_by_none}; delete the section by ~{key}, or "
                    f"leave {unread} out"
                )
        pressure = {"rho": 0.0} if key == "schedule" else {}
        given[key] = OmegaConf.merge(dict.fromkeys(options, 0.0) | pressure, section)
    if given.get("sensitivity") not in (None, "auto"):
        raise InputError(f"sensitivity={given.sensitivity} {read_by_none}; set sensitivity=null")
