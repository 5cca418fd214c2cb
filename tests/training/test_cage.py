"""Test CAGE: its formula, its schedule, a step by hand, shards, resuming."""

import copy

import pytest
import torch
from omegaconf import OmegaConf
from tiny import SHAPE, logged, make_config, run, tune_run, write_config
from torch.nn import functional as F

from hestia_tune import Fairy2iQATQuantizer, HestiaQATQuantizer
from hestia_tune.models import llama
from hestia_tune.models.checkpoints import read_weights
from hestia_tune.models.folder import SafetensorsFolder
from hestia_tune.qat.linear import full_tensor, quantized_linears
from hestia_tune.qat.schedule import get_wsd_schedule
from hestia_tune.qat.shards import cage_strength, pull_to_codes

STRAIGHT_THROUGH = ("schedule.rho=0", "schedule.tau_init=0", "schedule.alpha=0")
CAGE = ("cage_strength=40",)


def test_strength_is_0_at_first_and_then_rises_linearly():
    found = [cage_strength(10, step / 10) for step in range(11)]
    assert found == pytest.approx([0.0] * 9 + [5.0, 10.0])
    assert cage_strength(0, 1.0) == 0


def absmean(weight, size):
    """Return Q(w) of Eqs. 1 and 2, group by group in float64."""
    groups = weight.double().reshape(-1, size)
    scales = (groups.abs().mean(1, keepdim=True) + 1e-8).bfloat16().double()
    return (scales * (groups / scales).round().clamp(-1, 1)).reshape(weight.shape)


def linears(component, same=False):
    """Return two prepared linears. They share one weight if ``same`` is true."""
    torch.manual_seed(0)
    first, other = (torch.nn.Linear(64, 32, bias=False) for _ in range(2))
    if same:
        other.weight = first.weight
    return component.prepare(torch.nn.Sequential(first, other))


def hestia(group_size=32, **options):
    return HestiaQATQuantizer(group_size=group_size, include=["*"], **options)


@pytest.mark.parametrize("same", [False, True], ids=["two", "shared"])
def test_the_formula_with_the_rate_of_each_group(same):
    first, other = linears(hestia(), same)
    groups = [{"params": [first.weight], "lr": 0.01}]
    if not same:
        groups.append({"params": [other.weight], "lr": 0.2})
    before = [layer.weight.detach().double() for layer in (first, other)]
    pull_to_codes(torch.optim.SGD(groups, lr=1.0), [first, other], 4.0)
    for layer, w, lr in zip((first, other), before, (0.01, 0.01 if same else 0.2), strict=True):
        expected = w - 4.0 * lr * (w - absmean(w, 32))
        torch.testing.assert_close(layer.weight.double(), expected, atol=1e-7, rtol=0)


def test_strength_0_changes_nothing_and_rate_1_reaches_the_codes():
    first, other = linears(hestia())
    optimizer = torch.optim.SGD([first.weight], lr=0.5)
    before, left = first.weight.clone(), other.weight.clone()
    pull_to_codes(optimizer, [first, other], 0.0)
    assert torch.equal(first.weight, before)
    pull_to_codes(optimizer, [first, other], 1e3)
    torch.testing.assert_close(first.weight, absmean(before, 32).float())
    assert torch.equal(other.weight, left)  # no optimizer trains this weight
    on_codes = first.weight.clone()
    pull_to_codes(optimizer, [first], 1.0)
    torch.testing.assert_close(first.weight, on_codes)  # the weight ends on its codes


@pytest.mark.parametrize("component", [hestia("tensor"), Fairy2iQATQuantizer(include=["*"])])
def test_every_method_uses_its_own_codes(component):
    layer, _ = linears(component)
    before = layer.weight.detach().clone()
    pull_to_codes(torch.optim.SGD([layer.weight], lr=0.25), [layer], 1.0)
    expected = before - 0.25 * (before - component.method.hard(before))
    torch.testing.assert_close(layer.weight, expected)


def test_learned_scales_are_read_and_not_changed():
    component = hestia(scale="learned", start="least_squares")
    layer, _ = linears(component)
    parameters = [p.detach().clone() for p in layer.method_parameters()]
    before = layer.weight.detach().clone()
    optimizer = torch.optim.SGD([layer.weight, *layer.method_parameters()], lr=0.25)
    pull_to_codes(optimizer, [layer], 2.0)
    expected = before - 0.5 * (before - component.method.hard(before, parameters))
    torch.testing.assert_close(layer.weight, expected)
    assert all(map(torch.equal, layer.method_parameters(), parameters))


