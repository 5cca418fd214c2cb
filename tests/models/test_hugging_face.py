"""Tests models of transformers as torchtune decoders, and the table of families."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from families import FAMILIES, family_config, make_family
from tiny import make_config, make_model_dir

from hestia_tune import HestiaQATQuantizer
from hestia_tune.blocks import find_blocks, record_blocks, share_equal
from hestia_tune.config.run_config import RunConfig
from hestia_tune.export.gguf_families import check_architecture
from hestia_tune.models import AutoTokenizer, HuggingFaceCheckpointer, HuggingFaceTokenizer
from hestia_tune.models.decoder import (
    hugging_face,
    model_on_meta,
    names_in_files,
    transformers_tensors,
)
from hestia_tune.models.folder import SafetensorsFolder
from hestia_tune.models.loading import build_buffers
from hestia_tune.qat.linear import quantized_linears, weights_of
from hestia_tune.sensitivity.curvature import (
    CalibrationBatch,
    HessianBatch,
    Segment,
    cut,
    logits_of,
    mean_loss,
)

transformers = pytest.importorskip("transformers")

PAGE = Path(__file__).parents[2] / "docs" / "your_model.md"
TOKENS = torch.randint(1, 200, (2, 20), generator=torch.Generator().manual_seed(0))
# Positions of two documents in one sequence, longer than the sliding windows.
POSITIONS = torch.cat([torch.arange(11), torch.arange(9)]).expand(2, -1)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """Return the name, the folder and the loaded model of a family."""
    folder = make_family(tmp_path_factory.mktemp("family"), request.param)
    model = model_on_meta(folder)
    assert all(value.is_meta for value in (*model.parameters(), *model.buffers()))
    model.to_empty(device="cpu")
    build_buffers(model, "cpu")
    model.load_state_dict(dict(transformers_tensors(SafetensorsFolder(folder))))
    return request.param, folder, model.eval()


@torch.no_grad()
def test_it_computes_what_transformers_computes(family):
    _, folder, model = family
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = reference(TOKENS).logits
    assert torch.equal(model(TOKENS), expected)
    model.set_num_output_chunks(3)
    chunks = model(TOKENS)
    model.set_num_output_chunks(0)
    assert len(chunks) == 3 and torch.equal(torch.cat(chunks, 1), expected)


@torch.no_grad()
def test_documents_do_not_see_each_other(family):
    _, _, model = family
    mask = torch.ones(2, 20, 20, dtype=torch.bool)  # the positions decide, not these values
    found = model(TOKENS, mask=mask, input_pos=POSITIONS)
    for part in (slice(0, 11), slice(11, 20)):
        torch.testing.assert_close(found[:, part], model(TOKENS[:, part]), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="a mask needs input_pos"):
        model(TOKENS, mask=mask)


def test_names_lead_to_the_names_in_the_folder(family):
    name, folder, model = family
    source = SafetensorsFolder(folder)
    in_files = source.shapes
    parts = names_in_files(source)
    assert parts.keys() == model.state_dict().keys()
    assert sorted(sum(parts.values(), [])) == sorted(in_files)
    renamed = [key for key in parts if parts[key] != [key]]
    converted = {"Qwen3-MoE": "mlp.experts", "GPT-NeoX": "lm_head"}
    assert bool(renamed) == (name in converted)
    assert all(converted[name] in key for key in renamed)


@pytest.mark.parametrize("packed", [False, True])
def test_blocks_make_a_chain(family, packed, caplog):
    _, _, model = family
    layers = quantized_linears(HestiaQATQuantizer(group_size=32).prepare(model_of(family)))
    weights = weights_of(layers, dict(model.named_parameters()))
    model.requires_grad_(False)
    inputs = {"mask": torch.ones(2, 20, 20), "input_pos": POSITIONS} if packed else {}
    batch = CalibrationBatch(tokens=TOKENS, labels=TOKENS.roll(-1, 1), model_inputs=inputs)
    states, segments = cut(model, weights, batch)
    assert len(segments) == len(find_blocks(model)) + 1 and not caplog.records
    loss, start = states, states
    for segment in segments:
        loss = segment.forward(loss)
    torch.testing.assert_close(loss, mean_loss(logits_of(model, batch), batch.labels))
    assert [len(segment.weights) for segment in segments[:-1]] == [
        len(layers) // len(find_blocks(model))
    ] * len(find_blocks(model))
    # The curvature by segments equals the curvature of the whole model.
    for weight in weights.values():
        weight.requires_grad_()
    generator = torch.Generator().manual_seed(0)
    signs = {n: torch.randn(w.shape, generator=generator) for n, w in weights.items()}
    directions = [(name, lambda name=name: signs[name]) for name in weights]
    whole = Segment(lambda tokens: mean_loss(logits_of(model, batch), batch.labels), weights)
    found = HessianBatch(start, segments).quadratic_forms(directions)
    expected = HessianBatch(TOKENS, [whole]).quadratic_forms(directions)
    assert found == pytest.approx(expected, rel=1e-2, abs=1e-4)


def model_of(family):
    return model_on_meta(family[1])


def table_row(name: str, folder: Path) -> str:
    """Return the beginning of a family's row in the table of supported models."""
    HestiaQATQuantizer(group_size=32).prepare(model_on_meta(folder))
    try:
        gguf = check_architecture(json.loads((folder / "config.json").read_text()))[0].name
    except ValueError:
        gguf = "no"
    return f"| {name} | full | {gguf} |"


