"""The lm-eval model: batched and shared equals alone, errors name the request."""

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

from hestia_tune.evaluation.adapter import DecoderLM  # noqa: E402
from hestia_tune.evaluation.scoring import Request, fit_window, plan_rows  # noqa: E402

TOKENIZER = ByteTokenizer()


def make_lm(model, **options):
    options = {"window": WINDOW, "progress": False, "add_bos": False} | options
    return DecoderLM(model, TOKENIZER, **options)


def mixed_requests(seed, num_contexts=8):
    """Shared and single contexts, single-byte and long continuations, some beyond the window."""
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
    requests.append(requests[0])  # asked twice
    order = torch.randperm(len(requests), generator=generator).tolist()
    return [requests[i] for i in order]


def expected_scores(model, requests):
    found = []
    for one in requests:
        context, continuation = one.args
        ids = list(context.encode()) or [TOKENIZER.bos_id]
        found.append(reference_score(model, ids, list(continuation.encode())))
    return found


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("batch_size", ["auto", 1, 3])
@pytest.mark.parametrize("share_contexts", [True, False])
def test_scores_equal_those_of_each_request_alone(tie, batch_size, share_contexts):
    for seed in range(3):
        model = tiny_model(seed, tie=tie)
        requests = mixed_requests(seed)
        lm = make_lm(model, batch_size=batch_size, share_contexts=share_contexts)
        expected = expected_scores(model, requests)
        found = lm.loglikelihood(requests)
        for (value, greedy), (wanted, is_best) in zip(found, expected, strict=True):
            assert value == pytest.approx(wanted, abs=1e-3) and greedy is is_best


def test_any_module_scores_like_one_of_torchtunes_form():
    model = tiny_model()
    requests = mixed_requests(5)
    plain, ours = make_lm(WholeModel(model)), make_lm(model)
    assert plain.forward._norm is None and ours.forward._norm is model.norm
    for a, b in zip(plain.loglikelihood(requests), ours.loglikelihood(requests), strict=True):
        assert a[0] == pytest.approx(b[0], abs=1e-3) and a[1] == b[1]


def test_logits_in_pieces_equal_logits_at_once(monkeypatch):
    model, requests = tiny_model(), mixed_requests(2)
    whole = make_lm(model).loglikelihood(requests)
    monkeypatch.setattr("hestia_tune.evaluation.forward._LOGIT_ENTRIES", 5 * 264)
    for lm in (make_lm(model), make_lm(WholeModel(model))):
        assert lm.forward._rows_at_once == 5
        for a, b in zip(lm.loglikelihood(requests), whole, strict=True):
            assert a[0] == pytest.approx(b[0], abs=1e-3) and a[1] == b[1]


def test_only_wanted_rows_reach_the_head(monkeypatch):
    model = tiny_model(tie=False)
    rows = []
    model.output.register_forward_hook(lambda module, args, out: rows.append(out.shape[:-1]))
    lm = make_lm(model)
    rows.clear()
    lm.loglikelihood(
        [request("loglikelihood", "a" * 40, " bc"), request("loglikelihood", "d", "e")]
    )
    assert rows == [(1, 4)]


def test_a_norm_that_is_not_the_last_is_noticed():
    class Twice(WholeModel):
        """Has norm and output, but mixes positions after the norm."""

        def __init__(self, inner):
            super().__init__(inner)
            self.norm, self.output = torch.nn.LayerNorm(264), torch.nn.Identity()

        def forward(self, tokens):
            return self.norm(self.inner(tokens)).cumsum(1)

    model = Twice(tiny_model())
    lm = make_lm(model)
    assert lm.forward._norm is None
    requests = mixed_requests(1)
    for (a, _), (b, _) in zip(
        lm.loglikelihood(requests), expected_scores(model, requests), strict=True
    ):
        assert a == pytest.approx(b, rel=1e-4)


