"""The documentation as a site: it builds without warnings, and a browser shows it offline.

The browser and the server are fixtures of conftest.py.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
_SITE = ("mkdocs", "material", "mkdocstrings", "latex2mathml")
HAS_MKDOCS = all(map(importlib.util.find_spec, _SITE))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_MKDOCS, reason="needs pip install 'hestia-tune[docs]'"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def address(site, serve):
    """Where a server of this process shows the site."""
    return serve(site)


def errors(browser) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def test_every_page_is_built(site):
    pages = [path.relative_to(REPOSITORY / "docs") for path in REPOSITORY.glob("docs/**/*.md")]
    assert len(pages) > 20
    for page in pages:
        folder = page.parent if page.stem == "index" else page.with_suffix("")
        assert (site / folder / "index.html").is_file(), page


@pytest.mark.parametrize(
    "page, text, pictures",
    [
        ("/", "hestia qat demo", 0),
        ("/how_it_works/", "temperature", 3),
        ("/api/functional/", "hestia_tune.functional.relaxed_ternary", 0),
        ("/contributing/", "pip install -e '.[dev]'", 0),
        ("/results/bits/", "Four levels", 2),
    ],
)
def test_page_in_a_browser(browser, address, page, text, pictures):
    browser.get_log("browser")
    browser.get(address + page)
    article = browser.find_element("css selector", "article")
    assert text in article.text
    widths = browser.execute_script(
        "return [...document.querySelectorAll('article img')].map(image => image.naturalWidth)"
    )
    assert len(widths) == pictures and all(width > 0 for width in widths)
    assert browser.find_element("css selector", "input[data-md-component=search-query]")
    # Nothing comes from another host, so that the site can be read offline.
    loaded = browser.execute_script(
        "return performance.getEntriesByType('resource').map(entry => entry.name)"
    )
    assert loaded and all(name.startswith(address) for name in loaded)
    assert errors(browser) == []


# On a phone, where 76 characters are wider than the page, code wraps, and only output scrolls.
@pytest.mark.parametrize("width, blocks", [(1280, "pre"), (390, ":not(.language-text) > pre")])
def test_nothing_is_cut_off(browser, address, site, width, blocks):
    browser.set_window_size(width, 900)
    for index in site.glob("**/index.html"):
        browser.get(f"{address}/{index.parent.relative_to(site)}/")
        wide = browser.execute_script(
            "return [...document.querySelectorAll(`article ${arguments[0]} > code`)]"
            ".filter(code => code.scrollWidth > code.clientWidth + 1).map(code => code.innerText)",
            blocks,
        )
        assert wide == [], index
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width, index


@pytest.mark.parametrize("query", ["group_size", "AnnealingSchedule"])
def test_search_finds_a_page(browser, address, query):
    from selenium.webdriver.support.ui import WebDriverWait

    browser.set_window_size(1280, 900)
    browser.get(address + "/")
    box = browser.find_element("css selector", "input[data-md-component=search-query]")
    box.click()
    box.send_keys(query)
    links = WebDriverWait(browser, 60).until(
        lambda driver: driver.find_elements("css selector", ".md-search-result__item a")
    )
    assert all(link.get_attribute("href").startswith(address) for link in links)
    assert any(query in link.get_attribute("textContent") for link in links)
    assert errors(browser) == []
