"""Test every method: recipe, two ranks, resuming, bfloat16, export, evaluation."""

import pytest
import torch
from omegaconf import OmegaConf
from ranks import run_forked
from test_distributed import assert_same_run, hard_weights
from tiny import logged, make_config, make_model_dir, run, signal_at, write_config

from hestia_tune.commands.convert import ConvertRecipe
from hestia_tune.commands.qat import run_qat
from hestia_tune.config.run_config import RunConfig
from hestia_tune.export.format import holding
from hestia_tune.methods import TequilaMethod
from hestia_tune.models.loading import load_model
from hestia_tune.models.sources import check_can_hold
from hestia_tune.qat.linear import quantized_linears

pytestmark = pytest.mark.usefixtures("end_process_group")

ARGUMENTS = {"device": torch.device("cpu"), "dtype": torch.bfloat16}
METHODS = {
    "absmean": {"_component_": "hestia_tune.AbsMean", "group_size": 32},
    "absmean-tensor": {"_component_": "hestia_tune.AbsMean", "group_size": "tensor"},
    "twn-tensor": {"_component_": "hestia_tune.TWN", "group_size": "tensor"},
    "int2-absmax": {"_component_": "hestia_tune.INT2", "group_size": 32},
    "int2": {"_component_": "hestia_tune.INT2", "group_size": 32, "start": "least_squares"},
    "lsq": {"_component_": "hestia_tune.LSQ", "group_size": 32, "scale_lr": 1e-3},
    "seq": {"_component_": "hestia_tune.SEQ", "group_size": "channel"},
    "seq-2": {"_component_": "hestia_tune.SEQ", "bits": 2, "group_size": 32},
    "two-bit": {"_component_": "hestia_tune.TwoBit", "group_size": 32},
    "two-bit-learned": {
        "_component_": "hestia_tune.TwoBit",
        "group_size": 32,
        "scale": "learned",
        "scale_lr": 1e-3,
    },
    "dlt": {"_component_": "hestia_tune.DLT", "group_size": 32, "start": "least_squares"},
    "tequila": {"_component_": "hestia_tune.Tequila", "group_size": 32, "epsilon": 0.05},
    "tequila-tensor": {"_component_": "hestia_tune.Tequila", "group_size": "tensor"},
    "binary": {
        "_component_": "hestia_tune.HestiaQATQuantizer",
        "codebook": "binary",
        "group_size": 32,
    },
    "hestia-2": {
        "_component_": "hestia_tune.HestiaQATQuantizer",
        "codebook": "int2",
        "group_size": "channel",
    },
    "int4": {"_component_": "hestia_tune.INT4", "group_size": 32},
    # Every kind of codes, and dense linears, in one model.
    "mixed": {
        "_component_": "hestia_tune.HestiaQATQuantizer",
        "group_size": 32,
        "scale": "learned",
        "layers": {
            "*.mlp.*": {"_component_": "hestia_tune.INT4", "group_size": 32},
            "*.k_proj": {"_component_": "hestia_tune.INT2", "group_size": "channel"},
            "*.v_proj": {
                "_component_": "hestia_tune.HestiaQATQuantizer",
                "codebook": "binary",
                "group_size": 32,
            },
            "layers.0.*.w1": None,
        },
    },
}


def config(model_dir, output_dir, name, *overrides):
    base = make_config(model_dir, output_dir)
    base.quantizer = METHODS[name]
    return OmegaConf.merge(base, OmegaConf.from_dotlist(list(overrides)))


BITS = {2: 1, 3: 2, 4: 2, 16: 4}  # number of codes -> bits
QUICK = ("absmean-tensor", "lsq", "seq-2", "two-bit", "tequila", "mixed")  # of every kind one


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in METHODS]
)
def test_bfloat16_resume_convert_and_evaluate(model_dir, tmp_path, name):
    """A resumed run equals a run without a stop, and all formats equal the hard model.

    The hard model follows from the checkpoint's latent weights. The packed model computes the
    same logits.
    """
    options = ("dtype=bf16",)
    whole = run(config(model_dir, tmp_path / "whole", name, *options))
    cut = tmp_path / "cut"
    assert not run(config(model_dir, cut, name, *options, *signal_at(3, "SIGINT"))).finished
    run(config(model_dir, cut, name, *options, "resume_from_checkpoint=True"))
    assert logged(cut) == logged(tmp_path / "whole")
    assert logged(cut, "val_loss_hard") == logged(tmp_path / "whole", "val_loss_hard")
    hard = hard_weights(cut)
    for key, value in hard_weights(tmp_path / "whole").items():
        assert torch.equal(hard[key], value), key

    component, methods = whole.run.component, whole.run.methods
    method = component.method
    left_out = {"onnx"} | ({"gguf"} if method.group_size == "tensor" else set())
    shared = set.intersection(*(set(holding(each)) for each in methods.values()))
    formats = [name for name in holding(method) if name in shared - left_out]
    options += (f"convert.formats=[{','.join(formats)}]",)
    cfg = config(model_dir, cut, name, *options)
    found = ConvertRecipe(cfg).run()
    assert set(found) == set(formats)
    cfg = RunConfig.parse(cfg)
    trained, _ = load_model("trained", cfg, **ARGUMENTS)
    checkpoint, about = load_model("checkpoint_hard", cfg, **ARGUMENTS)
    assert about["quantizer"] == component.key()
    weights = trained.state_dict()
    for fqn, layer in quantized_linears(checkpoint).items():
        method = methods[fqn]
        exported = method.hard(*layer.whole_latents()).to(torch.bfloat16)
        assert torch.equal(exported, weights[f"{fqn}.weight"])
        if method.needs_training:
            (bias,) = layer.hard_extras(layer.weight).values()
            assert bias.any() and torch.equal(bias.to(torch.bfloat16), weights[f"{fqn}.bias"])
    tokens = torch.tensor([[1, 2, 3, 200]])
    assert torch.equal(checkpoint(tokens), trained(tokens))
    if "torchao" in formats:
        packed, _ = load_model("packed", cfg, **ARGUMENTS)
        assert torch.equal(packed(tokens), trained(tokens))
        shapes = {name: weights[f"{name}.weight"].numel() for name in methods}
        bits = sum(BITS[len(methods[name].levels)] * size for name, size in shapes.items())
        bits /= sum(shapes.values())
        # A scale of 16 bits is shared by at least 32 weights.
        assert bits <= found["torchao"]["quantized_bits_per_weight"] <= bits + 0.5
    naive, _ = load_model("naive", cfg, **ARGUMENTS)
    assert torch.isfinite(naive(tokens)).all()


