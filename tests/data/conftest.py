"""Tests of the data read local files only, and have a cache of their own."""

import pytest


@pytest.fixture(autouse=True)
def datasets_offline(tmp_path, monkeypatch):
    """Keep `datasets` from calling the hub, and give it an empty cache."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_UPDATE_DOWNLOAD_COUNTS", False)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
