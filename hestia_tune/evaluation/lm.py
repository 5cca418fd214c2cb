"""lm-eval's ``hf`` backend on a torchtune decoder: its scores, without its loading and its network.

`HFLM` does tokenization, scoring and batching, and cuts what is too long from the left, with a
warning. Here are the share of a rank, batches of so many tokens, and greedy decoding.

Every rank knows all requests, answers each n-th of them and gets the answers of all, so that
nothing depends on the number of ranks. A forward of a model that FSDP has sharded is collective:
its ranks agree before each one whether any still works, which costs a reduction of one number, and
those that are done run along on one token.

A torchtune tokenizer's ``encode`` decides about BOS by its own flags; a ``tokenizer.json`` may add
it by a post-processor whatever the flags say. lm-eval's scores rest on what the file says, so a
tokenizer that has one behind it (``.tokenizer``) is asked itself.
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
from transformers import PreTrainedTokenizerFast

from hestia_tune.distributed import gathered, progress_bar, raise_together
from hestia_tune.errors import InputError, NotFiniteError

_TOKENS = 2048  # per forward; with a vocabulary of 128k their logits are 1 GB, held three times


class DecoderLM(cast(Any, HFLM)):  # whose decorator hides its type
    """An lm-eval model.

    Args:
        decoder: a causal ``nn.Module``, called with int64 (batch, length); returns logits (batch,
            length, vocabulary). In eval mode, see `plain_outputs`.
        tokenizer: of torchtune's form; perhaps with ``bos_id``, ``vocab_size`` and ``tokenizer``.
        window: longest input in tokens that the model may be given.
        batch_size: sequences per forward, or "auto": as many as a fixed budget of tokens holds.
        device: of the tokens; None is that of the model's first parameter.
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
            tokenizer = PreTrainedTokenizerFast(
                tokenizer_object=inner,  # copied, without what it cuts and fills
                bos_token=None if bos is None else inner.id_to_token(bos),
                eos_token=inner.id_to_token(tokenizer.eos_id),
                clean_up_tokenization_spaces=False,
            )
        else:
            tokenizer = PlainTokenizer(tokenizer)
        logger = logging.getLogger(HFLM.__module__)
        logger.setLevel(logging.ERROR)  # it warns of a model that it did not load
        super().__init__(
            pretrained=SimpleNamespace(device=device, config=None),
            backend="causal",
            tokenizer=tokenizer,
            max_length=window,
            batch_size=batch_size,
        )
        logger.setLevel(logging.NOTSET)
        self._decoder = decoder
        self._is_sharded = any(isinstance(module, FSDPModule) for module in decoder.modules())

    def _create_tokenizer(self, pretrained: Any, tokenizer: Any, **options: Any) -> None:
        self.tokenizer = tokenizer  # nothing to load

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        documents = [self.tok_encode(request.args[0]) for request in requests]
        return self.rolling(documents, self.max_length, self.max_length)

    def rolling(self, documents: list[list[int]], window: int, stride: int) -> list[float]:
        """Log-probability in nats of the tokens of each document, by windows as in `perplexity`."""
        shared = window - stride + 1  # tokens of a window that were in the one before
        windows = [
            [(None, *make_disjoint_window(pair)) for pair in pairs]
            for ids in documents
            for pairs in [get_rolling_token_windows(ids, self.prefix_token_id, window, shared)]
        ]
        scores = iter(self._loglikelihood_tokens([one for group in windows for one in group]))
        return [sum(next(scores)[0] for _ in group) for group in windows]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        return self._shared(requests, self._generate, disable_tqdm)

    def _generate(self, requests: list[Instance], disable_tqdm: bool) -> list[str]:
        """Greedy continuations, each token by a forward of the whole text, for want of caches.

        Raises:
            InputError: if a request asks for sampling, or for more tokens than the window has.
        """
        texts = []
        arguments: list[Any] = [request.args for request in requests]
        for prompt, options in progress_bar(arguments, disable=disable_tqdm):
            settings: Any = normalize_gen_kwargs(options, self.max_gen_toks)
            until, most = settings["until"], settings["max_gen_toks"]
            if settings["do_sample"] or most >= self.max_length:
                rule = f"only greedy decoding of fewer than {self.max_length} tokens is done"
                raise InputError(f"{rule}; got {settings}; change the task's generation_kwargs")
            tokens, new, text = self.tok_encode(prompt)[most - self.max_length :], [], ""
            while len(new) < most and not any(one in text for one in until):
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
        """The answers to all requests, in order, on every rank; so is an error of any rank."""
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if ranks == 1:
            return answer(requests, disable_tqdm=disable_tqdm)
        found, error = [], None
        try:
            found = answer(requests[rank::ranks], disable_tqdm=disable_tqdm or rank > 0)
        except Exception as caught:
            error = caught
        while self._any_works(False):
            self._decoder(torch.zeros(1, 1, dtype=torch.int64, device=self.device))
        raise_together(error)
        parts = gathered(found)
        return [parts[index % ranks][index // ranks] for index in range(len(requests))]

    @torch.no_grad()
    def _model_call(self, inps: torch.Tensor, *_: Any) -> torch.Tensor:
        """Logits, float32 (batch, length, vocabulary), of tokens, int64 (batch, length)."""
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
        flag = torch.tensor(float(working and self._is_sharded))
        if self._is_sharded:
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)

    def _batch_scheduler(self, pos: int, n_reordered_requests: Sequence[tuple]) -> int:
        """Requests per forward. They come longest first, and the first one of a batch sets it."""
        if pos == 0 or pos == self._batch_end:
            _, context, continuation = n_reordered_requests[pos]
            length = min(len(context) + len(continuation), self.max_length)
            self._batch_length = max(_TOKENS // length, 1)
            self._batch_end = pos + self._batch_length
        return self._batch_length


class PlainTokenizer:
    """What lm-eval asks of a tokenizer, of one that is tiktoken or SentencePiece inside.

    A text starts with BOS if there is one that is not EOS.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self.eos_token_id = self.pad_token_id = tokenizer.eos_id
        self.bos_token_id = getattr(tokenizer, "bos_id", None)
        self.vocab_size = getattr(tokenizer, "vocab_size", None)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        has_bos = add_special_tokens and self.bos_token_id not in (None, self.eos_token_id)
        ids = self._tokenizer.encode(text, add_bos=False, add_eos=False)
        return [self.bos_token_id] * has_bos + ids

    def decode(self, ids: list[int] | int, skip_special_tokens: bool = False) -> str:
        """The text without BOS and EOS; one that comes as an int is shown by its number."""
        if isinstance(ids, int):
            return f"<|{ids}|>"
        special = (self.bos_token_id, self.eos_token_id)
        return self._tokenizer.decode([one for one in ids if one not in special])
