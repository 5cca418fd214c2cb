"""Tests read local files only: no call home for them, and a cache of their own."""

import pytest


@pytest.fixture(autouse=True)
def datasets_offline(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_UPDATE_DOWNLOAD_COUNTS", False)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
