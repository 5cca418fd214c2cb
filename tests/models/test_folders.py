"""Tests that a folder is read as transformers reads it: its files, its head, its odd tensors."""

import json
import shutil

import pytest
import torch
from families import family_config, make_family
from hard_folders import edit_json
from safetensors.torch import load_file, save_file
from tiny import make_config, run

from hestia_tune import HestiaQATQuantizer, quantized_linears
from hestia_tune.config.run_config import RunConfig
from hestia_tune.errors import InputError
from hestia_tune.models.decoder import model_on_meta
from hestia_tune.models.folder import ModelFolder, SafetensorsFolder
from hestia_tune.models.loading import (
    check_model_section,
    load_model,
    plain_on_meta,
    shapes_of,
)
from hestia_tune.models.sources import folder_tensors, folder_weights, open_source
from hestia_tune.run import PretrainedWeights

transformers = pytest.importorskip("transformers")

TOKENS = torch.randint(1, 200, (2, 20), generator=torch.Generator().manual_seed(0))
FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


def edit_state(folder, change):
    state = load_file(folder / FILE)
    change(state)
    save_file({k: v.contiguous() for k, v in state.items()}, folder / FILE, {"format": "pt"})
    return folder


@torch.no_grad()
def expected_logits(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()(TOKENS).logits


@torch.no_grad()
def found_logits(folder):
    """Return the logits of the model as it is read for training, after the gate."""
    model = model_on_meta(folder)
    model.load_state_dict(folder_weights("HUGGING_FACE", folder, model), assign=True)
    with torch.device("cpu"):
        model.rope_init()
    return model.float().eval()(TOKENS)


def assert_as_transformers(folder):
    torch.testing.assert_close(found_logits(folder), expected_logits(folder), rtol=0, atol=1e-6)


HEADS = {
    "absent": lambda state, head, embedding: state.pop(head),
    "equal": lambda state, head, embedding: state.update({head: state[embedding].clone()}),
    "different": lambda state, head, embedding: None,
    "alone": lambda state, head, embedding: state.pop(embedding),
}
NAMES = {
    "Llama": ("lm_head.weight", "model.embed_tokens.weight"),
    "Gemma": ("lm_head.weight", "model.embed_tokens.weight"),
    "GPT-NeoX": ("embed_out.weight", "gpt_neox.embed_in.weight"),
}


def head_folder(folder, family, flag, head):
    """Write a folder with one of the `HEADS`, and the flag, or no flag for None."""
    make_family(folder, family, tie_word_embeddings=False)
    edit_state(folder, lambda state: HEADS[head](state, *NAMES[family]))
    config = json.loads((folder / "config.json").read_text())
    config.pop("tie_word_embeddings", None)
    config |= {} if flag is None else {"tie_word_embeddings": flag}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("flag", [True, False, None])
@pytest.mark.parametrize("family", NAMES)
def test_a_tied_head_is_what_transformers_makes_of_it(tmp_path, family, flag, head):
    folder = head_folder(tmp_path / "model", family, flag, head)
    report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)[1]
    if report["missing_keys"]:  # transformers fills it with random numbers
        with pytest.raises(InputError, match="weights are missing in"):
            found_logits(folder)
        with pytest.raises(InputError, match="weights are missing in"):
            open_source("HUGGING_FACE", folder, {}, quantize=False)
        return
    assert_as_transformers(folder)
    # What is exported is the same model, for programs that believe config.json alone.
    source = open_source("HUGGING_FACE", folder, {}, quantize=False)
    model = load_exported(source)
    torch.testing.assert_close(model(TOKENS).logits, expected_logits(folder), rtol=0, atol=1e-6)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert bool(source.config.get("tie_word_embeddings", family == "Gemma")) == tied
    heads = [n for n in source.shapes if n in (NAMES[family][0], "lm_head.weight")]
    assert bool(heads) == (not tied or (head == "alone" and family == "GPT-NeoX"))


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("option", [True, False])
def test_torchtune_has_the_head_of_transformers_or_refuses(tmp_path, flag, head, option):
    folder = head_folder(tmp_path / "model", "Llama", flag, head)
    cfg = make_config(folder, tmp_path / "out")
    cfg.model |= {"tie_word_embeddings": option, "norm_eps": 1e-6}
    config = RunConfig.parse(cfg)
    is_tied = flag and head != "different"
    complete = is_tied or head in ("equal", "different")
    if not complete or is_tied != option:
        message = rf"model.tie_word_embeddings={is_tied}" if complete else "weights are missing"
        with pytest.raises(InputError, match=message):
            check_model_section(config)
            folder_weights(config.model_type, folder, plain_on_meta(config.model))
        return
    check_model_section(config)
    model = plain_on_meta(config.model)
    model.load_state_dict(folder_weights(config.model_type, folder, model), assign=True)
    with torch.device("cpu"):
        for module in model.modules():
            if hasattr(module, "rope_init"):
                module.rope_init()
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(TOKENS), expected_logits(folder))


