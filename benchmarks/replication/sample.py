"""What a model writes: a line for each of twenty beginnings, to be read.

    python benchmarks/replication/sample.py runs/smollm2_135m/hard_model [--threads 2] [--tokens 25]

Any Hugging Face folder of a causal language model that transformers loads, in bfloat16.
Temperature 0.7 and the 50 likeliest tokens; the seed is that of all lines.
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

BEGINNINGS = (
    "The theory of",
    "Plants need",
    "In order to find",
    "When the sun",
    "The history of the city of",
    "A good teacher",
    "The first step is to determine",
    "To write a program that",
    "Many scientists believe that",
    "The capital of France",
    "She opened the door",
    "Energy is",
    "If you want to improve",
    "The most important",
    "Water is made of",
    "The king",
    "During the war",
    "In mathematics,",
    "The doctor said that",
    "Children often",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--tokens", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).eval()
    torch.manual_seed(options.seed)
    chosen = {"max_new_tokens": options.tokens, "temperature": 0.7, "top_k": 50}
    for beginning in BEGINNINGS:
        inputs = tokenizer(beginning, return_tensors="pt")
        line = model.generate(**inputs, do_sample=True, pad_token_id=0, **chosen)[0]
        print(tokenizer.decode(line, skip_special_tokens=True).replace("\n", " "), flush=True)


if __name__ == "__main__":
    main()
