"""A model and a tokenizer as lm-eval sees them.

lm-eval's evaluator asks for log-likelihoods of continuations, of whole texts, and for greedy
continuations; this answers on any causal ``nn.Module`` (see `ModelForward`), with scores equal to
those of lm-eval's own ``hf`` backend. Over several ranks the evaluator is told that there is one:
each rank builds all prompts, computes its share of the answers, and gets everyone's. Thus results,
few-shot draws and bootstraps included, do not depend on the number of ranks. A model sharded by
FSDP does all requests on all ranks, in step, since its forward is collective.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from hestia_tune.evaluation.batching import Batcher
from hestia_tune.evaluation.forward import ModelForward, check_vocabulary
from hestia_tune.evaluation.generation import Prompt, continue_prompts
from hestia_tune.evaluation.naming import generation_key, request_name
from hestia_tune.evaluation.optional import lm_eval_installed
from hestia_tune.evaluation.scoring import Request, fit_window, plan_rows, score_rows
from hestia_tune.evaluation.sharing import gather_from_ranks, my_share, rank_and_world_size
from hestia_tune.evaluation.tokenization import TextCodec

lm_eval_installed()

from lm_eval.api.model import TemplateLM  # noqa: E402
from lm_eval.models.utils import (  # noqa: E402
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # noqa: E402

logger = logging.getLogger(__name__)


class DecoderLM(TemplateLM):
    """An lm-eval model on a causal ``nn.Module``.

    Args:
        model: see `ModelForward`; on its device.
        tokenizer: see `TextCodec`.
        window: longest input in tokens that the model may be given.
        batch_size: sequences per forward, or "auto" (see `Batcher`).
        add_bos: see `TextCodec`.
        device: of the tokens; None is that of the model.
        share_contexts: see `hestia_tune.evaluation.scoring`.
        progress: show progress bars on rank 0.

    Attributes:
        truncated: how many distinct requests so far were longer than the window and lost tokens
            from the left, on all ranks together.

    Raises:
        ValueError: if the tokenizer has more ids than the model, or the window is not positive.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        *,
        window: int,
        batch_size: int | str = "auto",
        add_bos: bool | None = None,
        device: torch.device | str | None = None,
        share_contexts: bool = True,
        progress: bool = True,
    ):
        super().__init__()
        if window < 1:
            raise ValueError(f"window must be at least 1 token; got {window}")
        self.codec = TextCodec(tokenizer, add_bos=add_bos)
        self.forward = ModelForward(model, device)
        check_vocabulary(self.codec, self.forward)
        self.window = window
        self.truncated = 0
        self._device = self.forward.device
        self._batcher = Batcher(
            batch_size, self._device, not self.forward.is_sharded, self.forward.most_tokens
        )
        self._shares_contexts = share_contexts and self.forward.takes_positions
        self._is_shared = not self.forward.is_sharded
        self._shows_progress = progress and rank_and_world_size()[0] == 0

    @property
    def eot_token_id(self) -> int:
        return self.codec.eos_id

    @property
    def prefix_token_id(self) -> int:
        return self.codec.prefix_id

    @property
    def max_length(self) -> int:
        return self.window

    @property
    def max_gen_toks(self) -> int:
        return 256

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        return self.codec.encode(string, add_special_tokens)

    def fingerprint(self) -> str:
        """A digest of the model's outputs and of all that turns text into its inputs."""
        probe = self.codec.encode("The quick brown fox, 12 + 34 = 46.\n")
        return self.forward.fingerprint(
            self.window, probe, self.codec.prefix_id, self.codec.vocab_size
        )

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval notes about the model beside the results."""
        return {
            "model_num_parameters": sum(p.numel() for p in self.forward.model.parameters()),
            "model_dtype": str(self.forward.dtype),
            "max_length": self.window,
            "add_bos": self.codec.add_bos,
            "prefix_token_id": self.prefix_token_id,
        }

    def loglikelihood(self, requests: list, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log-probability in nats, is greedy) of each request's continuation.

        Raises:
            ValueError: naming a request that cannot be scored.
            FloatingPointError: naming the request whose logits are NaN.
        """

        def answer(texts: list[tuple[str, str]]) -> Iterator[tuple[tuple[str, str], Any]]:
            encoded = [(pair, *self._encode(pair, named[pair])) for pair in texts]
            yield from self._answers(encoded, named, "loglikelihood")

        named = {request.args: request_name(request) for request in requests}
        return self._shared_answers(requests, "loglikelihood", answer, disable_tqdm)

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """As `loglikelihood`, of (any key, context ids, continuation ids), on this rank alone."""
        numbered = [(index, *request[1:]) for index, request in enumerate(requests)]
        answers = dict(self._answers(numbered, {}, None))
        return [answers[index] for index in range(len(requests))]

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
        """Log-probability in nats of each text, by disjoint windows as wide as the model's."""

        def answer(texts: list[tuple[str]]) -> Iterator[tuple[tuple[str], float]]:
            for key in texts:
                windows = get_rolling_token_windows(
                    token_list=self.tok_encode(key[0]),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.window,
                    context_len=1,
                )
                pairs = [(None, *make_disjoint_window(pair)) for pair in windows]
                yield key, sum(value for value, _ in self._loglikelihood_tokens(pairs))

        return self._shared_answers(requests, "loglikelihood_rolling", answer, disable_tqdm)

    def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
        """Greedy continuations, up to the first stop sequence or EOS.

        Raises:
            ValueError: if a request asks for sampling, or for more tokens than the window has.
            FloatingPointError: naming the request whose logits are NaN.
        """

        def answer(keys: list[tuple[str, str]]) -> Iterator[tuple[tuple[str, str], str]]:
            by_settings: dict[str, list[tuple[str, str]]] = {}
            for key in keys:
                by_settings.setdefault(key[1], []).append(key)
            for same in by_settings.values():
                yield from self._continuations(same, named)

        named = {generation_key(request): request for request in requests}
        return self._shared_answers(
            requests, "generate_until", answer, disable_tqdm, generation_key
        )

    def _continuations(
        self, keys: list[tuple[str, str]], named: dict[tuple[str, str], Any]
    ) -> Iterator[tuple[tuple[str, str], str]]:
        """Continues the prompts of ``keys``, which have the same generation settings."""
        first = named[keys[0]]
        settings = normalize_gen_kwargs(first.args[1], self.max_gen_toks)
        if settings["do_sample"]:
            raise ValueError(
                f"{request_name(first)} asks for sampling, and only greedy decoding is done; pass "
                "gen_kwargs do_sample=False, temperature=0"
            )
        most = settings["max_gen_toks"]
        room = self.window - most
        if not 0 < most < self.window:
            raise ValueError(
                f"{request_name(first)} asks for {most} new tokens, which leaves no room for a "
                f"prompt in the window of {self.window}; pass gen_kwargs max_gen_toks"
            )
        eos = self.codec.token_text(self.eot_token_id)
        stops = handle_stop_sequences(settings["until"], eos=eos or None)
        prompts = []
        for key in keys:
            ids = self.tok_encode(key[0])
            self.truncated += len(ids) > room
            prompts.append(Prompt(key=key, tokens=ids[-room:] or [self.prefix_token_id]))

        def describe(key: tuple[str, str]) -> str:
            return request_name(named[key])

        continued = continue_prompts(
            self.forward, self._batcher, self.codec, prompts, most, stops, describe
        )
        for key, text in continued:
            yield key, postprocess_generated_text(text, stops, None)

    def count_truncated(self, requests: Iterable) -> int:
        """How many distinct requests lose tokens to the window, answered before or not.

        Args:
            requests: lm-eval's instances of any kind.
        """
        seen, count = set(), 0
        for request in requests:
            key = (request.request_type, str(request.args))
            if key in seen:
                continue
            seen.add(key)
            if request.request_type == "loglikelihood":
                context, continuation = self._encode(request.args, request_name(request))
                count += len(context) + len(continuation) > self.window + 1
            elif request.request_type == "generate_until":
                most = normalize_gen_kwargs(request.args[1], self.max_gen_toks)["max_gen_toks"]
                count += len(self.tok_encode(request.args[0])) > self.window - most
        return count

    def _encode(self, pair: tuple[str, str], name: str) -> tuple[list[int], list[int]]:
        context, continuation = pair
        if context:
            ids = self._encode_pair(context, continuation)
        else:
            ids = [self.prefix_token_id], self.tok_encode(continuation, add_special_tokens=False)
            if ids[1][:1] == ids[0]:  # the continuation brings the prefix token itself
                ids = ids[1][:1], ids[1][1:]
        if not (ids[0] and ids[1]):
            part = "continuation" if ids[0] else "context"
            raise ValueError(f"the {part} of {name} has no tokens; check the task's prompts")
        return ids

    def _answers(
        self, encoded: Sequence[tuple[Any, list[int], list[int]]], named: dict, cached: str | None
    ) -> Iterator[tuple[Any, tuple[float, bool]]]:
        """Scores (key, context ids, continuation ids) and yields (key, answer) as they come."""
        requests = []
        for index, (key, context, continuation) in enumerate(encoded):
            request = Request(index=index, context=tuple(context), continuation=tuple(continuation))
            try:
                fitted = fit_window(request, self.window)
            except ValueError as error:
                raise ValueError(f"{named.get(key, f'request {index}')}: {error}") from None
            self.truncated += cached is not None and fitted is not request
            requests.append(fitted)

        def describe(index: int) -> str:
            return named.get(encoded[index][0], f"request {index}")

        rows = plan_rows(requests, self.window, self._shares_contexts)
        for batch in score_rows(self.forward, self._batcher, rows, describe):
            for index, value, is_greedy in batch:
                yield encoded[index][0], (value, is_greedy)

    def _shared_answers(
        self,
        requests: list,
        kind: str,
        answer: Callable[[list], Iterator[tuple[Any, Any]]],
        disable_tqdm: bool,
        key_of: Callable[[Any], Any] = lambda request: request.args,
    ) -> list:
        """Answers each distinct request once, on one rank; all ranks get all answers.

        Answers go into lm-eval's cache as they come, so that a killed run resumes.
        """
        distinct = {key_of(request): request for request in requests}
        groups: dict[str, list] = {}  # a context is tokenized and run where its others are
        for key in distinct:
            groups.setdefault(key[0], []).append(key)
        mine = my_share(
            list(groups.values()),
            lambda group: sum(len(str(key)) for key in group),
            self._is_shared,
        )
        keys = [key for group in mine for key in group]

        def run() -> tuple[dict, int]:
            before, found = self.truncated, {}
            bar = tqdm(total=len(keys), desc=kind, disable=disable_tqdm or not self._shows_progress)
            with bar:
                for key, result in answer(keys):
                    found[key] = result
                    self.cache_hook.add_partial(kind, distinct[key].args, result)
                    bar.update()
            return found, self.truncated - before

        before = self.truncated
        everyone = gather_from_ranks(run, self._is_shared)
        self.truncated = before + sum(count for _, count in everyone)
        if self.truncated > before and rank_and_world_size()[0] == 0:
            logger.warning(
                "%d of %d requests were longer than the window of %d tokens and lost tokens from "
                "the left",
                self.truncated - before,
                len(distinct),
                self.window,
            )
        answers = {key: result for found, _ in everyone for key, result in found.items()}
        return [answers[key_of(request)] for request in requests]
