"""Chats and mixtures in every stage of a run: losses, exact resuming, ranks, reconstruction."""

import datetime
import json
import logging
import shutil

import pytest
import torch
import torch.nn.functional as F
from chat_folders import MARKED, TURNS, make_chats, make_tokenizer_folder, write_chats
from omegaconf import OmegaConf
from ranks import run_forked
from tiny import (
    logged,
    make_config,
    make_model_dir,
    run,
    signal_at,
    write_config,
)

from hestia_tune.commands.qat import run_qat
from hestia_tune.components import make
from hestia_tune.config.run_config import RunConfig
from hestia_tune.errors import warn_once
from hestia_tune.models import llama
from hestia_tune.reconstruction import engine
from hestia_tune.reconstruction.reconstruct import ReconstructionRecipe
from hestia_tune.run import DATE_FILE, Run, TrainingRun
from hestia_tune.stages import measure_sensitivity
from hestia_tune.training.loader import TrainingData, calibration_batches, texts_of

pytestmark = pytest.mark.usefixtures("end_process_group")

STREAM = "hestia_tune.data.streaming_chat_dataset"
HELD = "hestia_tune.data.chat_dataset"


@pytest.fixture(scope="module")
def chat_dir(tmp_path_factory):
    """Return the folder of a tiny Llama with a chat template that marks no replies."""
    folder = make_model_dir(tmp_path_factory.mktemp("model"))
    make_tokenizer_folder(tmp_path_factory.mktemp("t") / "t", TURNS)
    source = make_tokenizer_folder(tmp_path_factory.mktemp("t") / "t", TURNS)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(f"{source}/{name}", folder / name)
    return folder


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chats")
    write_chats(folder / "train.jsonl", make_chats(60, longest=12))
    write_chats(folder / "held.jsonl", make_chats(9, longest=12))
    lines = [json.dumps({"text": f"Document {k}, " + "word " * (k % 11)}) for k in range(90)]
    (folder / "text.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def section(files, component=STREAM, **options):
    options = {"seq_len": 64} | options
    return {"_component_": component, "source": "json", "data_files": str(files)} | options


def config(chat_dir, output, chats, *overrides, dataset=None, **options):
    cfg = make_config(chat_dir, output, "max_steps=6", "dataset_val=null")
    stream = section(chats / "train.jsonl", shuffle_buffer=20, **options)
    cfg.dataset = OmegaConf.create(dataset or stream)
    return OmegaConf.merge(cfg, OmegaConf.from_dotlist(list(overrides)))


def mixture(chats, **options):
    text = "hestia_tune.data.streaming_text_dataset"
    return [
        section(chats / "text.jsonl", text, shuffle_buffer=20) | {"weight": 0.75},
        section(chats / "train.jsonl", shuffle_buffer=20, **options) | {"weight": 0.25},
    ]


KINDS = {
    "packed": {},
    "joined": {"document_masks": False},
    "padded": {"packed": False},
    "mixture": None,
    "padded mixture": None,
}


def dataset_of(kind, chats):
    if "mixture" in kind:
        return mixture(chats, packed=kind == "mixture")
    return section(chats / "train.jsonl", shuffle_buffer=20, **KINDS[kind])


@pytest.mark.parametrize(
    ("kind", "workers"),
    [("packed", 0), ("padded", 0), ("mixture", 2)]
    + [pytest.param(kind, 0, marks=pytest.mark.slow) for kind in ("joined", "padded mixture")],
)
def test_a_resumed_run_reads_the_same_chats(chat_dir, tmp_path, chats, kind, workers):
    options = (f"num_workers={workers}", "distillation.weight=0.5", "batch_size=3")
    options += ("gradient_accumulation_steps=2",)
    data = dataset_of(kind, chats)
    run(config(chat_dir, tmp_path / "whole", chats, *options, dataset=data))
    stop = signal_at(3, "SIGINT")
    cut = config(chat_dir, tmp_path / "cut", chats, *options, *stop, dataset=data)
    assert not run(cut).finished
    resume = "resume_from_checkpoint=True"
    recipe = run(config(chat_dir, tmp_path / "cut", chats, *options, resume, dataset=data))
    assert recipe.finished and logged(tmp_path / "cut") == logged(tmp_path / "whole")
    seen = [logged(tmp_path / name, "tokens_seen") for name in ("cut", "whole")]
    assert seen[0] == seen[1] and len(seen[0]) == 6
    losses = list(logged(tmp_path / "whole").values())
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["packed", "mixture"])
def test_two_ranks_resume_exactly(chat_dir, tmp_path, chats, kind):
    options = ("batch_size=2", "num_workers=1", "save_every_n_steps=2")

    def start(output, *more):
        cfg = config(chat_dir, output, chats, *options, *more, dataset=dataset_of(kind, chats))
        return run_forked("--config", write_config(cfg, tmp_path / "c.yaml"), ranks=2)

    done = start(tmp_path / "whole")
    assert done.returncode == 0, done.stderr
    assert start(tmp_path / "cut", *signal_at(5, "SIGKILL")).returncode != 0
    done = start(tmp_path / "cut", "resume_from_checkpoint=True")
    assert done.returncode == 0, done.stderr
    for key in ("loss", "tokens_seen"):
        assert logged(tmp_path / "cut", key) == logged(tmp_path / "whole", key), key