def test_a_builder_without_the_option_names_the_way_out(tmp_path):
    folder = head_folder(tmp_path / "model", "Llama", True, "different")
    cfg = make_config(folder, tmp_path / "out")
    shape = {key: value for key, value in cfg.model.items() if key != "_component_"}
    cfg.model = {"_component_": "torchtune.models.llama3_2.llama3_2", "scale_factor": 1} | shape
    with pytest.raises(
        InputError,
        match="of its own; with torchtune.*always the embedding.*tune init",
    ):
        check_model_section(RunConfig.parse(cfg))


@pytest.mark.parametrize("route", ["torchtune", "transformers"])
def test_a_run_trains_and_writes_a_head_of_its_own(tmp_path, route):
    """All of a run agrees: training, hard model, evaluation and export."""
    folder = head_folder(tmp_path / "model", "Llama", True, "different")
    make = make_config if route == "torchtune" else family_config
    cfg = make(folder, tmp_path / "out", "max_steps=1", "optimizer.lr=1e-9")
    if route == "torchtune":
        cfg.model |= {"tie_word_embeddings": False, "norm_eps": 1e-6}
    run(cfg)
    hard = tmp_path / "out" / "hard_model"
    assert json.loads((hard / "config.json").read_text())["tie_word_embeddings"] is False
    files = [load_file(path) for path in sorted(hard.glob("*.safetensors"))]
    state = {name: value for part in files for name, value in part.items()}
    before = load_file(folder / FILE)
    for name in NAMES["Llama"]:
        torch.testing.assert_close(state[name].float(), before[name], rtol=1e-2, atol=1e-3)
    model, _ = load_model(
        "trained", RunConfig.parse(cfg), device=torch.device("cpu"), dtype=torch.float32
    )
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS), expected_logits(hard))


def shard(folder, seed_offset=0.0):
    """Write the weights as two shards with an index, beside or instead of one file."""
    state = {k: v + seed_offset for k, v in load_file(folder / FILE).items()}
    names, weight_map = sorted(state), {}
    for number in (1, 2):
        part = f"model-0000{number}-of-00002.safetensors"
        chosen = names[number - 1 :: 2]
        save_file({name: state[name] for name in chosen}, folder / part, {"format": "pt"})
        weight_map |= dict.fromkeys(chosen, part)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def beside_stale_shards(folder):
    shard(folder, 0.3)


def shards_alone(folder):
    shard(folder)
    (folder / FILE).unlink()


def beside_other_files(folder):
    noise = {"model.norm.weight": torch.zeros(64), "layers.0.attention.wq.weight": torch.ones(2, 2)}
    (folder / "original").mkdir()
    for name in ("consolidated.safetensors", "consolidated-00001-of-00001.safetensors"):
        save_file(noise, folder / name)
        save_file(noise, folder / "original" / name)
    for name in ("optimizer.safetensors", "model.fp16.safetensors", "aaa.safetensors"):
        save_file(noise, folder / name)
    torch.save(noise, folder / "pytorch_model.bin")
    torch.save(noise, folder / "optimizer.pt")
    lora = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(2, 64)}
    save_file(lora, folder / "adapter_model.safetensors")


