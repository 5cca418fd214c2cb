"""Does a model still follow its chat template? Greedy replies to twenty questions.

    python benchmarks/replication/chat.py SMOLLM2_FOLDER runs/whole/hard_model --threads 1

The first folder is the pretrained model. Each folder is a Hugging Face folder of a causal language
model, in bfloat16. The table has, for each folder:

    ended    replies that end their turn within the limit of tokens, out of 20
    both     those among them whose pretrained reply ends, too
    repeating   replies that repeat a run of 8 of their tokens
    loss     mean cross-entropy of the pretrained model's replies, in nats per token, after their
             questions in the chat template; the token that ends the turn counts
    end      probability of that token where the pretrained model ends its turn, mean

and the first replies as text.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

QUESTIONS = (
    "What is the capital of France?",
    "Name three colors.",
    "How many days does a week have?",
    "Write one sentence about the sea.",
    "Is fire hot or cold?",
    "What do plants need to grow?",
    "Give me a short recipe for an omelet.",
    "Explain in one sentence what a prime number is.",
    "What is 2 plus 3?",
    "Who wrote Romeo and Juliet?",
    "Translate 'good morning' into Spanish.",
    "What is the opposite of big?",
    "Write a Python function that adds two numbers.",
    "Say hello to my friend Anna.",
    "What is water made of?",
    "Name an animal that can fly.",
    "Why do we sleep?",
    "Give a title for a story about a dragon.",
    "Which planet is the largest in the solar system?",
    "Rewrite politely: give me the book.",
)


def reply(model: Any, prompt: Tensor, end: int, tokens: int) -> Tensor:
    """The greedy reply to a prompt, with the token that ends the turn if it comes."""
    chosen = {"max_new_tokens": tokens, "do_sample": False}
    whole = model.generate(prompt, eos_token_id=end, pad_token_id=end, **chosen)
    return whole[0, prompt.shape[1] :]


def repeats(tokens: list[int], length: int = 8) -> bool:
    """Whether a run of tokens occurs twice."""
    runs = [tuple(tokens[i : i + length]) for i in range(len(tokens) - length + 1)]
    return len(set(runs)) < len(runs)


@torch.no_grad()
def log_probabilities(model: Any, prompt: Tensor, tokens: Tensor) -> Tensor:
    """The log-probability of each token of a reply, after its prompt."""
    logits = model(torch.cat([prompt, tokens[None]], 1)).logits[0, prompt.shape[1] - 1 : -1]
    return logits.float().log_softmax(-1).gather(1, tokens[:, None])[:, 0]


def measure(folders: Sequence[str | Path], tokens: int = 64, shown: int = 0) -> list[dict]:
    """Return the measures of every folder; the first is the pretrained model.

    Args:
        folders: Hugging Face folders.
        tokens: The most tokens of a reply.
        shown: Number of replies to keep as text.
    """
    tokenizer = AutoTokenizer.from_pretrained(folders[0])
    end = tokenizer.eos_token_id
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )["input_ids"]
        for question in QUESTIONS
    ]
    targets: list[Tensor] = []
    found = []
    for folder in folders:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        replies = [reply(model, prompt, end, tokens) for prompt in prompts]
        targets = targets or replies
        pairs = zip(prompts, targets, strict=True)
        scores = [log_probabilities(model, prompt, target) for prompt, target in pairs]
        ends = [s[-1].exp() for s, target in zip(scores, targets, strict=True) if target[-1] == end]
        texts = zip(QUESTIONS, map(tokenizer.decode, replies[:shown]), strict=False)
        found.append(
            {
                "ended": sum(ids[-1].item() == end for ids in replies),
                "both": sum(
                    ids[-1].item() == end == target[-1].item()
                    for ids, target in zip(replies, targets, strict=True)
                ),
                "repeating": sum(repeats(ids.tolist()) for ids in replies),
                "loss": round(-torch.cat(scores).mean().item(), 3),
                "end": round(torch.stack(ends).mean().item(), 2),
                "replies": dict(texts),
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", help="folders; the first is the pretrained model")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--show", type=int, default=3, help="replies to print for each model")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keys = ("ended", "both", "repeating", "loss", "end")
    print(f"| model | {' | '.join(keys)} |\n|---|" + "---:|" * len(keys))
    found = measure(options.models, options.tokens, options.show)
    for folder, row in zip(options.models, found, strict=True):
        print(f"| {folder} | {' | '.join(str(row[key]) for key in keys)} |")
    for folder, row in zip(options.models, found, strict=True):
        for question, text in row["replies"].items():
            print(f"{folder}: {question!r} -> {text!r}")


if __name__ == "__main__":
    main()
