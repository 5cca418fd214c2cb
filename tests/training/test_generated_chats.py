"""Test chats that the model itself writes: turns and ends, families, stops, mixtures, refusals."""

import json
import shutil
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from chat_folders import INSTRUCT, OPENED, SPECIAL, TURNS, make_tokenizer_folder, write_chats
from families import SHAPE, family_config, make_family
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from tiny import logged, make_config

from hestia_tune import generation
from hestia_tune.commands.inspect import check_run
from hestia_tune.commands.qat import run_qat
from hestia_tune.config import GeneratedConfig
from hestia_tune.config.run_config import SELF_GENERATED, RunConfig
from hestia_tune.data import GeneratedChats, chat_dataset, self_generated_dataset
from hestia_tune.models import HuggingFaceTokenizer
from hestia_tune.models.decoder import model_of_transformers
from hestia_tune.models.sources import META_FILE
from hestia_tune.run import Run, TrainingRun

pytestmark = pytest.mark.usefixtures("end_process_group")

END = SPECIAL.index("<|end|>")
SEQ_LEN = 96
SLOPE = 3.0  # between the logits of letters and those of other tokens


def make_chat_model(folder, family="Llama", template=TURNS, end=END):
    """Write a random model that ends a turn after some ten tokens, and writes no other special one.

    One dimension of the embeddings has the same large value in every token, so the logit of the end
    is large, and the logits of other special tokens and of bytes that are no letter are small.
    """
    make_family(folder, family, max_position_embeddings=128, tie_word_embeddings=False)
    source = make_tokenizer_folder(folder.with_name(f"{folder.name}_tokenizer"), template)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(f"{source}/{name}", folder / name)
    tokenizer = HuggingFaceTokenizer(source)
    letters = [n for n in range(SHAPE["vocab_size"]) if tokenizer.decode([n]).isalpha()]
    letters = [n for n in letters if tokenizer.decode([n]).isascii()]
    state = load_file(folder / "model.safetensors")
    for name, value in state.items():
        if value.shape == (SHAPE["vocab_size"], SHAPE["hidden_size"]):
            if "head" in name or "embed_out" in name:
                value[:, 0] = -SLOPE
                value[letters, 0] = 1.0
                value[end, 0] = 1.3
            else:
                value[:, 0] = 4.0
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    return make_chat_model(tmp_path_factory.mktemp("chat") / "model")


def section(cache_dir, **options):
    section = {"_component_": SELF_GENERATED, "num_sequences": 22, "seq_len": SEQ_LEN}
    return section | {"cache_dir": str(cache_dir), "chats": True, "batch_size": 8} | options


def config(folder, output_dir, *overrides, **options):
    cfg = family_config(folder, output_dir, "dataset_val=null", "max_steps=2", "batch_size=2")
    cfg.dataset = section(output_dir.with_name("chats"), **options)
    return OmegaConf.merge(cfg, OmegaConf.from_dotlist(list(overrides)))


def generate(cfg):
    generation.generate_missing(Run.of(RunConfig.parse(cfg)))


def rows_of(folder):
    return [json.loads(line) for line in (folder / "chats.jsonl").read_text("utf-8").splitlines()]


def test_chats_have_two_turns_and_every_reply_ends(chat_model, tmp_path):
    generate(config(chat_model, tmp_path / "run"))
    folder = tmp_path / "chats"
    rows, tokenizer = rows_of(folder), HuggingFaceTokenizer(str(chat_model))
    assert 5 < len(rows) <= 22 and len({json.dumps(row) for row in rows}) == len(rows)
    for row in rows:
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
        assert all(message["content"].strip() for message in row["messages"])
    options = {key: value for key, value in section(folder).items() if key != "_component_"}
    dataset = self_generated_dataset(tokenizer, **options)
    assert isinstance(dataset, GeneratedChats) and dataset.order["length"] == len(dataset)
    ends, losses = 0, []
    for sample in dataset.samples:
        assert len(sample["tokens"]) == SEQ_LEN
        has_loss = (sample["labels"] != -100).tolist()
        last = [i for i, has in enumerate(has_loss) if has and not [*has_loss, False][i + 1]]
        ends += sum(sample["tokens"][i] == END for i in last)
        losses += [sample["tokens"][i].item() for i, has in enumerate(has_loss) if has]
    assert ends == losses.count(END) == len(rows)
    plain = chat_dataset(
        tokenizer, source="json", data_files=str(folder / "chats.jsonl"), seq_len=SEQ_LEN
    )
    assert all(
        torch.equal(one["labels"], other["labels"])
        for one, other in zip(plain.samples, dataset.samples, strict=True)
    )


