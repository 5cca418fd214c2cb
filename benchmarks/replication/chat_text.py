"""Chats that a chat model writes itself, as text to train or to calibrate on.

    python benchmarks/replication/chat_text.py SMOLLM2_FOLDER chats.parquet --chats 160 --threads 1

The model continues the beginning of its own chat template with a question (as in Magpie, arXiv
2406.08464), and then answers the question. Each row of the file has a whole chat in the column
"text", with the tokens of the template. Questions are sampled at temperature 1, replies at 0.7.
"""

import argparse
from typing import Any

import pandas
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

BATCH = 32
QUESTION, REPLY = 96, 192  # the most tokens


def sample(model: Any, tokenizer: Any, texts: list[str], tokens: int, temperature: float) -> list:
    """The continuations of texts, without special tokens, or None where no end of turn comes."""
    inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    chosen = {"max_new_tokens": tokens, "do_sample": True, "temperature": temperature}
    whole = model.generate(**inputs, **chosen, top_k=0, pad_token_id=tokenizer.pad_token_id)
    rows = whole[:, inputs["input_ids"].shape[1] :]
    ended = (rows == tokenizer.eos_token_id).any(1).tolist()
    found = tokenizer.batch_decode(rows, skip_special_tokens=True)
    return [text.strip() if end else None for text, end in zip(found, ended, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder")
    parser.add_argument("out", help="a parquet file")
    parser.add_argument("--chats", type=int, default=160)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).eval()

    def template(*contents: str, **kwargs: Any) -> str:
        roles = zip(("user", "assistant"), contents, strict=False)
        chat = [{"role": role, "content": content} for role, content in roles]
        return tokenizer.apply_chat_template(chat, tokenize=False, **kwargs)

    beginning, chats = template("\0").split("\0")[0], []
    while len(chats) < options.chats:
        questions = [q for q in sample(model, tokenizer, [beginning] * BATCH, QUESTION, 1.0) if q]
        prompts = [template(question, add_generation_prompt=True) for question in questions]
        replies = sample(model, tokenizer, prompts, REPLY, 0.7)
        pairs = zip(questions, replies, strict=True)
        chats += [template(question, reply) for question, reply in pairs if reply]
        print(f"{len(chats)} chats", flush=True)
    pandas.DataFrame({"text": chats[: options.chats]}).to_parquet(options.out)


if __name__ == "__main__":
    main()
