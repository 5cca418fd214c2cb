"""Does a model still follow its chat template? Greedy replies to twenty questions.

    python benchmarks/replication/chat.py SMOLLM2_FOLDER runs/whole/hard_model --threads 1

The first folder is the pretrained model. Each folder is a Hugging Face folder of a causal language
model, in bfloat16. The table has, for each folder:

    ended    replies that end their turn within the limit of tokens, out of 20
    echoes   replies that repeat a run of 8 of their tokens
    loss     mean cross-entropy of the pretrained model's replies, in nats per token, after their
             questions in the chat template; the token that ends the turn counts
    end      probability of that token where the pretrained model ends its turn, mean

and the first replies as text.
"""

import argparse
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", help="folders; the first is the pretrained model")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--show", type=int, default=3, help="replies to print for each model")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.models[0])
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
    rows, texts = [], []
    for folder in options.models:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        replies = [reply(model, prompt, end, options.tokens) for prompt in prompts]
        targets = targets or replies
        pairs = zip(prompts, targets, strict=True)
        scores = [log_probabilities(model, prompt, tokens) for prompt, tokens in pairs]
        ends = [s[-1].exp() for s, tokens in zip(scores, targets, strict=True) if tokens[-1] == end]
        ended = sum(tokens[-1].item() == end for tokens in replies)
        echoes = sum(repeats(tokens.tolist()) for tokens in replies)
        loss, probability = -torch.cat(scores).mean(), torch.stack(ends).mean()
        rows.append(f"| {folder} | {ended} | {echoes} | {loss:.3f} | {probability:.2f} |")
        shown = zip(QUESTIONS, replies[: options.show], strict=False)
        texts += [f"{folder}: {q!r} -> {tokenizer.decode(tokens)!r}" for q, tokens in shown]
    print("| model | ended | echoes | loss | end |\n|---|---:|---:|---:|---:|")
    print("\n".join(rows) + "\n\n" + "\n".join(texts))


if __name__ == "__main__":
    main()