def test_replies_are_what_the_model_samples_behind_each_prompt(chat_model):
    """Prompts of several lengths share a batch. Almost greedy, a row equals that prompt alone."""
    model = model_of_transformers(chat_model, torch.float32)
    tokenizer = HuggingFaceTokenizer(str(chat_model))
    settings = GeneratedConfig.parse(
        {k: v for k, v in section("x", temperature=0.01).items() if k != "_component_"}
    )
    prompts = [[5, 20, 30], [9], [7] * 20]
    end = generation.End([END])
    together = generation._turns(model, tokenizer, prompts, [6, 2, 4], end, settings)
    for prompt, ids, count in zip(prompts, together, [6, 2, 4], strict=True):
        assert [ids] == generation._turns(model, tokenizer, [prompt], [count], end, settings)


class Counting:
    """A model whose next token follows from the sum of all real tokens before it."""

    device, config = torch.device("cpu"), SimpleNamespace()

    def __init__(self):
        self.sizes = []

    def generate(self, tokens, attention_mask):
        self.sizes.append(len(tokens))
        for _ in range(self.generation_config.max_new_tokens):
            sums = (tokens * attention_mask).sum(1, keepdim=True)
            tokens = torch.cat([tokens, 7 + sums * 31 % 101 % 60], 1)
            attention_mask = F.pad(attention_mask, (0, 1), value=1)
        return tokens


def test_rows_that_have_ended_leave_the_batch(chat_model):
    tokenizer, model = HuggingFaceTokenizer(str(chat_model)), Counting()
    settings = GeneratedConfig(num_sequences=1, seq_len=512, cache_dir="x")
    prompts, end = [[number] * (1 + number % 5) for number in range(40, 80)], generation.End([7])
    counts = [300] * len(prompts)
    found = generation._turns(model, tokenizer, prompts, counts, end, settings)
    whole = generation._turns(Counting(), tokenizer, prompts, counts, generation.End([]), settings)
    assert model.sizes[0] == 40 > model.sizes[1] >= model.sizes[-1] and len(model.sizes) > 2
    for ids, one in zip(found, whole, strict=True):
        last = one.index(7) + 1 if 7 in one else 300
        assert len(one) == 300 and ids[:last] == one[:last] and len(ids) in (64, 128, 256, 300)


@pytest.mark.parametrize(
    ("template", "end", "start"),
    [(TURNS, END, ""), (OPENED, END, "<think>\n"), (INSTRUCT, 0, "")],
    ids=["turns", "opened", "instruct"],
)
def test_turns_of_templates(tmp_path, template, end, start):
    tokenizer = HuggingFaceTokenizer(make_tokenizer_folder(tmp_path / "t", template))
    settings = GeneratedConfig(num_sequences=1, seq_len=64, cache_dir="x", chats=True)
    turns = generation.Turns.of(tokenizer, settings)
    decode = tokenizer.tokenizer.decode
    prompt = decode(turns.prompt, skip_special_tokens=False)
    assert prompt == ("<bos>[INST]" if template is INSTRUCT else "<|start|>user\n")
    assert turns.opened == start and end in turns.reply.ids and turns.reply.text is None
    # Llama 2 ends a user's turn by text, which has no token of its own.
    assert turns.user.text == ("[/INST]" if template is INSTRUCT else None)
    encode = tokenizer.tokenizer.encode
    written = encode("a text [/INST]<pad>" if template is INSTRUCT else "a text<|end|>").ids
    assert turns.user.cut(tokenizer, written, turns.special) == "a text"
    for text in ("a text", "a <|start|> text<|end|>", " <|end|>"):
        assert turns.user.cut(tokenizer, encode(text).ids, turns.special) is None


def test_a_text_that_ends_a_turn_stops_the_generation(tmp_path):
    folder = make_chat_model(tmp_path / "model", template=INSTRUCT, end=0)
    model = model_of_transformers(folder, torch.float32)
    tokenizer = HuggingFaceTokenizer(str(folder))
    settings = GeneratedConfig(num_sequences=1, seq_len=64, cache_dir="x", chats=True)
    end = generation.End([0, tokenizer.pad_id], text="e")
    found = generation._turns(model, tokenizer, [[9]] * 32, [40] * 32, end, settings)
    [letter] = tokenizer.tokenizer.encode("e").ids
    cut = [ids for ids in found if letter in ids]
    assert cut and all({*ids[ids.index(letter) + 1 :]} <= {tokenizer.pad_id} for ids in cut)


