"""Test training and conversion that start from a model that is ternary (or binary, ...) already."""

import json
import logging

import pytest
import torch
from hard_folders import assert_same, dense, edit_json, is_linear, make_hard, to_mlx
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from test_methods_recipe import METHODS
from tiny import SHAPE, logged, make_config, run, signal_at

from hestia_tune.blocks import as_one
from hestia_tune.commands.convert import ConvertRecipe
from hestia_tune.config.run_config import RunConfig
from hestia_tune.errors import InputError, warn_once
from hestia_tune.functional import hard_ternary
from hestia_tune.methods import EvenMethod, INT4Method
from hestia_tune.methods.two_bit import TwoBitMethod
from hestia_tune.models import llama
from hestia_tune.models.folder import SafetensorsFolder
from hestia_tune.models.sources import folder_tensors
from hestia_tune.run import Run
from hestia_tune.torchtune.recipe import HestiaQATRecipe

pytestmark = pytest.mark.usefixtures("end_process_group")

TOKENS = torch.tensor([[5, 9, 200, 13, 42], [1, 2, 3, 4, 5]])
STRAIGHT = ("schedule.rho=0", "schedule.tau_init=0", "schedule.alpha=0")
WIDE = {"embed_dim": 128, "intermediate_dim": 256}


def ternary(folder, group_size=32, **shape):
    return make_hard(folder, lambda w: hard_ternary(w, group_size=group_size), **shape)


def source_state(folder):
    state = folder_tensors("LLAMA3_2", SafetensorsFolder(folder))
    return {name: value.float() for name, value in state}


@torch.no_grad()
def assert_starts_from(folder, cfg, **shape):
    """Check the weights, and the logits, of the first training forward of a config."""
    recipe = HestiaQATRecipe(cfg)
    recipe.setup(recipe.config)
    recipe.driver.set_step(0)
    source = source_state(folder)
    for name, layer in recipe.driver.layers.items():
        latent, parameters = layer.whole_latents()
        fake = layer.weight_fake_quantizer
        assert torch.equal(fake(latent, *parameters), source[f"{name}.weight"]), name
        assert torch.equal(layer.method.hard(latent, parameters), source[f"{name}.weight"]), name
    model = llama(**SHAPE | shape)
    model.load_state_dict(source)
    model.set_num_output_chunks(8)
    found = as_one(recipe._model(TOKENS))
    assert torch.allclose(found, as_one(model(TOKENS)), rtol=1e-5, atol=1e-5)
    torch.distributed.destroy_process_group()


def trained_without_steps(cfg, output_dir, folder):
    """Check that a run with a learning rate of 0 writes the source again."""
    run(OmegaConf.merge(cfg, {"optimizer": {"lr": 0.0, "weight_decay": 0.0}}))
    before, after = dense(folder), dense(output_dir / "hard_model")
    assert before.keys() == after.keys()
    for name in filter(is_linear, before):
        assert torch.equal(after[name].float(), before[name].float()), name


def test_which_linears_are_hard_depends_on_the_methods(tmp_path):
    """A ternary model whose linears get eight levels does not continue from its codes."""
    folder = ternary(tmp_path / "source")
    cfg = make_config(folder, tmp_path / "run", "bits.average=5", "bits.choices=[ternary,int4]")
    run = Run.of(RunConfig.parse(OmegaConf.merge(cfg, {"bits": {"by": "error"}})))
    run.pretrained.read(run, run.undecided)
    names = set(run.undecided.layers)
    assert run.pretrained.hard(run.undecided).keys() == names
    chosen = run.choosing(dict.fromkeys(names, "int4"))
    assert set(chosen.layers) == names
    chosen.pretrained.read(chosen, chosen.prepared)
    assert chosen.pretrained.hard(chosen.prepared) == {}


@pytest.mark.parametrize(
    ("group_size", "options"),
    [*((size, STRAIGHT) for size in (32, 64, 128, "channel")), (64, ("schedule.rho=0.5",))],
)
def test_the_first_step_is_the_source(tmp_path, caplog, group_size, options):
    folder = ternary(tmp_path / "source", group_size, **WIDE)
    cfg = make_config(folder, tmp_path / "out", f"quantizer.group_size={group_size}", *options)
    cfg.model |= WIDE
    with caplog.at_level(logging.INFO):
        assert_starts_from(folder, cfg, **WIDE)
    words = "with one scale per row" if group_size == "channel" else f"in groups of {group_size}"
    line = f"the pretrained model is ternary already, {words}: training continues from its codes"
    assert caplog.messages.count(line) == 1
    if group_size == 64:  # a divisor is as good
        cfg.quantizer.group_size = 32
        cfg.overwrite_output = True
        assert_starts_from(folder, cfg, **WIDE)


