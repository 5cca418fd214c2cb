"""The report of a run: its parts, what it leaves out, several runs, and how a browser shows it."""

import json
import re
import shutil
from html.parser import HTMLParser

import pytest
from tiny import make_config, run

from hestia_tune.__main__ import main
from hestia_tune.commands.convert import run_convert
from hestia_tune.commands.report import write_report
from hestia_tune.evaluation.evaluator import PROMPTS
from hestia_tune.plots import plot_errors, plot_sensitivity
from hestia_tune.reconstruction.window import WindowResult

pytest.importorskip("lm_eval", reason="the evaluation needs lm-eval")

from hestia_tune.commands.evaluate import run_evaluation  # noqa: E402

TITLES = [
    "Validation losses",
    "Training",
    "Sensitivity of the layers",
    "Zeros in the layers",
    "Reconstruction",
    "Written files",
    "Evaluation",
    "Continuations",
]


class Page(HTMLParser):
    """The texts of the elements of a page, by tag, and the addresses in its attributes."""

    def __init__(self, path):
        super().__init__()
        self.texts, self.open, self.addresses, self.tables = {}, [], [], []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        self.addresses += [value for key, value in attributes if key in ("src", "href")]
        self.texts.setdefault(tag, []).append("")
        if tag not in ("img", "meta", "link"):
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.texts[self.open[-1]][-1] += data
            if self.open[-1] in ("td", "th"):
                self.tables[-1][-1][-1] += data


@pytest.fixture(scope="module")
def whole(model_dir, tmp_path_factory):
    """The folder of a run with everything that a report shows."""
    folder = tmp_path_factory.mktemp("report") / "whole"
    cfg = make_config(model_dir, folder, "eval.tasks=[]", "dataset_val.num=5")
    run(cfg)
    run_convert(cfg)
    run_evaluation(cfg)
    plot_sensitivity({"layers.0.mlp.w1": 1.0}, folder / "sensitivity.png", "hessian")
    windows = [WindowResult(0, 0, 1, 0.5, 0.25, 1.0)]
    plot_errors(windows, folder / "reconstruction" / "errors.png")
    return folder


@pytest.fixture(scope="module")
def begun(whole):
    """The folder of a run that is not finished. A kill has cut off its last metrics."""
    folder = whole.with_name("begun")
    folder.mkdir()
    text = (whole / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(text[: len(text) * 2 // 3])
    return folder


def test_a_report_has_every_part_of_a_run(whole, capsys):
    assert main(["report", str(whole)]) == 0
    path = whole / "report.html"
    assert capsys.readouterr().out.split() == [str(path)]
    page = Page(path)
    assert page.texts["h2"] == TITLES and page.texts["h1"] == ["whole"]
    assert all(address.startswith("data:") for address in page.addresses)
    assert sum(address.startswith("data:image/png") for address in page.addresses) == 4
    assert "script" not in page.texts and "http" not in path.read_text()
    facts = {row[0]: row[1] for row in page.tables[0]}
    assert facts["method"] == "ternary, group_size=32" and facts["training steps"] == "6"
    assert re.fullmatch(r"[\d,]+ tokens/s per process", facts["training speed"])
    losses = json.loads((whole / "results.json").read_text())["validation_loss"]
    assert facts["validation loss, pretrained"] == f"{losses['pretrained']:.4f}"
    files = json.loads((whole / "converted" / "sizes.json").read_text())
    for name, file in files.items():  # each tells the same size in bfloat16
        size = file["bytes"] * 16 / file["whole_bits_per_weight"] / 1e6
        assert float(facts["size in bfloat16, MB"]) == pytest.approx(size, abs=0.051), name
    shown = {row[0]: row[1] for row in page.tables[1][1:]}
    assert shown == {
        str(whole) if label == "trained, hard" else label: f"{loss:.4f}"
        for label, loss in losses.items()
    }
    found = json.loads((whole / "evaluation.json").read_text())
    distance = found["tables"]["kl_divergence"]["trained"]["dataset_val"]["value"]
    assert facts["KL divergence, dataset_val"] == f"{distance:.4f}"
    measured = {row[1]: dict(zip(page.tables[3][0], row, strict=True)) for row in page.tables[3]}
    assert measured["kl divergence"]["trained"] == f"{distance:.4f}"
    texts = [text for text in page.texts["p"] if text in PROMPTS]
    assert texts == [*PROMPTS] and page.texts["h3"] == [*found["models"]] * 10


def test_a_report_of_a_begun_run_says_what_makes_the_rest(begun):
    page = Page(write_report([str(begun)]))
    assert page.texts["h2"] == ["Training until now", "Not in this run"]
    commands = ["qat", "qat", "sensitivity", "reconstruct", "convert", "eval"]
    assert page.texts["code"] == [f"hestia {x} CONFIG output_dir={begun}" for x in commands]
    assert "http" not in begun.joinpath("report.html").read_text()


def test_several_runs_share_a_table_and_axes(whole, begun, tmp_path, monkeypatch):
    other = shutil.copytree(whole, tmp_path / "<b>other</b>")
    results = json.loads((other / "results.json").read_text())
    results["validation_loss"]["trained, hard"] = 9.5
    (other / "results.json").write_text(json.dumps(results))
    monkeypatch.chdir(tmp_path)
    runs = [str(whole), str(other)]
    page = Page(write_report(runs))
    assert (tmp_path / "report.html").is_file()
    assert page.texts["h1"] == ["2 runs"] and page.texts["summary"] == runs  # escaped
    assert page.texts["h2"] == [*TITLES[:2], *TITLES, *TITLES]
    assert page.tables[0][0] == ["", *runs]
    losses = {row[0]: row[1] for row in page.tables[1][1:]}
    assert losses[runs[1]] == "9.5000" and losses[runs[0]] != "9.5000"
    path = write_report([str(whole), str(begun)], str(tmp_path / "mine.html"))
    assert Page(path).texts["h1"] == ["2 runs"] and path.name == "mine.html"


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 1
    assert "has no metrics.jsonl; give an output_dir of hestia_qat" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1300])
def test_a_browser_shows_the_report(browser, whole, begun, tmp_path, width):
    browser.get_log("browser")
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    both = write_report([str(whole), str(begun)], str(tmp_path / "both.html"))
    for path, pictures in ((write_report([str(whole)]), 4), (both, 6)):
        browser.get(path.as_uri())
        assert "report of hestia_tune" in browser.title
        widths = browser.execute_script(
            "return [...document.images].map(image => image.naturalWidth)"
        )
        assert len(widths) == pictures and all(width > 0 for width in widths)
        headings = [element.text for element in browser.find_elements("css selector", "h2")]
        assert headings[:2] == TITLES[:2]
        assert len(browser.find_elements("css selector", "table")) >= 4
        # The page is as wide as the window: wide tables scroll by themselves.
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        assert browser.execute_script("return performance.getEntriesByType('resource')") == []
        assert [e for e in browser.get_log("browser") if e["level"] == "SEVERE"] == []
