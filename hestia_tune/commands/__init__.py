"""The commands: one module each, from a config to an exit code."""
