"""How fast the text stream is, against the tokenizer alone, and how much memory it takes.

    python benchmarks/data.py --tokenizer FOLDER --source parquet --data-files FILE.parquet

One run measures, on one thread each: the tokenizer's own rate on the same documents, one by one
and in batches; the stream's rate (reading, shuffling, tokenizing and packing) in one worker; the
rate of a tokenized set made from the same text; and the peak memory of a process that streams 0.5M
and 5M tokens, with the size of its data loader's state. It also
measures a stream of chats: the same text, cut into turns of a few hundred characters and rendered
by the folder's chat template. From the stream's rate it computes how many
workers a training run needs. With ``--step-seconds`` it also gives the share of a training step
spent waiting for data, measured with a data loader and a step that only sleeps.
"""

import argparse
import json
import math
import os
import pickle
import resource
import statistics
import subprocess
import sys
import tempfile
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")

from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: E402

from hestia_tune.config import StreamConfig  # noqa: E402
from hestia_tune.data import (  # noqa: E402
    streaming_chat_dataset,
    streaming_text_dataset,
    write_token_shards,
)
from hestia_tune.data.stream import LOT, open_rows, read_text, row_blocks  # noqa: E402
from hestia_tune.models.tokenizers import HuggingFaceTokenizer  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", required=True, help="a Hugging Face folder")
    parser.add_argument("--source", default="parquet")
    parser.add_argument("--data-files", required=True, nargs="+")
    parser.add_argument("--column", default="text")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=1_000_000, help="of each rate's measurement")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--gpu-rate", type=float, default=150_000, help="tokens/s of the training")
    parser.add_argument("--step-seconds", type=float, help="of a training step, for the waiting")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--num-workers", type=int, default=1)
    parser.add_argument("--only-stream", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only_stream:
        loader = StatefulDataLoader(stream(options, options.only_stream), batch_size=None)
        consume(loader)
        print(len(pickle.dumps(loader.state_dict())))
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        return
    rates(options)
    memory(options)
    if options.step_seconds is not None:
        waiting(options)


def stream(options, max_tokens, **source):
    source = source or {
        "source": options.source,
        "data_files": options.data_files,
        "column": options.column,
    }
    return streaming_text_dataset(
        HuggingFaceTokenizer(options.tokenizer),
        seq_len=options.seq_len,
        max_tokens=max_tokens,
        **source,
    )


def consume(items) -> int:
    """Tokens in ``items``."""
    return sum(len(item["tokens"]) for item in items)


def some_texts(options, wanted: int) -> list[str]:
    """Documents of about ``wanted`` tokens."""
    config = StreamConfig(
        source=options.source, column=options.column, data_files=options.data_files, seq_len=1
    )
    texts, characters = [], 0
    rows = open_rows(config)[0]
    for (text,), _ in row_blocks(rows, config, 1, read_text(options.column)):
        texts.append(text)
        characters += len(text)
        if characters > 4 * wanted:
            break
    return texts


def write_chats(path: str, texts: list[str]) -> None:
    """Write texts as chats of four turns: 100 characters of a question, 400 of a reply, twice."""
    with open(path, "w") as file:
        for text in texts:
            for start in range(0, len(text), 1000):
                turns, end = [], start
                for size, role in ((100, "user"), (400, "assistant")) * 2:
                    begin, end = end, end + size
                    turns.append({"role": role, "content": text[begin:end].strip() or "."})
                file.write(json.dumps({"messages": turns}) + "\n")


def rates(options) -> None:
    tokenizer = HuggingFaceTokenizer(options.tokenizer)
    texts = some_texts(options, options.tokens)

    def single():
        return sum(len(tokenizer.encode(text, add_bos=False, add_eos=False)) + 1 for text in texts)

    def batched():
        parts = (texts[i : i + LOT] for i in range(0, len(texts), LOT))
        encodings = (e for part in parts for e in tokenizer.tokenizer.encode_batch_fast(part))
        return sum(len(encoding.ids) + 1 for encoding in encodings)

    with tempfile.TemporaryDirectory() as folder:
        write_token_shards(
            tokenizer,
            folder,
            source=options.source,
            data_files=options.data_files,
            column=options.column,
            max_tokens=options.tokens,
        )
        shards = {"source": "token_shards", "data_files": folder}
        tokenized = stream(options, 10 * options.tokens, **shards)
        chats = os.path.join(folder, "chats.jsonl")
        write_chats(chats, texts)

        def of_chats(**more):
            return consume(
                streaming_chat_dataset(
                    tokenizer,
                    source="json",
                    data_files=chats,
                    seq_len=options.seq_len,
                    max_tokens=options.tokens,
                    **more,
                )
            )

        makers = {
            "tokenizer, one by one": single,
            "tokenizer, batches": batched,
            "stream, one worker": lambda: consume(stream(options, options.tokens)),
            "chats, packed": of_chats,
            "chats, loss on all tokens": lambda: of_chats(loss_on="all"),
            "tokenized set, one worker": lambda: consume(
                map(tokenized.__getitem__, range(len(tokenized)))
            ),
        }
        # In turns, so that a slow spell of the machine meets all of them alike.
        found: dict[str, list[float]] = {name: [] for name in makers}
        for _ in range(options.repeats):
            for name, make in makers.items():
                start = time.perf_counter()
                tokens = make()
                found[name].append(tokens / (time.perf_counter() - start))
    medians = {name: statistics.median(values) for name, values in found.items()}
    alone = medians["tokenizer, one by one"]
    print(f"{'':26}{'tokens/s':>12}{'of the tokenizer':>18}")
    for name, rate in medians.items():
        print(f"{name:26}{rate:12,.0f}{rate / alone:18.1%}")
    workers = math.ceil(options.gpu_rate / medians["stream, one worker"])
    print(f"workers for a training at {options.gpu_rate:,.0f} tokens/s: {workers}")


def memory(options) -> None:
    """Peak resident memory of fresh processes."""
    peaks = {}
    for tokens in (500_000, 5_000_000):
        command = [sys.executable, __file__, *sys.argv[1:], "--only-stream", str(tokens)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        state, peak = map(int, output.split()[-2:])
        peaks[tokens] = peak / 1024
        print(
            f"peak memory over {tokens:9,} tokens: {peaks[tokens]:7.0f} MiB (state of the loader: "
            f"{state:,} bytes)"
        )
    ratio = peaks[5_000_000] / peaks[500_000] - 1
    print(f"peak memory over ten times as many tokens: {ratio:+.1%}")


def waiting(options) -> None:
    """The share of a step spent waiting, after the first batch."""
    dataset = stream(options, None)
    loader = StatefulDataLoader(
        dataset,
        batch_size=options.batch_size,
        num_workers=options.num_workers,
        collate_fn=lambda items: items,
    )
    batches = iter(loader)
    next(batches)
    waited, steps = 0.0, max(10, int(20 / options.step_seconds))
    for _ in range(steps):
        time.sleep(options.step_seconds)
        start = time.perf_counter()
        next(batches)
        waited += time.perf_counter() - start
    share = waited / (waited + steps * options.step_seconds)
    print(
        f"waiting for data: {share:.2%} of a step of {options.step_seconds} s "
        f"({options.batch_size} x {options.seq_len} tokens, {options.num_workers} workers)"
    )


if __name__ == "__main__":
    main()
