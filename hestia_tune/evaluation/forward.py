"""Logits at the positions that are asked for, and at no others.

Of the logits of a whole batch, (batch, length, vocabulary) in float32, an evaluation reads a few
rows; with 128k tokens of vocabulary and 2048 of length they would take 1 GB a sequence. Models of
torchtune's form end in ``norm`` and ``output``, both of which work on each position by itself, so a
hook on ``norm`` lets only the wanted positions through, some at a time. Whether that holds for the
model at hand is tried on a few tokens; if not (another form of model, or one compiled as a whole),
all logits are computed and the wanted ones picked.
"""

import hashlib
import inspect
import logging
from collections.abc import Iterator

import torch
from torch import nn

from hestia_tune.evaluation.sharing import is_sharded
from hestia_tune.evaluation.tokenization import TextCodec

log = logging.getLogger(__name__)

# Entries of logits held at once: 256 MB in float32.
_LOGIT_ENTRIES = 1 << 26
_PROBE_LENGTH = 24


class ModelForward:
    """A model in evaluation mode, without gradients.

    Args:
        model: called as ``model(tokens)`` with int64 (batch, length); returns logits (batch,
            length, vocabulary), a list of such in chunks of length, or an object with ``logits``.
            Causal. Not in use with KV caches.
        device: of the tokens; None is the device of the model's first parameter.

    Attributes:
        vocab_size: width of the logits.
        dtype: of the hidden states, hence of a KV cache.
        takes_positions: whether the model accepts ``mask`` and ``input_pos``, as torchtune's do.

    Raises:
        ValueError: if the model's KV caches are set up.
    """

    def __init__(self, model: nn.Module, device: torch.device | str | None = None):
        if getattr(model, "caches_are_setup", lambda: False)():
            raise ValueError(
                "the model's KV caches are set up, which changes its forward; delete them "
                "(torchtune.modules.common_utils.delete_kv_caches) before an evaluation"
            )
        first = next(model.parameters(), None)
        self.model = model
        self.device = torch.device(
            device if device is not None else "cpu" if first is None else first.device
        )
        self.is_sharded = is_sharded(model)
        self.dtype = torch.float32 if first is None else first.dtype
        parameters = inspect.signature(model.forward).parameters
        self.takes_positions = {"mask", "input_pos"} <= parameters.keys()
        self._norm: nn.Module | None = None
        self._rows_at_once: int | None = None
        self.vocab_size = 1
        self._probe()

    def log_probs(
        self,
        tokens: torch.Tensor,
        rows: torch.Tensor,
        targets: torch.Tensor,
        mask: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities of ``targets`` and whether each is the most probable token.

        Args:
            tokens: int64 (batch, length).
            rows: int64 (n,), indices into the flattened (batch * length) positions.
            targets: int64 (n,), the token that follows each of those positions.
            mask: bool (batch, length, length), True where a position is seen; None is causal.
            positions: int64 (batch, length); None is 0, 1, 2, ...

        Returns:
            float32 (n,) and bool (n,), on the CPU.
        """
        values, greedy = [], []
        start = 0
        for logits in self._logits(tokens, rows, mask, positions):
            target = targets[start : start + len(logits)].to(logits.device)
            start += len(logits)
            chosen = logits.gather(1, target[:, None])[:, 0]
            values.append(chosen - logits.logsumexp(dim=1))
            greedy.append(logits.argmax(dim=1) == target)
        return torch.cat(values).cpu(), torch.cat(greedy).cpu()

    def best_tokens(
        self,
        tokens: torch.Tensor,
        rows: torch.Tensor,
        mask: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The most probable next token at each of ``rows``, int64 (n,), -1 where logits are NaN."""
        best = []
        for logits in self._logits(tokens, rows, mask, positions):
            is_nan = logits.isnan().any(dim=1)
            best.append(logits.argmax(dim=1).masked_fill(is_nan, -1))
        return torch.cat(best)

    def fingerprint(self, *settings: object) -> str:
        """A digest of what the model computes on fixed tokens, and of ``settings``.

        Changes with weights, temperature, pressure and quantizer, with no need to know of them;
        also with the machine, which for a cache key errs on the safe side.
        """
        tokens, rows = self._probe_tokens(_PROBE_LENGTH)
        digest = hashlib.sha256(repr(settings).encode())
        for logits in self._logits(tokens, rows):
            digest.update(logits.cpu().numpy().tobytes())
        return digest.hexdigest()[:16]

    @torch.no_grad()
    def _logits(
        self,
        tokens: torch.Tensor,
        rows: torch.Tensor,
        mask: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> Iterator[torch.Tensor]:
        """Float32 logits (some, vocabulary) of ``rows`` in order."""
        extra = {} if mask is None else {"mask": mask}
        extra |= {} if positions is None else {"input_pos": positions}
        pieces: tuple[torch.Tensor, ...] = ()

        def let_rows_through(module, args, hidden):
            nonlocal pieces
            self.dtype = hidden.dtype
            pieces = hidden.flatten(0, 1)[rows].split(self._rows_at_once or len(rows))
            return pieces[0][None]

        training = [module for module in self.model.modules() if module.training]
        for module in training:
            module.training = False
        handle = self._norm.register_forward_hook(let_rows_through) if self._norm else None
        try:
            logits = self._joined(self.model(tokens, **extra))
        finally:
            if handle is not None:
                handle.remove()
            for module in training:
                module.training = True
        if handle is None:
            for some in rows.split(self._rows_at_once or len(rows)):
                yield logits.flatten(0, 1)[some].float()
            return
        yield logits[0].float()
        del logits
        for piece in pieces[1:]:
            yield self.model.output(piece[None])[0].float()

    def _joined(self, output) -> torch.Tensor:
        if isinstance(output, list | tuple):
            chunked = getattr(self.model, "num_output_chunks", 0) > 0
            return torch.cat(output, dim=1) if chunked else output[-1]
        return getattr(output, "logits", output)

    def _probe(self) -> None:
        """Learns the vocabulary's size and whether the hook on ``norm`` is exact."""
        self.vocab_size = next(self._logits(*self._probe_tokens(1))).shape[-1]
        tokens, rows = self._probe_tokens(3)
        whole = next(self._logits(tokens, rows))
        if not self.is_sharded:  # a sharded head can only run inside the model's own forward
            self._rows_at_once = max(_LOGIT_ENTRIES // self.vocab_size, 1)
        compiled = hasattr(self.model, "_orig_mod") or self.model._compiled_call_impl is not None
        norm = getattr(self.model, "norm", None)
        if compiled or not isinstance(norm, nn.Module) or not hasattr(self.model, "output"):
            return
        self._norm = norm
        try:
            picked = next(self._logits(tokens, rows[1:]))
        except Exception:  # whatever a model of another form makes of it
            self._norm = None
            return
        expected = whole[1:]
        error = (
            (picked - expected).abs().nan_to_num().max() if picked.shape == expected.shape else 1
        )
        if error > 1e-2 * expected.abs().nan_to_num().max():
            self._norm = None

    @property
    def most_tokens(self) -> int | None:
        """Tokens per forward whose logits fit into memory; None where rows are taken in pieces."""
        return max(_LOGIT_ENTRIES // self.vocab_size, 1) if self.is_sharded else None

    def _probe_tokens(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.arange(length, device=self.device)
        return (rows * 7919 % self.vocab_size)[None], rows


# A tokenizer this much smaller than the vocabulary is no padding any more.
_LIKELY_SHARE = 0.9


def check_vocabulary(codec: TextCodec, forward: ModelForward) -> None:
    """Raises ValueError if the tokenizer has ids that the model has no logits for.

    A vocabulary that is much larger than the tokenizer is only a warning: it may be padding.
    """
    if codec.vocab_size is not None and codec.vocab_size < _LIKELY_SHARE * forward.vocab_size:
        log.warning(
            "the tokenizer has %d ids and the model's vocabulary %d: do they belong together?",
            codec.vocab_size,
            forward.vocab_size,
        )
    if codec.vocab_size is not None and codec.vocab_size > forward.vocab_size:
        raise ValueError(
            f"the tokenizer has {codec.vocab_size} ids but the model's vocabulary is "
            f"{forward.vocab_size}; they do not belong together: check tokenizer.path and the "
            "model's vocab_size"
        )
