"""Everything that needs torchtune: its recipe, its builders and names of weights, its own recipes.

torchtune's maintenance has ended with version 0.6.1, which needs torchao 0.15. So it is an extra of
this package, and all imports of it are in this folder. No other module imports this folder when it
is imported; `hestia_tune.components.torchtune_module` imports a part of it when a config needs it.
"""
