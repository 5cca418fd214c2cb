"""The documentation: its commands parse, its links lead somewhere, its file map is whole."""

import inspect
import re
import shlex
from argparse import Namespace
from pathlib import Path
from string import Template

import pytest
from omegaconf import OmegaConf
from torchtune.config._utils import _merge_yaml_and_cli_args

import hestia_tune
from hestia_tune.commands.options import options_page
from hestia_tune.components import find_component
from hestia_tune.config import Section, SourceConfig
from hestia_tune.config.run_config import RunConfig, load_config, packaged_configs
from hestia_tune.config.section import describe

REPOSITORY = Path(__file__).parents[1]
PAGES = sorted([*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")])
SECTIONS = [*Section.__subclasses__(), *SourceConfig.__subclasses__()]
RECIPES = {path.stem for path in (REPOSITORY / "recipes").glob("*.py")}
COMMAND = re.compile(
    r"(pip install .* && )?(\w+=\S+ )*(tune run |python benchmarks/.* --overrides )"
)


def code_of(path: Path) -> list[str]:
    """The lines of a page's shell blocks and inline code, or of a config's header, continued lines
    joined."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
        rest = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        inline = [code.replace("\n", " ") for code in re.findall(r"`([^`]+)`", rest)]
        text = "\n".join([*blocks, *inline])
    else:
        comments = (line for line in text.splitlines() if line.startswith("#"))
        text = "\n".join(line.removeprefix("#").strip() for line in comments)
    return re.sub(r"\\\n\s*", "", text).splitlines()


def commands() -> list[tuple[str, str, list[str]]]:
    """Return (file and command, config, overrides) of every command that names a packaged config.

    These are the commands of `tune run` and the scripts in benchmarks/ that take --overrides. A
    line NAME="VALUE" sets a variable for the rest of its page.
    """
    found = []
    for path in [*PAGES, *packaged_configs().values()]:
        variables: dict[str, str] = {}
        for line in code_of(path):
            line = Template(line).safe_substitute(variables)
            if assignment := re.fullmatch(r'(\w+)="([^"]*)"', line):
                variables[assignment[1]] = assignment[2]
            if not COMMAND.match(line):
                continue
            words = shlex.split(line, comments=True)
            name = words[words.index("--config") + 1] if "--config" in words else "demo"
            own = name == "NAME" or name.endswith(".yaml")  # a config of the reader
            if own or ("--overrides" not in words and RECIPES.isdisjoint(words)):
                continue
            words = words[words.index("--overrides" if "--overrides" in words else "--config") :]
            overrides = [word for word in words if "=" in word or word.startswith("~")]
            found.append((f"{path.relative_to(path.parents[1])}: {line}", name, overrides))
    return found


COMMANDS = commands()


def test_there_are_commands():
    assert len(COMMANDS) > 40


@pytest.mark.parametrize("name, overrides", [c[1:] for c in COMMANDS], ids=[c[0] for c in COMMANDS])
def test_commands_parse(name, overrides):
    assert packaged_configs().keys() >= set(name.split("+"))
    packaged = Namespace(**OmegaConf.to_container(load_config(name)))
    cfg = _merge_yaml_and_cli_args(packaged, overrides)
    RunConfig.parse(cfg)
    for key in ("dataset", "quantizer"):
        own = dict(cfg[key])
        component = find_component(own.pop("_component_"), name)
        required = {"tokenizer": None} if key == "dataset" else {}
        inspect.signature(component).bind(**required, **own)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", text):
        path = page.parent / target if target else page
        assert path.is_file(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            names = (re.sub(r"[^\w -]", "", heading) for heading in headings)
            assert anchor in {name.lower().replace(" ", "-") for name in names}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_no_code_block_is_cut_off_on_a_laptop(page):
    blocks = re.findall(r"^```\w+\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()]
    assert [line for line in lines if len(line) > 76] == []


def test_the_page_of_options_is_what_the_command_prints():
    page = (REPOSITORY / "docs" / "options.md").read_text(encoding="utf-8")
    assert page == options_page(), "run: python -m hestia_tune options > docs/options.md"


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_every_option_has_a_meaning(section):
    assert [key for key, *_, meaning in describe(section) if not meaning] == []


def test_readme_is_short_and_the_file_map_is_whole():
    assert len((REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines()) <= 160
    text = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rooms = text.partition("## Where things are")[2].partition("## How to")[0]
    mapped = {name.rstrip("/") for name in re.findall(r"`([\w.]+/?)`", rooms)}
    package = REPOSITORY / "hestia_tune"
    python = {path.parent for path in package.glob("*/*.py")} | set(package.glob("[!_]*.py"))
    assert {path.name for path in python} <= mapped


def test_the_pages_of_the_api_have_every_public_name():
    pages = "".join(path.read_text("utf-8") for path in REPOSITORY.glob("docs/api/*.md"))
    described = set(re.findall(r"^::: ([\w.]+)$", pages, re.MULTILINE))
    for name in hestia_tune.__all__:
        # A component or a config has the options of its methods, and a row that leads to them.
        methods = getattr(getattr(hestia_tune, name), "methods", None)
        if methods:
            assert f"`hestia_tune.{name}`" in pages
            assert {f"hestia_tune.methods.{method.__name__}" for method in methods} <= described
        else:
            assert f"hestia_tune.{name}" in described, name
