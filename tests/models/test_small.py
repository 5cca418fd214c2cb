"""Test small models: which families keep the documents of a sequence apart."""

import shutil

import pytest
import torch
from chat_folders import TURNS, make_chats, make_tokenizer_folder, write_chats
from families import family_config, make_family

from hestia_tune.__main__ import main
from hestia_tune.config.run_config import RunConfig, load_config
from hestia_tune.generation import check_sets
from hestia_tune.models import AutoTokenizer
from hestia_tune.models.small import (
    distance_of_documents,
    full_config,
    require_separate_documents,
    small_config,
)
from hestia_tune.run import Run
from hestia_tune.training.loader import build_dataset

transformers = pytest.importorskip("transformers")

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
    with pytest.raises(ValueError, match=r"\w+ForCausalLM does not keep packed documents apart"):
        require_separate_documents(folder)


HYBRIDS = {
    "Bamba": {"num_hidden_layers": 4, "attn_layer_indices": [3]},
    "GraniteMoeHybrid": {"num_hidden_layers": 4, "layer_types": ["mamba"] * 3 + ["attention"]},
    "FalconH1": {},
    "NemotronH": {},
    "Lfm2": {"num_hidden_layers": 4, "layer_types": ["conv"] * 3 + ["full_attention"]},
    "GptOss": {},
    "Qwen3Next": {},
}


@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids_of_real_sizes_are_named(tmp_path, name):
    config = getattr(transformers, f"{name}Config")(**HYBRIDS[name])
    config.save_pretrained(tmp_path)
    assert distance_of_documents(str(tmp_path)) > 0.01
    assert small_config(full_config(tmp_path))["vocab_size"] == 512


def test_a_config_that_no_small_model_can_have_is_not_refused(tmp_path, monkeypatch, caplog):
    folder = make_family(tmp_path / "model", "Mamba")
    monkeypatch.setattr("hestia_tune.models.small._random_decoder", lambda _: 1 / 0)
    require_separate_documents(str(folder))
    assert "packed documents apart could not be checked: division by zero" in caplog.text


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
        config.dataset = section | options
        return build_dataset(RunConfig.parse(config), AutoTokenizer(str(folder)), "dataset")

    if mixes:
        with pytest.raises(ValueError, match=r"dataset.*MambaForCausalLM.*set packed: False"):
            build()
    else:
        build()
    build(packed=False)
    build(document_masks=False)


def test_init_packs_the_chats_of_a_model_that_keeps_them_apart(tmp_path, chats, capsys):
    mixes, folder, file = chats
    (tmp_path / "text.txt").write_text("A line of text.\n" * 200)
    for data, keys in ((str(file), ("dataset", "dataset_val")), ("text.txt", ("dataset_val",))):
        command = ["init", str(folder), data, "--validation", "held.jsonl", "--overwrite"]
        assert main(command) == 0
        config = load_config("model.yaml")
        assert all(config[key].get("packed", True) == (not mixes) for key in keys)


def test_generated_chats_are_checked_before_they_are_written(tmp_path, chats):
    mixes, folder, _ = chats
    config = family_config(folder, tmp_path / "out", "max_steps=2", "distillation.weight=1.0")
    config.tokenizer = {"_component_": "hestia_tune.models.AutoTokenizer", "path": str(folder)}
    config.dataset = {"_component_": "hestia_tune.data.self_generated_dataset", "chats": True}
    config.dataset |= {"num_sequences": 8, "seq_len": 32, "cache_dir": str(tmp_path / "set")}
    for packed in (True, False):
        config.dataset.packed = packed
        run = Run.of(config)
        if mixes and packed:
            with pytest.raises(ValueError, match="does not keep packed documents apart"):
                check_sets(run)
        else:
            check_sets(run)
