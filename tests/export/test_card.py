"""Tests model cards: their content, that the hub can read them, and what GGUF reads from them."""

import json

import gguf
import pytest
from families import family_config, make_family
from huggingface_hub import ModelCard
from tiny import NUM_QUANTIZED, make_config, make_model_dir, run

from hestia_tune.commands.convert import ConvertRecipe, sizes_table
from hestia_tune.config.run_config import RunConfig
from hestia_tune.distributed import end_process_group
from hestia_tune.export.huggingface import write_card
from hestia_tune.models.folder import hub_name
from hestia_tune.reconstruction.reconstruct import ReconstructionRecipe
from hestia_tune.run import Run
from hestia_tune.training.outputs import provenance

BASE_CARD = "---\nlicense: apache-2.0\nlanguage: [en]\nbase_model: other/base\n---\n# Its own\n"
FORMATS = ("torchao", "huggingface", "compressed_tensors", "gguf", "mlx", "onnx", "openvino")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train a model of the hub's cache, evaluate and convert it; return its folder and the run."""
    top = tmp_path_factory.mktemp("card")
    folder = make_model_dir(top / "models--owner--Tiny-1M" / "snapshots" / "abc")
    (folder / "README.md").write_text(BASE_CARD)
    run(make_config(folder, top / "run"))
    source = {"settings": {"source": str(top / "run" / "hard_model")}}
    cell = {"value": 0.25, "stderr": None}
    found = {"models": {"trained": source}, "tables": {"acc": {"trained": {"a_task": cell}}}}
    found["tables"]["acc"]["trained"]["b_task"] = {"value": None}
    found["tables"]["kl_divergence"] = {"trained": {"a_text": {"value": 0.5}}}
    (top / "run" / "evaluation.json").write_text(json.dumps(found))
    formats = f"convert.formats=[{','.join(FORMATS)}]"
    recipe = ConvertRecipe(make_config(folder, top / "run", formats))
    recipe.run()
    return folder, top / "run"


def read(folder):
    """Return the card, and first cell -> other cells of the rows of its tables."""
    card = ModelCard.load(folder / "README.md", ignore_metadata_errors=False)
    lines = (line.strip("| ").split(" | ") for line in card.text.splitlines() if line[:1] == "|")
    return card, {cells[0]: cells[1:] for cells in lines}


def test_card_of_the_hard_model(trained):
    _, output = trained
    card, rows = read(output / "hard_model")
    data = card.data.to_dict()
    assert (data["license"], data["language"]) == ("apache-2.0", ["en"])
    assert (data["base_model"], data["base_model_relation"]) == ("owner/Tiny-1M", "quantized")
    assert data["library_name"] == "transformers" and data["tags"] == ["hestia_tune", "ternary"]
    assert "Its own" not in card.text and "datasets" not in data
    results = json.loads((output / "results.json").read_text())
    for label, loss in results["validation_loss"].items():
        assert rows[label][0] == f"{loss:.4f}"
    assert rows["quantized"] == [f"{NUM_QUANTIZED} linear layers"]
    assert rows["tokens"] == [f"{results['tokens']:,}"] and results["tokens"] == 24 * 15
    assert rows["data"] == ["tiny.random_dataset"] and rows["trained"] == [
        "6 steps from end to end"
    ]
    assert "a_task" not in rows  # it was measured after the card was written
    assert str(output) not in card.content


@pytest.mark.parametrize("form", FORMATS)
def test_card_of_every_format(trained, form):
    _, output = trained
    card, rows = read(output / "converted" / ("" if form == "gguf" else form))
    assert card.data.base_model == "owner/Tiny-1M" and card.data.license == "apache-2.0"
    sizes = json.loads((output / "converted" / "sizes.json").read_text())[form]
    assert rows["bits"][0].startswith(f"{sizes['quantized_bits_per_weight']:.3f} per quantized")
    assert rows["a_task"] == ["acc", "0.2500"] and rows["b_task"][0] == "acc"
    assert rows["a_text"] == ["kl_divergence", "0.5000"]
    assert "the mean of KL(trained || model) in nats per token" in card.text
    assert "trained, hard" in rows
    loads = {"gguf": "llama-cli", "torchao": "load_quantized", "onnx": "og.Model("}
    loads |= {"mlx": "mlx_lm.generate", "openvino": "LLMPipeline("}
    loads = loads.get(form, "pipeline(")
    assert loads in card.text and ("vllm serve" in card.text) == (form == "huggingface")
    assert "not tested" not in card.text


def test_gguf_metadata_come_from_the_card(trained):
    _, output = trained
    fields = gguf.GGUFReader(output / "converted" / "model.gguf").fields
    general = {k.removeprefix("general."): f.contents() for k, f in fields.items()}
    assert general["name"] == "Tiny-1M, ternary" and general["license"] == "apache-2.0"
    assert general["base_model.0.repo_url"] == "https://huggingface.co/owner/Tiny-1M"
    assert general["quantized_by"].startswith("hestia_tune ")
    assert general["languages"] == ["en"] and "ternary" in general["tags"]


