"""Text and chats that the pretrained model writes itself, before the stages that read them.

transformers builds the model and samples with its own key-value cache, so every model that
transformers loads can write its data, also one that torchtune trains. Text begins with a random
token (LLM-QAT, arXiv 2305.17888). A chat begins with the chat template up to the place of the
user's text. The model writes this text until its turn ends, and then replies to it.

Sequences are sampled in batches of ``dataset.batch_size``. Each batch has its own random numbers,
so the ranks can share the batches, and any number of ranks writes the same set. A run after a stop
generates only the missing batches. Until the set is complete, the batches are files in
``cache_dir.DIGEST``. Every rank that generates holds the whole model in the run's dtype, and the
cache of one batch. Later runs do not load the model to generate. Their rank 0 reads the model's
files to compare their checksum.
"""

import contextlib
import dataclasses
import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence

from hestia_tune.config import GeneratedConfig
from hestia_tune.config.run_config import SELF_GENERATED, RunConfig
from hestia_tune.data.chat_stream import require_template
from hestia_tune.data.chats import Chat
from hestia_tune.data.sequences import prefix_of
from hestia_tune.data.tokens import INDEX, write_chats, write_set
from hestia_tune.distributed import on_first_rank, progress_bar, together
from hestia_tune.errors import InputError, one_line
from hestia_tune.files import checksum, digest, remove, staged, write_json
from hestia_tune.models.decoder import model_of_transformers, quiet, read_config
from hestia_tune.models.small import require_separate_documents
from hestia_tune.models.sources import pretrained_folder
from hestia_tune.run import Run, keep_date
from hestia_tune.training import loader

log = logging.getLogger(__name__)

# Of the key-value cache, in bfloat16. It decides the batch size, so it must not depend on a device.
_CACHE_BYTES, _LARGEST_BATCH = 4 << 30, 256
_FIRST_ROUND = 64  # tokens of a turn after which rows that have ended leave the batch
_MARKER = "\ue000user\ue001"  # characters for private use, which no template has


def generated_sets(config: RunConfig) -> list[GeneratedConfig]:
    """Return the options of the sets in a config's dataset that its own model generates."""
    sections = [part for part in config.datasets if part.get("_component_") == SELF_GENERATED]
    other = ("_component_", "weight")
    return [
        GeneratedConfig.parse({key: value for key, value in section.items() if key not in other})
        for section in sections
    ]