QUICK = ("absmean", "seq", "binary", "hestia-2")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in METHODS
        if "tensor" not in name and name != "mixed"
    ],
)
def test_every_method_starts_from_its_own_codes(tmp_path, name):
    section = METHODS[name]
    cfg = make_config(tmp_path / "source", tmp_path / "out")
    cfg.quantizer = section
    cfg = OmegaConf.merge(cfg, {"schedule": {"rho": 0, "tau_init": 0, "alpha": 0}})
    size = section["group_size"]
    even = {"codebook": section.get("codebook", "int2"), "group_size": size}
    if section.get("codebook") or name in ("int2", "seq-2"):
        folder = make_hard(tmp_path / "source", EvenMethod(**even).hard)
    elif name.startswith("two-bit"):  # its scales have fewer digits than those of ternary codes
        method = TwoBitMethod(group_size=size)
        folder = make_hard(
            tmp_path / "source", lambda w: method.hard(w, method.initial_parameters(w))
        )
    elif name == "int4":
        folder = make_hard(tmp_path / "source", INT4Method(group_size=size).hard)
    else:
        folder = ternary(tmp_path / "source", size)
    assert_starts_from(folder, cfg)
    cfg.overwrite_output = True
    if name in ("absmean", "seq", "binary"):
        trained_without_steps(cfg, tmp_path / "out", folder)


@pytest.mark.parametrize("layout", ["mlx", "compressed_tensors"])
@pytest.mark.parametrize("route", ["torchtune", "transformers"])
def test_packed_folders_are_trained_and_converted(tmp_path, layout, route):
    pytest.importorskip("compressed_tensors")
    source = ternary(tmp_path / "source")
    convert = ("convert.source=pretrained", f"convert.output={tmp_path}/packed")
    if layout == "mlx":
        folder = to_mlx(source, tmp_path / "mlx", 32)
    else:
        formats = "convert.formats=[compressed_tensors]"
        ConvertRecipe(make_config(source, tmp_path / "out", *convert, formats)).run()
        folder = tmp_path / "packed" / "compressed_tensors"
        (folder / "hestia.json").unlink()  # as another program would write it
    cfg = make_config(folder, tmp_path / "run", *STRAIGHT, "dataset.num=8")
    if route == "transformers":
        pytest.importorskip("transformers")
        del cfg.checkpointer, cfg.tokenizer
        cfg.model = {"_component_": "hestia_tune.models.hugging_face", "path": str(folder)}
    else:
        assert_starts_from(source, cfg)
        cfg.overwrite_output = True
    trained_without_steps(cfg, tmp_path / "run", source)
    assert "quantization" not in (tmp_path / "run" / "hard_model" / "config.json").read_text()
    again = OmegaConf.merge(
        cfg,
        {
            "convert": {
                "source": "pretrained",
                "formats": ["huggingface", "compressed_tensors", "torchao", "gguf"],
                "output": str(tmp_path / "again"),
            }
        },
    )
    recipe = ConvertRecipe(again)
    assert set(recipe.found.values()) == {32}
    recipe.run()
    for name in ("huggingface", "compressed_tensors"):
        assert_same(source, recipe.output / name)


def test_a_group_size_that_does_not_fit_is_refused_before_any_long_work(tmp_path):
    folder = ternary(tmp_path / "source", 64, **WIDE)
    remedy = "set quantizer.group_size=64"
    for size in (128, "channel", "tensor"):
        cfg = make_config(folder, tmp_path / "out", f"quantizer.group_size={size}", *STRAIGHT)
        cfg.model |= WIDE
        message = f"layers.0.attn.q_proj is ternary already, in groups of 64; .*{size}.*{remedy}"
        with pytest.raises(InputError, match=message):
            run(cfg)
        cfg.convert = {"source": "pretrained"}
        with pytest.raises(InputError, match=f"q_proj.weight is ternary already.*{remedy}"):
            ConvertRecipe(cfg)
        assert not (tmp_path / "out" / "converted").exists() or not any(
            (tmp_path / "out" / "converted").iterdir()
        )
    rows = ternary(tmp_path / "rows", "channel", **WIDE)
    cfg = make_config(rows, tmp_path / "out", "quantizer.group_size=tensor", *STRAIGHT)
    cfg.model |= WIDE
    with pytest.raises(InputError, match="with one scale per row; .*set quantizer.group_size=chan"):
        run(cfg)


