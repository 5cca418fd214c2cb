"""Says how to run what `hestia_convert` wrote, and writes an Ollama Modelfile beside a GGUF file.

LM Studio and llama.cpp use the chat template in the GGUF file. Ollama has templates of its own, in
the language of Go's text/template. It recognises well-known chat templates only. So the Modelfile
has a template that is made from what the tokenizer's chat template renders: the text before and
after the content of each role. It is used only if it renders other conversations alike. Some chat
templates, such as Gemma's, put the system prompt before the first content of the user, or refuse
it. Ollama's template then puts it there, with a blank line in between.
"""

import contextlib
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hestia_tune.export.gguf_tokenizer import end_ids
from hestia_tune.files import read_json, write_atomically
from hestia_tune.models.folder import ModelFolder

MODELFILE = "Modelfile"
_PROMPT = "Once upon a time"


def model_name(description: Mapping[str, Any]) -> str:
    """Return a name for a model that programs accept, such as smollm2-135m-ternary.

    Args:
        description: Content of hestia.json.
    """
    base = str(description.get("base_model", "")).rpartition("/")[2] or "model"
    method = str(description.get("quantizer", "quantized")).partition(",")[0]
    return re.sub(r"[^a-z0-9._-]+", "-", f"{base}-{method}".lower()).strip("-.")


def run_lines(form: str, path: Path, name: str, *, is_chat: bool = False) -> list[str]:
    """Return commands that run a file or folder of a format.

    Args:
        form: Name of the format.
        path: The file or folder.
        name: See `model_name`.
        is_chat: Whether the tokenizer has a chat template.
    """
    shell, text = shlex.quote(str(path)), repr(str(path))
    if form == "gguf":
        model = f"local/{name}"
        modelfile = shlex.quote(str(path.with_name(MODELFILE)))
        return [
            f"llama-cli -m {shell}"
            if is_chat
            else f"llama-cli -m {shell} -p {_PROMPT!r} -n 40 --single-turn   # without a chat "
            "template, llama-completion continues the text",
            f"llama-server -m {shell}   # then open http://localhost:8080",
            f"lms import {shell} --user-repo {model} --copy --yes   # LM Studio: the file goes to "
            f"~/.lmstudio/models/{model}/",
            f"ollama create {name} -f {modelfile} && ollama run {name}",
        ]
    if form == "mlx":
        command = "mlx_lm.chat" if is_chat else f"mlx_lm.generate --prompt {_PROMPT!r}"
        return [f"{command} --model {shell}"]
    if form in ("torchao", "intx") and (path / "generate.yaml").is_file():
        config = shlex.quote(str(path / "generate.yaml"))
        return [f"tune run generate --config {config} prompt.user={_PROMPT!r}"]
    known = {
        "torchao": f"import hestia_tune; print(hestia_tune.load_quantized({text}))",
        "onnx": f"import onnxruntime_genai as og; m = og.Model({text}); t = og.Tokenizer(m); "
        "p = og.GeneratorParams(m); p.set_search_options(max_length=60); g = og.Generator(m, p); "
        f"g.append_tokens(t.encode({_PROMPT!r})); "
        "[g.generate_next_token() for _ in iter(g.is_done, True)]; "
        "print(t.decode(g.get_sequence(0)))",
        "openvino": "import openvino_genai as ov; "
        f"print(ov.LLMPipeline({text}, 'CPU').generate({_PROMPT!r}, max_new_tokens=40))",
    }
    known["intx"] = known["torchao"]
    others = (
        f"from transformers import pipeline; p = pipeline('text-generation', {text}); "
        f"print(p({_PROMPT!r}, max_new_tokens=40)[0]['generated_text'])"
    )
    code = known.get(form, others)
    is_plain = not set('"$`\\!') & set(code)  # nothing in it has a meaning within double quotes
    return [f'python -c "{code}"' if is_plain else f"python -c {shlex.quote(code)}"]


def has_chat_template(folder: Path) -> bool:
    """Return whether the tokenizer of a folder has a chat template."""
    if (folder / "chat_template.jinja").is_file():
        return True
    file = folder / "tokenizer_config.json"
    return file.is_file() and bool(read_json(file).get("chat_template"))


