"""Test models whose layers have several methods: training, ranks, resuming, every hand-over."""

import copy
import json

import pytest
import torch
from omegaconf import OmegaConf
from ranks import run_forked
from test_distributed import hard_weights
from tiny import logged, make_config, run, signal_at, write_config

from hestia_tune.commands.convert import ConvertRecipe
from hestia_tune.commands.inspect import run_validate
from hestia_tune.commands.qat import run_qat
from hestia_tune.config.run_config import RunConfig
from hestia_tune.models import PackedWeights
from hestia_tune.models.contents import contents_table, read_matrices
from hestia_tune.models.folder import IntegerWeight, SafetensorsFolder
from hestia_tune.models.loading import load_model
from hestia_tune.qat.linear import quantized_linears
from hestia_tune.sensitivity import SensitivityArtifact

pytestmark = pytest.mark.usefixtures("end_process_group")

ARGUMENTS = {"device": torch.device("cpu"), "dtype": torch.bfloat16}
OPTIONS = ("schedule.tau_init=auto", "schedule.alpha=0.4")
TOKENS = torch.tensor([[1, 2, 3, 200]])
INT4 = {"_component_": "hestia_tune.INT4", "group_size": 32}
LAYERS = {
    "layers.*.mlp.*": INT4,
    "layers.0.mlp.w1": {
        "_component_": "hestia_tune.INT2",
        "group_size": 32,
        "start": "least_squares",
    },
    "layers.0.mlp.w3": {
        "_component_": "hestia_tune.HestiaQATQuantizer",
        "codebook": "binary",
        "group_size": 32,
    },
    "layers.1.attn.q_proj": {"_component_": "hestia_tune.LSQ", "group_size": 64},
    "layers.1.attn.v_proj": None,
}
KEYS = {
    "layers.0.mlp.w1": "int2, group_size=32, start=least_squares",
    "layers.0.mlp.w3": "even, group_size=32, codebook=binary",
    **dict.fromkeys(
        ("layers.0.mlp.w2", "layers.1.mlp.w1", "layers.1.mlp.w2", "layers.1.mlp.w3"),
        "int4, group_size=32",
    ),
    "layers.1.attn.q_proj": "lsq, group_size=64, start=absmax",
    "layers.1.attn.v_proj": None,
}
# The bits of the same layers in files, by their names there.
LEVELS = {"gate_proj": (4, 16), "up_proj": (2, 16), "down_proj": (16, 16), "v_proj": (3, None)}


def config(model_dir, output_dir, *overrides, layers=LAYERS):
    quantizer = {"quantizer": {"layers": copy.deepcopy(layers)}}
    return OmegaConf.merge(make_config(model_dir, output_dir, *overrides), quantizer)


@pytest.fixture(scope="module")
def trained(model_dir, tmp_path_factory):
    """The folder of a finished run, and its recipe."""
    folder = tmp_path_factory.mktemp("mixed") / "run"
    return folder, run(config(model_dir, folder, *OPTIONS))


def levels_in(folder):
    """Return name -> number of codes of every linear in a folder."""
    matrices, _ = read_matrices(folder)
    return {m.name: m.levels and len(m.levels) for m in matrices if ".layers." in f".{m.name}"}