def test_bfloat16_and_chunked_output_and_training_mode_kept():
    model = tiny_model(dtype=torch.bfloat16)
    requests = mixed_requests(3)
    model.train()
    model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    plain = make_lm(model).loglikelihood(requests)
    assert [module.training for module in model.modules()] == modes
    model.set_num_output_chunks(4)
    chunked = make_lm(model).loglikelihood(requests)
    for a, b in zip(plain, chunked, strict=True):
        assert a[0] == pytest.approx(b[0], abs=0.5)


def test_shared_context_is_run_once():
    requests = [
        Request(index=i, context=tuple(range(30)), continuation=(i, i + 1, i + 2)) for i in range(4)
    ]
    (row,) = plan_rows(requests, window=64, share_contexts=True)
    assert row.length == 30 + 4 * 2 and row.num_requests == 4
    assert len(plan_rows(requests, window=64, share_contexts=False)) == 4
    # Two rows of two branches each, for want of room.
    assert [row.length for row in plan_rows(requests, window=35, share_contexts=True)] == [34, 34]
    # Continuations of one token are never inputs: one sequence for any model.
    single = [Request(index=i, context=(1, 2, 3), continuation=(i,)) for i in range(4)]
    (row,) = plan_rows(single, window=64, share_contexts=False)
    assert row.length == 3 and row.num_requests == 4


@pytest.mark.parametrize("size", [10, 11, 12, 30])
def test_window_cuts_from_the_left(size):
    request_ = Request(index=0, context=tuple(range(size)), continuation=(7, 8))
    fitted = fit_window(request_, window=12)
    whole = (*request_.context, 7, 8)
    assert (*fitted.context, *fitted.continuation) == whole[-13:]
    assert (fitted is request_) == (size + 2 <= 13)


def test_truncated_requests_are_counted_and_reported(caplog):
    lm = make_lm(tiny_model())
    long, short = "x" * 100, "x"
    lm.loglikelihood([request("loglikelihood", text, "y") for text in (long, short, long)])
    assert lm.truncated == 1  # asked twice, truncated once
    assert "1 of 2 requests were longer than the window of 64" in caplog.text


def test_memory_running_out_halves_the_batch():
    model = tiny_model()
    small = WholeModel(model, most_tokens=200)
    requests = mixed_requests(4)
    lm = make_lm(small)
    found = lm.loglikelihood(requests)
    assert lm._batcher.token_budget <= 200
    for a, b in zip(found, make_lm(model).loglikelihood(requests), strict=True):
        assert a[0] == pytest.approx(b[0], abs=1e-3)
    with pytest.raises(torch.OutOfMemoryError, match="smaller batch_size"):
        make_lm(WholeModel(model, most_tokens=200), batch_size=50).loglikelihood(requests)
    with pytest.raises(torch.OutOfMemoryError, match="smaller window"):
        make_lm(WholeModel(model, most_tokens=30)).loglikelihood(requests)