def write_modelfile(source: ModelFolder, model: Path) -> Path:
    """Write a Modelfile for Ollama beside a GGUF file, and return its path.

    Args:
        source: The model, whose tokenizer has the chat template.
        model: The GGUF file.
    """
    folder, lines = source.folder, [f"FROM ./{model.name}"]
    if has_chat_template(folder):
        template = None
        with contextlib.suppress(Exception):  # a chat template is a program, and may raise anything
            template = _template_of(folder)
        if template is None:
            lines.append(
                "# Ollama uses its own template if it knows this model's chat template. Otherwise "
                "write one here: TEMPLATE"
            )
        else:
            lines.append(f'TEMPLATE """{template}"""')
    else:
        lines.append('TEMPLATE """{{ .Prompt }}"""')
    tokens = _token_texts(folder)
    stops = [tokens[index] for index in end_ids(folder, source.config) if index in tokens]
    lines += [f"PARAMETER stop {_quoted(stop)}" for stop in dict.fromkeys(stops)]
    path = model.with_name(MODELFILE)
    write_atomically(path, "\n".join(lines) + "\n")
    return path


def _quoted(text: str) -> str:
    """Return a text in the quotes of a Modelfile."""
    return '"' + text.replace('"', '\\"') + '"'


def _token_texts(folder: Path) -> dict[int, str]:
    """Return id -> text of the added tokens of a folder."""
    added = read_json(folder / "tokenizer.json").get("added_tokens", [])
    return {token["id"]: token["content"] for token in added}


def _template_of(folder: Path) -> str | None:
    """Return Go's template of a folder's chat template, or None if the roles are not separate."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    adds_bos = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]

    def render(roles: str, is_prompt: bool = False) -> str:
        """Render a conversation of one letter for each role; the content is the role's number."""
        names = {"s": "system", "u": "user", "a": "assistant"}
        messages = [
            {"role": names[role], "content": f"<{role}{index}>"} for index, role in enumerate(roles)
        ]
        options = {"tokenize": False, "add_generation_prompt": is_prompt}
        text = tokenizer.apply_chat_template(messages, **options)
        # Ollama adds BOS to a text if the tokenizer does.
        return text.removeprefix(tokenizer.bos_token) if adds_bos else text

    return make_template(render)


def make_template(render: Callable[..., str]) -> str | None:
    """Return Go's template of a chat template, or None if it is none of texts around contents.

    Args:
        render: A function from the roles of a conversation ("s", "u", "a" for system, user and
            assistant) and whether the reply follows to a text. The content of message i of the
            role r is ``<ri>``.
    """
    first, second, third = render("u"), render("ua"), render("uau")
    reply = render("u", True).removeprefix(first)  # what comes before a reply
    before, after = third.removeprefix(second).split("<u2>")
    own = second.removeprefix(first).removeprefix(reply)
    if not own.startswith("<a1>") or not reply:
        return None
    end, user = own.removeprefix("<a1>"), "{}<u{}>{}"
    default = first.removesuffix(user.format(before, 0, after))  # a system prompt, or nothing
    # The texts around a system prompt, and whether they are a part of the user's first turn.
    ways: list[tuple[list[str], bool]] = [(["", "\n\n"], True)]
    asked = ["u", "uau"]
    with contextlib.suppress(Exception):  # a chat template without system prompts raises
        text = render("su")
        asked += ["su", "suauau"]
        joint = text.removeprefix(default + before).removesuffix(f"<u1>{after}")
        own = text.removesuffix(user.format(before, 1, after))
        ways = [(own.split("<s0>"), False), (joint.split("<s0>"), True)]

    def expected(roles: str, system: list[str], is_joint: bool) -> str:
        text = default if is_joint or "s" not in roles else ""
        for index, role in enumerate(roles):
            content = f"<{role}{index}>"
            if role == "s":
                text += "" if is_joint else content.join(system)
            elif role == "u":
                is_first = is_joint and roles[:index] == "s"
                text += ("<s0>".join(system) * is_first + content).join((before, after))
            else:
                text += content.join((reply, end))
        return text + reply

    for system, is_joint in ways:
        texts = (before, after, reply, end, default, *system)
        is_plain = len(system) == 2 and "{{" not in "".join(texts)
        if is_plain and all(render(r, True) == expected(r, system, is_joint) for r in asked):
            break
    else:
        return None
    prompt, content = "{{ .System }}".join(system), "{{ .Content }}"
    if is_joint:
        start = "{{ $system := .System }}" + default
        prompt = "{{ $system }}".join(system)
        content = "{{ if $system }}" + prompt + '{{ $system = "" }}{{ end }}' + content
    else:
        start = "{{ if .System }}" + prompt + "{{ else }}" + default + "{{ end }}"
    return (
        start
        + '{{ range .Messages }}{{ if eq .Role "user" }}'
        + content.join((before, after))
        + '{{ else if eq .Role "assistant" }}'
        + "{{ .Content }}".join((reply, end))
        + "{{ end }}{{ end }}"
        + reply
    )