@pytest.mark.parametrize(
    "family",
    ["Qwen3", "Gemma 3", "Qwen3-MoE"]
    + [
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("Mistral", "Phi-3", "GPT-NeoX", "Mamba", "Granite-MoE", "OPT", "Granite")
    ],
)
def test_every_family_writes_text_and_chats(tmp_path, family):
    folder = make_chat_model(tmp_path / "model", family)
    packed = family not in ("Mamba", "OPT")  # packed documents would see each other in these
    cfg = config(folder, tmp_path / "run", num_sequences=32, batch_size=32, packed=packed)
    text = section(tmp_path / "text", num_sequences=4, batch_size=4) | {"chats": False}
    cfg.dataset = [cfg.dataset | {"weight": 0.5}, text | {"weight": 0.5}]
    generate(cfg)
    assert rows_of(tmp_path / "chats")
    assert (tmp_path / "text" / "tokens.bin").stat().st_size == 4 * SEQ_LEN * 2


def test_two_sets_with_one_folder_are_refused_before_one_is_written(chat_model, tmp_path):
    cfg = config(chat_model, tmp_path / "run")
    cfg.dataset = [cfg.dataset | {"weight": 0.5}, cfg.dataset | {"weight": 0.5, "chats": False}]
    with pytest.raises(ValueError, match="two generated sets have the cache_dir .*chats, but not"):
        generate(cfg)
    assert not [*tmp_path.glob("chats*")]
    cfg.dataset[1] = cfg.dataset[0] | {"epochs": 3}  # one set, read twice
    generate(cfg)
    assert rows_of(tmp_path / "chats")


def test_no_row_goes_beyond_the_positions_of_a_model(tmp_path):
    """OPT has an embedding for each of its 128 positions, and prompts differ in length."""
    folder = make_chat_model(tmp_path / "model", "OPT")
    model, tokenizer = (
        model_of_transformers(folder, torch.float32),
        HuggingFaceTokenizer(str(folder)),
    )
    settings = GeneratedConfig(num_sequences=1, seq_len=128, cache_dir="x")
    prompts, counts = [[9] * 100, [9] * 5, [9] * 60], [28, 123, 40]
    found = generation._turns(model, tokenizer, prompts, counts, generation.End([]), settings)
    assert [len(ids) for ids in found] == counts


def test_a_chat_that_the_template_makes_too_long_is_left_out(chat_model, tmp_path):
    """This template adds to replies what the model has not written."""
    thought = "('<think>' * 40 if m['role'] == 'assistant' else '')"
    template = TURNS.replace("+ m['content']", f"+ {thought} + m['content']")
    folder = make_chat_model(tmp_path / "model", template=template)
    options = {"num_sequences": 64, "batch_size": 64}
    generate(config(folder, tmp_path / "run", **options))
    tokenizer = HuggingFaceTokenizer(str(folder))
    for row in rows_of(tmp_path / "chats"):
        text = tokenizer.of_transformers.apply_chat_template(row["messages"], tokenize=False)
        assert len(tokenizer.tokenizer.encode(text)) <= SEQ_LEN and "<think>" * 40 in text
    generate(config(chat_model, tmp_path / "plain" / "run", **options))
    assert len(rows_of(tmp_path / "chats")) < len(rows_of(tmp_path / "plain" / "chats"))


