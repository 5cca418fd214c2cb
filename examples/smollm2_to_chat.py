# %% [markdown]
# # From SmolLM2 to a ternary chat
#
# A notebook in percent format: VS Code, Jupytext and Spyder open it cell by cell, and `python
# examples/smollm2_to_chat.py` runs it as a whole. It reconstructs SmolLM2-135M-Instruct block by
# block with ternary weights, then as a whole, in about two hours on two CPU cores, and talks to the
# result, in transformers and in llama.cpp.
#
# Before it (this needs the hub):
#
#     pip install -e '.[torchtune,gguf]' xllamacpp   # in a clone
#     hf download HuggingFaceTB/SmolLM2-135M-Instruct --local-dir models/SmolLM2-135M-Instruct
#
# The environment can change what is below: MODEL (a folder), CONFIG (its config), SETTINGS
# (options of `tune run`, in place of those here), e.g. for a glance with the demo's model:
#
#     CONFIG=demo MODEL= SETTINGS="reconstruct.num_samples=32" python examples/smollm2_to_chat.py

# %%
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

CONFIG = os.environ.get("CONFIG", "smollm2_135m")
MODEL = os.environ.get("MODEL", "models/SmolLM2-135M-Instruct")
OUTPUT = Path("runs") / f"{CONFIG}_chat"
SETTINGS = shlex.split(
    os.environ.get(
        "SETTINGS",
        # For a CPU: short sequences, and the first megabytes of the config's own stream.
        "dataset.seq_len=256 "
        "dataset.max_tokens=3000000 reconstruct.num_samples=1200 reconstruct.epochs=2 "
        "reconstruct.batch_size=4",
    )
)
if MODEL:
    SETTINGS.append(f"checkpointer.checkpoint_dir={MODEL}")


def tune(recipe: str, *options: str) -> None:
    """`tune run RECIPE --config CONFIG ...`, with the settings above."""
    program = Path(sys.executable).with_name("tune")
    common = ["--config", CONFIG, f"output_dir={OUTPUT}", *SETTINGS]
    subprocess.run([program, "run", recipe, *common, *options], check=True)


# %% [markdown]
# ## Reconstruct
#
# Each block learns to put out what the pretrained block puts out, with weights γ·{−1, 0, 1}:
# first softened, then hard. The scales are learned, from their least-squares start. Then all blocks
# are trained together towards the pretrained predictions. Stopped with Ctrl-C, the same command
# goes on from there.

# %%
METHOD = ("quantizer.scale=learned", "quantizer.start=least_squares")
tune("hestia_reconstruct", *METHOD)
FOLDER = OUTPUT / "reconstruction"
for window in json.loads((FOLDER / "reconstruction.json").read_text())["windows"]:
    print(
        f"block {window['begin']}: {window['measure']} {window['error']:.4f}, "
        f"before {window['naive_error']:.4f}"
    )

# %% [markdown]
# ## Look at it
#
# The hard model is an ordinary Hugging Face folder, with a model card. Each group of weights
# holds one number, its negative, and zero.

# %%
hard = FOLDER / "hard_model"
print((hard / "README.md").read_text())
model = AutoModelForCausalLM.from_pretrained(hard, dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(hard)
print(model.model.layers[0].mlp.down_proj.weight[0, :16])

# %% [markdown]
# ## Chat, in transformers

# %%
QUESTION = "What is the capital of France?"


def prompt_of(question: str) -> str:
    """The question as the model's chat template puts it; as it is, if the model has none."""
    if tokenizer.chat_template is None:
        return question
    messages = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


inputs = tokenizer(prompt_of(QUESTION), return_tensors="pt", add_special_tokens=False)
with torch.no_grad():
    output = model.generate(**inputs, max_new_tokens=40, do_sample=False)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))

# %% [markdown]
# ## Chat, in llama.cpp
#
# One file with 2.25 bits per weight (`Q2_0`), which llama.cpp reads since July 2026. `llama-cli -m`
# takes it as well. `convert.block_type=Q4_0` is for older programs, and faster on an x86 CPU.

# %%
tune(
    "hestia_convert",
    *METHOD,
    f"convert.source={hard}",
    "convert.formats=[gguf]",
    "convert.overwrite=True",
)
try:
    import xllamacpp
except ImportError:
    sys.exit("pip install xllamacpp to go on")
parameters = xllamacpp.CommonParams()
parameters.model.path = str(OUTPUT / "converted" / "model.gguf")
parameters.n_predict, parameters.verbosity = 40, -1
server = xllamacpp.Server(parameters)
answer = server.handle_completions({"prompt": prompt_of(QUESTION), "temperature": 0})
print(answer["choices"][0]["text"])