def reference_loss(chat_dir, output, batches):
    """Return the mean loss of the pretrained model over the tokens with a label, one by one."""
    cfg = RunConfig.parse(make_config(chat_dir, output))
    model = llama(**{k: v for k, v in cfg.model.items() if k != "_component_"})
    run = Run.of(cfg)
    model.load_state_dict(run.pretrained.read(run, run.prepared))
    total, count = 0.0, 0
    for ids, labels in batches:
        with torch.no_grad():
            logits = model(torch.tensor([ids]))[0, :-1].double()
        losses = F.cross_entropy(logits, torch.tensor(labels[1:]), reduction="none")
        kept = torch.tensor(labels[1:]) != -100
        total, count = total + losses[kept].sum().item(), count + int(kept.sum())
    return total / count


def dated_folder(chat_dir, folder):
    """Copy a folder, and let its template print the date."""
    shutil.copytree(chat_dir, folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{{ strftime_now('%d %B %Y') }}" + TURNS
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def let_years_pass(monkeypatch):
    class Later(datetime.date):
        @classmethod
        def today(cls):
            return datetime.date(2031, 9, 1)

    for module in ("hestia_tune.models.tokenizers", "hestia_tune.run"):
        monkeypatch.setattr(f"{module}.date", Later)


def test_stages_before_the_training_keep_the_date_of_their_start(
    chat_dir, tmp_path, chats, monkeypatch
):
    """Sensitivity and reconstruction identify their chats by the tokens, which hold the date."""
    folder, out = dated_folder(chat_dir, tmp_path / "dated"), tmp_path / "out"
    few = (*FEW, "sensitivity_estimation.num_samples=3", "sensitivity_estimation.num_probes=2")
    cfg = config(folder, out, chats, *few, dataset=dataset_of("packed", chats))
    measure_sensitivity(Run.of(RunConfig.parse(cfg)))
    first = Run.of(cfg)
    ReconstructionRecipe(first).run()
    let_years_pass(monkeypatch)
    again = Run.of(cfg)
    assert again.tokenizer.date == first.tokenizer.date != "2031-09-01"
    monkeypatch.setattr("hestia_tune.stages._measure", None)  # nothing is measured again
    measure_sensitivity(again)
    recipe = ReconstructionRecipe(again)
    recipe.run()
    assert not recipe.computed
    assert run_qat(cfg) == 0
    assert Run.of(OmegaConf.merge(cfg, {"output_dir": str(tmp_path / "other")})).tokenizer.date == (
        "2031-09-01"
    )
    (out / DATE_FILE).write_text("yesterday")
    with pytest.raises(ValueError, match=f"{DATE_FILE} must hold a date such as .* delete it"):
        Run.of(cfg)


@pytest.mark.parametrize("component", [HELD, STREAM, "torchtune.datasets.chat_dataset"])
def test_a_run_that_resumes_on_another_day(chat_dir, tmp_path, chats, monkeypatch, component):
    """The template prints the date of the run's start, also in data that is held in memory."""
    folder = dated_folder(chat_dir, tmp_path / "dated")
    data, most = section(chats / "train.jsonl", component), "tokenizer.max_seq_len=48"
    if "torchtune" in component:
        del data["seq_len"]
        data |= {"conversation_column": "messages", "conversation_style": "openai"}
        data |= {"split": "train"}
    run(config(folder, tmp_path / "whole", chats, most, dataset=data))
    stop = signal_at(3, "SIGINT")
    assert not run(config(folder, tmp_path / "cut", chats, most, *stop, dataset=data)).finished

    let_years_pass(monkeypatch)
    resume = "resume_from_checkpoint=True"
    assert run(config(folder, tmp_path / "cut", chats, most, resume, dataset=data)).finished
    assert logged(tmp_path / "cut") == logged(tmp_path / "whole")
    run(config(folder, tmp_path / "later", chats, most, dataset=data))
    assert logged(tmp_path / "later") != logged(tmp_path / "whole")


@pytest.mark.parametrize("loss_on", ["replies", "all"])
def test_packed_and_padded_chats_have_the_loss_of_single_chats(chat_dir, tmp_path, chats, loss_on):
    from hestia_tune.data import chat_dataset
    from hestia_tune.models import HuggingFaceTokenizer

    found = {}
    for kind, packed in (("packed", True), ("padded", False)):
        cfg = config(chat_dir, tmp_path / kind, chats, "max_steps=1", "batch_size_val=4")
        held = {"packed": packed, "loss_on": loss_on}
        cfg.dataset_val = section(chats / "held.jsonl", HELD, **held)
        found[kind] = run(cfg).validation_losses["pretrained"]
    single = chat_dataset(
        HuggingFaceTokenizer(str(chat_dir)), source="json", data_files=str(chats / "held.jsonl"),
        seq_len=64, packed=False, loss_on=loss_on,
    )  # fmt: skip
    pairs = [(sample["tokens"], sample["labels"]) for sample in single]
    expected = reference_loss(chat_dir, tmp_path / "none", pairs)
    assert found["packed"] == pytest.approx(expected, rel=1e-5)
    assert found["padded"] == pytest.approx(expected, rel=1e-5)


FEW = (
    "reconstruction=auto",
    "reconstruct.num_samples=8",
    "reconstruct.batch_size=4",
    "reconstruct.epochs=2",
    "reconstruct.kl_blocks=2",
    "reconstruct.kl_epochs=2",
    "quantizer.scale=learned",
    "quantizer.start=least_squares",
    "schedule={rho: 0.0, tau_init: 0.0, alpha: 0.0}",
    "distillation.weight=1.0",
)


SLOWLY = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("joined", "mixture")]