def test_the_run_records_every_method_and_reads_them_again(model_dir, trained):
    folder, recipe = trained
    layers = quantized_linears(recipe._model)
    assert len(layers) == 13
    assert {n: layer.method.key() for n, layer in layers.items()} == {
        n: KEYS.get(n, "ternary, group_size=32") for n in layers
    }
    assert 0.05 < recipe.schedule.tau_init < 2
    losses = json.loads((folder / "results.json").read_text())["validation_loss"]
    assert [*losses] == ["pretrained", "naive mixed", "trained, hard"]
    description = json.loads((folder / "hard_model" / "hestia.json").read_text())
    key = recipe.run.component.key()
    assert description["quantizer"] == key and key.startswith("mixed, layers=")
    assert description["methods"] == {name: each for name, each in KEYS.items() if each}
    assert len(description["layers"]) == 13
    assert f"`{key}`" in (folder / "hard_model" / "README.md").read_text()
    found = levels_in(folder / "hard_model")
    for part, expected in LEVELS.items():
        assert tuple(v for n, v in found.items() if n.endswith(part)) == expected, part
    assert "4-bit integers in groups of 32" in contents_table(folder / "hard_model")
    cfg = RunConfig.parse(config(model_dir, folder))
    hard, checkpoint = (load_model(n, cfg, **ARGUMENTS)[0] for n in ("trained", "checkpoint_hard"))
    assert torch.equal(hard(TOKENS), checkpoint(TOKENS))
    other = RunConfig.parse(config(model_dir, folder, layers=LAYERS | {"layers.0.mlp.w1": INT4}))
    with pytest.raises(ValueError, match="with quantizer mixed, layers=.*config has mixed"):
        load_model("checkpoint_hard", other, **ARGUMENTS)


def test_preparing_the_hard_model_again_changes_nothing(model_dir, trained):
    folder, _ = trained
    (file,) = (folder / "hard_model").glob("*.safetensors")
    options = ("optimizer.lr=0.0", f"checkpointer.checkpoint_files=[{file.name}]")
    cfg = config(folder / "hard_model", folder.parent / "again", *options)
    cfg = OmegaConf.merge(cfg, {"schedule": {"rho": 0.0, "tau_init": 0.0, "alpha": 0.0}})
    # Layers without codes of their own to learn: LSQ starts from the scales of a hard weight.
    recipe = run(cfg)
    assert len(recipe._hard_start) == 13
    first, again = hard_weights(folder), hard_weights(folder.parent / "again")
    for name, value in first.items():
        assert torch.equal(again[name], value), name


def test_two_ranks_resume_and_one_process_agree(model_dir, trained, tmp_path):
    whole, _ = trained
    cfg = config(model_dir, tmp_path / "two", *OPTIONS, "batch_size=2")
    two = run_forked("--config", write_config(cfg, tmp_path / "two.yaml"), ranks=2)
    assert two.returncode == 0, two.stderr
    assert logged(tmp_path / "two") == pytest.approx(logged(whole), rel=1e-6)
    expected = logged(whole, "zero_fraction")
    assert logged(tmp_path / "two", "zero_fraction") == pytest.approx(expected, abs=2e-4)
    assert all(0.1 < share < 0.6 for share in expected.values())  # of the ternary layers
    cut = tmp_path / "cut"
    assert not run(config(model_dir, cut, *OPTIONS, *signal_at(3, "SIGINT"))).finished
    resumed = (*OPTIONS, "resume_from_checkpoint=True")
    other = config(model_dir, cut, *resumed, layers=LAYERS | {"layers.0.attn.*": INT4})
    with pytest.raises(ValueError, match="has quantizer mixed, layers=.*this run mixed, layers="):
        run(other)
    run(config(model_dir, cut, *resumed))
    assert logged(cut) == logged(whole)
    expected = hard_weights(whole)
    assert all(torch.equal(value, expected[name]) for name, value in hard_weights(cut).items())


def test_reconstruction_and_sensitivity(model_dir, tmp_path):
    options = ("reconstruction=auto", "sensitivity=auto", "schedule.alpha=0.4")
    options += ("reconstruct.num_samples=8", "reconstruct.batch_size=4", "reconstruct.epochs=2")
    options += ("sensitivity_estimation.num_samples=2", "sensitivity_estimation.num_probes=4")
    cfg = config(model_dir, tmp_path, *options)
    assert run_qat(cfg) == 0
    results = json.loads((tmp_path / "reconstruction" / "reconstruction.json").read_text())
    assert results["methods"] == {name: each for name, each in KEYS.items() if each}
    assert all(window["error"] < window["naive_error"] for window in results["windows"])
    artifact = next(tmp_path.glob("**/sensitivity*.json"))
    assert len(SensitivityArtifact.load(artifact).scores) == 13
    options = (f"reconstruction={tmp_path / 'reconstruction'}",)
    with pytest.raises(ValueError, match="was made by quantizer mixed, .*config has mixed"):
        run(config(model_dir, tmp_path / "b", *options, layers={"layers.0.mlp.w1": INT4}))


