"""Tests the end of hestia_convert: block types, commands, and the Modelfile for Ollama."""

import json
import re
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from gguf_models import DEMO, edit_json, random_qwen2, ternarize

from hestia_tune.config.sections import FORMATS
from hestia_tune.export import llama_cpp
from hestia_tune.export.format import load_format, model_name, suggested_group_size
from hestia_tune.export.gguf import (
    compare_types,
    make_template,
    smaller_type,
    write_gguf,
    write_modelfile,
)
from hestia_tune.models.folder import ModelFolder


@pytest.mark.parametrize(
    ("group_size", "expected"),
    [
        (256, {"TQ1_0", "TQ2_0", "Q2_0", "Q4_0"}),
        (128, {"Q2_0", "Q4_0"}),
        (32, {"Q4_0"}),
    ],
)
def test_sizes_of_other_types_are_those_of_their_files(tmp_path, group_size, expected):
    source = ModelFolder(tmp_path / "model", random_qwen2(tmp_path / "model", group_size))
    path = tmp_path / "model.gguf"
    write_gguf(source, path)
    rows = compare_types(source, path, measure=False)
    assert {row.name for row in rows} == expected
    assert [row.num_bytes for row in rows] == sorted(row.num_bytes for row in rows)
    for row in rows:
        summary = write_gguf(source, tmp_path / f"{row.name}.gguf", block_type=row.name)
        assert (row.num_bytes, row.bits) == (
            summary["bytes"],
            pytest.approx(summary["quantized_bits_per_weight"]),
        )
        assert row.is_written == (path.read_bytes() == (tmp_path / f"{row.name}.gguf").read_bytes())
        assert row.tokens_per_second is None
    assert sum(row.is_written for row in rows) == 1


def test_a_file_of_several_types_has_a_line_of_its_own(tmp_path):
    source = ModelFolder(DEMO, dict.fromkeys(ternarize(DEMO, tmp_path / "model", 128), 128))
    source = ModelFolder(tmp_path / "model", source.quantized)
    name = next(iter(source.quantized))
    others = {n: 32 if n == name else 128 for n in source.quantized}
    source = ModelFolder(tmp_path / "model", others)
    summary = write_gguf(source, tmp_path / "m.gguf")
    (row,) = (r for r in compare_types(source, tmp_path / "m.gguf", measure=False) if r.is_written)
    assert row.name == "Q2_0 + Q4_0" and row.num_bytes == summary["bytes"]
    assert row.bits == pytest.approx(summary["quantized_bits_per_weight"])


def test_a_model_without_quantized_weights_has_no_types(tmp_path):
    ternarize(DEMO, tmp_path / "model", 128)
    source = ModelFolder(tmp_path / "model", {})
    write_gguf(source, tmp_path / "m.gguf")
    assert compare_types(source, tmp_path / "m.gguf", measure=False) == []
    assert smaller_type(source) is None


@pytest.mark.slow
def test_speeds_are_measured_in_llama_cpp(tmp_path):
    pytest.importorskip("xllamacpp")
    source = ModelFolder(tmp_path / "model", ternarize(DEMO, tmp_path / "model", 128))
    write_gguf(source, tmp_path / "m.gguf")
    rows = compare_types(source, tmp_path / "m.gguf", measure=True)
    assert all(row.tokens_per_second > 0 for row in rows) and len(rows) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"model", "m.gguf"}
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    found = llama_cpp.tokens_per_second([tmp_path / "broken.gguf", tmp_path / "m.gguf"], 60)
    assert found[0] is None and found[1] > 0
    assert llama_cpp.ask([{"file": str(tmp_path / "m.gguf"), "predict": 4}], 0.01) == []


def test_without_llama_cpp_there_is_no_speed(tmp_path, monkeypatch):
    monkeypatch.setattr(llama_cpp, "is_installed", lambda: False)
    source = ModelFolder(tmp_path / "model", ternarize(DEMO, tmp_path / "model", 128))
    write_gguf(source, tmp_path / "m.gguf")
    rows = compare_types(source, tmp_path / "m.gguf", measure=True)
    assert [row.tokens_per_second for row in rows] == [None, None]
    assert llama_cpp.ask([{"file": "x", "predict": 4}], 5) == []


@pytest.mark.parametrize(
    ("widths", "formats", "expected"),
    [
        ((2048, 8192), ["gguf", "torchao"], 256),
        ((2048, 8192), ["torchao", "mlx"], 128),
        ((640, 2048), ["gguf"], 128),
        ((576, 1536), ["gguf"], 64),
        ((96, 64), ["gguf"], 32),
        ((172, 512), ["gguf"], "channel"),
    ],
)
def test_suggested_group_size(widths, formats, expected):
    assert suggested_group_size(iter(widths), iter(formats)) == expected


@pytest.mark.parametrize(
    ("group_size", "match"),
    [(256, None), ("channel", None), (128, "TQ2_0 .*group_size=256"), (32, "group_size=256")],
)
def test_how_to_get_a_smaller_type(tmp_path, group_size, match):
    quantized = random_qwen2(tmp_path / "model", group_size)
    found = smaller_type(ModelFolder(tmp_path / "model", quantized))
    assert found is None if match is None else re.search(match, found)


def chatml(roles: str, is_prompt: bool = False, system: str = "Be nice.") -> str:
    names = {"s": "system", "u": "user", "a": "assistant"}
    text = "" if "s" in roles else f"<|im_start|>system\n{system}<|im_end|>\n"
    for index, role in enumerate(roles):
        text += f"<|im_start|>{names[role]}\n<{role}{index}><|im_end|>\n"
    return text + "<|im_start|>assistant\n" * is_prompt