def test_a_stop_changes_nothing(chat_model, tmp_path, monkeypatch):
    generate(config(chat_model, tmp_path / "run"))
    made, write = [], generation.chat_batch

    def stopping(*arguments):
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(arguments[-1])
        return write(*arguments)

    cfg = config(chat_model, tmp_path / "run", f"dataset.cache_dir={tmp_path / 'again'}")
    monkeypatch.setattr(generation, "chat_batch", stopping)
    with pytest.raises(KeyboardInterrupt):
        generate(cfg)
    assert len([*tmp_path.glob("again.*/*.json")]) == 2
    monkeypatch.setattr(generation, "chat_batch", lambda *a: made.append(a[-1]) or write(*a))
    generate(cfg)
    assert sorted(made) == [0, 1, 2] and not [*tmp_path.glob("again.*")]
    for name in ("chats.jsonl", "index.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "chats" / name).read_bytes()
    monkeypatch.setattr(generation, "model_of_transformers", None)  # a complete set needs no model
    generate(cfg)


def test_all_stages_read_a_mixture(chat_model, tmp_path, caplog):
    """torchtune builds this model. hestia_qat writes the chats before the first stage."""
    more = ("sensitivity=auto", "schedule.alpha=0.4", "reconstruction=auto", "max_steps=3")
    more += ("sensitivity_estimation.curvature=fisher", "sensitivity_estimation.num_samples=4")
    more += ("reconstruct.num_samples=4", "reconstruct.batch_size=4", "reconstruct.epochs=1")
    cfg = make_config(chat_model, tmp_path / "run", "dataset_val=null", *more)
    cfg.model |= {"max_seq_len": 128, "tie_word_embeddings": False, "norm_eps": 1e-6}
    text = tmp_path / "text.jsonl"
    write_chats(text, [{"text": "some words " * 20}] * 20)
    stream = {"_component_": "hestia_tune.data.streaming_text_dataset", "source": "json"}
    stream |= {"data_files": str(text), "seq_len": SEQ_LEN, "weight": 0.75}
    cfg.dataset = [stream, section(tmp_path / "chats") | {"weight": 0.25}]
    lines = check_run(cfg)
    assert any("the model writes 22 chats of up to 96 tokens into" in line for line in lines)
    assert run_qat(cfg) == 0 and len(logged(tmp_path / "run")) == 3
    for name in ("sensitivity.json", "reconstruction", "../chats/chats.jsonl"):
        assert (tmp_path / "run" / name).exists()
    data = TrainingRun.of(RunConfig.parse(cfg).changed(overwrite_output=True)).data
    assert isinstance(data.dataset.parts[1].stream.dataset, GeneratedChats)
    more = RunConfig.parse(cfg).changed(overwrite_output=True, max_steps=400)
    TrainingRun.of(more)
    assert "raise its num_sequences with another cache_dir, or lower max_steps" in caplog.text


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("optimizer.nope", 1, "optimizer: "),
        ("lr_scheduler.nope", 1, "lr_scheduler: "),
        ("loss._component_", "nope.Nope", "loss: "),
        ("reconstruction", "/nope", "/nope"),
        ("dataset_val._component_", "nope.Nope", "dataset_val could not be loaded"),
        ("dataset", "text", "dataset could not be loaded: .*nowhere.jsonl"),
        ("output_dir", "old", "holds a run at step 1"),
        ("max_steps_per_epoch", 3, "a stream has epochs of its own; leave out epochs"),
        ("max_steps", "mixed", "the number of steps is not known; give max_steps"),
    ],
)
def test_other_mistakes_are_found_before_the_model_writes(
    chat_model, tmp_path, monkeypatch, key, value, message
):
    cfg = config(chat_model, tmp_path / "run")
    if value == "text":
        stream = {"_component_": "hestia_tune.data.streaming_text_dataset", "source": "json"}
        stream |= {"data_files": str(tmp_path / "nowhere.jsonl"), "seq_len": SEQ_LEN}
        cfg.dataset = [stream | {"weight": 0.5}, {**cfg.dataset, "weight": 0.5}]
    elif value == "mixed":
        other = section(tmp_path / "more")
        cfg.dataset = [{**cfg.dataset, "weight": 0.5}, {**other, "weight": 0.5}]
        cfg.max_steps = None
    elif value == "old":
        meta = tmp_path / "run" / "checkpoints" / "step_1" / META_FILE
        meta.parent.mkdir(parents=True)
        meta.write_text("{}")
    else:
        OmegaConf.update(cfg, key, value, force_add=True)
    monkeypatch.setattr(generation, "_generate_set", Mock(side_effect=AssertionError))
    for command in (run_qat, check_run):
        with pytest.raises(ValueError, match=message):
            command(cfg)


def test_epochs_and_damage(chat_model, tmp_path):
    cfg = config(chat_model, tmp_path / "run", "max_steps=null", epochs=3)
    generate(cfg)
    data = TrainingRun.of(RunConfig.parse(cfg)).data
    assert data.is_stream and data.total_steps == 3 * len(data.dataset) // 2
    path = tmp_path / "chats" / "chats.jsonl"
    path.write_text(path.read_text("utf-8").replace("user", "uzer", 1), "utf-8")
    with pytest.raises(ValueError, match="differs from its checksum; delete"):
        TrainingRun.of(RunConfig.parse(cfg))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("template", "no chat template; use the tokenizer of a chat model, or put its"),
        ("hidden", "does not show where a turn begins"),
        (
            "endless",
            r"none of 22 chats .* can be kept: none ends within 96 tokens without .* raise",
        ),
        ("text", "holds no set of generated chats: no index.json"),
        ("unknown", "transformers generates the data of self_generated_dataset, and it cannot"),
    ],
)
def test_refusals(chat_model, tmp_path, change, message):
    folder = shutil.copytree(chat_model, tmp_path / "model")
    cfg = config(folder, tmp_path / "run")
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    if change == "template":
        del settings["chat_template"]
    elif change == "hidden":
        settings["chat_template"] = "{{ messages | length }}"
    elif change == "endless":
        settings["chat_template"] = TURNS.replace("<|end|>", "<think>")
        settings["eos_token"] = settings["pad_token"] = "<pad>"
    file.write_text(json.dumps(settings))
    if change == "text":
        generate(config(folder, tmp_path / "run", "dataset.chats=False"))
    if change == "unknown":
        found = Run.of(RunConfig.parse(cfg))
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(values | {"model_type": "none"}))
        with pytest.raises(ValueError, match=message):
            generation.generate_missing(found)
        return
    with pytest.raises(ValueError, match=message):
        generate(cfg)
