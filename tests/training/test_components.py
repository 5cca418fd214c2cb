"""Test the model builder and the tokenizer against transformers; statistics, history, plots."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tiny import SHAPE, make_model_dir
from torchtune.models.convert_weights import hf_to_tune

from hestia_tune.models import llama
from hestia_tune.models.tokenizers import HuggingFaceTokenizer
from hestia_tune.plots import plot_training_curves
from hestia_tune.training.monitoring import History
from hestia_tune.training.outputs import results_table


def tune_state(folder):
    state = load_file(next(folder.glob("*.safetensors")))
    sizes = {"num_heads": SHAPE["num_heads"], "num_kv_heads": SHAPE["num_kv_heads"]}
    return hf_to_tune(state, dim=SHAPE["embed_dim"], **sizes)


def test_llama_equals_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = make_model_dir(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours = llama(**SHAPE)
    ours.load_state_dict(tune_state(folder))
    tokens = torch.randint(0, SHAPE["vocab_size"], (2, SHAPE["max_seq_len"]))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)


def test_llama_refuses_heads_that_do_not_divide():
    with pytest.raises(ValueError, match="must be divisible"):
        llama(**SHAPE | {"num_heads": 5})


def test_tokenizer(tmp_path):
    folder = make_model_dir(tmp_path)
    tokenizer = HuggingFaceTokenizer(str(folder))
    ids = tokenizer.encode("naïve ternary", add_bos=False, add_eos=False)
    assert tokenizer.decode(ids) == "naïve ternary"
    assert tokenizer.encode("a", add_bos=False, add_eos=True)[-1] == tokenizer.eos_id == 0
    assert tokenizer.pad_id == 0 and tokenizer.vocab_size == 258
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"bos_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    other = HuggingFaceTokenizer(str(folder), eos_token="a")
    assert other.eos_id == ids[1] and other.pad_id == other.bos_id == 0


def test_history_skips_a_cut_line_and_drops_later_steps(tmp_path):
    path = tmp_path / "metrics.jsonl"
    history = History(path)
    for step in (1, 2, 3):
        history.append({"step": step, "loss": 1.0 / step})
    with path.open("a") as file:
        file.write('{"step": 4, "lo')
    resumed = History(path, resume_step=2)
    assert [row["step"] for row in resumed.rows] == [1, 2]
    resumed.append({"step": 3, "loss": 0.5})
    assert [json.loads(x)["step"] for x in path.read_text().splitlines()] == [1, 2, 3]
    assert History(path).rows == [] and path.read_text() == ""


def test_results_table():
    lines = results_table({"pretrained": 2.0, "naive ternary": 4.0, "trained": 2.5}).splitlines()
    assert len(lines) == 5 and "75.0%" in lines[-1] and "12.18" in lines[-1]
    assert "-" in results_table({"only": 1.0}).splitlines()[-1]


def test_plot_is_a_png(tmp_path):
    history = [
        {"step": 1, "loss": 3.0, "pressure": 0.0},
        {"step": 2, "loss": 2.0, "pressure": 1.0},
        {"step": 2, "val_loss_relaxed": 2.1, "val_loss_hard": 2.2},
    ]
    path = tmp_path / "curves.png"
    plot_training_curves(history, {"a": [0.3, 0.1, 0.0]}, {"pretrained": 1.9}, path)
    assert path.read_bytes().startswith(b"\x89PNG") and list(tmp_path.iterdir()) == [path]
    plot_training_curves([], {"a": [0.3]}, {}, path)
