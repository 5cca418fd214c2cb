"""The hooks of the site: formulas become MathML."""

import importlib.util
import re
from pathlib import Path

import pytest

markdown = pytest.importorskip("markdown", reason="needs pip install 'hestia-tune[docs]'")
pytest.importorskip("latex2mathml", reason="needs pip install 'hestia-tune[docs]'")
pytest.importorskip("pymdownx", reason="needs pip install 'hestia-tune[docs]'")

REPOSITORY = Path(__file__).parents[1]


class Config:
    """The part of MkDocs' config that the hook changes."""

    def __init__(self):
        self.nav, self.extra_css = [], []
        self.markdown_extensions, self.mdx_configs = ["tables"], {}


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("hooks", REPOSITORY / "docs" / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def rendered(hooks):
    """Function from Markdown to the HTML of the site."""
    config = hooks.on_config(Config())
    extensions = [*config.markdown_extensions, "pymdownx.superfences"]

    def render(text: str) -> str:
        page = markdown.markdown(text, extensions=extensions, extension_configs=config.mdx_configs)
        return hooks.on_page_content(page)

    return render


def test_a_formula_in_a_sentence_is_mathml(rendered):
    page = rendered(r"The scale $\gamma_i < 1$, *always*.")
    assert re.fullmatch(
        r'<p>The scale <span class="arithmatex"><math [^>]*display="inline">.*</math></span>, '
        "<em>always</em>.</p>",
        page,
    )
    assert "<msub><mi>&#x003B3;</mi><mi>i</mi></msub><mo>&#x0003C;</mo><mn>1</mn>" in page


def test_a_formula_on_lines_of_its_own_is_a_block(rendered):
    page = rendered("Let\n\n$$\nQ(w) = \\frac{a_1}{b_1}\n$$\n\nbe given.")
    assert page.count("<math ") == 1 and 'display="block"' in page
    assert "<mfrac>" in page and "$" not in page and "\\" not in page


def test_a_formula_in_a_table_is_mathml(rendered):
    page = rendered("| symbol | option |\n|---|---|\n| $\\lvert w \\rvert$ | `a` |\n")
    assert page.count("<td>") == 2 and page.count("<math ") == 1


def test_dollars_in_code_and_amounts_stay(rendered):
    text = "It costs 5$ or 6$. `echo $a $b`\n\n```bash\necho $DATA and $OUT\n```\n"
    page = rendered(text)
    assert "<math" not in page and page.count("$") == 6


@pytest.mark.parametrize(
    "page", sorted(REPOSITORY.glob("docs/**/*.md")), ids=lambda page: page.stem
)
def test_the_formulas_of_a_page_are_understood(rendered, page):
    # A command that latex2mathml does not know stays as it is written, with its backslash.
    text = rendered(page.read_text("utf-8"))
    assert not any("\\" in formula for formula in re.findall(r"<math .*?</math>", text, re.DOTALL))
    assert 'arithmatex">\\' not in text
