"""Tests docs/format_support.md: whether its tables are complete, and cells against conversions."""

import inspect
import re

import pytest

pytest.importorskip("gguf")
pytest.importorskip("transformers")

from formats_table import (
    PAGE,
    TABLES,
    cells,
    columns,
    formats_page,
    read_page,
    reason,
    registry_table,
)

import hestia_tune
from hestia_tune.__main__ import main
from hestia_tune.config.sections import FORMATS
from hestia_tune.qat.prepare import Component

DATA = read_page()
PACKAGES = ("compressed_tensors", "mlx_lm", "onnxruntime_genai", "openvino_tokenizers")


def test_the_tables_are_made_from_the_registry_and_the_cells():
    remedy = "run: PYTHONPATH=tests:tests/export python tests/export/formats_table.py Falcon"
    text = PAGE.read_text(encoding="utf-8")
    assert text == formats_page(text, DATA), remedy
    rows = [line.split("|")[1].strip(" `") for line in registry_table().splitlines()]
    assert rows[2:] == list(FORMATS)


def test_only_the_tables_change():
    text = PAGE.read_text(encoding="utf-8")
    tables = {table: dict.fromkeys(rows, {"new": "exact"}) for table, rows in TABLES.items()}
    outside = re.compile(r"(?s)(<!-- table: \w+ -->\n).*?(?=<!-- end of table -->)")
    changed = formats_page(text, tables)
    assert changed != text and outside.sub(r"\1", changed) == outside.sub(r"\1", text)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            "a model of dlt, group_size=256 can only be written as huggingface; got gguf",
            "the format does not hold the codes of the method",
        ),
        (
            "no block of TQ2_0 holds a.weight exactly (in_features 576, group_size 64); use Q2_0",
            "no block of this type holds these codes in groups of this size",
        ),
        (
            "mlx files cannot hold the weights of experts, such as a; set convert.formats=[gguf]",
            "the format cannot hold expert weights",
        ),
        (
            "X must load a packed a with the hard model's logits; it raises: an error; export",
            "X must load a packed model with the hard model's logits; it raises: an error",
        ),
        (
            "only plain linear layers can be packed; a is odd",
            "only plain linear layers can be packed",
        ),
    ],
)
def test_a_reason_has_no_names_of_the_model(error, expected):
    assert reason(error) == expected


def test_there_is_no_command_for_the_page(capsys):
    assert main(["formats"]) == 2
    assert "there is no command 'formats'" in capsys.readouterr().err
    assert main(["--help"]) == 0 and "formats" not in capsys.readouterr().out


def test_every_format_method_and_family_has_its_place():
    assert {table: tuple(rows) for table, rows in DATA.items()} == TABLES
    for rows in DATA.values():
        assert all(list(cells) == list(columns()) for cells in rows.values())
    public = [getattr(hestia_tune, name) for name in hestia_tune.__all__]
    components = {c.__name__ for c in public if inspect.isclass(c) and issubclass(c, Component)}
    assert {row.partition(",")[0] for row in TABLES["methods"]} == components


def assert_cells(table: str, row: str, only: set[str] | None = None) -> None:
    expected = {name: cell for name, cell in DATA[table][row].items() if not only or name in only}
    assert cells(table, row, only) == expected


@pytest.mark.parametrize(
    ("table", "row", "only"),
    [
        ("groups", "128", {"torchao", "huggingface", "gguf TQ2_0", "gguf Q2_0", "gguf Q4_0"}),
        ("families", "Falcon", {"intx", "huggingface", "gguf Q4_0"}),
        ("methods", "Fairy2iQATQuantizer, num_stages: 2", {"torchao", "huggingface"}),
    ],
)
def test_some_cells_are_measured(table, row, only):
    assert_cells(table, row, only)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("table", "row"), [(t, row) for t, rows in TABLES.items() for row in rows])
def test_every_cell_is_measured(table, row):
    for package in PACKAGES:
        pytest.importorskip(package)
    assert_cells(table, row)
