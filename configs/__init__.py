"""The packaged experiment files; `python -m hestia_tune configs` lists them."""
