"""Tests that our scores on the packaged model equal lm-eval's own hf backend."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("lm_eval", reason="evaluation on tasks needs lm-eval")
transformers = pytest.importorskip("transformers", reason="the hf backend is the reference")
pytest.importorskip("accelerate", reason="lm-eval's hf backend imports it")

from eval_tasks_local import make_manager, make_task_folder  # noqa: E402
from eval_tiny import request  # noqa: E402
from lm_eval.evaluator import simple_evaluate  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from tiny import make_model_dir  # noqa: E402
from torchtune import config  # noqa: E402
from torchtune.models.convert_weights import hf_to_tune  # noqa: E402

from hestia_tune.config.run_config import asset_path, config_path  # noqa: E402
from hestia_tune.data.sequences import demo_documents  # noqa: E402
from hestia_tune.evaluation.evaluator import (  # noqa: E402
    evaluate_tasks,
    load_tasks,
    perplexity,  # noqa: E402
)
from hestia_tune.evaluation.lm import DecoderLM  # noqa: E402
from hestia_tune.models import llama  # noqa: E402
from hestia_tune.models.folder import SafetensorsFolder  # noqa: E402
from hestia_tune.models.sources import folder_tensors  # noqa: E402
from hestia_tune.models.tokenizers import HuggingFaceTokenizer  # noqa: E402

WINDOW = 128


@pytest.fixture(scope="module")
def pair():
    """Return our model and lm-eval's model of the packaged demo, in float32."""
    folder = asset_path("demo")
    model = config.instantiate(OmegaConf.load(config_path("demo")).model)
    state = hf_to_tune(
        load_file(f"{folder}/model.safetensors"), num_heads=4, num_kv_heads=2, dim=128
    )
    model.load_state_dict({name: value.float() for name, value in state.items()})
    ours = DecoderLM(model.eval(), HuggingFaceTokenizer(folder), window=WINDOW)
    reference = HFLM(
        pretrained=transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        tokenizer=transformers.AutoTokenizer.from_pretrained(folder),
        max_length=WINDOW,
        batch_size=8,
        device="cpu",
    )
    return ours, reference


def requests_from_text():
    """Return 200 requests with shared, empty, one-token, spaced, long and marked contexts."""
    words = " ".join(demo_documents("validation")).split()
    generator = torch.Generator().manual_seed(0)
    requests = []
    for prompt, answer in (("The import statement", " is executed"), ("An object is", " a")):
        requests.append(request("loglikelihood", prompt, answer))
    while len(requests) < 200:
        start, size = (
            int(torch.randint(high, (1,), generator=generator)) for high in (len(words) - 300, 90)
        )
        context = " ".join(words[start : start + size])
        kind = len(requests) % 10
        if kind == 3 and context:
            context += "  "
        if kind == 5:
            context = "<|endoftext|>" + context
        for end in (1, 2, 7, 7):
            at = start + size + end
            answer = " of" if kind == 7 else " " + " ".join(words[at : at + end])
            requests.append(request("loglikelihood", context, answer, doc_id=len(requests)))
    return requests[:200]


def test_loglikelihoods_equal_the_hf_backend(pair):
    ours, reference = pair
    requests = requests_from_text()
    assert len(requests) == 200 and any(not one.args[0] for one in requests)
    expected = reference.loglikelihood(requests, disable_tqdm=True)
    found = ours.loglikelihood(requests)
    worst = max(abs(a - b) for (a, _), (b, _) in zip(found, expected, strict=True))
    assert worst < 1e-3
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert any(greedy for _, greedy in found)


def test_rolling_equals_the_hf_backend_and_our_perplexity(pair):
    ours, reference = pair
    texts = sorted(demo_documents("validation"), key=len)[:12] + ["x"]
    requests = [request("loglikelihood_rolling", text) for text in texts]
    found = ours.loglikelihood_rolling(requests)
    assert found == pytest.approx(reference.loglikelihood_rolling(requests, True), abs=2e-2)
    result = perplexity(ours, texts, window=WINDOW)
    assert -result["nll"] == pytest.approx(sum(found), abs=1e-3)
    assert result["tokens"] > 10 * WINDOW


def test_generations_equal_the_hf_backend(pair):
    ours, reference = pair
    prompts = ["The import statement", "An object is", "If a class defines", "x"]
    settings = [{"until": ["\n\n"], "max_gen_toks": 30}, {"until": [" the"], "max_gen_toks": 12}]
    requests = [request("generate_until", p, s) for s in settings for p in prompts]
    assert ours.generate_until(requests) == reference.generate_until(requests, True)


STORIES = Path(__file__).parents[3] / "shared" / "models" / "stories260K"


@pytest.mark.parametrize("source", ["tiny", "stories260K"])
def test_results_of_tasks_equal_the_hf_backend(source, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)  # takes seconds
    if source == "stories260K" and not STORIES.is_dir():
        pytest.skip(f"{STORIES} is not there")
    folder = make_model_dir(tmp_path / "model") if source == "tiny" else STORIES
    reference = HFLM(str(folder), dtype="float32", device="cpu", batch_size=4)
    manager = make_manager(make_task_folder(tmp_path / "tasks", num=40))
    loaded = load_tasks(["tiny_choice", "tiny_rolling"], manager)
    expected = simple_evaluate(reference, tasks=loaded[0], task_manager=manager, num_fewshot=1)

    shape = json.loads((folder / "config.json").read_text())
    model = llama(
        vocab_size=shape["vocab_size"],
        num_layers=shape["num_hidden_layers"],
        num_heads=shape["num_attention_heads"],
        num_kv_heads=shape["num_key_value_heads"],
        embed_dim=shape["hidden_size"],
        intermediate_dim=shape["intermediate_size"],
        max_seq_len=shape["max_position_embeddings"],
        norm_eps=shape["rms_norm_eps"],
    )
    state = {
        name: value.float() for name, value in folder_tensors("LLAMA3_2", SafetensorsFolder(folder))
    }
    model.load_state_dict(state)
    lm = DecoderLM(model.eval(), HuggingFaceTokenizer(str(folder)), window=reference.max_length)
    found = evaluate_tasks(lm, loaded, num_fewshot=1)["results"]
    for metric in ("acc,none", "acc_norm,none"):
        assert found["tiny_choice"][metric] == expected["results"]["tiny_choice"][metric]
    for metric in ("word_perplexity,none", "bits_per_byte,none"):
        assert found["tiny_rolling"][metric] == pytest.approx(
            expected["results"]["tiny_rolling"][metric], rel=1e-5
        )