def bin_alone(folder):
    torch.save(load_file(folder / FILE), folder / "pytorch_model.bin")
    (folder / FILE).unlink()


def named_in_the_config(folder):
    shutil.copy(folder / FILE, folder / "mine.safetensors")
    edit_state(folder, lambda state: state["model.norm.weight"].mul_(2))
    edit_json(folder / "config.json", transformers_weights="mine.safetensors")


FILES = (
    beside_stale_shards,
    shards_alone,
    beside_other_files,
    bin_alone,
    named_in_the_config,
)


@pytest.mark.parametrize("arrange", FILES)
def test_the_files_of_transformers_are_read(tmp_path, arrange):
    folder = make_family(tmp_path / "model [1]", "Llama")
    arrange(folder)
    assert_as_transformers(folder)
    with torch.no_grad():
        source = open_source("HUGGING_FACE", folder, {}, quantize=False)
        found = load_exported(source)(TOKENS).logits
    torch.testing.assert_close(found, expected_logits(folder))


def load_exported(source):
    config = transformers.AutoConfig.from_pretrained(source.folder)
    state = {name: source.read(name) for name in source.shapes}
    kind = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    return kind.from_pretrained(None, config=config, state_dict=state, dtype=torch.float32).eval()


def missing_shard(folder):
    shards_alone(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def no_index(folder):
    shards_alone(folder)
    (folder / INDEX).unlink()


def only(name):
    def arrange(folder):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.move(folder / FILE, folder / name)

    return arrange


def adapter(folder):
    (folder / FILE).unlink()
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "someone/model"}')
    save_file({"a": torch.ones(1)}, folder / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("arrange", "message"),
    [
        (missing_shard, r"lacks 1 of them: model-00002-of-00002.safetensors; get them, too"),
        (no_index, r"it has shards and no model.safetensors.index.json"),
        (only("model.fp16.safetensors"), r"variant model.fp16.safetensors alone; use it: cp "),
        (only("consolidated.safetensors"), r"in the format of their makers.*Hugging Face's format"),
        (only("original/consolidated.00.pth"), r"in the format of their makers"),
        (only("model.gguf"), r"model.gguf is a finished file; give the folder of the model"),
        (only("weights.safetensors"), r"it has weights.safetensors, which transformers does not"),
        (adapter, r"LoRA adapter; merge it first: python -c '?.*merge_and_unload"),
    ],
)
def test_a_folder_without_the_model_says_what_it_has(tmp_path, arrange, message):
    folder = make_family(tmp_path / "model", "Llama")
    arrange(folder)
    with pytest.raises((OSError, ValueError)):  # transformers has no model there, either
        transformers.AutoModelForCausalLM.from_pretrained(folder)
    for read in (lambda: found_logits(folder), lambda: SafetensorsFolder(folder)):
        with pytest.raises(InputError, match=message) as error:
            read()
        assert "\n" not in str(error.value)


def test_an_adapter_without_a_config_says_how_to_merge_it(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match="no config.json; it holds a LoRA adapter; merge it first"):
        model_on_meta(tmp_path)


def test_torchtune_keeps_the_files_of_the_weights(tmp_path):
    """The hard model has the shards of the pretrained model."""
    folder = shard(make_family(tmp_path / "model", "Llama", tie_word_embeddings=True))
    (folder / FILE).unlink()
    names = sorted(path.name for path in folder.glob("model-*"))
    files = ",".join(names)
    cfg = make_config(
        folder,
        tmp_path / "out",
        f"checkpointer.checkpoint_files=[{files}]",
        "max_steps=1",
        "model.norm_eps=1e-6",
    )
    run(cfg)
    assert len([*(tmp_path / "out" / "hard_model").glob("model-*.safetensors")]) == 2


