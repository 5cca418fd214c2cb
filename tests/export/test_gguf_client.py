"""Compares GGUF files in a real llama.cpp (xllamacpp) with the hard model in transformers.

The client rounds the activations of every ternary matrix to 8 bits, so logits differ by about a
percent. Files with dense types show that everything else (row order, rotary embedding, tokenizer)
equals transformers.
"""

import json
from pathlib import Path

import pytest
import torch
from gguf_models import DEMO, edit_json, pre_tokenizer, random_model, random_qwen2, ternarize
from safetensors.torch import load_file, save_file

from hestia_tune.export.gguf import write_gguf
from hestia_tune.methods.straight_through import round_embedding
from hestia_tune.models.folder import ModelFolder

xllamacpp = pytest.importorskip("xllamacpp")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow

STORIES = Path(__file__).parents[3] / "shared" / "models" / "stories260K"
TEXTS = [
    "The built-in function returns a list of",
    "def main():\n    for i in range(10):\n        print(f'{i:>3}  items')\n",
    "It's 1234567 o'clock; we'll see: naïve café — “quoted” £5\t\ttabs  and   spaces.\n\n\nEnd",
]


class Client:
    """A file that llama.cpp has loaded."""

    def __init__(self, path: Path, vocab_size: int, length: int = 256):
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_parallel, params.n_gpu_layers = length, 1, 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.warmup = params.fit_params = False
        params.verbosity = -1
        self.server, self.vocab_size = xllamacpp.Server(params), vocab_size

    def _complete(self, prompt: str | list[int], **options: object) -> list[dict]:
        request = {"prompt": prompt, "temperature": 0, "cache_prompt": False}
        answer = self.server.handle_completions(request | options)
        self.prompt_tokens = answer["usage"]["prompt_tokens"]
        return answer["choices"][0]["logprobs"]["content"]

    def logits(self, prompt: str | list[int]) -> torch.Tensor:
        """Return the centered logits of the token after the prompt, (vocab_size,).

        The client reports the model's probabilities, whatever it samples. It reports none if it
        samples a token that ends the text or is a part of a character. So it is made to sample "!".
        """
        out = torch.full((self.vocab_size,), float("nan"))
        options = {"max_tokens": 1, "logprobs": self.vocab_size, "logit_bias": {"!": 1000}}
        for entry in self._complete(prompt, **options)[0]["top_logprobs"]:
            out[entry["id"]] = entry["logprob"]
        assert out.isfinite().all()
        return out - out.mean()

    def greedy(self, prompt: list[int], length: int) -> list[int]:
        options = {"max_tokens": length, "logprobs": 1, "ignore_eos": True}
        return [token["id"] for token in self._complete(prompt, **options)]


class Reference:
    """The hard model in transformers in float32."""

    def __init__(self, folder: Path):
        load = transformers.AutoModelForCausalLM.from_pretrained
        self.model = load(folder, dtype=torch.float32)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    @torch.no_grad()
    def logits(self, ids: list[int]) -> torch.Tensor:
        out = self.model(torch.tensor([ids])).logits[0, -1]
        return out - out.mean()

    @torch.no_grad()
    def shortfall(self, ids: list[int], continuation: list[int]) -> float:
        """Return the largest difference between the best logit and a continuation's logit.

        The unit is the standard deviation of the logits. 0 means that each token is the best.
        """
        logits = self.model(torch.tensor([ids + continuation])).logits[0, len(ids) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(continuation)[:, None])[:, 0]
        return ((logits.amax(1) - chosen) / logits.std(1)).max().item()


def largest_error(client: Client, reference: Reference) -> float:
    """Return the largest relative error of logits over `TEXTS`, and check that token ids agree."""
    errors = []
    for text in TEXTS:
        ids = reference.tokenizer(text)["input_ids"]
        expected = reference.logits(ids)
        found = client.logits(text)
        assert client.prompt_tokens == len(ids)
        assert torch.equal(found, client.logits(ids)), text
        errors.append(((found - expected).norm() / expected.norm()).item())
    return max(errors)