def test_a_loop_by_hand_equals_the_recipe(model_dir, tmp_path):
    """Plain torch without FSDP2 ends with the same latent weights on the recipe's batches."""
    cfg = make_config(model_dir, tmp_path, *STRAIGHT_THROUGH, *CAGE, "shuffle=False")
    found = {}

    def keep(recipe):
        layers = quantized_linears(recipe.model)
        found.update({name: full_tensor(layer.weight) for name, layer in layers.items()})
        found["batches"] = list(recipe.data.begin(0))

    recipe = run(cfg, keep)
    model = llama(**SHAPE)
    model.load_state_dict(dict(read_weights("LLAMA3_2", SafetensorsFolder(model_dir))))
    model = HestiaQATQuantizer(group_size=32).prepare(model)
    layers = quantized_linears(model)
    for layer in layers.values():
        layer.weight_fake_quantizer.tau.zero_()
    groups = [{"params": [p for p in model.parameters() if p.dim() >= 2]}]
    groups += [{"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.1)
    scheduler = get_wsd_schedule(optimizer, recipe.total_steps, warmup_ratio=0.2)
    start = copy.deepcopy({name: layer.weight.detach() for name, layer in layers.items()})
    pulls = []
    for step, batch in enumerate(found.pop("batches"), 1):
        logits = model(batch["tokens"])[:, :-1]
        F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        strength = 40 * max(0, step - 0.8 * recipe.total_steps) / (0.2 * recipe.total_steps)
        pulls.append(strength * optimizer.param_groups[0]["lr"])
        with torch.no_grad():
            for layer in layers.values():
                difference = layer.weight - absmean(layer.weight, 32).float()
                layer.weight -= pulls[-1] * difference
        optimizer.zero_grad()
        scheduler.step()
    assert sum(pull > 0.01 for pull in pulls) >= 2 and pulls[0] == 0
    for name, layer in layers.items():
        assert (layer.weight - start[name]).abs().max() > 1e-3
        # A weight at a boundary may fall on different sides in the two runs.
        different = (layer.weight - found[name]).abs() > 1e-4
        assert different.float().mean() < 0.01, name


def test_it_moves_latent_weights_closer_to_their_codes(model_dir, tmp_path):
    distances = {}

    def measure(recipe):
        layers = quantized_linears(recipe.model).values()
        for layer in layers:
            latent, _ = layer.whole_latents()
            error = (latent - layer.method.hard(latent)).square().sum() / latent.square().sum()
            distances.setdefault(recipe.output_dir.name, []).append(float(error))

    run(make_config(model_dir, tmp_path / "without", *STRAIGHT_THROUGH), measure)
    run(make_config(model_dir, tmp_path / "with", *STRAIGHT_THROUGH, *CAGE), measure)
    assert all(map(float.__lt__, distances["with"], distances["without"]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "quantizer",
    [
        {"_component_": "hestia_tune.HestiaQATQuantizer", "group_size": 32},
        {"_component_": "hestia_tune.HestiaQATQuantizer", "group_size": "tensor"},
        {"_component_": "hestia_tune.Fairy2iQATQuantizer"},
    ],
    ids=["group", "tensor", "fairy2i"],
)
def test_two_ranks_equal_one_process(model_dir, tmp_path, quantizer):
    changes = OmegaConf.create({"quantizer": quantizer})
    one = make_config(model_dir, tmp_path / "one", *CAGE)
    one.quantizer = changes.quantizer
    run(one)
    two = make_config(model_dir, tmp_path / "two", *CAGE, "batch_size=2")
    two.quantizer = changes.quantizer
    done = tune_run(
        "--config", write_config(two, tmp_path / "two.yaml"), torchrun=("--nproc_per_node", "2")
    )
    assert done.returncode == 0, done.stderr
    for key in ("loss", "val_loss_hard", "quantization_error"):
        expected = logged(tmp_path / "one", key)
        assert logged(tmp_path / "two", key) == pytest.approx(expected, rel=1e-4), key


def test_a_run_resumes_bit_for_bit_and_only_with_the_same_strength(model_dir, tmp_path):
    run(make_config(model_dir, tmp_path / "whole", *CAGE))
    every = (*CAGE, "save_every_n_steps=4")
    run(make_config(model_dir, tmp_path / "cut", *every))
    (tmp_path / "cut" / "checkpoints" / "step_6" / "meta.json").unlink()
    again = (*every, "resume_from_checkpoint=True")
    with pytest.raises(ValueError, match="has cage_strength 40.*this run 2"):
        run(make_config(model_dir, tmp_path / "cut", *again, "cage_strength=2"))
    run(make_config(model_dir, tmp_path / "cut", *again))
    assert logged(tmp_path / "cut") == logged(tmp_path / "whole")
    hard = [next((tmp_path / k / "hard_model").glob("*.safetensors")) for k in ("cut", "whole")]
    assert hard[0].read_bytes() == hard[1].read_bytes()
