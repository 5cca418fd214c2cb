"""Test distillation: the loss against its definition, a step by hand, teachers, resuming."""

import weakref
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from ranks import spawn
from tiny import SHAPE, logged, make_config, make_model_dir, random_dataset, run
from torch._dynamo.utils import counters
from torch.nn import functional as F

from hestia_tune import losses
from hestia_tune import run as runs
from hestia_tune.config import DistillationConfig
from hestia_tune.config.run_config import RunConfig
from hestia_tune.errors import InputError
from hestia_tune.losses import distillation_loss_sum
from hestia_tune.models import HuggingFaceTokenizer, llama
from hestia_tune.models.folder import SafetensorsFolder
from hestia_tune.models.sources import folder_tensors, folder_weights
from hestia_tune.torchtune.recipe import HestiaQATRecipe

IGNORED = -100


def reference(logits, wanted, labels, kind):
    """Return the loss token by token in float64; "kl" is the cross-entropy with the teacher."""
    total = 0.0
    for own, other, label in zip(
        logits.flatten(0, 1), wanted.flatten(0, 1), labels.flatten(), strict=True
    ):
        if label == IGNORED:
            continue
        p, q = (torch.softmax(x.double(), -1) for x in (other, own))
        forward = -(p * q.log()).sum()
        reverse = (q * (q.log() - p.log())).sum()
        total += {"kl": forward, "kl_reverse": reverse, "mixed": (forward + reverse) / 2}[kind]
    return total


EAGER = [(kind, chunks, False) for kind in ("kl", "kl_reverse", "mixed") for chunks in (None, 3)]


@pytest.mark.parametrize(("kind", "chunks", "compiled"), [*EAGER, ("mixed", 3, True)])
def test_the_loss_equals_its_definition(kind, chunks, compiled):
    generator = torch.Generator().manual_seed(0)
    logits, wanted = (3 * torch.randn(2, 7, 11, generator=generator) for _ in range(2))
    labels = torch.randint(0, 11, (2, 7), generator=generator)
    labels[0, :4] = IGNORED
    settings = DistillationConfig(weight=1, loss=kind)
    own = logits.clone().requires_grad_()
    given = (own, wanted) if chunks is None else (list(x.chunk(chunks, 1)) for x in (own, wanted))
    torch._dynamo.reset()
    counters.clear()
    found = distillation_loss_sum(*given, labels, settings, IGNORED, compiled)
    assert bool(counters["stats"]["unique_graphs"]) == compiled
    expected = reference(logits.requires_grad_(), wanted, labels, kind)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    (0.3 * found).backward()
    (0.3 * expected).backward()
    torch.testing.assert_close(own.grad, logits.grad, atol=1e-5, rtol=1e-4)


def test_no_float32_tensor_is_kept_for_the_backward():
    logits = torch.randn(2, 8, 11, dtype=torch.bfloat16).requires_grad_()
    labels, kept = torch.zeros(2, 8, dtype=torch.long), []

    def keep(value):
        kept.append(weakref.ref(value))
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        chunks = list(logits.chunk(4, dim=1))
        given = chunks, [chunk.detach() for chunk in chunks], labels, DistillationConfig(weight=1)
        total = distillation_loss_sum(*given, IGNORED)
    waiting = [value for reference in kept if (value := reference()) is not None]
    assert len(kept) > len(waiting) == 4
    assert {value.dtype for value in waiting} == {torch.bfloat16}
    assert sum(value.numel() for value in waiting) == logits.numel()
    total.backward()


def test_the_gradient_is_0_if_the_model_equals_the_teacher():
    logits = torch.randn(1, 5, 9).requires_grad_()
    settings = DistillationConfig(weight=1)
    labels = torch.zeros(1, 5, dtype=torch.long)
    distillation_loss_sum(logits, logits.detach(), labels, settings, IGNORED).backward()
    torch.testing.assert_close(logits.grad, torch.zeros_like(logits), atol=1e-6, rtol=0)


def batch_of(model_dir):
    tokenizer = HuggingFaceTokenizer(str(model_dir))
    samples = [random_dataset(tokenizer, num=4)[index] for index in range(4)]
    return {key: torch.tensor([s[key] for s in samples]) for key in ("tokens", "labels")}