FORMATS = ("torchao", "huggingface", "compressed_tensors", "gguf", "openvino")


def test_every_format_holds_every_layer(model_dir, trained):
    """Every writer compares all weights with the hard model, and most run it. See the bits."""
    folder, _ = trained
    for package in ("compressed_tensors", "gguf", "openvino"):
        pytest.importorskip(package)
    cfg = config(model_dir, folder, f"convert.formats=[{','.join(FORMATS)}]")
    cfg.convert.block_type = ["Q2_0", "Q4_0"]
    recipe = ConvertRecipe(cfg)
    sizes = recipe.run()
    assert set(sizes) == set(FORMATS)
    types = sizes["gguf"]["types"]  # Q2_0 needs groups of 64, which LSQ has here
    assert (types["Q2_0"], types["Q4_0"], types.get("F16", 0) + types.get("BF16", 0)) == (1, 12, 2)
    hard = SafetensorsFolder(folder / "hard_model")
    source = SafetensorsFolder(recipe.output / "compressed_tensors")
    bits = {n: t.bits for n, t in source.tensors.items() if isinstance(t, IntegerWeight)}
    assert len(bits) == 13 and all(torch.equal(source.read(n), hard.read(n)) for n in bits)
    for name, expected in {"0.mlp.up": 2, "1.mlp.down": 4, "0.self_attn.q": 2}.items():
        assert bits[f"model.layers.{name}_proj.weight"] == expected, name
    parsed = RunConfig.parse(cfg)
    packed, model = (load_model(n, parsed, **ARGUMENTS)[0] for n in ("packed", "trained"))
    assert torch.equal(packed(TOKENS), model(TOKENS))
    generate = OmegaConf.load(recipe.output / "torchao" / "generate.yaml").quantizer
    assert generate.pop("_component_").endswith("PackedWeights")
    dense, _ = load_model("pretrained", parsed, **ARGUMENTS)
    empty = PackedWeights(**generate).quantize(dense).state_dict()
    assert {n: type(v) for n, v in empty.items()} == {
        n: type(v) for n, v in packed.state_dict().items()
    }
    assert 2.5 < sizes["torchao"]["quantized_bits_per_weight"] < 4.5


@pytest.mark.parametrize(
    ("options", "layers", "message"),
    [
        ((), {"layers.0.mlp.w9": INT4}, r"matches no linear.*did you mean layers.0.mlp.w"),
        (
            (),
            {"*": {"_component_": "os.system"}},
            "names os.system, which is no quantizer",
        ),
        ((), {"*": INT4 | {"exclude": ["*"]}}, "options of its method; got exclude"),
        ((), {"*": INT4 | {"bits": 8}}, "unknown option bits"),
        ((), {"*.w2": INT4 | {"group_size": 36}}, "does not divide in_features 96 of layers.0.mlp"),
        ((), {"*": {"_component_": "hestia_tune.Fairy2iQATQuantizer"}}, "scales by group"),
        (
            ("convert.formats=[intx]",),
            {"*.w2": INT4},
            "layers.0.mlp.w2: a model of int4",
        ),
        (
            ("convert.formats=[onnx]",),
            {"*.w2": INT4},
            "layers.0.mlp.w2: a model of int4",
        ),
        (
            ("convert.formats=[gguf]", "convert.block_type=Q2_0"),
            {"*": INT4 | {"group_size": 32}},
            r"no block of Q2_0 holds model.layers.0.\S+ exactly .*codes -8 to 7",
        ),
    ],
)
def test_wrong_layers_are_refused_before_training(model_dir, tmp_path, options, layers, message):
    with pytest.raises(ValueError, match=message):
        run_validate(config(model_dir, tmp_path, *options, layers=layers))