@pytest.mark.parametrize("kind", ["packed", "padded", "padded mixture", *SLOWLY])
def test_all_three_stages_run_on_chats(chat_dir, tmp_path, chats, kind, monkeypatch):
    """Stage 1 learns all real tokens, and stages 2 and 3 the replies.

    Padding has the hidden states of a token that nobody wrote, so no loss may see it.
    """
    seen = {}

    class Spy(engine.Reconstruction):
        def __init__(self, *args, predicted_masks, **options):
            seen["hidden"], seen["predicted"] = args[4], predicted_masks
            super().__init__(*args, predicted_masks=predicted_masks, **options)

    monkeypatch.setattr("hestia_tune.reconstruction.reconstruct.Reconstruction", Spy)
    cfg = config(chat_dir, tmp_path, chats, *FEW, dataset=dataset_of(kind, chats))
    cfg.dataset_val = section(chats / "held.jsonl", HELD)
    parsed = RunConfig.parse(cfg)
    batches = calibration_batches(parsed, Run.of(parsed).tokenizer, 8, 4)
    assert run_qat(cfg) == 0
    found = json.loads((tmp_path / "reconstruction" / "reconstruction.json").read_text())
    measures = [window["measure"] for window in found["windows"]]
    assert measures == ["error", "error", "divergence"]
    assert all(window["error"] < window["naive_error"] for window in found["windows"])
    assert len(logged(tmp_path)) == 6

    longest = max(batch.tokens.shape[1] for batch in batches)
    for batch, hidden, predicted in zip(batches, seen["hidden"], seen["predicted"], strict=True):
        rows = F.pad(batch.tokens, (0, longest - batch.tokens.shape[1]), value=2)
        is_padding = rows == 2  # <pad>, which no chat holds
        following = torch.hstack((is_padding[:, 1:], torch.ones_like(is_padding[:, :1])))
        assert torch.equal(hidden, ~following)
        assert (predicted <= hidden).all() and 0 < predicted.sum() < hidden.sum()


@pytest.mark.parametrize("kind", ["packed", "padded"])
@pytest.mark.parametrize("bos", [True, False])  # BOS of the template alone, as in SmolLM2
def test_every_chat_is_scored_alone_without_a_second_bos(chat_dir, tmp_path, chats, kind, bos):
    """The texts of an evaluation get BOS when they are scored, so they have none of their own."""
    source = make_tokenizer_folder(tmp_path / "t", "{{ bos_token }}" + TURNS, bos=bos)
    cfg = config(chat_dir, tmp_path, chats, dataset=dataset_of(kind, chats))
    cfg.tokenizer = {"_component_": "hestia_tune.models.AutoTokenizer", "path": source}
    tokenizer = make(cfg.tokenizer)
    texts = texts_of(calibration_batches(RunConfig.parse(cfg), tokenizer, 1000, 1), tokenizer)
    rows = [json.loads(line)["messages"] for line in (chats / "train.jsonl").open()]
    rendered = [tokenizer.of_transformers.apply_chat_template(row, tokenize=False) for row in rows]
    assert all(text.startswith("<bos>") for text in rendered)
    assert not any("<bos>" in text for text in texts) and len(texts) > 30
    whole = [text.removeprefix("<bos>") for text in rendered]  # long chats are cut
    assert all(any(chat.startswith(text) for chat in whole) for text in texts)
    assert set(texts) & set(whole) and len(set(texts)) > 30