def masks(state):
    for layer in range(2):
        stem = f"gpt_neox.layers.{layer}.attention"
        state[f"{stem}.bias"] = torch.tril(torch.ones(1, 1, 64, 64, dtype=torch.bool))
        state[f"{stem}.masked_bias"] = torch.tensor(-1e9)
        state[f"{stem}.rotary_emb.inv_freq"] = torch.rand(2)


def rotary(state):
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.rand(8)
    state["model.rotary_emb.inv_freq"] = torch.rand(8)


def more_layers(state):
    for name in [name for name in state if ".layers.1." in name]:
        state[name.replace(".1.", ".2.")] = state[name] + 1


def towers(state):
    state["mtp.layers.0.proj.weight"] = torch.ones(4, 4)
    state["vision_tower.encoder.layers.0.q_proj.weight"] = torch.ones(4, 4)


def no_prefix(state):
    for name in list(state):
        if name.startswith("model."):
            state[name.removeprefix("model.")] = state.pop(name)


def halves(dtype):
    def change(state):
        for name in state:
            state[name] = state[name].to(dtype)

    return change


def norms_apart(state):
    for name in state:
        state[name] = state[name].to(torch.float32 if "norm" in name else torch.bfloat16)


def raw_float8(state):
    for name in state:
        if state[name].dim() == 2:
            state[name] = state[name].to(torch.float8_e4m3fn)


