"""``hestia-tune``: torchtune's own command line (ls, cp, run, validate) that knows our configs.

torchtune has no plugins, but its registry is a list, and a path in it may be absolute. `tune run`
works without this; `tune ls` and `tune cp` do not.
"""

import importlib.util

from torchtune._cli.tune import TuneCLIParser
from torchtune._recipe_registry import Config, Recipe, get_all_recipes

from hestia_tune.training.configs import packaged_configs

RECIPES = (
    "hestia_qat",
    "hestia_sensitivity",
    "hestia_convert",
    "hestia_eval",
    "hestia_tokenize",
)


def main() -> None:
    """Entry point of the console script."""
    configs = [Config(name=n, file_path=str(p)) for n, p in packaged_configs().items()]
    for name in RECIPES:
        path = importlib.util.find_spec(name).origin
        get_all_recipes().append(
            Recipe(name=name, file_path=path, configs=configs, supports_distributed=True)
        )
    parser = TuneCLIParser()
    parser.run(parser.parse_args())


if __name__ == "__main__":
    main()