@pytest.mark.parametrize("weight", [0.3, 1.0])
def test_the_loss_of_a_step_mixes_both(model_dir, tmp_path, weight):
    """The recipe with chunks and sharding gives the same loss as a computation by hand."""
    teacher = llama(**SHAPE)
    teacher.load_state_dict(dict(folder_tensors("LLAMA3_2", SafetensorsFolder(model_dir))))
    found = []

    def measure(recipe):
        own, count = recipe.loss_sum(batch_of(model_dir), recipe._teacher)
        plain, _ = recipe.loss_sum(batch_of(model_dir))
        recipe._model.set_num_output_chunks(0)
        batch = batch_of(model_dir)
        logits = recipe._model(batch["tokens"])[:, :-1].float()
        with torch.no_grad():
            wanted = teacher(batch["tokens"])[:, :-1].softmax(-1)
        labels = batch["labels"][:, 1:]
        counted = labels != IGNORED
        soft = -(wanted * logits.log_softmax(-1)).sum(-1)[counted].sum()
        hard = F.cross_entropy(logits[counted], labels[counted], reduction="sum")
        assert plain.item() == pytest.approx(hard.item(), rel=1e-5)
        found.append((own.item(), (weight * soft + (1 - weight) * hard).item()))
        assert not any(p.requires_grad for p in recipe._teacher.parameters())

    cfg = make_config(model_dir, tmp_path, f"distillation.weight={weight}", "max_steps_per_epoch=2")
    run(cfg, measure)
    [(own, expected)] = found
    assert own == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("transformers", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_dropped_logits_give_the_same_training(
    model_dir, tmp_path, monkeypatch, weight, transformers, dtype
):
    """Loss and weights do not change if the logits of one chunk exist at a time."""
    found, seen = {}, []
    head = losses._head
    monkeypatch.setattr(losses, "_head", lambda *args: seen.append(args[1].shape) or head(*args))
    for drop in (None, "recompute", "at_once"):
        seen.clear()
        monkeypatch.setattr(runs.TrainingRun, "drops_logits", drop)
        options = (f"distillation.weight={weight}", "max_steps=4", f"dtype={dtype}")
        cfg = make_config(model_dir, tmp_path / f"{drop}", *options, "compile=False")
        if transformers:
            cfg.model = {"_component_": "hestia_tune.models.hugging_face", "path": str(model_dir)}
            del cfg.checkpointer, cfg.tokenizer
        run(cfg)
        rows = (logged(tmp_path / f"{drop}", key) for key in ("loss", "grad_norm"))
        found[drop] = [value for row in rows for value in row.values()]
        lengths = Counter(shape[1] for shape in seen)
        assert {*lengths} - {0} == ({2} if drop else set())  # eight chunks of 16 tokens
        passes = lengths[2]  # of a chunk through the heads
        if drop == "recompute":
            twice = passes
    assert passes < twice
    rounding = 1e-6 if dtype == "fp32" else 2e-3
    assert found["recompute"] == pytest.approx(found[None], rel=rounding)
    if weight == 1:  # otherwise a mean over the labels of a chunk is multiplied by their number
        assert found["at_once"] == found[None]
    assert found["at_once"] == pytest.approx(found[None], rel=rounding)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("chunks", [False, True])
def test_only_large_logits_are_dropped(model_dir, tmp_path, monkeypatch, sharded, large, chunks):
    monkeypatch.setattr(RunConfig, "is_sharded", sharded)
    logits = 4 * 16 * 264 * 4  # bytes of a micro-batch
    limit = "_LARGE_LOGITS" if sharded else "_SMALL_LOGITS"
    monkeypatch.setattr(runs, limit, logits - large)
    options = () if chunks else ("loss._component_=torch.nn.CrossEntropyLoss",)
    found = runs.TrainingRun.of(RunConfig.parse(make_config(model_dir, tmp_path, *options)))
    wanted = "recompute" if sharded else "at_once"
    assert found.drops_logits == (wanted if chunks and large else None)


class TinyDecoder(torch.nn.Module):
    """An embedding, a layer, and a head of its own or tied to the embedding."""

    num_output_chunks = 3

    def __init__(self, tied):
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 5)
        self.layer = torch.nn.Linear(5, 5)
        self.own = None if tied else torch.nn.Linear(5, 11)
        self.double()

    def output(self, hidden):
        weight = self.embedding.weight if self.own is None else self.own.weight
        return F.linear(hidden, weight, None if self.own is None else self.own.bias)

    def chunked_output(self, hidden):
        return [self.output(chunk) for chunk in hidden.chunk(self.num_output_chunks, dim=1)]

    def forward(self, tokens):
        return self.chunked_output(self.layer(self.embedding(tokens)).tanh())