def compare(folder: Path, quantized: dict, tolerance: float, embedding=None, **options) -> dict:
    """Write the file and compare the client's logits with the reference's logits."""
    path = folder.with_suffix(".gguf")
    source = ModelFolder(folder, quantized, embedding=embedding)
    summary = write_gguf(source, path, overwrite=True, **options)
    reference = Reference(folder)
    client = Client(path, reference.model.config.vocab_size)
    error = largest_error(client, reference)
    print(f"{options}, {summary['types']}: relative error of logits {error:.5f}")
    assert error < tolerance
    return {"client": client, "reference": reference, "types": summary["types"]}


@pytest.mark.parametrize("block_type", ["Q2_0", "Q4_0"])
def test_ternary_llama(tmp_path, block_type):
    quantized = ternarize(DEMO, tmp_path / "model", 128)
    both = compare(tmp_path / "model", quantized, 0.03, block_type=block_type)
    assert both["types"][block_type] == 28
    ids = both["reference"].tokenizer("The mean of a set of")["input_ids"]
    continuation = both["client"].greedy(ids, 40)
    assert len(continuation) == 40 and len(set(continuation)) > 5
    assert both["reference"].shortfall(ids, continuation) < 0.1


@pytest.mark.parametrize(("choice", "kind"), [("int4", "Q4_0"), ("int5", "Q5_0"), ("int8", "Q8_0")])
def test_rounded_embedding(tmp_path, choice, kind):
    folder, name = tmp_path / "model", "model.embed_tokens.weight"
    ternarize(DEMO, folder, 128)
    state = load_file(folder / "model.safetensors")
    rounded = round_embedding(state[name], choice)
    assert not torch.equal(rounded, state[name])
    save_file(state | {name: rounded}, folder / "model.safetensors")
    both = compare(folder, {}, 0.01, embedding=choice)
    assert both["types"][kind] == 1


@pytest.mark.parametrize("block_type", ["TQ1_0", "TQ2_0", "Q2_0", "Q4_0"])
@pytest.mark.parametrize("group_size", [256, "channel", "tensor"])
def test_ternary_qwen2(tmp_path, group_size, block_type):
    quantized = random_qwen2(tmp_path / "model", group_size)
    both = compare(tmp_path / "model", quantized, 0.03, block_type=block_type)
    assert both["types"][block_type] == 14


def test_dense_llama(tmp_path):
    ternarize(DEMO, tmp_path / "model", 128)
    compare(tmp_path / "model", {}, 0.002)


def test_dense_qwen2(tmp_path):
    random_qwen2(tmp_path / "model", 128)
    compare(tmp_path / "model", {}, 0.005)


@pytest.mark.parametrize(
    "scaling",
    [
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ],
)
def test_rotary_scaling(tmp_path, scaling):
    folder = tmp_path / "model"
    ternarize(DEMO, folder, 128)
    unscaled = Reference(folder)
    edit_json(folder / "config.json", rope_scaling=scaling)
    both = compare(folder, {}, 0.002)
    ids = both["reference"].tokenizer(TEXTS[2])["input_ids"]
    scaled = both["client"].logits(ids)  # show that the scaling has an effect:
    assert (scaled - unscaled.logits(ids)).norm() > 0.02 * scaled.norm()


def test_biases_of_llama(tmp_path):
    folder = tmp_path / "model"
    ternarize(DEMO, folder, 128)
    edit_json(folder / "config.json", attention_bias=True)
    state = load_file(folder / "model.safetensors")
    torch.manual_seed(0)
    for name in [n for n in state if "self_attn" in n]:
        bias = 0.3 * torch.randn(state[name].shape[0])
        state[name.replace(".weight", ".bias")] = bias.bfloat16()
    save_file(state, folder / "model.safetensors")
    compare(folder, {}, 0.005)


@pytest.mark.parametrize("digits", [r"\p{N}", r"\p{N}{1,3}", "individual"])
def test_pre_tokenizers(tmp_path, digits):
    """The demo's vocabulary is used with the rules of Qwen2, Llama 3 and SmolLM."""
    folder = tmp_path / "model"
    ternarize(DEMO, folder, 128)
    edit_json(folder / "tokenizer.json", pre_tokenizer=pre_tokenizer(digits))
    compare(folder, {}, 0.002)


