"""Text in, token sequences out."""

from hestia_tune.data.datasets import SequenceDataset, demo_dataset, text_dataset

__all__ = ["SequenceDataset", "demo_dataset", "text_dataset"]
