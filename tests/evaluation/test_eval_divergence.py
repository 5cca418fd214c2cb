"""Tests the comparison with a reference's predictions, and the greedy continuations of prompts."""

import pytest
import torch

pytest.importorskip("lm_eval", reason="the comparison needs lm-eval's windows")

from eval_tiny import (  # noqa: E402
    EOS,
    WINDOW,
    ByteTokenizer,
    random_text,
    reference_generate,
    tiny_model,
)

from hestia_tune.config import EvalConfig, TextConfig  # noqa: E402
from hestia_tune.evaluation import Evaluator, compare  # noqa: E402
from hestia_tune.evaluation.evaluator import PROMPTS, tokenize  # noqa: E402
from hestia_tune.evaluation.lm import DecoderLM  # noqa: E402

BOS = ByteTokenizer.bos_id


def make_lm(model):
    return DecoderLM(model, ByteTokenizer(), window=WINDOW, batch_size=4)


def divergence(lm, reference, texts, window, stride=None, max_tokens=None):
    return lm.divergence(reference, tokenize(lm, texts, max_tokens)[1], window, stride or window)


@torch.no_grad()
def one_token_at_a_time(model, reference, texts, window, stride):
    """Return the mean divergence and the agreement in float64, with one forward per token.

    A token is predicted from the start of its window: every window begins with BOS, and each later
    one ends ``stride`` tokens after the window before, or at the end of the text.
    """
    divergences, same = [], []
    models = [m.double() for m in (model, reference)]
    for text in texts:
        inputs = [BOS, *text.encode()][:-1]  # the input before each token of the text
        for last in range(len(inputs)):
            moves = max(-(-(last + 1 - window) // stride), 0)
            end = min(window + moves * stride, len(inputs))
            seen = torch.tensor([[BOS, *inputs[max(end - window, 0) + 1 : last + 1]]])
            own, other = (m(seen)[0, -1].log_softmax(-1) for m in models)
            divergences.append(float((other.exp() * (other - own)).sum()))
            same.append(int(own.argmax()) == int(other.argmax()))
    return sum(divergences) / len(divergences), sum(same) / len(same)


@pytest.mark.parametrize(("window", "stride"), [(64, 64), (16, 5), (8, 8), (1, 1)])
def test_equals_one_token_at_a_time_in_float64(window, stride):
    generator = torch.Generator().manual_seed(window)
    texts = [random_text(generator, 1, 90) for _ in range(5)]
    for seed in range(2):
        model, reference = tiny_model(seed), tiny_model(seed + 10)
        found = divergence(make_lm(model), make_lm(reference), texts, window, stride)
        kl, agreement = one_token_at_a_time(model, reference, texts, window, stride)
        assert found["kl_divergence"] == pytest.approx(kl, rel=1e-5)
        assert found["top1_agreement"] == agreement
        assert found["tokens"] == sum(map(len, texts))


def test_a_model_agrees_with_itself_and_the_direction_matters():
    one, other, text = make_lm(tiny_model(0)), make_lm(tiny_model(1)), ["A text, of 23 bytes."]
    same = divergence(one, one, text, 8)
    assert same == {"kl_divergence": 0.0, "top1_agreement": 1.0, "tokens": 20}
    forward, backward = (divergence(*pair, text, 8) for pair in ((one, other), (other, one)))
    assert forward["kl_divergence"] != backward["kl_divergence"]
    assert forward["top1_agreement"] == backward["top1_agreement"]
    assert divergence(one, other, text, 8, max_tokens=7)["tokens"] == 7


def test_the_table_has_the_distances_and_the_ratio_of_the_perplexities(tmp_path):
    (tmp_path / "text.txt").write_text("A held-out text of a few words.")
    settings = EvalConfig(
        tasks=[], perplexity={"t": TextConfig(source=str(tmp_path / "text.txt"), window=8)}
    )
    evaluator, cpu = Evaluator(settings, ByteTokenizer(), WINDOW), torch.device("cpu")
    models = {"first": tiny_model(0), "second": tiny_model(1)}
    results = [evaluator.evaluate(name, model, {}, cpu) for name, model in models.items()]
    assert results[0].continuations == {}
    distances = {"second": evaluator.divergence(models["second"], models["first"], cpu)}
    table = compare(results, distances)
    measured = [result.perplexity["t"]["token_perplexity"] for result in results]
    ratio = table.tables["perplexity_ratio"]["second"]["t"]["value"]
    assert ratio == pytest.approx(measured[1] / measured[0])
    agreement = distances["second"]["t"]["top1_agreement"]
    rows = [line.split("|")[1:-1] for line in table.markdown().splitlines() if line[:1] == "|"]
    cells = {row[1].strip(): [cell.strip() for cell in row[2:]] for row in rows}
    assert cells["top1 agreement, %"] == ["", f"{100 * agreement:.1f}"]
    assert "KL(first || model) in nats" in table.markdown()
    assert "KL(" not in compare(results).markdown()


def test_continuations_equal_one_prompt_at_a_time():
    model = tiny_model(4)
    lm, prompts = make_lm(model), ["ab", "a longer prompt", "z" * 90]
    encoded = [lm.tok_encode(prompt)[-(WINDOW - 12) :] for prompt in prompts]
    expected = [lm.tok_decode(reference_generate(model, ids, 12)) for ids in encoded]
    assert lm.continuations(prompts, 12) == dict(zip(prompts, expected, strict=True))
    assert len(set(PROMPTS)) == 10


def test_a_continuation_ends_at_eos():
    class Ending(torch.nn.Module):
        """Find EOS most likely after a z, else the token itself."""

        def forward(self, tokens):
            following = torch.where(tokens == ord("z"), EOS, tokens)
            return torch.nn.functional.one_hot(following, 258).float()

    lm = DecoderLM(Ending(), ByteTokenizer(), window=WINDOW, device="cpu")
    assert lm.continuations(["az", "za"], 4) == {"az": "", "za": "aaaa"}