def test_a_reconstruction_on_other_masks_is_another_one(chat_dir, tmp_path, chats):
    options = ("quantizer.scale=learned", "reconstruct.num_samples=4", "reconstruct.batch_size=4")
    cfg = config(chat_dir, tmp_path, chats, *options, dataset=dataset_of("packed", chats))
    ReconstructionRecipe(Run.of(cfg)).run()
    cfg.dataset.document_masks = False
    with pytest.raises(ValueError, match=r"made with other settings \(samples\)"):
        ReconstructionRecipe(Run.of(cfg)).run()


@pytest.mark.parametrize("kind", ["packed", "padded"])
def test_sensitivity_is_measured_on_chats(chat_dir, tmp_path, chats, kind):
    cfg = config(
        chat_dir, tmp_path, chats, "sensitivity_estimation.num_samples=3",
        "sensitivity_estimation.num_probes=2", dataset=dataset_of(kind, chats),
    )  # fmt: skip
    artifact = measure_sensitivity(Run.of(RunConfig.parse(cfg))).artifact
    parsed = RunConfig.parse(cfg)
    batches = calibration_batches(parsed, Run.of(parsed).tokenizer, 3, 1)
    assert artifact.tokens_seen == sum(batch.num_predicted for batch in batches)


TORCHTUNE = {
    "_component_": "torchtune.datasets.chat_dataset",
    "source": "json",
    "split": "train",
    "conversation_column": "messages",
    "conversation_style": "openai",
}


@pytest.mark.parametrize("template", [TURNS, MARKED])
@pytest.mark.parametrize("packed", [False, True])
def test_torchtunes_chat_dataset_has_our_masks(tmp_path, chats, template, packed):
    folder = make_model_dir(tmp_path / "model")
    make_tokenizer_folder(folder, template)
    shutil.copy(make_model_dir(tmp_path / "other") / "config.json", folder / "config.json")
    data = TORCHTUNE | {"data_files": str(chats / "train.jsonl"), "packed": packed}
    cfg = config(folder, tmp_path / "run", chats, dataset=data)
    cfg.tokenizer.max_seq_len = 64
    run(cfg)
    assert len(logged(tmp_path / "run")) == 6
    parsed = RunConfig.parse(cfg)
    planned = TrainingRun.of(parsed.changed(overwrite_output=True))
    own = config(folder, tmp_path / "x", chats, packed=False, seq_len=64)
    theirs = planned.data.dataset
    if packed:
        return
    from hestia_tune.data import streaming_chat_dataset

    options = OmegaConf.to_container(own.dataset) | {"shuffle_buffer": 0, "epochs": 1}
    del options["_component_"]
    ours = [*streaming_chat_dataset(planned.tokenizer, **options)]
    for number in range(20):
        mine, other = ours[number], theirs[number]
        assert mine["tokens"] == list(other["tokens"])
        assert mine["labels"] == list(map(int, other["labels"]))


def told(caplog, cfg):
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        parsed = RunConfig.parse(cfg)
        planned = Run.of(parsed)
        TrainingData(parsed, planned.tokenizer, seed=0)
    return caplog.text


def test_short_data_are_reported(chat_dir, tmp_path, chats, caplog):
    path = tmp_path / "short.txt"
    path.write_text("Hello, this is a short text of fifty-two characters.")
    text = {
        "_component_": "hestia_tune.data.streaming_text_dataset",
        "source": "text",
        "data_files": str(path),
        "seq_len": 64,
    }
    cfg = config(chat_dir, tmp_path / "a", chats, "max_steps=500", dataset=text)
    log = told(caplog, cfg)
    # 53 tokens with EOS, and 500 steps of 4 sequences of 64 tokens.
    assert "short.txt is short (52 characters, 1 sequence of up to 64 tokens)" in log
    assert "the run will read it 2,415 times; add data, or lower max_steps (now 500)" in log
    caplog.clear()
    assert "is short" not in told(caplog, config(chat_dir, tmp_path / "b", chats, "max_steps=8"))
    log = told(caplog, config(chat_dir, tmp_path / "c", chats, "max_steps=900"))
    assert "train.jsonl is short" in log and "sequences of up to 64 tokens" in log
    caplog.clear()
    mixed = config(chat_dir, tmp_path / "d", chats, "max_steps=900", dataset=mixture(chats))
    log = told(caplog, mixed)
    assert "train.jsonl is short" in log and "text.jsonl is short" in log