def test_the_template_of_a_chat_template():
    assert make_template(chatml) == (
        "{{ if .System }}<|im_start|>system\n{{ .System }}<|im_end|>\n"
        "{{ else }}<|im_start|>system\nBe nice.<|im_end|>\n{{ end }}"
        '{{ range .Messages }}{{ if eq .Role "user" }}<|im_start|>user\n{{ .Content }}<|im_end|>\n'
        '{{ else if eq .Role "assistant" }}<|im_start|>assistant\n{{ .Content }}<|im_end|>\n'
        "{{ end }}{{ end }}<|im_start|>assistant\n"
    )


def gemma(roles: str, is_prompt: bool = False, system: tuple[str, str] | None = None) -> str:
    """The system prompt, if it is allowed, is a part of the first turn of the user."""
    names, text = {"u": "user", "a": "model"}, "<bos>"
    if "s" in roles and system is None:
        raise ValueError("System role not supported")
    for index, role in enumerate(roles):
        if role != "s":
            first = "<s0>".join(system) if system and roles[:index] == "s" else ""
            text += f"<start_of_turn>{names[role]}\n{first}<{role}{index}><end_of_turn>\n"
    return text + "<start_of_turn>model\n" * is_prompt


@pytest.mark.parametrize(
    ("system", "written"),
    [
        (None, ("", "\n\n")),
        (("", "\n\n"), ("", "\n\n")),
        (("<<SYS>>\n", "\n<</SYS>>\n"), ("<<SYS>>\n", "\n<</SYS>>\n")),
    ],
)
def test_a_system_prompt_in_the_turn_of_the_user(system, written):
    """The chat template refuses a system prompt, or puts it there."""
    first = "{{ $system }}".join(written)
    assert make_template(partial(gemma, system=system)) == (
        "{{ $system := .System }}<bos>"
        '{{ range .Messages }}{{ if eq .Role "user" }}<start_of_turn>user\n'
        f'{{{{ if $system }}}}{first}{{{{ $system = "" }}}}{{{{ end }}}}'
        "{{ .Content }}<end_of_turn>\n"
        '{{ else if eq .Role "assistant" }}<start_of_turn>model\n{{ .Content }}<end_of_turn>\n'
        "{{ end }}{{ end }}<start_of_turn>model\n"
    )


@pytest.mark.parametrize(
    "render",
    [
        lambda roles, is_prompt=False: chatml(roles.replace("s", ""), is_prompt),
        lambda roles, is_prompt=False: chatml(roles, is_prompt).replace("<u5>", "<u5>!"),
        lambda roles, is_prompt=False: chatml(roles, is_prompt, "{{ now }}"),
        lambda roles, is_prompt=False: chatml(roles),
    ],
)
def test_a_chat_template_that_is_more_than_texts_around_contents(render):
    assert make_template(render) is None


def test_modelfile(tmp_path):
    pytest.importorskip("transformers")
    ternarize(DEMO, tmp_path / "model", 128)
    source, file = ModelFolder(tmp_path / "model", {}), tmp_path / "out" / "model.gguf"
    file.parent.mkdir()
    text = write_modelfile(source, file).read_text()
    assert text.splitlines() == [
        "FROM ./model.gguf",
        'TEMPLATE """{{ .Prompt }}"""',
        'PARAMETER stop "<|endoftext|>"',
    ]
    (tmp_path / "model" / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    text = write_modelfile(source, file).read_text()
    assert 'TEMPLATE """{{ if .System }}[system]{{ .System }}\n{{ else }}{{ end }}' in text
    # BOS is a part of the text if the tokenizer does not add it, as in SmolLM2.
    edit_json(tmp_path / "model" / "tokenizer_config.json", bos_token="[system]")
    assert "{{ if .System }}[system]{{ .System }}" in write_modelfile(source, file).read_text()
    today = "{{ strftime_now('%d %b %Y') }}"
    template = (tmp_path / "model" / "chat_template.jinja").read_text()
    (tmp_path / "model" / "chat_template.jinja").write_text(today + template)
    text = write_modelfile(source, file).read_text()
    assert "\nTEMPLATE" not in text and "# Ollama uses its own template" in text
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    text = write_modelfile(source, file).read_text()
    assert "\nTEMPLATE" not in text and "# Ollama uses its own template" in text


@pytest.mark.parametrize("form", FORMATS)
def test_commands_hold_the_path(tmp_path, form):
    path = load_format(form).target(tmp_path / "it's a $folder")
    for line in load_format(form).run_lines(path, "m"):
        words = shlex.split(line, comments=True)
        assert str(path) in line or any(
            str(path) in word or repr(str(path)) in word or str(path.parent / "Modelfile") == word
            for word in words
        ), line
        if words[:2] == ["python", "-c"]:
            compile(words[2], "command", "exec")


def test_a_command_of_a_folder_runs(tmp_path):
    pytest.importorskip("transformers")
    ternarize(DEMO, tmp_path / "model", 128)
    (line,) = load_format("huggingface").run_lines(tmp_path / "model", "m")
    _, *arguments = shlex.split(line)
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("Once upon a time")


def test_names():
    made = {"base_model": "HuggingFaceTB/SmolLM2-135M", "quantizer": "ternary, group_size=64"}
    assert model_name(made) == "smollm2-135m-ternary"
    assert model_name({}) == "model-quantized"
    assert json.dumps(model_name({"base_model": "A B/ü x"})) == '"x-quantized"'
    assert Path(model_name({"base_model": "../.."})).name == "quantized"