@pytest.mark.parametrize("frozen", [(), ("embedding", "own"), ("layer", "embedding")])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("weight", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("seq_len", [2, 7])  # 2: fewer positions than chunks
def test_gradients_at_once_are_those_of_kept_logits(frozen, tied, weight, seq_len):
    """With any part of the model frozen, and for any gradient of the loss."""
    torch.manual_seed(0)
    model, teacher = TinyDecoder(tied), TinyDecoder(tied).requires_grad_(False)
    for name in frozen:
        if getattr(model, name) is not None:
            getattr(model, name).requires_grad_(False)
    trained = [value for value in model.parameters() if value.requires_grad]
    batch = {"tokens": torch.randint(11, (2, seq_len))}
    labels = torch.randint(11, (2, seq_len))
    labels[0, 0] = IGNORED
    config = SimpleNamespace(distillation=DistillationConfig(weight=weight))
    loss = losses.CEWithChunkedOutputLoss(3, ignore_index=IGNORED)
    found = {}
    for drop in (None, "recompute", "at_once"):
        other = teacher if weight else None
        value = losses.training_loss(model, other, batch, labels, loss, config, drop=drop)
        grads = torch.autograd.grad(-0.3 * value, trained) if trained else ()
        found[drop] = (value.detach(), *grads)
        with torch.no_grad():
            again = losses.training_loss(model, other, batch, labels, loss, config, drop=drop)
        torch.testing.assert_close(again, value.detach(), rtol=1e-6, atol=0)
    for drop in ("recompute", "at_once"):
        torch.testing.assert_close(found[drop], found[None], rtol=1e-6, atol=1e-7)


def as_rank(rank, model_dir, folder):
    for large in (2**30, 0):
        runs._LARGE_LOGITS = large
        options = ("distillation.weight=0.5", "max_steps=3", "compile=False")
        recipe = HestiaQATRecipe(make_config(model_dir, f"{folder}/{large}", *options))
        recipe.setup(recipe.config)
        recipe.train()
        recipe.release()
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_recomputed_logits_give_the_same_training_on_two_ranks(model_dir, tmp_path):
    spawn(as_rank, str(model_dir), str(tmp_path), ranks=2)
    for key in ("loss", "grad_norm"):
        whole, chunks = (logged(tmp_path / str(large), key) for large in (2**30, 0))
        assert chunks == pytest.approx(whole, rel=1e-6) and len(chunks) == 3


def test_it_trains_towards_the_teacher_and_validates_as_usual(model_dir, tmp_path):
    losses = {}
    for weight in (0, 1):
        options = (f"distillation.weight={weight}", "epochs=4", "dtype=bf16", "compile=False")
        recipe = run(make_config(model_dir, tmp_path / str(weight), *options))
        losses[weight] = recipe.validation_losses
    assert losses[0]["pretrained"] == losses[1]["pretrained"]
    # Cross-entropy overfits random tokens, so for a random model the teacher is the best.
    gaps = {w: abs(one["trained, hard"] - one["pretrained"]) for w, one in losses.items()}
    assert gaps[1] < gaps[0]


def test_a_model_in_another_folder_is_the_teacher(model_dir, tmp_path):
    other = make_model_dir(tmp_path / "other", seed=5)
    theirs = dict(folder_tensors("LLAMA3_2", SafetensorsFolder(other)))

    def check(recipe):
        own = recipe._teacher.state_dict()["layers.0.mlp.w1.weight"]
        assert torch.equal(own, theirs["layers.0.mlp.w1.weight"])

    options = ("distillation.weight=0.5", f"distillation.teacher={other}", "max_steps_per_epoch=1")
    run(make_config(model_dir, tmp_path / "run", *options), check)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["distillation.loss=jsd"], "must be one of kl, kl_reverse, mixed; got jsd"),
        (["distillation.weight=2"], r"distillation.weight must be in \[0, 1\]; got 2"),
        (["distillation.teacher=nowhere"], "teacher nowhere has no config.json"),
    ],
)
def test_errors(model_dir, tmp_path, overrides, message):
    with pytest.raises(InputError, match=message):
        run(make_config(model_dir, tmp_path, "distillation.weight=1", *overrides))


def test_a_teacher_of_another_shape_is_refused(model_dir, tmp_path):
    other = make_model_dir(tmp_path / "other", intermediate_dim=128)
    options = ("distillation.weight=1", f"distillation.teacher={other}")
    with pytest.raises(ValueError, match="of another model than the config's"):
        run(make_config(model_dir, tmp_path / "run", *options))


def test_a_teacher_whose_names_cannot_be_converted_is_refused(model_dir, tmp_path, monkeypatch):
    other = make_model_dir(tmp_path / "other")

    def fail(*_):
        raise KeyError("layers.0.odd")

    monkeypatch.setattr(SafetensorsFolder, "read", fail)
    with pytest.raises(InputError, match="other could not be read as LLAMA3_2: .*layers.0.odd"):
        folder_weights("LLAMA3_2", other, llama(**SHAPE))


def test_a_run_resumes_only_with_the_same_distillation(model_dir, tmp_path):
    first = ("distillation.weight=1", "max_steps_per_epoch=2", "save_every_n_steps=1")
    run(make_config(model_dir, tmp_path, *first))
    again = (*first, "resume_from_checkpoint=True")
    run(make_config(model_dir, tmp_path, *again))
    with pytest.raises(ValueError, match="has distillation .*'weight': 1.0.*this run"):
        run(make_config(model_dir, tmp_path, *again, "distillation.weight=0.5"))
