"""lm-eval's ``hf`` backend on a torchtune decoder: its scores, without its loading and its network.

`HFLM` does tokenization, scoring and batching. Here are the share of a rank, batches that follow
the length, greedy decoding, and errors that name the document.

Every rank knows all requests, answers each n-th of them and gets the answers of all, so that
nothing depends on the number of ranks.
"""

import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import find_executable_batch_size
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from torch import nn

from hestia_tune.distributed import raise_together
from hestia_tune.evaluation.shim import Shim, hf_tokenizer

# Tokens per forward: a processor gains nothing from more.
_CPU_TOKENS, _GPU_TOKENS = 1 << 12, 1 << 17
# Entries of the logits (batch, length, vocabulary): 0.5 GB in float32, or 2 GB, held twice.
_FEW_LOGITS, _MANY_LOGITS = 1 << 27, 1 << 29


class DecoderLM(HFLM):
    """An lm-eval model.

    Args:
        model: a causal ``nn.Module``, called with int64 (batch, length); returns logits (batch,
            length, vocabulary). In eval mode, see `plain_outputs`.
        tokenizer: of torchtune's form; see `hf_tokenizer`.
        window: longest input in tokens that the model may be given.
        batch_size: sequences per forward, or "auto": as many as a budget of tokens holds, which
            is lowered whenever a GPU's memory runs out.
        device: of the tokens; None is that of the model's first parameter.
        add_bos: whether a text starts with BOS; None is as the tokenizer does it.
        progress: show progress bars on rank 0.

    Attributes:
        truncated: texts of the requests that lost tokens from the left, on this rank.

    Raises:
        ValueError: if the tokenizer has more ids than the model.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        *,
        window: int,
        batch_size: int | str = "auto",
        device: torch.device | str | None = None,
        add_bos: bool | None = None,
        progress: bool = True,
    ):
        shim = Shim(model, device)
        # It warns of a model that it did not load, and of each request that it cuts.
        logging.getLogger(HFLM.__module__).setLevel(logging.ERROR)
        super().__init__(
            pretrained=shim,
            backend="causal",
            tokenizer=hf_tokenizer(tokenizer),
            max_length=window,
            batch_size="auto",
            add_bos_token=add_bos,
        )
        vocab_size = shim(shim.one_token).logits.shape[-1]
        if (self.vocab_size or 0) > vocab_size:
            raise ValueError(
                f"the tokenizer has {self.vocab_size} ids but the model's vocabulary is "
                f"{vocab_size}; they do not belong together: check tokenizer.path and the model's "
                "vocab_size"
            )
        self.truncated: set[tuple[str, ...]] = set()
        self._documents: dict[tuple[str, ...], str] = {}
        self._is_quiet = not progress or (dist.is_initialized() and dist.get_rank() > 0)
        self._batch_size = batch_size
        on_cpu = self.device.type == "cpu"
        logits = _FEW_LOGITS if on_cpu or shim.is_sharded else _MANY_LOGITS
        self._room = min(_CPU_TOKENS if on_cpu else _GPU_TOKENS, logits // vocab_size)

    def get_model_info(self) -> dict[str, Any]:
        """What is noted beside the results."""
        return {
            "model_num_parameters": sum(p.numel() for p in self.model.model.parameters()),
            "model_dtype": str(self.model.dtype),
            "device": str(self.device),
            "batch_size": self._batch_size,
            "max_length": self.max_length,
            "add_bos": self.add_bos_token,
            "prefix_token_id": self.prefix_token_id,
        }

    def _create_tokenizer(self, pretrained: Any, tokenizer: Any, **options: Any) -> None:
        self.tokenizer = tokenizer  # nothing to load

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """(log-probability in nats, is greedy) of each request's continuation.

        Raises:
            ValueError: naming a request that cannot be scored.
            FloatingPointError: naming the request whose logits are NaN.
        """
        self._note(requests)
        for request in requests:
            if not request.args[1]:
                raise ValueError(f"the continuation of {self._name(request.args)} has no tokens")
        return self._shared(requests, super().loglikelihood, disable_tqdm)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-probability in nats of each text, by disjoint windows as wide as the model's."""
        self._note(requests)
        return self._shared(requests, super().loglikelihood_rolling, disable_tqdm)

    def score(self, windows: list[tuple[tuple[str, ...], list[int], list[int]]]) -> list[float]:
        """Log-probabilities in nats of (name, context ids, continuation ids), on every rank."""
        scores = self._shared(windows, self._loglikelihood_tokens, False)
        return [value for value, _ in scores]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy continuations, up to the first stop sequence or EOS.

        Raises:
            ValueError: if a request asks for sampling, or for more tokens than the window has.
            FloatingPointError: naming the prompt whose logits are NaN.
        """
        self._note(requests)
        for request in requests:
            settings = normalize_gen_kwargs(request.args[1], self.max_gen_toks)
            room = self.max_length - settings["max_gen_toks"]
            if settings["do_sample"] or not 0 < room < self.max_length:
                raise ValueError(
                    f"{self._name(request.args[:1])} asks for {settings['max_gen_toks']} new "
                    f"tokens, do_sample {settings['do_sample']}; only greedy decoding is done, in "
                    f"a window of {self.max_length} with the prompt: set the task's "
                    "generation_kwargs do_sample and max_gen_toks"
                )
            if len(self.tok_encode(request.args[0])) > room:
                self.truncated.add(request.args[:1])
        return self._shared(requests, super().generate_until, disable_tqdm)

    def _shared(self, requests: list, answer: Callable[..., list], disable_tqdm: bool) -> list:
        """The answers to all requests, in order, on every rank; each rank computes its share.

        What one rank raises is raised on all.
        """
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        shim, quiet = self.model, disable_tqdm or self._is_quiet
        mine = requests[rank::ranks]

        def answer_with(room: int) -> list:
            self._room = room
            return answer(mine, disable_tqdm=quiet)

        if not shim.is_sharded and self._batch_size == "auto":  # no rank can repeat alone
            answer_with = find_executable_batch_size(answer_with, starting_batch_size=self._room)
        else:
            answer_with = functools.partial(answer_with, self._room)
        if ranks == 1:
            return answer_with()
        found, error = [], None
        try:
            found = answer_with()
        except Exception as caught:
            error = caught
        shim.run_along()
        raise_together(error)
        parts: list = [None] * ranks
        dist.all_gather_object(parts, found)
        answers: list = [None] * len(requests)
        for start, part in enumerate(parts):
            answers[start::ranks] = part
        return answers

    def _loglikelihood_tokens(
        self, requests: list[tuple], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        for texts, context, continuation in requests:
            size, room = len(continuation), self.max_length
            if not context or not 0 < size <= room:
                raise ValueError(
                    f"{self._name(texts)} has a context of {len(context)} tokens and a "
                    f"continuation of {size}; each needs one, and the continuation must fit into "
                    f"the window of {room}: use a longer window or leave the task out"
                )
            if len(context) + size > room + 1:  # the last token is no input
                self.truncated.add(texts)
        # In rolling requests each batch is a call of its own, with a bar of its own.
        quiet = disable_tqdm or override_bs is not None
        answers = super()._loglikelihood_tokens(requests, quiet, override_bs)
        for (texts, _, _), (value, _) in zip(requests, answers, strict=True):
            if math.isnan(value):
                raise FloatingPointError(
                    f"NaN in the logits of {self._name(texts)}; check the model's weights and dtype"
                )
        return answers

    def _fits(self, length: int) -> int:
        """How many sequences of ``length`` tokens go into one forward."""
        return max(self._room // length, 1) if self._batch_size == "auto" else self._batch_size

    def _batch_scheduler(self, pos: int, n_reordered_requests: Sequence[tuple]) -> int:
        """Requests per forward. They come longest first, and the first one of a batch sets it."""
        if pos == 0 or pos == self._batch_end:
            _, context, continuation = n_reordered_requests[pos]
            length = min(len(context) + len(continuation) - 1, self.max_length)
            self._batch_length = self._fits(length)
            self._batch_end = pos + self._batch_length
        return self._batch_length

    def _detect_batch_size(self, requests: Sequence | None = None, pos: int = 0) -> int:
        return self._fits(self.max_length)

    def _model_generate(
        self,
        context: torch.Tensor,
        max_length: int,
        stop: list[str],
        attention_mask: torch.Tensor,
        **settings: Any,
    ) -> torch.Tensor:
        """``context`` (batch, length) and greedy tokens behind it, up to ``max_length``.

        Each token is a forward of the whole text: slow, but of any model, and no caches to mind.
        """
        eos, size = self.eot_token_id, context.shape[1]
        pairs = zip(context, attention_mask, strict=True)
        rows = [row[mask > 0].tolist() for row, mask in pairs]  # without the padding on the left
        new: list[list[int]] = [[] for _ in rows]
        is_done = [False] * len(rows)
        tail = 4 + max(len(one.encode()) for one in stop)  # so many tokens hold any of them
        while len(new[0]) < max_length - size and not all(is_done):
            # Padding on the right, which a causal model does not see.
            width = max(map(len, rows)) + len(new[0])
            tokens = torch.zeros(len(rows), width, dtype=torch.int64)
            for index, (row, more) in enumerate(zip(rows, new, strict=True)):
                tokens[index, : len(row) + len(more)] = torch.tensor(row + more)
            last = [len(row) + len(new[0]) - 1 for row in rows]
            logits = self.model(tokens.to(self.device)).logits  # (batch, width, vocabulary)
            logits = logits[range(len(rows)), last]  # (batch, vocabulary)
            best = logits.argmax(1).masked_fill(logits.isnan().any(1), -1)  # (batch,)
            for index, token in enumerate(best.tolist()):
                if token < 0:
                    raise FloatingPointError(
                        f"NaN in the logits of {self._name((self.tok_decode(rows[index]),))}; "
                        "check the model's weights and dtype"
                    )
                new[index].append(eos if is_done[index] else token)
                text = self.tok_decode(new[index][-tail:], skip_special_tokens=False)
                is_done[index] |= token == eos or any(one in text for one in stop)
        return torch.cat([context.cpu(), torch.tensor(new)], 1)

    def _note(self, requests: Sequence[Instance]) -> None:
        """Remembers which documents the texts of requests are from."""
        for request in requests:
            texts = tuple(text for text in request.args if isinstance(text, str))
            self._documents[texts] = f"{request.task_name} document {request.doc_id}"

    def _name(self, texts: tuple[str, ...]) -> str:
        """Where a request comes from and the ends of its texts."""
        short = [text if len(text) <= 80 else f"{text[:40]} ... {text[-40:]}" for text in texts]
        return f"{self._documents.get(texts, 'a request')} ({' -> '.join(map(repr, short))})"