def test_a_part_that_is_dense_is_quantized_as_ever(tmp_path, caplog):
    folder = ternary(tmp_path / "source")
    state = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    state[name] = torch.randn(96, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    save_file(state, folder / "model.safetensors")
    with caplog.at_level(logging.INFO):
        recipe = ConvertRecipe(
            make_config(
                folder,
                tmp_path / "out",
                "convert.source=pretrained",
                "convert.formats=[huggingface]",
            )
        )
        recipe.run()
    assert "is ternary already in 13 of 14 linears, in groups of 32: its codes are" in caplog.text
    found = load_file(recipe.output / "huggingface" / "model.safetensors")
    assert torch.equal(found[name].float(), hard_ternary(state[name].float(), group_size=32))
    del found[name], state[name]
    assert all(torch.equal(found[key], state[key]) for key in state)


def test_scales_that_bfloat16_rounds_are_rounded_with_a_warning(tmp_path, caplog):
    folder = ternary(tmp_path / "source")
    state = load_file(folder / "model.safetensors")
    state = {n: w.float() * (1.001 if is_linear(n) else 1.0) for n, w in state.items()}
    save_file(state, folder / "model.safetensors")
    edit_json(folder / "config.json", torch_dtype="float32")
    rounded = {n: w.bfloat16().float() if is_linear(n) else w for n, w in state.items()}
    assert any(not torch.equal(rounded[n], state[n]) for n in state)
    (tmp_path / "rounded").mkdir()
    save_file(rounded, tmp_path / "rounded" / "model.safetensors")
    (tmp_path / "rounded" / "config.json").write_text((folder / "config.json").read_text())
    assert_starts_from(tmp_path / "rounded", make_config(folder, tmp_path / "out", *STRAIGHT))
    assert "scales of the pretrained model are rounded to bfloat16, by up to 0." in caplog.text


@pytest.mark.parametrize("schedule", [STRAIGHT, ("schedule.rho=0.5",)])
@pytest.mark.parametrize("codes", [(-1.0, 0.0, 1.0, 2.0), (-2.0, -1.0, 0.0, 1.0), (-1.0, 0.0, 1.0)])
def test_four_levels_adopt_scales_in_half_precision(tmp_path, caplog, codes, schedule):
    """As other programs write them: 11 significant bits, of which four levels keep 6."""

    def source(weight):
        generator = torch.Generator().manual_seed(weight.numel())
        scale = torch.rand(weight.numel() // 32, 1, generator=generator).half().float() * 0.02
        index = torch.randint(len(codes), (len(scale), 32), generator=generator)
        return (torch.tensor(codes)[index] * scale).view_as(weight)

    warn_once.cache_clear()
    folder = make_hard(tmp_path / "source", lambda weight: weight)
    state = {
        name: source(weight) if is_linear(name) else weight.float()
        for name, weight in load_file(folder / "model.safetensors").items()
    }
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    edit_json(folder / "config.json", torch_dtype="float32")
    convert = ("convert.source=pretrained", "convert.formats=[huggingface]")
    cfg = make_config(folder, tmp_path / "out", *schedule, *convert)
    cfg.quantizer = {"_component_": "hestia_tune.TwoBit", "group_size": 32}
    recipe = ConvertRecipe(cfg)
    recipe.run()
    found = load_file(recipe.output / "huggingface" / "model.safetensors")
    for name in filter(is_linear, state):
        share = found[name].float() / state[name]
        assert torch.equal(found[name].float().sign(), state[name].sign())
        assert (share.nan_to_num(1) - 1).abs().max() < 2**-6
    assert "scales of the pretrained model are rounded to 6 significant bits" in caplog.text
    trained = {"optimizer": {"lr": 0.0, "weight_decay": 0.0}}
    run(OmegaConf.merge(cfg, trained))
    after = dense(tmp_path / "out" / "hard_model")
    for name in filter(is_linear, state):
        assert torch.equal(after[name].float(), found[name].float()), name


def test_a_run_resumes_exactly(tmp_path):
    folder = ternary(tmp_path / "source")
    run(make_config(folder, tmp_path / "whole", *STRAIGHT))
    cut = make_config(folder, tmp_path / "cut", *STRAIGHT, *signal_at(3, "SIGINT"))
    assert not run(cut).finished
    run(make_config(folder, tmp_path / "cut", *STRAIGHT, "resume_from_checkpoint=True"))
    assert_same(tmp_path / "whole" / "hard_model", tmp_path / "cut" / "hard_model")


def test_training_improves_on_the_source(tmp_path):
    """Check that straight-through training from codes lowers the loss, from its first value."""
    folder = ternary(tmp_path / "source")
    options = (*STRAIGHT, "epochs=4", "optimizer.lr=1e-2", "log_every_n_steps=1")
    run(make_config(folder, tmp_path / "out", *options))
    losses = json.loads((tmp_path / "out" / "results.json").read_text())["validation_loss"]
    assert losses["naive ternary"] == losses["pretrained"]
    assert losses["trained, hard"] < losses["pretrained"] - 0.05
    # The first forward is the source, so its loss is that of the source, and falls from there.
    training = logged(tmp_path / "out")
    assert training[max(training)] < training[1] - 0.05
