"""Tokenizer folders with chat templates of every kind, as small as their kind allows."""

import json

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

SPECIAL = ["<eos>", "<bos>", "<pad>", "<|start|>", "<|end|>", "<think>", "</think>"]

# Every turn has a header and an end.
TURNS = (
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' + m['content'] + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
# The template marks its replies, and uses what only transformers' environment has.
MARKED = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'skip' %}{% continue %}{% endif %}"
    "{{ '<|start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if strftime_now is defined and tools %}{{ tools | tojson }}{{ pad_token }}{% endif %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
# As Qwen3: thoughts stay in the turns after the last question only, and a reply without thoughts
# gets empty ones there.
THINKING = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}"
    "{% set text = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n')"
    " if '</think>' in m.content else '' %}"
    "{% if loop.index0 > ns.last %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}"
    "{{ text }}{% for call in m.tool_calls or [] %}{{ '\n<call>' + (call.function | tojson) }}"
    "{% endfor %}{% else %}{{ m.content }}{% endif %}{{ '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}"
    "{% endif %}{% endif %}"
)
# As Llama 2 and Mistral: no header, BOS at the start, EOS behind each reply, content stripped.
INSTRUCT = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}"
    "{{ raise_exception('no system message is allowed') }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{{ '[INST] ' + m.content | trim + ' [/INST]' }}{% else %}"
    "{{ ' ' + m.content | trim + eos_token }}{% endif %}{% endfor %}"
)
# The generation prompt opens a thought that finished replies do not have, as DeepSeek R1.
OPENED = TURNS.replace("'<|start|>assistant\n' }}", "'<|start|>assistant\n<think>\n' }}")
# Tools stand before the last question, as in Mistral v3: earlier turns move when turns follow.
MOVING = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.index0 >= messages | length - 2 %}{{ '[T]' + tools | tojson }}{% endif %}"
    "{{ '[INST] ' + m.content + '[/INST]' }}{% else %}{{ m.content + eos_token }}{% endif %}"
    "{% endfor %}"
)
# The text of a reply depends on the number of turns behind it: no place can be found.
UNSTABLE = (
    "{% for m in messages %}{{ m.role + ':' + (messages | length - loop.index) | string "
    "+ m.content[::-1] }}{% endfor %}"
)
TEMPLATES = {
    "turns": TURNS,
    "marked": MARKED,
    "thinking": THINKING,
    "instruct": INSTRUCT,
    "opened": OPENED,
    "moving": MOVING,
}


def make_tokenizer_folder(folder, template=TURNS, **changes):
    """Write a byte-level tokenizer with a chat template; return the folder as a string.

    ``bos`` and ``eos`` in ``changes`` add these tokens in a post-processor. The other changes go
    into tokenizer_config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # llama.cpp loads no BPE without merges. This merge is of bytes that no test has.
    merge = ("\u0100", "\u0101")
    vocab = {token: index for index, token in enumerate([*SPECIAL, *alphabet, "".join(merge)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[merge]))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    single = "<bos> " * changes.pop("bos", False) + "$A" + " <eos>" * changes.pop("eos", False)
    if single != "$A":
        special = [("<bos>", 1), ("<eos>", 0)]
        tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=special)
    change = changes.pop("change", None)
    if change is not None:
        change(tokenizer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    config |= {"bos_token": "<bos>", "pad_token": "<pad>"} | changes
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return str(folder)


def write_chats(path, rows):
    """Write rows as lines of JSON; return the arguments of a stream of them."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"source": "json", "data_files": str(path)}


def make_chats(count, longest=30):
    """Return rows with one or two exchanges; each begins with its number."""
    rows = []
    for number in range(count):
        turns = []
        for turn in range(1 + number % 2):
            reply = f"{number}.{turn}" + "r" * (number * 7 % longest)
            turns.append({"role": "user", "content": f"{number}?" + "q" * (number * 3 % 11)})
            turns.append({"role": "assistant", "content": reply})
        rows.append({"messages": turns})
    return rows


def replies_of(tokenizer, ids, has_loss):
    """Return the texts of the runs of tokens with a loss."""
    texts, run = [], []
    for token, has in [*zip(ids, has_loss, strict=True), (None, False)]:
        if has:
            run.append(token)
        elif run:
            texts.append(tokenizer.tokenizer.decode(run, skip_special_tokens=False))
            run = []
    return texts
