"""What MkDocs cannot do by configuration: outside links, the list of results pages, formulas.

**Links.** A page is read on GitHub too, so its links may lead to files beside docs/, such as a
benchmark script. The site does not hold these files: such a link becomes the path of the file.
`contributing.md` is CONTRIBUTING.md of the repository, whose links are relative to the root.

**Formulas** are LaTeX between dollar signs, as GitHub renders it. The site may load no script from
another host, so MathJax is out: the build converts them to MathML, which browsers render.
"""

import html
import os
import re
from pathlib import Path

from latex2mathml.converter import convert

DOCS = Path(__file__).parent
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)]*)?\)")
# What the extension arithmatex makes of $...$, and of $$...$$ on lines of their own. It skips code.
_FORMULA = re.compile(
    r'(<(span|div) class="arithmatex">)\\[(\[](.*?)\\[)\]](</\2>)', flags=re.DOTALL
)


def on_config(config):
    """Put the results pages into the navigation, in the order of their index, and find formulas."""
    config.markdown_extensions.append("pymdownx.arithmatex")
    config.mdx_configs["pymdownx.arithmatex"] = {"generic": True}
    config.extra_css.append("stylesheets/math.css")
    index = (DOCS / "results" / "index.md").read_text("utf-8")
    pages = sorted(path.name for path in (DOCS / "results").glob("*.md"))
    # A page that the index does not link to comes before the others, where it is noticed.
    pages.sort(key=lambda name: (name != "index.md", index.find(f"({name}")))
    for entry in config.nav or []:
        if "Results" in entry:
            entry["Results"] = [f"results/{name}" for name in pages]
    return config


def on_page_markdown(markdown, page, **_):
    """Return the text of a page with links that work in the site."""
    folder = (DOCS / page.file.src_uri).parent
    if page.file.src_uri == "contributing.md":
        source = DOCS.parent / "CONTRIBUTING.md"
        return relinked(source.read_text("utf-8"), source.parent, folder)
    return relinked(markdown, folder, folder)


def on_page_content(content, **_):
    """Return the HTML of a page with its formulas in MathML."""
    return typeset(content)


def typeset(content: str) -> str:
    """Return HTML in which every LaTeX formula that arithmatex has marked is MathML."""

    def mathml(match: re.Match) -> str:
        start, kind, formula, end = match.groups()
        display = "block" if kind == "div" else "inline"
        return start + convert(html.unescape(formula).strip(), display=display) + end

    return _FORMULA.sub(mathml, content)


def relinked(markdown: str, written_in: Path, read_in: Path) -> str:
    """Return Markdown whose links lead to the same files from another folder.

    Args:
        markdown: The text of a page.
        written_in: The folder that its links are relative to.
        read_in: The folder that they shall be relative to. A link to a file outside of docs/
            becomes its text and the path of the file in the repository.
    """

    def link(match: re.Match) -> str:
        text, target, anchor = match.group(1), match.group(2), match.group(3) or ""
        path = Path(os.path.normpath(written_in / target))
        if path.is_relative_to(DOCS):
            return f"[{text}]({os.path.relpath(path, read_in)}{anchor})"
        name = path.relative_to(DOCS.parent).as_posix()
        return f"`{name}`" if text.strip("`") == name else f"{text} (`{name}`)"

    # Links in blocks of code are no links.
    parts = re.split(r"(^```.*?^```)", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else _LINK.sub(link, part) for part in parts)