def test_rolling_scores_every_token_once_in_disjoint_windows():
    model = tiny_model()
    generator = torch.Generator().manual_seed(0)
    texts = [random_text(generator, n, n + 1) for n in (1, 63, 64, 65, 128, 150)]
    found = make_lm(model).loglikelihood_rolling(
        [request("loglikelihood_rolling", text) for text in texts]
    )
    for text, value in zip(texts, found, strict=True):
        ids = [TOKENIZER.bos_id, *text.encode()]
        expected = 0.0
        for end in range(1, len(ids)):
            # What lies in the window of `end`: the last one is moved left to be full.
            right = min(-(-end // WINDOW) * WINDOW, len(ids) - 1)
            start = max(right - WINDOW, 0)
            expected += reference_score(model, ids[start:end], [ids[end]])[0]
        assert value == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("batch_size", ["auto", 1, 2])
@pytest.mark.parametrize("cached", [True, False])
def test_generation_continues_each_prompt_as_alone(cached, batch_size):
    for seed in range(3):
        model = tiny_model(seed)
        lm = make_lm(model if cached else WholeModel(model), batch_size=batch_size)
        prompts = ["a", "hello world", "xyz " * 10, "q" * 70]
        settings = {"until": [], "max_gen_toks": 20}
        before = lm.loglikelihood([request("loglikelihood", "hello", " you")])
        found = lm.generate_until([request("generate_until", p, settings) for p in prompts])
        for prompt, text in zip(prompts, found, strict=True):
            ids = list(prompt.encode())[-(WINDOW - 20) :]
            expected = reference_generate(model, ids, 20)
            assert text == TOKENIZER.decode([i for i in expected if i != EOS])
        assert settings == {"until": [], "max_gen_toks": 20}
        # Caches that stayed behind would make attention see the future.
        assert lm.loglikelihood([request("loglikelihood", "hello", " you")]) == before


def test_generation_stops_at_strings_and_at_eos():
    class Parrot(torch.nn.Module):
        """Says the letters after the last one: after d comes e; after z EOS."""

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


def test_errors_name_the_request():
    model = tiny_model()
    lm = make_lm(model)
    with pytest.raises(ValueError, match="some_task document 3 .*70 tokens does not fit .* 64"):
        lm.loglikelihood([request("loglikelihood", "c", "x" * 70, doc_id=3)])
    with pytest.raises(ValueError, match="continuation of some_task document 4 .* no tokens"):
        lm.loglikelihood([request("loglikelihood", "c", "", doc_id=4)])
    with pytest.raises(ValueError, match="no tokens"):
        lm.loglikelihood([request("loglikelihood", "", "", doc_id=4)])
    with pytest.raises(ValueError, match="document 5 .*only greedy decoding"):
        lm.generate_until([request("generate_until", "c", {"do_sample": True}, doc_id=5)])
    with pytest.raises(ValueError, match="document 6 .* 256 new tokens.* window of 64"):
        lm.generate_until([request("generate_until", "c", {"until": ["x"]}, doc_id=6)])


@pytest.mark.parametrize("cached", [True, False])
def test_nan_names_the_request(cached):
    model = tiny_model()
    with torch.no_grad():
        model.tok_embeddings.weight[ord("Z")] = float("nan")
    lm = make_lm(model if cached else WholeModel(model))
    good = request("loglikelihood", "fine", " too", doc_id=1)
    # A tied head makes the logit of Z NaN everywhere: take it out of the head.
    model.output = torch.nn.Linear(32, 264, bias=False)
    assert len(lm.loglikelihood([good])) == 1
    with pytest.raises(FloatingPointError, match="NaN in the logits of some_task document 2 .*aZ"):
        lm.loglikelihood([good, request("loglikelihood", "aZ", " b", doc_id=2)])
    settings = {"until": [], "max_gen_toks": 3}
    prompts = [("fine prompt", 1), ("aZ", 7)]
    with pytest.raises(FloatingPointError, match="some_task document 7 .*aZ"):
        lm.generate_until([request("generate_until", p, settings, doc_id=i) for p, i in prompts])


def test_what_does_not_fit_together_is_refused_up_front():
    model = tiny_model()

    class Larger(ByteTokenizer):
        vocab_size = 265

    with pytest.raises(ValueError, match="265 ids but the model's vocabulary is 264"):
        DecoderLM(model, Larger(), window=8)
    with pytest.raises(TypeError, match="lacks encode"):
        DecoderLM(model, object(), window=8)
    for bad in (0, -1, True, 1.5, "many"):
        with pytest.raises(ValueError, match="batch_size"):
            make_lm(model, batch_size=bad)
    with pytest.raises(ValueError, match="window"):
        make_lm(model, window=0)
    model.setup_caches(1, torch.float32, decoder_max_seq_len=8)
    with pytest.raises(ValueError, match="KV caches are set up"):
        make_lm(model)


def test_fingerprint_follows_the_model_and_the_settings():
    model = tiny_model()
    first = make_lm(model).fingerprint()
    assert first == make_lm(model).fingerprint()
    assert first != make_lm(model, window=63).fingerprint()
    assert first != make_lm(model, add_bos=True).fingerprint()
    with torch.no_grad():
        model.layers[1].mlp.w1.weight[3, 4] += 0.01
    assert first != make_lm(model).fingerprint()
