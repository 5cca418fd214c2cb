"""Gives torchtune's decoders to lm-eval's ``hf`` backend, without its loading and its network.

The scores are lm-eval's own. `HFLM` tokenizes, scores and batches. It cuts too long inputs from the
left and warns. This module adds three things: ranks share the requests, a batch has a fixed number
of tokens, and decoding is greedy.

Every rank knows all requests, answers every n-th request on n ranks, and gets the answers of all
ranks. Results therefore do not depend on the number of ranks. If FSDP has sharded the model, each
forward is collective. Before each forward, the ranks check whether any rank still has work. This
costs one reduction of one number. A rank without work joins the forward with one token.

The ``encode`` of a torchtune tokenizer adds BOS by its own flags. A ``tokenizer.json`` may add BOS
in a post-processor, whatever the flags are. lm-eval's scores follow ``tokenizer.json``. So if a
torchtune tokenizer holds one (``.tokenizer``), that one is used directly.
"""

import logging
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tokenizers import Tokenizer
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast

from hestia_tune.data.sequences import prefix_of
from hestia_tune.distributed import gathered, progress_bar, raise_together
from hestia_tune.errors import InputError, NotFiniteError
from hestia_tune.losses import divergence
from hestia_tune.models.tokenizers import added_tokens

# Tokens per forward. With a vocabulary of 128k, their logits are 1 GB and exist three times.
_TOKENS = 2048


