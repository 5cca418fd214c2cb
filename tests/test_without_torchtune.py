"""Test what needs no torchtune, in an environment with the newest torchao and without torchtune.

The environment has the wheel of this package and torchao from the registry. All other packages are
those of the tests' own environment, by links, because torch alone is gigabytes.
"""

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from families import make_family

REPOSITORY = Path(__file__).parents[1]
TORCHAO = "0.18"
# What meets torchao: packed tensors, `quantize_`, linears, the callback of transformers' Trainer.
LIBRARY = ("methods/test_linear.py", "tensors", "test_qat.py", "test_qat_packed.py")
LIBRARY += ("integrations/test_transformers.py",)


class Environment:
    """A virtual environment without torchtune."""

    def __init__(self, folder: Path):
        venv.create(folder)
        self.folder, self.python = folder, folder / "bin" / "python"
        where = [self.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        site = Path(
            subprocess.run(where, capture_output=True, text=True, check=True).stdout.strip()
        )
        self._link_packages(site)
        source = self._copy_sources()
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        wheel = [*pip, "wheel", "--no-deps", "-w", str(folder), str(source)]
        subprocess.run(wheel, check=True, timeout=300)
        (built,) = folder.glob("hestia_tune-*.whl")
        # With its script `hestia`. Nothing is uninstalled: the links leave out what it replaces.
        own = [*pip, "--python", str(self.python), "install", "--no-deps"]
        subprocess.run([*own, str(built)], check=True, timeout=300)
        subprocess.run([*own, f"torchao=={TORCHAO}.*"], check=True, timeout=300)

    @staticmethod
    def _link_packages(site: Path) -> None:
        """Link everything that this process can import, but torchtune, torchao and this package."""
        hidden = {"hestia_tune", "recipes", "torchao", "torchtune"}
        for folder in map(Path, sys.path):
            if folder.name not in ("site-packages", "dist-packages"):
                continue
            for entry in folder.iterdir():
                name = entry.name.split("-")[0].lower()
                is_hidden = name in hidden or name.startswith(("__editable__", "hestia_"))
                link = site / entry.name
                if not is_hidden and entry.suffix != ".pth" and not link.exists():
                    link.symlink_to(entry)

    def _copy_sources(self) -> Path:
        """Copy what a wheel is made of: setuptools would leave its build folder beside it."""
        source = self.folder / "source"
        source.mkdir()
        for name in ("LICENSE", "README.md", "pyproject.toml"):
            shutil.copy(REPOSITORY / name, source / name)
        for name in ("configs", "hestia_tune", "recipes"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(REPOSITORY / name, source / name, ignore=ignored)
        return source

    def run(self, *command, ok: bool = True, **options) -> str:
        """Run a program of the environment, and return what it prints."""
        shared = {"env": os.environ | {"PYTHONPATH": ""}, "timeout": 900}
        program, *words = map(str, command)
        done = subprocess.run(
            [str(self.folder / "bin" / program), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **shared | options,
        )
        assert (done.returncode == 0) == ok, done.stdout[-8000:]
        return done.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    found = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    downloads = tmp_path_factory.mktemp("downloads")
    done = subprocess.run(
        [*found, "-d", str(downloads), f"torchao=={TORCHAO}.*"], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"pip cannot get torchao {TORCHAO}: {done.stderr.strip().splitlines()[-1]}")
    return Environment(tmp_path_factory.mktemp("environment"))


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A folder with a model of transformers in ``model`` and a text file."""
    folder = tmp_path_factory.mktemp("run")
    make_family(folder / "model", "Qwen3")
    words = ["one", "two", "three", "four", "five"]
    lines = (" ".join(words[(i * k) % 5] for k in range(1, 40)) for i in range(400))
    (folder / "text.txt").write_text("\n\n".join(lines))
    return folder


@pytest.mark.slow
def test_the_environment_is_what_it_should_be(environment, tmp_path):
    code = "import hestia_tune, importlib.metadata as m, importlib.util as u; "
    code += "print(hestia_tune.__file__, m.version('torchao'), u.find_spec('torchtune')); "
    code += "print(hestia_tune.HestiaConfig().step)"  # its import is quiet
    told = environment.run("python", "-c", code, cwd=tmp_path).splitlines()
    assert len(told) == 2, told
    file, version, spec = told[0].split()
    assert file.startswith(str(environment.folder)) and version.startswith(TORCHAO)
    assert spec == "None"


@pytest.mark.slow
def test_the_library(environment, tmp_path):
    tests = [str(REPOSITORY / "tests" / name) for name in LIBRARY]
    options = ["-q", "-x", "-n", "auto", "--dist", "loadfile", "-p", "no:cacheprovider"]
    code = "import pytest, sys; sys.exit(pytest.main(sys.argv[1:]))"  # -m would add this folder
    where = ["--rootdir", str(REPOSITORY), "-c", str(REPOSITORY / "pyproject.toml")]
    told = environment.run("python", "-c", code, *options, *where, *tests, cwd=tmp_path)
    assert " passed" in told.splitlines()[-1] and "failed" not in told.splitlines()[-1]


@pytest.mark.slow
def test_the_commands(environment, run_folder):
    def hestia(*words, ok: bool = True) -> str:
        return environment.run("hestia", *words, cwd=run_folder, ok=ok)

    assert "14 linears: dense float32" in hestia("inspect", "model")
    both = ("--format", "gguf", "--format", "torchao")  # gguf alone would round the embedding
    hestia("init", "model", "text.txt", *both, "--output", "mine.yaml")
    few = ("mine.yaml", "seed=1", "device=cpu", "dtype=fp32", "compile=False")
    told = hestia("qat", *few, ok=False)
    assert "pip install 'hestia-tune[torchtune]'" in told and "Traceback" not in told
    assert not [*(run_folder / "runs").rglob("*.safetensors")]  # it fails before long work

    samples = "sensitivity_estimation.num_samples=4"
    told = hestia("sensitivity", *few, "sensitivity=auto", "schedule.alpha=1", samples)
    assert "scores of the most and the least sensitive layers" in told
    passes = ("reconstruct.epochs=1", "reconstruct.kl_epochs=1", "reconstruct.num_samples=32")
    told = hestia("reconstruct", *few, *passes)
    errors = re.findall(r"block \d of 2: error ([\d.]+), was ([\d.]+) before", told)
    assert len(errors) == 2 and all(float(after) < float(before) for after, before in errors)

    hard = "runs/mine/reconstruction/hard_model"
    formats = "convert.formats=[huggingface,torchao,intx,gguf]"
    hestia("convert", *few, f"convert.source={hard}", formats)
    assert "14 linears: four levels" in hestia("inspect", "runs/mine/converted/torchao")
    models = f"eval.models=[pretrained,{hard},packed]"
    text = "eval.perplexity={mine: {source: text.txt}}"
    told = hestia("eval", *few, models, "eval.tasks=[]", text)
    _, trained, packed = re.search(r"token perplexity +\| (\S+) +\| (\S+) +\| (\S+)", told).groups()
    assert trained == packed


@pytest.mark.slow
def test_models_of_torchtune_say_what_to_install(environment, run_folder):
    told = environment.run("hestia", "validate", "demo", cwd=run_folder, ok=False)
    assert told.splitlines()[-1].startswith("validate: error: model hestia_tune.models.llama needs")
    assert "pip install 'hestia-tune[torchtune]'" in told and "Traceback" not in told