def test_a_stream_that_its_epochs_end_too_soon_is_reported(chat_dir, tmp_path, chats, caplog):
    options = ("dataset.max_tokens=9999999", "dataset.epochs=2")
    log = told(caplog, config(chat_dir, tmp_path / "a", chats, *options, "max_steps=900"))
    assert "train.jsonl ends before the run: dataset.epochs=2 gives about" in log
    assert "set dataset.epochs=null" in log and "is short" not in log
    caplog.clear()
    enough = config(chat_dir, tmp_path / "b", chats, *options, "max_steps=1")
    assert "ends before the run" not in told(caplog, enough)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["dataset.max_tokens=2560"],
            "the run has 10 steps, not the 1,000 of max_steps: dataset.max_tokens=2560 ends it (40 "
            "sequences, 4 in a step); set dataset.max_tokens=256000 for 1,000 steps",
        ),
        (
            ["dataset.max_tokens=2560", "dataset.epochs=1"],
            "dataset.max_tokens=2560 ends it (40 sequences, 4 in a step)",
        ),
        (["dataset.max_tokens=null", "max_steps=7"], ""),
    ],
)
def test_max_steps_that_a_stream_cuts_is_reported(
    chat_dir, tmp_path, chats, caplog, overrides, message
):
    cfg = config(chat_dir, tmp_path, chats, "max_steps=1000", *overrides)
    log = told(caplog, cfg)
    assert (message in log) if message else ("not the" not in log)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["epochs=2"],
            "the run has 20 steps, not the 1,000 of max_steps: epochs=2 ends it (40 sequences, 4 "
            "in a step); set epochs=100 for 1,000 steps",
        ),
        (["max_steps_per_epoch=3", "epochs=2"], "6 steps, .* max_steps_per_epoch=3 ends it"),
        (["max_steps=10"], ""),
    ],
)
def test_max_steps_that_epochs_cut_is_reported(model_dir, tmp_path, caplog, overrides, message):
    cfg = make_config(model_dir, tmp_path, "dataset.num=40", "max_steps=1000", *overrides)
    log = told(caplog, cfg)
    if not message:
        assert "not the" not in log
    else:
        assert message in log or all(part in log for part in message.split(" .* "))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            TORCHTUNE | {"conversation_column": "chat"},
            "dataset could not be loaded: its first sample cannot be made (KeyError: 'chat')",
        ),
        ([{"weight": 0.5}], "dataset[0] must be a section with a _component_"),
        (
            [{"_component_": STREAM, "weight": 0.5}, {"_component_": STREAM}],
            "dataset[1] has no weight, but other sections of the list have",
        ),
        ([{"_component_": STREAM, "weight": 0}], "dataset[0].weight must be in [1e-09, 1e+09]"),
        ({"_component_": STREAM, "weight": 1}, "dataset.weight is for a list of datasets"),
        (
            [{"_component_": STREAM, "weight": 1, "seq_len": n} for n in (8, 16)],
            "the sections of dataset have the seq_len 8, 16; a mixture has one seq_len",
        ),
    ],
)
def test_wrong_sections_are_refused_before_the_run(chat_dir, tmp_path, chats, data, message):
    if isinstance(data, dict) and "source" in data:
        data = data | {"data_files": str(chats / "train.jsonl")}
    with pytest.raises(ValueError) as raised:
        TrainingRun.of(RunConfig.parse(config(chat_dir, tmp_path, chats, dataset=data)))
    assert message in str(raised.value)


def test_streams_in_a_list_need_weights(chat_dir, tmp_path, chats):
    data = [{k: v for k, v in part.items() if k != "weight"} for part in mixture(chats)]
    with pytest.raises(ValueError, match="streams in a list need a weight in every section"):
        TrainingRun.of(RunConfig.parse(config(chat_dir, tmp_path, chats, dataset=data)))
    with pytest.raises(ValueError, match="the number of steps is not known; give max_steps"):
        cfg = config(chat_dir, tmp_path, chats, "max_steps=null", dataset=mixture(chats))
        TrainingRun.of(RunConfig.parse(cfg))