class DecoderLM(cast(Any, HFLM)):  # a decorator hides the type of HFLM
    """Run a torchtune decoder as an lm-eval model.

    Args:
        decoder: A causal ``nn.Module`` in eval mode; see `plain_outputs`. It is called with tokens,
            int64 (batch, length), and returns logits (batch, length, vocabulary).
        tokenizer: A tokenizer in torchtune's form. It may have ``bos_id``, ``vocab_size`` and
            ``tokenizer``.
        window: The longest input of the model in tokens.
        batch_size: Sequences per forward. "auto": as many as a fixed number of tokens holds.
        device: The device of the tokens. None: the device of the model's first parameter.
    """

    def __init__(
        self,
        decoder: nn.Module,
        tokenizer: Any,
        *,
        window: int,
        batch_size: int | str = "auto",
        device: torch.device | str | None = None,
    ):
        device = torch.device(device or next(decoder.parameters()).device)
        inner, bos = getattr(tokenizer, "tokenizer", None), getattr(tokenizer, "bos_id", None)
        if isinstance(inner, Tokenizer):
            prefix = added_tokens(inner)[0]
            tokenizer = PreTrainedTokenizerFast(
                tokenizer_object=inner,  # a copy, without truncation and padding
                bos_token=None if bos is None else inner.id_to_token(bos),
                eos_token=inner.id_to_token(tokenizer.eos_id),
                clean_up_tokenization_spaces=False,
                split_special_tokens=inner.encode_special_tokens,
            )
        else:
            prefix = prefix_of(tokenizer)
            tokenizer = PlainTokenizer(tokenizer)
        logger = logging.getLogger(HFLM.__module__)
        logger.setLevel(logging.ERROR)  # no warning that HFLM did not load the model itself
        super().__init__(
            pretrained=SimpleNamespace(device=device, config=None),
            backend="causal",
            tokenizer=tokenizer,
            max_length=window,
            batch_size=batch_size,
        )
        logger.setLevel(logging.NOTSET)
        self._decoder, self._prefix = decoder, prefix
        self._is_sharded = any(isinstance(module, FSDPModule) for module in decoder.modules())

    def _create_tokenizer(self, pretrained: Any, tokenizer: Any, **options: Any) -> None:
        self.tokenizer = tokenizer  # nothing to load

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        documents = [self.tok_encode(request.args[0]) for request in requests]
        window = self.max_length  # as in lm-eval, whose windows have no BOS but the first
        return self.rolling(documents, window, window, has_bos=False)

    def rolling(
        self, documents: list[list[int]], window: int, stride: int, has_bos: bool = True
    ) -> list[float]:
        """Return the log-probability in nats of each document, in the windows of `perplexity`.

        Args:
            documents: The token ids of each document.
            window: The number of inputs per forward.
            stride: The step from one window to the next.
            has_bos: Whether every window begins with BOS if the tokenizer's texts do.
        """
        windows = [self._windows(ids, window, stride, has_bos) for ids in documents]
        pairs = [(None, *make_disjoint_window(pair)) for group in windows for pair in group]
        scores = iter(self._loglikelihood_tokens(pairs))
        return [sum(next(scores)[0] for _ in group) for group in windows]

    def _windows(
        self, ids: list[int], window: int, stride: int, has_bos: bool = True
    ) -> list[tuple[list[int], list[int]]]:
        """Return the inputs of every window, and the tokens that their last positions predict."""
        prefix = self._prefix if has_bos else []
        *before, last = prefix or [self.prefix_token_id]  # more than BOS in GLM
        if window <= len(before):
            raise InputError(f"window must be longer than {len(before)}; got {window}")
        if before:
            window, stride = window - len(before), min(stride, window - len(before))
        shared = window - stride + 1  # tokens of a window that the window before also has
        windows = [*get_rolling_token_windows(ids, last, window, shared)]
        if prefix:
            windows = [([*prefix, *inputs[1:]], targets) for inputs, targets in windows]
        return windows

    def divergence(
        self, reference: "DecoderLM", documents: list[list[int]], window: int, stride: int
    ) -> dict[str, float]:
        """Compare the predictions with the predictions of a reference, in the same windows.

        Args:
            reference: The reference, with the same tokenizer and on the same device.
            documents: The token ids of each document.
            window: The number of inputs per forward.
            stride: The step from one window to the next.

        Returns:
            On every rank: ``kl_divergence``, the mean over the tokens of KL(reference || self) in
            nats; ``top1_agreement``, the share of tokens for which both models find the same token
            most likely; and ``tokens``, their number.
        """
        windows = [pair for ids in documents for pair in self._windows(ids, window, stride)]
        size = max(_TOKENS // window, 1)

        def answer(windows: list, disable_tqdm: bool) -> list[tuple[float, int, int]]:
            answers = []
            starts = range(0, len(windows), size)
            for begin in progress_bar(starts, disable=disable_tqdm, desc="comparing"):
                batch = windows[begin : begin + size]
                tokens = self._padded([inputs for inputs, _ in batch])
                both = zip(self._model_call(tokens), reference._model_call(tokens), strict=True)
                for (inputs, targets), logits in zip(batch, both, strict=True):
                    new = slice(len(inputs) - len(targets), len(inputs))
                    own, other = (of_model[new] for of_model in logits)  # (new, vocabulary)
                    same = (own.argmax(-1) == other.argmax(-1)).sum()
                    total = divergence(own, other, lambda scores: scores)
                    answers.append((float(total), int(same), len(targets)))
            return answers

        parts = self._shared(windows, answer, disable_tqdm=False)
        total, same, tokens = map(sum, zip(*parts, strict=True))
        return {"kl_divergence": total / tokens, "top1_agreement": same / tokens, "tokens": tokens}

    def _padded(self, rows: list[list[int]]) -> torch.Tensor:
        """Return tokens (batch, longest) on the device. A causal model ignores the padding."""
        return pad_sequence([torch.tensor(row) for row in rows], batch_first=True).to(self.device)

    def continuations(self, prompts: Sequence[str], max_new: int = 48) -> dict[str, str]:
        """Continue all prompts greedily, in one batch that grows by a token per forward.

        Every rank computes all continuations.

        Args:
            prompts: The prompts. A prompt without room for ``max_new`` tokens loses its beginning.
            max_new: The most tokens of a continuation, and at most half of the model's longest
                input. EOS ends a continuation early.

        Returns:
            Prompt -> its continuation.
        """
        max_new = min(max_new, self.max_length // 2)
        rows = [self.tok_encode(prompt)[max_new - self.max_length :] for prompt in prompts]
        starts = [len(row) for row in rows]
        for _ in range(max_new):
            logits = self._model_call(self._padded(rows))  # (prompts, longest, vocabulary)
            for row, start, scores in zip(rows, starts, logits, strict=True):
                if len(row) == start or row[-1] != self.eot_token_id:
                    row.append(int(scores[len(row) - 1].argmax()))
        texts = (self.tok_decode(row[start:]) for row, start in zip(rows, starts, strict=True))
        return dict(zip(prompts, texts, strict=True))

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        return self._shared(requests, self._generate, disable_tqdm)

    def _generate(self, requests: list[Instance], disable_tqdm: bool) -> list[str]:
        """Continue each request greedily. Each new token costs a forward of the whole text.

        Raises:
            InputError: If a request asks for sampling, or for more tokens than the window has.
        """
        texts = []
        arguments: list[Any] = [request.args for request in requests]
        for prompt, options in progress_bar(
            arguments, disable=disable_tqdm, desc="continuing texts"
        ):
            settings: Any = normalize_gen_kwargs(options, self.max_gen_toks)
            until, max_new = settings["until"], settings["max_gen_toks"]
            if settings["do_sample"] or max_new >= self.max_length:
                rule = f"only greedy decoding of fewer than {self.max_length} tokens is possible"
                raise InputError(f"{rule}; got {settings}; change the task's generation_kwargs")
            tokens, new, text = self.tok_encode(prompt)[max_new - self.max_length :], [], ""
            while len(new) < max_new and not any(end in text for end in until):
                logits = self._model_call(torch.tensor([tokens + new], device=self.device))
                new.append(int(logits[0, -1].argmax()))
                if new[-1] == self.eot_token_id:
                    break
                text = self.tok_decode(new)
            texts.append(postprocess_generated_text(text, until, None))
        return texts

    def _loglikelihood_tokens(
        self, requests: list[tuple], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        return self._shared(requests, super()._loglikelihood_tokens, disable_tqdm)

    def _shared(self, requests: list, answer: Callable[..., list], disable_tqdm: bool) -> list:
        """Return the answers to all requests on every rank, in the order of the requests.

        An error on one rank is raised on every rank.

        Args:
            requests: All requests.
            answer: A function that answers the requests of this rank.
            disable_tqdm: Whether to show no progress bar.
        """
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if ranks == 1:
            return answer(requests, disable_tqdm=disable_tqdm)
        answers, error = [], None
        try:
            answers = answer(requests[rank::ranks], disable_tqdm=disable_tqdm or rank > 0)
        except Exception as caught:
            error = caught
        while self._any_works(False):
            self._decoder(torch.zeros(1, 1, dtype=torch.int64, device=self.device))
        raise_together(error)
        parts = gathered(answers)
        return [parts[index % ranks][index // ranks] for index in range(len(requests))]

    @torch.no_grad()
    def _model_call(self, inps: torch.Tensor, *_: Any) -> torch.Tensor:
        """Return logits, float32 (batch, length, vocabulary), of tokens, int64 (batch, length)."""
        self._any_works(True)
        logits = self._decoder(inps).float()
        is_nan = logits.isnan().flatten(1).any(1)  # (batch,)
        if is_nan.any():
            text = self.tok_decode(inps[is_nan][0].tolist())
            raise NotFiniteError(
                f"NaN in the logits of {text[:200]!r}; check the model's weights and dtype"
            )
        return logits

    def _any_works(self, working: bool) -> bool:
        """Return whether any rank still works on its requests. Return False without sharding."""
        flag = torch.tensor(float(working and self._is_sharded))
        if self._is_sharded:
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)

    def _batch_scheduler(self, pos: int, n_reordered_requests: Sequence[tuple]) -> int:
        """Return the number of requests per forward.

        Requests come longest first, and the first request of a batch decides the number.
        """
        if pos == 0 or pos == self._batch_end:
            _, context, continuation = n_reordered_requests[pos]
            length = min(len(context) + len(continuation), self.max_length)
            self._batch_length = max(_TOKENS // length, 1)
            self._batch_end = pos + self._batch_length
        return self._batch_length


class PlainTokenizer:
    """Give lm-eval's tokenizer interface to torchtune's tiktoken and SentencePiece tokenizers.

    A text starts with BOS if there is a BOS other than EOS.

    Args:
        tokenizer: A tokenizer in torchtune's form.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer, self._prefix = tokenizer, prefix_of(tokenizer)
        self.eos_token_id = self.pad_token_id = tokenizer.eos_id
        self.bos_token_id = getattr(tokenizer, "bos_id", None)
        self.vocab_size = getattr(tokenizer, "vocab_size", None)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = self._tokenizer.encode(text, add_bos=False, add_eos=False)
        return [*self._prefix, *ids] if add_special_tokens else ids

    def decode(self, ids: list[int] | int, skip_special_tokens: bool = False) -> str:
        """Return the text of tokens without BOS and EOS, or a token given as an int by number."""
        if isinstance(ids, int):
            return f"<|{ids}|>"
        special = (self.bos_token_id, self.eos_token_id)
        return self._tokenizer.decode([token for token in ids if token not in special])