ODD = {
    "masks of Pythia": ("GPT-NeoX", masks),
    "rotary frequencies": ("Llama", rotary),
    "more layers than config.json": ("Llama", more_layers),
    "parts that transformers ignores": ("Llama", towers),
    "no prefix": ("Llama", no_prefix),
    "float16": ("Llama", halves(torch.float16)),
    "bfloat16": ("Qwen3-MoE", halves(torch.bfloat16)),
    "mixed dtypes": ("Gemma 2", norms_apart),
    "raw float8": ("Llama", raw_float8),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_tensors_are_read_as_transformers_reads_them(tmp_path, name):
    family, change = ODD[name]
    folder = edit_state(make_family(tmp_path / "model", family), change)
    assert_as_transformers(folder)
    layers = quantized_linears(HestiaQATQuantizer(group_size=32).prepare(model_on_meta(folder)))
    methods = {name: layer.method for name, layer in layers.items()}
    source = open_source("HUGGING_FACE", folder, methods, quantize=True)
    assert sum(len(source.shapes[n]) in (2, 3) for n in source.quantized) >= len(methods)
    for each in source.shapes:
        source.read(each)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_both_keys_of_the_dtype_are_read(tmp_path, key):
    folder = make_family(tmp_path / "model", "Llama")
    config = json.loads((folder / "config.json").read_text())
    for old in ("dtype", "torch_dtype"):
        config.pop(old, None)
    config[key] = "bfloat16"
    (folder / "config.json").write_text(json.dumps(config))
    assert_as_transformers(folder)
    source = ModelFolder(folder, {})
    assert source.config["torch_dtype"] == "bfloat16" and "dtype" not in source.config


@pytest.mark.parametrize("layout", ["fp8", "compressed-tensors", "one scale"])
def test_float8_with_scales_is_the_model_of_transformers(tmp_path, layout):
    shape = {"hidden_size": 256, "intermediate_size": 384}
    folder = make_family(tmp_path / "model", "Llama", **shape)
    key = "weight_scale_inv" if layout == "fp8" else "weight_scale"

    def change(state):
        for name in [n for n in state if "_proj" in n]:
            weight, stem = state[name], name.removesuffix("weight")
            if layout == "fp8":
                blocks = weight.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
                scale = blocks.abs().amax((1, 3)) / 448
                wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
            elif layout == "one scale":
                scale = wide = weight.abs().max().reshape(1) / 448
            else:
                scale = wide = weight.abs().amax(1, keepdim=True) / 448
            state[name] = (weight / wide).to(torch.float8_e4m3fn)
            state[f"{stem}{key}"] = scale

    edit_state(folder, halves(torch.bfloat16))
    edit_state(folder, change)
    with pytest.raises(InputError, match="float8 with scales, but config.json has no quantization"):
        SafetensorsFolder(folder)
    settings = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    if layout == "fp8":
        settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    edit_json(folder / "config.json", quantization_config=settings)
    found = found_logits(folder)
    if layout == "fp8":  # the others need the package compressed-tensors
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        with torch.no_grad():
            expected = model.float()(TOKENS).logits
        assert torch.linalg.norm(found - expected) <= 1e-5 * torch.linalg.norm(expected)
    state = load_file(folder / FILE)
    name = "model.layers.1.mlp.down_proj.weight"
    scale = state[name.replace("weight", key)]
    if layout == "fp8":
        scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    expected = (state[name].float() * scale).bfloat16()
    assert torch.equal(SafetensorsFolder(folder).read(name), expected)


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "fbgemm_fp8", "mxfp4"])
def test_other_quantized_folders_are_refused_with_the_remedy(tmp_path, method):
    folder = make_family(tmp_path / "model", "Llama")
    edit_json(folder / "config.json", quantization_config={"quant_method": method})
    for read in (found_logits, SafetensorsFolder):
        with pytest.raises(InputError, match=rf"is quantized \({method}\); give a folder with"):
            read(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("model.layers.1.mlp.up_proj.weight"), "missing in .*up_proj.weight; get"),
        (lambda s: s.pop("model.norm.weight"), "missing in .*model.norm.weight"),
        (
            lambda s: s.update({"model.norm.weight": torch.ones(32)}),
            r"mismatched in .*model.norm.weight is \(32,\) instead of \(64,\)",
        ),
        (
            lambda s: s["model.norm.weight"].fill_(float("nan")),
            "must be finite; model.norm.weight .* has NaN or infinity",
        ),
        (
            lambda s: s.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}),
            "quantized already, .* model.norm.weight is torch.int8; give the folder of the orig",
        ),
    ],
)
def test_weights_that_transformers_would_invent_are_refused(tmp_path, change, message):
    folder = edit_state(make_family(tmp_path / "model", "Llama"), change)
    with pytest.raises(InputError, match=message) as error:
        found_logits(folder)
    assert "\n" not in str(error.value)


def test_code_in_the_folder_is_not_needed_for_a_known_class(tmp_path):
    folder = make_family(tmp_path / "model", "Llama")
    edit_json(folder / "config.json", auto_map={"AutoModelForCausalLM": "modeling_own.Own"})
    (folder / "modeling_own.py").write_text("raise SystemError")
    assert_as_transformers(folder)


def test_the_checkpointer_of_torchtune_reads_what_it_cannot_name(tmp_path):
    """A list of files is mapped; torchtune reads other kinds of ``checkpoint_files`` itself."""
    folder = shard(make_family(tmp_path / "model", "Llama", tie_word_embeddings=True))
    cfg = make_config(folder, tmp_path / "out", "model.norm_eps=1e-6")
    cfg.checkpointer.checkpoint_files = {
        "filename_format": "model-{}-of-{}.safetensors",
        "max_filename": "00002",
    }
    (folder / FILE).unlink()
    config = RunConfig.parse(cfg)
    from hestia_tune.models.loading import instantiate

    checkpointer = instantiate(config.checkpointer, "checkpointer")
    model = plain_on_meta(config.model)
    state = PretrainedWeights(config).read_files(checkpointer, shapes_of(model))
    listed = dict(folder_tensors(config.model_type, SafetensorsFolder(folder)))
    assert all(torch.equal(state[name], value) for name, value in listed.items())
