"""Tests names of tasks: presets, suggestions for unknown names, and folders."""

from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="evaluation on tasks needs lm-eval")

from eval_tasks_local import make_manager, make_task_folder  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from hestia_tune import evaluation  # noqa: E402
from hestia_tune.config import EvalConfig, TextConfig  # noqa: E402
from hestia_tune.evaluation import Evaluator, evaluator  # noqa: E402
from hestia_tune.evaluation.evaluator import find_tasks, load_tasks  # noqa: E402

FIVE = ["arc_easy", "arc_challenge", "hellaswag", "piqa", "winogrande"]


@pytest.fixture(scope="module")
def manager(tmp_path_factory):
    return make_manager(make_task_folder(tmp_path_factory.mktemp("tasks")))


def test_preset_is_the_papers_five_tasks(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = make_task_folder(tmp_path / "tasks", official=FIVE)
    ours = Path(evaluation.__file__).parent / "tasks"
    manager = TaskManager(include_path=[str(ours), str(folder)], include_defaults=False)
    ((group,), _) = load_tasks(["hestia_zeroshot"], manager)
    assert [task.task_name for task in group.get_all_tasks()] == FIVE
    with pytest.raises(ValueError, match="near|did you mean hestia_zeroshot"):
        load_tasks(["hestia_zero_shot"], manager)
    with pytest.raises(ValueError, match="arc_easy"):  # before any model is loaded
        load_tasks(["hestia_zeroshot", "arc_easy"], manager)


@pytest.mark.slow
def test_presets_are_tasks_of_lm_eval(tmp_path):
    manager = find_tasks()
    assert {"hestia_zeroshot", *FIVE} <= set(manager.all_tasks)
    folder = make_task_folder(tmp_path / "tasks", official=["arc_easy"])
    index = find_tasks(folder).task_index  # the given folder comes first
    assert index["arc_easy"].yaml_path.parent == folder
    with pytest.raises(ValueError, match="unknown task 'arc_eazy'; did you mean .*easy"):
        load_tasks(["arc_eazy"], manager)


def test_an_unknown_task_suggests_similar_names(manager):
    message = "unknown task 'tiny_choise'; did you mean tiny_choice.*include"
    with pytest.raises(ValueError, match=message):
        load_tasks(["tiny_rolling", "tiny_choise"], manager)
    with pytest.raises(ValueError, match="include_path /no/such is not a folder"):
        find_tasks("/no/such")


def test_an_unreachable_hub_is_explained(manager, monkeypatch):
    def unreachable(*args, **options):
        raise ConnectionError("Couldn't reach 'a/b'")

    def make(**section):
        return Evaluator(EvalConfig(**section), None, 64)

    message = "hub cannot be reached .Couldn't reach 'a/b'.*include_path"
    monkeypatch.setattr(evaluator, "find_tasks", lambda folder: manager)
    monkeypatch.setattr("datasets.load_dataset", unreachable)
    with pytest.raises(ValueError, match=message):
        make(tasks=[], perplexity={"t": TextConfig(source="a/b")})
    monkeypatch.setattr(manager, "load", unreachable)
    with pytest.raises(ValueError, match=message):
        make(tasks=["tiny_choice"])
    monkeypatch.setattr(manager, "load", lambda names: {}[names[0]])
    with pytest.raises(KeyError):  # an error without a network
        make(tasks=["tiny_choice"])