def test_transformers_loads_the_biases(model_dir, tmp_path):
    transformers = pytest.importorskip("transformers")
    cfg = config(model_dir, tmp_path, "tequila", "quantizer.exclude=[layers.0.mlp.w1]")
    run(cfg)
    theirs, about = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hard_model", dtype=torch.float32, output_loading_info=True
    )
    assert not about["missing_keys"] and not about["unexpected_keys"]
    ours, _ = load_model("trained", RunConfig.parse(cfg), **ARGUMENTS | {"dtype": torch.float32})
    tokens = torch.tensor([[1, 2, 3, 200]])
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)
    bias = ours.layers[0].attn.q_proj.bias
    assert bias.any() and not ours.layers[0].mlp.w1.bias.any()
    with pytest.raises(ValueError, match="Llamas .* have room for it; got model_type MISTRAL"):
        check_can_hold(TequilaMethod(), "MISTRAL")


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_two_ranks_equal_one_process(tmp_path, name):
    """The rows do not divide by the ranks: 97 rows on two ranks."""
    shape = {} if METHODS[name]["group_size"] == 32 else {"intermediate_dim": 97}
    folder = make_model_dir(tmp_path / "model", **shape)
    options = (
        *(f"model.{key}={value}" for key, value in shape.items()),
        "gradient_accumulation_steps=2",
        "run_val_every_n_steps=2",
    )
    run(config(folder, tmp_path / "one", name, *options))
    cfg = config(folder, tmp_path / "two", name, *options, "batch_size=2")
    two = run_forked("--config", write_config(cfg, tmp_path / "two.yaml"), ranks=2)
    assert two.returncode == 0, two.stderr
    assert_same_run(tmp_path / "one", tmp_path / "two")


def test_a_schedule_without_a_temperature_is_the_pressure_alone(model_dir, tmp_path):
    plain = config(model_dir, tmp_path, "lsq")
    assert RunConfig.parse(plain).schedule.rho == 0
    assert RunConfig.parse(plain).reconstruct.tau_init == 0
    ramp = RunConfig.parse(
        OmegaConf.merge(plain, {"schedule": {"rho": 0.5}, "sensitivity": "auto"})
    )
    assert ramp.schedule.rho == 0.5 and ramp.schedule.tau_init == 0
    for changes, message in (
        ({"schedule": {"tau_init": 0.3}}, "schedule.tau_init=0.3 is read by.*delete.*~schedule"),
        ({"schedule": {"alpha": 0.4}}, "schedule.alpha=0.4"),
        ({"schedule": {"hard_fraction": 0.2}}, "schedule.hard_fraction=0.2"),
        ({"reconstruct": {"tau_init": 0.2}}, "reconstruct.tau_init=0.2"),
        ({"sensitivity": "scores.json"}, "sensitivity=scores.json is read by methods with"),
    ):
        with pytest.raises(ValueError, match=message):
            RunConfig.parse(OmegaConf.merge(plain, changes))


@pytest.mark.slow
def test_one_override_of_a_packaged_config(tmp_path):
    """Without a schedule, `sensitivity: auto` computes nothing."""
    arguments = ("quantizer._component_=hestia_tune.LSQ", f"output_dir={tmp_path}", "max_steps=1")
    arguments += ("max_val_batches=1", "batch_size=2", "dataset.docstrings=False")
    refused = run_forked("--config", "demo", *arguments)
    assert refused.returncode == 1 and "delete the section by ~schedule" in refused.stderr
    done = run_forked("--config", "demo", *arguments, "~schedule")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "sensitivity.json").exists() and (tmp_path / "hard_model").exists()


def test_a_format_that_cannot_hold_the_codes_is_refused_before_training(model_dir, tmp_path):
    cfg = config(model_dir, tmp_path, "dlt", "convert.formats=[gguf]")
    with pytest.raises(ValueError, match="can only be written as huggingface; got gguf; remove"):
        run_qat(RunConfig.parse(cfg))
    assert not (tmp_path / "metrics.jsonl").exists()
    with pytest.raises(ValueError, match="unknown option delta"):
        run(OmegaConf.merge(cfg, {"quantizer": {"delta": 0.7}}))
    bad = OmegaConf.merge(config(model_dir, tmp_path, "int2"), {"quantizer": {"scale_lr": 0.1}})
    with pytest.raises(ValueError, match="scale_lr is read by methods that learn a scale"):
        run(bad)