def test_the_table_of_families_matches_the_models(tmp_path):
    rows = [table_row(name, make_family(tmp_path / name, name)) for name in FAMILIES]
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if "| full |" in line]
    found = [line[: len(row)] for line, row in zip(lines, rows, strict=True)]
    assert found == rows, "\n".join(rows)


def edit_config(folder: Path, **changes) -> str:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return str(folder)


def test_no_code_of_a_folder_runs(tmp_path):
    """Neither a class in the folder nor a kernel on the hub runs."""
    folder = make_family(tmp_path / "kernel", "Qwen3")
    for key in ("attn_implementation", "_attn_implementation", "experts_implementation"):
        model = hugging_face(edit_config(folder, **{key: "someone/kernel"}))
        assert model.config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match='must be "sdpa" or "eager".*someone/kernel'):
        hugging_face(str(folder), attn_implementation="someone/kernel")
    assert hugging_face(str(folder), "eager").config._attn_implementation == "eager"
    own = edit_config(folder, model_type="own", auto_map={"AutoConfig": "own.Config"})
    (folder / "own.py").write_text("raise SystemError")
    with pytest.raises(ValueError, match="custom code|execute"):
        hugging_face(own)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "nothing"}, "nothing"),
        ({"model_type": "gemma3", "text_config": {}}, "parts besides a text decoder"),
        ({"quantization_config": {"quant_method": "gptq"}}, "is quantized .gptq.*dense"),
        ({"model_type": "t5"}, "parts besides a text decoder"),
    ],
)
def test_models_that_cannot_be_trained_are_refused(tmp_path, changes, message):
    folder = make_family(tmp_path / "model", "Llama")
    with pytest.raises(ValueError, match=message):
        hugging_face(edit_config(folder, **changes))


def test_a_model_without_a_longest_sequence_takes_2048_or_the_option(tmp_path):
    transformers.BloomConfig(hidden_size=64, n_layer=2, n_head=4).save_pretrained(tmp_path)
    with torch.device("meta"):
        assert hugging_face(str(tmp_path)).max_seq_len == 2048
        model = hugging_face(str(tmp_path), max_seq_len=512)
    assert model.max_seq_len == 512
    assert len(quantized_linears(HestiaQATQuantizer(group_size=32).prepare(model))) == 8


def test_layers_that_are_not_linears_are_refused_by_their_kind(tmp_path):
    transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4).save_pretrained(tmp_path)
    with torch.device("meta"):
        model = hugging_face(str(tmp_path))
    for include in (None, ["*"], ["*.c_attn"]):  # No advice may lead to the head that is tied.
        with pytest.raises(
            ValueError, match="not linears but Conv1D, .*use another model"
        ) as error:
            HestiaQATQuantizer(group_size=32, include=include).prepare(model)
        assert "include" not in str(error.value)
    theirs = transformers.AutoModelForCausalLM.from_config(model.config)
    assert theirs.lm_head.weight is theirs.transformer.wte.weight
    with pytest.raises(ValueError, match="not linears but Conv1D, .*use another model"):
        HestiaQATQuantizer(group_size=32, include=["*"]).prepare(theirs)


@pytest.mark.parametrize(
    ("family", "parts"),
    [("Mamba", ["in_proj", "x_proj", "out_proj"]), ("Mamba2", ["in_proj", "out_proj"])],
)
def test_state_space_models_are_quantized_except_for_dt_proj(tmp_path, family, parts):
    """Mamba reads the weight of its ``dt_proj`` directly."""
    model = model_on_meta(make_family(tmp_path / "model", family))
    layers = quantized_linears(HestiaQATQuantizer(group_size=32).prepare(model))
    assert {name.rpartition(".")[2] for name in layers} == set(parts)
    assert len(layers) == 2 * len(parts)


def test_a_missing_folder_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="no config.json"):
        hugging_face(str(tmp_path))
    asked = []

    def offline(name, **options):
        asked.append(name)
        raise ConnectionError("no\nnetwork")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(ValueError, match="someone/model is not a local folder.*no network"):
        hugging_face("someone/model")
    with pytest.raises(ValueError, match="no config.json"):
        hugging_face("./models/model")
    assert asked == ["someone/model"]


