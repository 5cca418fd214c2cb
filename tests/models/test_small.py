"""Test small models: which families keep the documents of a sequence apart."""

import shutil

import pytest
import torch
from chat_folders import TURNS, make_chats, make_tokenizer_folder, write_chats
from families import family_config, make_family
from omegaconf import OmegaConf

from hestia_tune.__main__ import main
from hestia_tune.config.run_config import RunConfig, load_config
from hestia_tune.models import AutoTokenizer
from hestia_tune.models.small import require_separate_documents
from hestia_tune.training.loader import build_dataset

pytest.importorskip("transformers")

APART = ("Llama", "Gemma 3", "Phi-3", "GPT-NeoX", "Falcon", "GPT-2", "Qwen3-MoE")
MIXED = ("OPT", "Bloom", "MPT", "Mamba", "Mamba2")


@pytest.mark.parametrize("family", APART + MIXED)
def test_documents_of_a_sequence_stay_apart_or_the_class_is_named(tmp_path, family):
    folder = str(make_family(tmp_path / "model", family))
    if family in APART:
        before = torch.get_rng_state()
        require_separate_documents(folder)
        assert torch.equal(torch.get_rng_state(), before)
        return
    with pytest.raises(ValueError, match=r"\w+ForCausalLM does not keep the documents of a seq"):
        require_separate_documents(folder)


def test_a_config_that_no_small_model_can_have_is_not_refused(tmp_path, monkeypatch):
    folder = make_family(tmp_path / "model", "Mamba")
    monkeypatch.setattr("hestia_tune.models.small.make_small", lambda *_: 1 / 0)
    require_separate_documents(str(folder))


@pytest.fixture(params=["Mamba", "Llama"])
def chats(request, tmp_path, monkeypatch):
    """Return whether the family mixes documents, the model's folder, and a file of chats."""
    folder = make_family(tmp_path / "model", request.param)
    source = make_tokenizer_folder(tmp_path / "tokenizer", TURNS)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(f"{source}/{name}", folder / name)
    write_chats(tmp_path / "chats.jsonl", make_chats(40, longest=12))
    write_chats(tmp_path / "held.jsonl", make_chats(9, longest=12))
    monkeypatch.chdir(tmp_path)
    return request.param == "Mamba", folder, tmp_path / "chats.jsonl"


@pytest.mark.parametrize("component", ["streaming_chat_dataset", "chat_dataset"])
def test_packed_chats_of_a_model_that_mixes_them_are_refused(tmp_path, chats, component):
    mixes, folder, file = chats
    config = family_config(folder, tmp_path / "out")
    section = {"source": "json", "data_files": str(file), "seq_len": 64}
    section["_component_"] = f"hestia_tune.data.{component}"

    def build(**options):
        dataset = OmegaConf.merge(config, {"dataset": section | options})
        dataset.dataset = section | options  # without the keys of the tiny dataset
        return build_dataset(RunConfig.parse(dataset), AutoTokenizer(str(folder)), "dataset")

    if mixes:
        with pytest.raises(ValueError, match=r"MambaForCausalLM.*for chats dataset.packed=False"):
            build()
    else:
        build()
    build(packed=False)
    build(document_masks=False)


def test_init_packs_the_chats_of_a_model_that_keeps_them_apart(tmp_path, chats, capsys):
    mixes, folder, file = chats
    assert main(["init", str(folder), str(file), "--validation", "held.jsonl"]) == 0
    config = load_config("model.yaml")
    for section in (config.dataset, config.dataset_val):
        assert section.get("packed", True) == (not mixes)