@pytest.mark.skipif(not STORIES.is_dir(), reason="needs ../shared/models/stories260K")
def test_sentencepiece_story(tmp_path):
    folder = tmp_path / "model"
    ternarize(STORIES, folder, "channel")
    compare(folder, {}, 0.005)
    state = load_file(STORIES / "model.safetensors")
    save_file(state, folder / "model.safetensors")
    both = compare(folder, {}, 0.005)
    ids = both["reference"].tokenizer("Once upon a time, there was a little girl")["input_ids"]
    story = both["client"].greedy(ids, 22)
    assert both["reference"].shortfall(ids, story) == 0
    expected = "named Lily. She loved to play outside in the park."
    assert both["reference"].tokenizer.decode(story).strip().startswith(expected)
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == 512


GRANITE = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.6,
    "logits_scaling": 4.0,
    "tie_word_embeddings": True,
}
# The window is shorter than the longest of `TEXTS`.
GEMMA = {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 8}
LOCAL_AND_SCALED = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000000.0},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "head_dim": 64}
NEOX = {"num_key_value_heads": 4}  # GPT-NeoX has a key for every query


@pytest.mark.parametrize(
    ("kind", "differences"),
    [
        ("Qwen3Config", {"head_dim": 64}),
        ("SmolLM3Config", {"num_hidden_layers": 5, "tie_word_embeddings": True}),
        ("MistralConfig", {"sliding_window": None, "head_dim": 64}),
        ("Olmo2Config", {}),
        ("GraniteConfig", GRANITE),
        ("GemmaConfig", {"head_dim": 64}),
        ("Gemma2Config", GEMMA),
        ("Gemma3TextConfig", GEMMA | {"num_hidden_layers": 7}),
        ("Gemma3TextConfig", GEMMA | {"rope_parameters": LOCAL_AND_SCALED}),
        ("Qwen3MoeConfig", EXPERTS | {"norm_topk_prob": True}),
        ("Qwen2MoeConfig", EXPERTS | {"shared_expert_intermediate_size": 128}),
        ("OlmoeConfig", EXPERTS | {"num_key_value_heads": 4}),
        ("MixtralConfig", {"num_local_experts": 4}),
        ("GraniteMoeConfig", GRANITE | {"num_local_experts": 4}),
        ("Phi3Config", {"sliding_window": 256}),
        ("PhiConfig", {}),
        ("GPTNeoXConfig", NEOX),
        ("GPTNeoXConfig", NEOX | {"use_parallel_residual": False}),
    ],
)
def test_dense_models_of_transformers(tmp_path, kind, differences):
    """Row order, norms, multipliers and layers without rotation equal transformers."""
    random_model(tmp_path / "model", kind, differences)
    if kind == "SmolLM3Config":  # its embeddings are tied unless the config says otherwise
        file = tmp_path / "model" / "config.json"
        config = json.loads(file.read_text())
        del config["tie_word_embeddings"]
        file.write_text(json.dumps(config))
    # Four norms in a block and large embeddings round more in llama.cpp's float16.
    compare(tmp_path / "model", {}, 0.005 if kind == "Gemma3TextConfig" else 0.002)


@pytest.mark.parametrize(
    ("kind", "differences", "linears"),
    [
        ("Olmo2Config", {}, 7),
        ("GraniteConfig", GRANITE, 7),
        ("Phi3Config", {}, 4),
        ("PhiConfig", {}, 6),
        ("GPTNeoXConfig", NEOX, 4),
        ("Gemma3TextConfig", GEMMA, 7),
        # q, k, v, o, and three matrices for all experts, which llama.cpp has in one tensor.
        ("Qwen3MoeConfig", EXPERTS | {"norm_topk_prob": True}, 7),
        ("GraniteMoeConfig", GRANITE | {"num_local_experts": 4}, 7),
    ],
)
def test_ternary_models_of_transformers(tmp_path, kind, differences, linears):
    """Fused and interleaved projections are ternary in the file too."""
    quantized = random_model(tmp_path / "model", kind, differences, 128)
    tolerance = 0.05 if kind == "Gemma3TextConfig" else 0.03
    both = compare(tmp_path / "model", quantized, tolerance)
    assert both["types"]["Q2_0"] == 2 * linears


def test_missing_biases_are_refused(tmp_path):
    random_model(tmp_path / "model", "GPTNeoXConfig", NEOX | {"attention_bias": False})
    with pytest.raises(ValueError, match="query_key_value.bias is missing"):
        write_gguf(ModelFolder(tmp_path / "model", {}), tmp_path / "model.gguf")