def batch_size_of(settings: GeneratedConfig, config: Any) -> int:
    """Return the number of sequences that are generated together.

    Args:
        settings: The options.
        config: The configuration of the model in transformers.
    """
    if settings.batch_size is not None:
        return settings.batch_size
    heads = getattr(config, "num_attention_heads", None) or 1
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    per_sequence = settings.seq_len * config.num_hidden_layers * 2 * kv_heads * head_dim * 2
    most = min(_LARGEST_BATCH, settings.num_sequences)
    return max(1, min(most, _CACHE_BYTES // per_sequence))


def missing_sets(config: RunConfig) -> list[GeneratedConfig]:
    """Return the options of the generated sets that do not exist yet."""
    sets = generated_sets(config)
    return [settings for settings in sets if not (Path(settings.cache_dir) / INDEX).is_file()]


def check_sets(run: Run) -> None:
    """Check that the model can write the sets of a run's dataset, before anything is computed.

    While a set is missing, this opens all other data of the run too, because writing takes long.

    Raises:
        InputError: If transformers does not know the model, chats have no template, two sets would
            be in one folder, or other data cannot be loaded.
    """
    folder, sets = pretrained_folder(run.config), generated_sets(run.config)
    written: dict[Path, dict[str, Any]] = {}
    for settings in sets:
        place, content = Path(settings.cache_dir).resolve(), _content(settings)
        if written.setdefault(place, content) != content:
            raise InputError(
                f"two generated sets have the cache_dir {settings.cache_dir}, but not the same "
                f"options; set the cache_dir of one to another folder, such as "
                f"{settings.cache_dir}_2"
            )
    for settings in sets:
        try:
            read_config(str(folder))
        except InputError as error:
            raise InputError(
                f"transformers generates the data of {SELF_GENERATED.rpartition('.')[2]}, and it "
                f"cannot load the model ({error}); use another dataset, such as "
                "dataset._component_=hestia_tune.data.streaming_text_dataset"
            ) from error
        if settings.chats:
            Turns.of(run.tokenizer, settings)
        if settings.chats and settings.packed and run.config.is_transformers_model:
            require_separate_documents(str(folder))
    if missing_sets(run.config):
        loader.check_given_data(run.config, run.tokenizer)


def _content(settings: GeneratedConfig) -> dict[str, Any]:
    """Return the options that decide what a set holds."""
    content = dataclasses.asdict(settings)
    for name in ("cache_dir", "epochs", "packed"):
        del content[name]
    return content


def generate_missing(run: Run) -> None:
    """Generate the missing parts of the generated sets in a run's dataset. Collective.

    Raises:
        InputError: If ``cache_dir`` holds something else; or if `check_sets` raises it.
    """
    check_sets(run)
    keep_date(run)
    for settings in generated_sets(run.config):
        _generate_set(run, settings)


def _generate_set(run: Run, settings: GeneratedConfig) -> None:
    """Generate the missing batches of one set, and write the set once all exist. Collective."""
    folder = pretrained_folder(run.config)
    size = batch_size_of(settings, read_config(str(folder)))

    def digest_of_model() -> str:
        files = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
        return digest([(path.name, checksum(path)) for path in files])

    model = on_first_rank(digest_of_model)
    source: Any = {"self_generated": True, "model": model} | _content(settings)
    source["batch_size"] = size
    if settings.chats:
        source["chat_template"] = digest(run.tokenizer.chat_template)
    target = Path(settings.cache_dir)
    parts = target.with_name(f"{target.name}.{digest(source)}")
    suffix = "json" if settings.chats else "npy"
    count = -(-settings.num_sequences // size)
    paths = [parts / f"{number}.{suffix}" for number in range(count)]

    def find_missing() -> list[int]:
        cache_dir = Path(settings.cache_dir)
        # It holds the complete set, or something else that `join` refuses.
        if cache_dir.is_file() or any(cache_dir.glob("*")):
            return []
        missing = [number for number, path in enumerate(paths) if not path.exists()]
        if missing:
            log.info(f"the pretrained model writes {describe(settings)}")
        return missing

    def join() -> None:
        if settings.chats:
            rows = (row for path in paths for row in json.loads(path.read_text("utf-8")))
            write_chats(settings.cache_dir, source, rows, settings.num_sequences)
        else:
            lists = (np.load(path, allow_pickle=False).flatten().tolist() for path in paths)
            max_tokens = settings.num_sequences * settings.seq_len
            write_set(run.tokenizer, settings.cache_dir, source, lists, max_tokens)
        remove(parts)

    own = (on_first_rank(find_missing) or [])[dist.get_rank() :: dist.get_world_size()]
    with together():
        if own:
            _generate_batches(run, settings, size, {n: paths[n] for n in own})
    on_first_rank(join, share=False)


def describe(settings: GeneratedConfig) -> str:
    """Return what a set will hold, and where."""
    what = "chats" if settings.chats else "sequences"
    length = "up to " if settings.chats else ""
    size = f"{settings.num_sequences:,} {what} of {length}{settings.seq_len:,} tokens"
    return f"{size} into {settings.cache_dir}"


def _generate_batches(
    run: Run, settings: GeneratedConfig, size: int, paths: dict[int, Path]
) -> None:
    """Generate batches on this rank and write each to its file.

    Args:
        run: The run.
        settings: The options of the generated set.
        size: Number of sequences in a batch.
        paths: Number of a batch -> its file.
    """
    model = model_of_transformers(pretrained_folder(run.config), run.dtype).to(run.device)
    with progress_bar(total=len(paths), unit="batch") as progress:
        for number, path in paths.items():
            try:
                if settings.chats:
                    rows = chat_batch(model, run.tokenizer, settings, size, number)
                    write_json(path, rows)
                else:
                    tokens = text_batch(model, run.tokenizer, settings, size, number)
                    with staged(path) as temporary, open(temporary, "wb") as file:
                        np.save(file, tokens.numpy(force=True))
            except torch.OutOfMemoryError as error:
                raise InputError(
                    f"the generation of {size} sequences at a time ran out of memory "
                    f"({one_line(error)}); set dataset.batch_size={max(1, size // 2)}"
                ) from error
            progress.update()


@contextlib.contextmanager
def _seeded(settings: GeneratedConfig, number: int, device: torch.device) -> Iterator[None]:
    """Give torch the random numbers of a batch. The generator of the run stays as it was."""
    (state,) = np.random.SeedSequence([settings.seed, number]).generate_state(1, np.uint64)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(int(state >> np.uint64(1)))
        yield


def _continued(model: Any, prompts: torch.Tensor, count: int, **options: Any) -> torch.Tensor:
    """Return prompts (batch, length) with up to ``count`` more tokens each.

    Args:
        model: A model of transformers.
        prompts: The prompts. With ``attention_mask`` among the options, they may have padding.
        count: Number of tokens to add.
        options: Further options of transformers' ``GenerationConfig``, or of ``generate``.
    """
    import transformers

    inputs = {key: options.pop(key) for key in ("attention_mask", "tokenizer") if key in options}
    inputs = {"attention_mask": torch.ones_like(prompts)} | inputs
    # The model's own generation_config may have penalties and stops of its own.
    plain = {"pad_token_id": 0, "max_new_tokens": count}
    plain |= {"top_k": 0, "top_p": 1.0} if options.get("do_sample") else {}
    model.generation_config = transformers.GenerationConfig(**plain | options)
    with quiet(), torch.inference_mode():
        return model.generate(prompts, **inputs)


def text_batch(
    model: Any, tokenizer: Any, settings: GeneratedConfig, size: int, number: int
) -> torch.Tensor:
    """Return the token ids (size, seq_len) of a batch of text.

    The first token is random. If texts begin with BOS, it stands behind BOS. The next 3 to 5 tokens
    are greedy, the same number in the whole batch. All further tokens are sampled.

    Args:
        model: A model of transformers.
        tokenizer: The tokenizer. The first token is below its ``vocab_size``.
        settings: The options of the generated set.
        size: Number of sequences in the batch.
        number: Number of the batch.
    """
    vocab_size = getattr(tokenizer, "vocab_size", None) or model.config.vocab_size
    before = torch.tensor(prefix_of(tokenizer), dtype=torch.int64)
    with _seeded(settings, number, model.device):
        first = torch.randint(vocab_size, (size, 1))
        num_greedy = int(torch.randint(3, 6, ()))
        tokens = torch.cat([before.expand(size, -1), first], 1).to(model.device)
        tokens = _continued(model, tokens, num_greedy, do_sample=False)
        rest, temperature = settings.seq_len - tokens.shape[1], settings.temperature
        return _continued(model, tokens, rest, do_sample=True, temperature=temperature)


@dataclass(frozen=True)
class End:
    """What ends a turn.

    Attributes:
        ids: Special tokens that end it.
        text: Text that ends it, for templates without a special token there. None: only tokens do.
    """

    ids: list[int]
    text: str | None = None

    def is_in(self, tokenizer: Any, ids: Sequence[int]) -> bool:
        """Return whether generated ids hold the end of the turn."""
        if not self.text:
            return not set(self.ids).isdisjoint(ids)
        text = tokenizer.tokenizer.decode(list(ids), skip_special_tokens=False)
        return self.text in text or not set(self.ids).isdisjoint(ids)

    def cut(self, tokenizer: Any, ids: Sequence[int], special: frozenset[int]) -> str | None:
        """Return the text of generated ids before the end of the turn.

        Returns:
            None if the turn does not end, is empty, or holds a special token, which would change
            the chat when it is rendered.
        """
        last = next((place for place, token in enumerate(ids) if token in self.ids), None)
        content = ids[:last]
        if special.intersection(content):
            return None
        text, found, _ = tokenizer.tokenizer.decode(
            list(content), skip_special_tokens=False
        ).partition(self.text or "\0")
        return text.strip() or None if found or last is not None else None


@dataclass(frozen=True)
class Turns:
    """How a chat template separates the turns of a user and of the model.

    Attributes:
        prompt: Token ids up to the user's text.
        user: What ends the user's text.
        reply: What ends a reply.
        opened: The beginning of every reply that the template writes itself, such as "<think>".
        special: The special tokens, which no turn may hold.
        options: Variables of the chat template.
    """

    prompt: list[int]
    user: End
    reply: End
    opened: str
    special: frozenset[int]
    options: dict[str, Any]

    @classmethod
    def of(cls, tokenizer: Any, settings: GeneratedConfig) -> "Turns":
        """Find the turns by rendering a chat with a marker in place of each text.

        Raises:
            InputError: If there is no chat template, or it hides or changes the texts.
        """
        require_template(tokenizer)
        options = settings.chat_template_kwargs
        user = {"role": "user", "content": _MARKER}
        reply = {"role": "assistant", "content": _MARKER}
        asked = tokenizer.render(Chat([user], [False], options=options), prompt=True)
        pair = Chat([{"role": "user", "content": "Hi"}, reply], [False, True], options=options)
        replied, prompt = tokenizer.render(pair), tokenizer.render(pair, pair.messages[:1], True)
        if asked.count(_MARKER) != 1 or replied.count(_MARKER) != 1:
            raise InputError(
                "the chat template does not show where a turn begins, so the model cannot write "
                "chats; set dataset.chats=False, or use another tokenizer"
            )
        before, behind = asked.split(_MARKER)
        added = tokenizer.tokenizer.get_added_tokens_decoder().items()
        special = {token.content: number for number, token in added if token.special}

        def end(tail: str) -> End:
            tail = tail.strip()
            names = [name for name in special if tail.startswith(name)]
            if names:
                return End(sorted({special[max(names, key=len)], *tokenizer.stop_tokens}))
            # Behind a text that ends it, transformers fills a row with padding.
            ids = {*tokenizer.stop_tokens, tokenizer.pad_id}
            return End(sorted(ids), tail.splitlines()[0] if tail else None)

        # A space at the end would be a token of its own, where texts have it before their first
        # word.
        ids = tokenizer.tokenizer.encode(before.rstrip(" "), add_special_tokens=False).ids
        return cls(
            prompt=ids or [tokenizer.bos_id],
            user=end(behind),
            reply=end(replied.split(_MARKER)[1]),
            opened=prompt[len(os.path.commonprefix([prompt, replied.split(_MARKER)[0]])) :],
            special=frozenset(special.values()),
            options=options,
        )


def chat_batch(
    model: Any, tokenizer: Any, settings: GeneratedConfig, size: int, number: int
) -> list[dict[str, Any] | None]:
    """Return a batch of chats, each with a user's turn and a reply that the model has written.

    A user's turn has at most half of ``seq_len``, and the whole chat at most ``seq_len`` tokens.

    Args:
        model: A model of transformers.
        tokenizer: `hestia_tune.models.AutoTokenizer` or `HuggingFaceTokenizer`.
        settings: The options of the generated set.
        size: Number of sequences in the batch.
        number: Number of the batch.

    Returns:
        Rows with ``messages``. None in place of a chat whose turns do not both end, because a model
        that learns from cut replies forgets how to end them.
    """
    turns = Turns.of(tokenizer, settings)
    with _seeded(settings, number, model.device):
        first, room = [turns.prompt] * size, [settings.seq_len // 2] * size
        asked = _turns(model, tokenizer, first, room, turns.user, settings)
        users = [turns.user.cut(tokenizer, ids, turns.special) for ids in asked]
        prompts, chats = [], []
        for place, user in enumerate(users):
            if user is None:
                continue
            messages = [{"role": "user", "content": user}]
            text = tokenizer.render(Chat(messages, [False], options=turns.options), prompt=True)
            ids = tokenizer.tokenizer.encode(text, add_special_tokens=False).ids
            if len(ids) < settings.seq_len:
                prompts.append(ids)
                chats.append((place, messages))
        rows: list[dict[str, Any] | None] = [None] * size
        if not prompts:
            return rows
        room = [settings.seq_len - len(prompt) for prompt in prompts]
        replies = _turns(model, tokenizer, prompts, room, turns.reply, settings)
    for (place, messages), ids in zip(chats, replies, strict=True):
        reply = turns.reply.cut(tokenizer, ids, turns.special)
        if reply is not None:
            content = (turns.opened + reply).strip()
            messages = [*messages, {"role": "assistant", "content": content}]
            # A template may write more than the model did, such as an empty thought.
            text = tokenizer.render(Chat(messages, [False, True], options=turns.options))
            if len(tokenizer.tokenizer.encode(text, add_special_tokens=False)) <= settings.seq_len:
                rows[place] = {"messages": messages}
    return rows


def _turns(
    model: Any,
    tokenizer: Any,
    prompts: list[list[int]],
    counts: list[int],
    end: End,
    settings: GeneratedConfig,
) -> list[list[int]]:
    """Return the ids of up to ``counts`` tokens that the model writes behind each prompt.

    Most turns are much shorter than the longest. So the model writes in rounds, each as long as all
    rounds before, and only the rows that have not ended go on to the next one. Its first step
    computes the cache again, which is far cheaper than the steps of rows that have ended. In the
    last round, a row may become longer than it needs to be, but never than the model's positions.
    """
    stops: dict[str, Any] = {"eos_token_id": end.ids, "pad_token_id": tokenizer.pad_id}
    if end.text is not None:
        stops |= {"stop_strings": [end.text], "tokenizer": tokenizer.of_transformers}
    options = {"do_sample": True, "temperature": settings.temperature}
    written: list[list[int]] = [[] for _ in prompts]
    open_rows, done = [*range(len(prompts))], 0
    longest = max(len(row) + count for row, count in zip(prompts, counts, strict=True))
    positions = max(longest, getattr(model.config, "max_position_embeddings", None) or 0)
    pad: Any = {"batch_first": True, "padding_side": "left"}
    while open_rows:
        ids = [torch.tensor(prompts[row] + written[row]) for row in open_rows]
        tokens = pad_sequence(ids, padding_value=tokenizer.pad_id, **pad).to(model.device)
        mask = pad_sequence([torch.ones_like(one) for one in ids], **pad).to(model.device)
        most = max(counts[row] for row in open_rows) - done
        more = min(max(done, _FIRST_ROUND), most, positions - tokens.shape[1])
        longer = _continued(model, tokens, more, attention_mask=mask, **options, **stops)
        for row, new in zip(open_rows, longer[:, tokens.shape[1] :].tolist(), strict=True):
            written[row] += new
        done += more
        open_rows = [
            row
            for row in open_rows
            if done < counts[row] and not end.is_in(tokenizer, written[row])
        ]
    return [ids[:count] for ids, count in zip(written, counts, strict=True)]