def gguf_fields(tmp_path, card):
    """Return the metadata of the GGUF file of a pretrained model with a card."""
    folder = make_model_dir(tmp_path / "model")
    (folder / "README.md").write_text(card)
    options = ("convert.source=pretrained", "convert.formats=[gguf]")
    ConvertRecipe(make_config(folder, tmp_path, *options)).run()
    return gguf.GGUFReader(tmp_path / "converted" / "model.gguf").fields


def test_gguf_ignores_a_broken_card(tmp_path):
    fields = gguf_fields(tmp_path, "---\n[: not yaml\n---\n")
    assert fields["general.name"].contents() == "model"


def test_the_license_of_a_model_of_transformers_is_kept(tmp_path):
    folder = make_family(tmp_path / "model", "Llama")
    (folder / "README.md").write_text(BASE_CARD)
    options = ("max_steps=1", "dataset_val=null", "convert.formats=[gguf]")
    run(family_config(folder, tmp_path / "run", *options))
    ConvertRecipe(family_config(folder, tmp_path / "run", *options)).run()
    for name in ("hard_model", "converted"):
        card, _ = read(tmp_path / "run" / name)
        assert card.data.license == "apache-2.0" and "Its own" not in card.text


def test_a_card_without_packed_weights(tmp_path):
    """torchao's files hold experts dense."""
    sizes = {"bytes": 10**6, "quantized_bits_per_weight": None, "whole_bits_per_weight": 16.0}
    write_card(tmp_path, {"quantizer": "ternary", "step": 3}, form="torchao", sizes=sizes)
    assert read(tmp_path)[1]["bits"] == ["16.000 per weight of the whole"]
    assert "| torchao | 1.0 | - | 16.000 | 100.0% |" in sizes_table({"torchao": sizes})


def test_the_language_no_is_a_text(tmp_path):
    """YAML reads no as False."""
    fields = gguf_fields(tmp_path, "---\nlanguage:\n- en\n- no\n---\n")
    assert fields["general.languages"].contents() == ["en", "no"]


def test_card_of_an_untrained_model_claims_no_training(trained, tmp_path):
    folder, _ = trained
    cfg = make_config(
        folder, tmp_path, "convert.source=pretrained", "convert.formats=[huggingface]"
    )
    ConvertRecipe(cfg).run()
    card, rows = read(tmp_path / "converted" / "huggingface")
    assert card.data.license == "apache-2.0" and card.data.base_model == "owner/Tiny-1M"
    assert not {"trained", "data", "tokens", "pretrained"} & rows.keys()
    assert rows["training"] == ["none: the weights of the base model, rounded"]


def test_card_of_a_reconstruction(trained, tmp_path):
    folder, _ = trained
    options = ("reconstruct.num_samples=8", "reconstruct.batch_size=4", "reconstruct.epochs=1")
    ReconstructionRecipe(Run.of(make_config(folder, tmp_path, *options))).run()
    end_process_group()
    _, rows = read(tmp_path / "reconstruction" / "hard_model")
    assert rows["tokens"] == ["128"] and "reconstructed, hard" in rows
    assert not {"trained", "training"} & rows.keys()


@pytest.mark.parametrize("readme", ["---\n[: not yaml\n---\n", "no metadata\n", None])
def test_unreadable_cards_of_the_pretrained_model(tmp_path, readme):
    if readme is not None:
        (tmp_path / "README.md").write_text(readme)
    write_card(tmp_path, {"quantizer": "ternary, group_size=128", "base_model": "x"})
    card, rows = read(tmp_path)
    assert "license" not in card.data.to_dict() and rows["base model"] == ["x"]
    assert card.data.base_model is None


def test_names_of_models_and_datasets(tmp_path):
    assert hub_name("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    assert hub_name(tmp_path) == tmp_path.name and hub_name("") == ""
    cfg = make_config(tmp_path, tmp_path)
    for section, names in (
        ({"source": "owner/data"}, ["owner/data"]),
        (
            {"source": "parquet", "data_files": ["/a/b.parquet", "/c/*.parquet"]},
            ["b.parquet", "*.parquet"],
        ),
        ({"source": "token_shards", "data_files": "/a/tokens"}, ["tokens"]),
        ({"source": "json", "data_files": {"train": "/a/t.jsonl", "test": "/a/x"}}, ["t.jsonl"]),
        (
            {"source": "json", "data_files": {"train": ["/a/t.jsonl"]}, "split": "train[:95%]"},
            ["t.jsonl"],
        ),
        ({"source": "owner/data", "data_files": "part/*.parquet"}, ["owner/data"]),
    ):
        cfg.dataset = section
        expected = {"base_model": tmp_path.name, "data": names, "tokens": 5}
        assert provenance(RunConfig.parse(cfg), 5) == expected
