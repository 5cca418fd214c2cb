"""Names of tasks: presets, near names, folders, and a hub out of reach."""

import pytest

pytest.importorskip("lm_eval", reason="evaluation on tasks needs lm-eval")

from eval_tasks_local import make_manager, make_task_folder  # noqa: E402

from hestia_tune.evaluation import GROUPS, check_tasks, expand_groups  # noqa: E402
from hestia_tune.evaluation.tasks import hub_errors, load_tasks, make_task_manager  # noqa: E402


@pytest.fixture(scope="module")
def manager(tmp_path_factory):
    return make_manager(make_task_folder(tmp_path_factory.mktemp("tasks")))


def test_preset_is_the_papers_five_tasks():
    five = ["arc_easy", "arc_challenge", "hellaswag", "piqa", "winogrande"]
    assert expand_groups(["hestia_zeroshot"]) == five
    assert expand_groups(["piqa", "hestia_zeroshot", "x"]) == ["piqa", *five[:3], five[4], "x"]
    for bad, error in (([], ValueError), ("piqa", TypeError), ([1], TypeError)):
        with pytest.raises(error, match="tasks"):
            expand_groups(bad)


@pytest.mark.slow
def test_presets_are_tasks_of_lm_eval():
    manager = make_task_manager()
    for tasks in GROUPS.values():
        check_tasks(tasks, manager)
    with pytest.raises(ValueError, match="unknown task 'arc_eazy'; near: .*arc_easy"):
        check_tasks(["arc_eazy"], manager)


def test_unknown_task_suggests_near_ones(manager):
    with pytest.raises(ValueError, match="unknown task 'tiny_choise'; near: tiny_choice.*include"):
        check_tasks(["tiny_rolling", "tiny_choise"], manager)
    with pytest.raises(ValueError, match="near: hestia_zeroshot"):
        check_tasks(["hestia_zero_shot"], manager)
    with pytest.raises(FileNotFoundError, match="include_path /no/such is not a folder"):
        make_task_manager(["/no/such"])


def test_hub_errors_are_one_message_and_others_pass(manager, monkeypatch):
    def unreachable(names):
        try:
            raise ConnectionError("Couldn't reach 'a/b'")
        except ConnectionError as error:
            raise FileNotFoundError("not cached") from error

    monkeypatch.setattr(manager, "load", unreachable)
    message = "task tiny_choice is on the .* hub.*Couldn't reach 'a/b'.*include_path.*OFFLINE"
    with pytest.raises(ConnectionError, match=message):
        load_tasks(["tiny_choice"], manager)
    with pytest.raises(KeyError), hub_errors("x"):
        raise KeyError("not a matter of networks")
