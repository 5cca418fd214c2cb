"""Tests the lm-eval model: batches do not change scores, and errors name the request."""

import pytest
import torch

pytest.importorskip("lm_eval", reason="evaluation on tasks needs lm-eval")

from eval_tiny import (  # noqa: E402
    EOS,
    WINDOW,
    ByteTokenizer,
    WholeModel,
    random_text,
    reference_generate,
    reference_score,
    request,
    tiny_model,
)

from hestia_tune.evaluation import plain_outputs  # noqa: E402
from hestia_tune.evaluation.lm import DecoderLM  # noqa: E402

TOKENIZER = ByteTokenizer()


def make_lm(model, **options):
    return DecoderLM(model, TOKENIZER, window=WINDOW, device="cpu", **options)


def mixed_requests(seed, num_contexts=8):
    """Return requests with shared, single and long contexts and continuations."""
    generator = torch.Generator().manual_seed(seed)
    requests = []
    for index in range(num_contexts):
        context = random_text(generator, 1, 80)
        for _ in range(1 + index % 4):
            continuation = " " + random_text(generator, 0, 12)
            requests.append(request("loglikelihood", context, continuation, doc_id=index))
        requests.append(request("loglikelihood", context, "!"))
        requests.append(request("loglikelihood", context, "?"))
    requests.append(request("loglikelihood", "", "no context"))
    requests.append(requests[0])  # the same request twice
    order = torch.randperm(len(requests), generator=generator).tolist()
    return [requests[i] for i in order]


def expected_scores(model, requests):
    found = []
    for one in requests:
        context, continuation = one.args
        ids = [TOKENIZER.bos_id, *context.encode()]
        found.append(reference_score(model, ids, list(continuation.encode())))
    return found


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("batch_size", ["auto", 1, 3])
def test_batched_scores_equal_single_scores(tie, batch_size):
    for seed in range(3):
        model = tiny_model(seed, tie=tie)
        requests = mixed_requests(seed)
        lm = make_lm(model, batch_size=batch_size)
        expected = expected_scores(model, requests)
        found = lm.loglikelihood(requests)
        for (value, greedy), (wanted, is_best) in zip(found, expected, strict=True):
            assert value == pytest.approx(wanted, abs=1e-3) and greedy is is_best


def test_any_module_scores_like_a_torchtune_model():
    model = tiny_model()
    requests = mixed_requests(5)
    plain, ours = make_lm(WholeModel(model)), make_lm(model)
    for a, b in zip(plain.loglikelihood(requests), ours.loglikelihood(requests), strict=True):
        assert a[0] == pytest.approx(b[0], abs=1e-3) and a[1] == b[1]


def test_bfloat16_and_chunked_output_and_training_mode_kept():
    model = tiny_model(dtype=torch.bfloat16)
    requests = mixed_requests(3)
    plain = make_lm(model).loglikelihood(requests)
    model.train()
    model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    model.set_num_output_chunks(4)
    with plain_outputs(model):
        assert not any(module.training for module in model.modules())
        chunked = make_lm(model).loglikelihood(requests)
    assert [module.training for module in model.modules()] == modes
    assert model.num_output_chunks == 4
    for a, b in zip(plain, chunked, strict=True):
        assert a[0] == pytest.approx(b[0], abs=0.5)


def test_batches_hold_their_budget_of_tokens(monkeypatch):
    monkeypatch.setattr("hestia_tune.evaluation.lm._TOKENS", 300)
    model, sizes = tiny_model(), []
    model.register_forward_hook(lambda module, args, out: sizes.append(args[0].shape))
    make_lm(model).loglikelihood(mixed_requests(6, num_contexts=20))
    assert max(batch * length for batch, length in sizes) <= 300
    assert len(sizes) < 30  # for 92 requests


def test_rolling_scores_every_token_once_in_disjoint_windows():
    model = tiny_model()
    generator = torch.Generator().manual_seed(0)
    texts = [random_text(generator, n, n + 1) for n in (1, 63, 64, 65, 128, 150)]
    found = make_lm(model).loglikelihood_rolling(
        [request("loglikelihood_rolling", text) for text in texts]
    )
    for text, value in zip(texts, found, strict=True):
        ids = [TOKENIZER.bos_id, *TOKENIZER.encode(text, add_eos=False)]  # the prefix and BOS
        expected = 0.0
        for end in range(1, len(ids)):
            # The tokens in the window of `end`. The last window is moved left, so that it is full.
            right = min(-(-end // WINDOW) * WINDOW, len(ids) - 1)
            start = max(right - WINDOW, 0)
            expected += reference_score(model, ids[start:end], [ids[end]])[0]
        assert value == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("batch_size", ["auto", 1, 2])
def test_batched_generation_equals_single_generation(batch_size):
    for seed in range(3):
        model = tiny_model(seed)
        lm = make_lm(model, batch_size=batch_size)
        prompts = ["a", "hello world", "xyz " * 10, "q" * 70]
        settings = {"until": [], "max_gen_toks": 20}
        before = lm.loglikelihood([request("loglikelihood", "hello", " you")])
        found = lm.generate_until([request("generate_until", p, settings) for p in prompts])
        for prompt, text in zip(prompts, found, strict=True):
            ids = [TOKENIZER.bos_id, *prompt.encode()][-(WINDOW - 20) :]
            expected = reference_generate(model, ids, 20)
            assert text == TOKENIZER.decode([i for i in expected if i != EOS])
        assert settings == {"until": [], "max_gen_toks": 20}
        assert lm.loglikelihood([request("loglikelihood", "hello", " you")]) == before


def test_generation_stops_at_strings_and_at_eos():
    class Parrot(torch.nn.Module):
        """A model that continues the alphabet: e follows d, and EOS follows z."""

        def forward(self, tokens):
            following = torch.where(tokens == ord("z"), EOS, tokens + 1) % 264
            return torch.nn.functional.one_hot(following, 264).float()

    lm = make_lm(Parrot())
    prompts = [("ab", []), ("ab", ["gh"]), ("ab", "e"), ("wx", ["gh"]), ("z", [])]
    requests = [
        request("generate_until", prompt, {"until": until, "max_gen_toks": 8})
        for prompt, until in prompts
    ]
    assert lm.generate_until(requests) == ["cdefghij", "cdef", "cd", "yz", ""]


def test_other_generation_than_greedy_is_refused():
    lm = make_lm(tiny_model())
    for settings in ({"do_sample": True, "max_gen_toks": 3}, {"until": ["x"]}):
        with pytest.raises(ValueError, match="only greedy .* fewer than 64"):
            lm.generate_until([request("generate_until", "c", settings)])


def test_nan_names_the_text():
    model = tiny_model()
    with torch.no_grad():
        model.tok_embeddings.weight[ord("Z")] = float("nan")
    # With a tied head the logit of Z is NaN everywhere, so Z is removed from the head.
    model.output = torch.nn.Linear(32, 264, bias=False)
    lm = make_lm(model)
    good = request("loglikelihood", "fine", " too")
    assert len(lm.loglikelihood([good])) == 1
    with pytest.raises(ValueError, match="NaN in the logits of 'aZ "):
        lm.loglikelihood([good, request("loglikelihood", "aZ", " b")])
    with pytest.raises(ValueError, match="NaN in the logits of 'Z'"):
        lm.loglikelihood_rolling([request("loglikelihood_rolling", text) for text in ("a", "Zb")])
    settings = {"until": [], "max_gen_toks": 3}
    with pytest.raises(ValueError, match="NaN in the logits of 'aZ'"):
        lm.generate_until([request("generate_until", p, settings) for p in ("fine prompt", "aZ")])