def test_a_name_on_the_hub(tmp_path, monkeypatch):
    folder = make_family(tmp_path / "model", "Qwen2")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: str(folder))
    assert type(hugging_face("someone/qwen")).__name__ == "Qwen2ForCausalLM"
    assert AutoTokenizer("someone/qwen").eos_id == 0
    assert HuggingFaceCheckpointer("someone/qwen", str(tmp_path)).folder == folder


def test_the_config_needs_only_a_path(tmp_path):
    config = RunConfig.parse(family_config(tmp_path / "model", tmp_path / "out"))
    folder = str(tmp_path / "model")
    assert config.tokenizer["path"] == config.checkpointer["checkpoint_dir"] == folder
    other = family_config(
        tmp_path / "model",
        tmp_path / "out",
        "checkpointer._component_=torchtune.training.FullModelHFCheckpointer",
    )
    with pytest.raises(ValueError, match="must be hestia_tune.models.HuggingFaceCheckpointer"):
        RunConfig.parse(other)
    mixed = make_config(
        make_model_dir(tmp_path / "llama"),
        tmp_path / "out",
        "checkpointer._component_=hestia_tune.models.HuggingFaceCheckpointer",
    )
    with pytest.raises(ValueError, match="must be torchtune.training.FullModelHFCheckpointer"):
        RunConfig.parse(mixed)


def test_the_tokenizer_equals_the_one_of_transformers(tmp_path):
    folder = make_model_dir(tmp_path / "model")
    ours, plain = AutoTokenizer(str(folder)), HuggingFaceTokenizer(str(folder))
    text = "Ids, of a text: as transformers has them."
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert ours.encode(text, add_bos=False, add_eos=False) == theirs(text)["input_ids"]
    assert (ours.eos_id, ours.pad_id, ours.vocab_size) == (0, 0, plain.vocab_size)
    with pytest.raises(ValueError, match=f"'<no>' is not in {folder}/tokenizer.json"):
        AutoTokenizer(str(folder), "<no>")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="no tokenizer in"):
        AutoTokenizer(str(folder))


def test_a_link_out_of_the_folder_is_refused_before_training(tmp_path):
    folder = make_family(tmp_path / "model", "Qwen3")
    shutil.move(folder / "tokenizer.json", tmp_path / "tokenizer.json")
    (folder / "tokenizer.json").symlink_to(tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match="tokenizer.json is a link to"):
        HuggingFaceCheckpointer(str(folder), str(tmp_path))


def test_missing_weights_are_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = make_family(tmp_path / "model", "Qwen3-MoE")
    state = load_file(folder / "model.safetensors")
    del state["model.layers.1.mlp.experts.2.up_proj.weight"]
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises((ValueError, RuntimeError), match="missing|onversion"):
        dict(transformers_tensors(SafetensorsFolder(folder)))


class Shared(torch.nn.Module):
    """A decoder whose blocks are called twice."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(5, 4)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for block in [*self.blocks, *self.blocks]:
            hidden = block(hidden)
        return hidden


def test_blocks_that_are_not_a_chain_are_refused():
    model = Shared()
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="more than its blocks"):
        record_blocks(model, tokens).check(model(tokens))
    with pytest.raises(ValueError, match="one after the other"):
        record_blocks(torch.nn.Embedding(5, 4), tokens)
    assert not find_blocks(torch.nn.Linear(2, 2))
    assert "forward" not in vars(model.blocks[0])


def test_blocks_that_share_a_dict_do_not_run_one_by_one():
    """Gemma 4's later blocks read keys and values there that earlier ones have computed."""

    class Block(torch.nn.Module):
        def forward(self, hidden, shared):
            shared.setdefault("keys", hidden)
            return hidden + shared["keys"]

    class Model(torch.nn.Module):
        def __init__(self, shared):
            super().__init__()
            self.layers, self.shared = torch.nn.ModuleList([Block(), Block()]), shared

        def forward(self, tokens):
            hidden, shared = tokens.float(), {}
            for block in self.layers:
                hidden = block(hidden, shared if self.shared else {})
            return hidden

    tokens = torch.ones(1, 3, dtype=torch.int64)
    record_blocks(Model(shared=False), tokens)
    with pytest.raises(ValueError, match="share a dict or list.* cannot run one by one"):
        record_blocks(Model(shared=True), tokens)


def test_equal_tensors_are_kept_once(family, monkeypatch):
    _, _, model = family
    with torch.no_grad():
        chain = record_blocks(model, TOKENS)
        monkeypatch.delattr(type(chain.blocks[0]), "forward")  # so no block can run
        again = record_blocks(model, TOKENS, gives_tuple=chain.gives_tuple)
    assert torch.equal(again.hidden, chain.hidden) and again.gives_tuple == chain.gives_tuple
    one, other = chain.calls, again.calls
    shared = share_equal(other, one)
    for before, after in zip(one, shared, strict=True):
        for key, value in before.kwargs.items():
            if isinstance(value, torch.Tensor):
                assert after.kwargs[key] is value
    assert share_equal(other[:1], one) == other[:1]  # another structure is returned unchanged
