"""Names of tasks to lm-eval's task objects, with clear errors for what is not there.

lm-eval knows some fifteen thousand tasks; `GROUPS` adds presets of ours. A task's rows come from
the Hugging Face hub unless its YAML points to local files, so loading is where a missing network
shows.
"""

import difflib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hestia_tune.config import one_line
from hestia_tune.evaluation.optional import lm_eval_installed

# Zero-shot tasks of the paper's Tables 1 to 4; their metric is `acc`.
GROUPS: dict[str, tuple[str, ...]] = {
    "hestia_zeroshot": ("arc_easy", "arc_challenge", "hellaswag", "piqa", "winogrande"),
}

# Names, since these classes live in packages and versions that need not be there.
_REFUSALS = {  # the hub answered: it does not have this, or does not give it
    "EntryNotFoundError",
    "GatedRepoError",
    "RepositoryNotFoundError",
    "RevisionNotFoundError",
}
_NETWORK_ERRORS = {
    "ConnectionError",
    "ConnectError",
    "ConnectTimeout",
    "HfHubHTTPError",
    "HTTPError",
    "LocalEntryNotFoundError",
    "MaxRetryError",
    "NetworkError",
    "OfflineModeIsEnabled",
    "ReadTimeout",
    "Timeout",
    "TransportError",
}


def expand_groups(tasks: Sequence[str]) -> list[str]:
    """Task names with our presets replaced by their members, each name once.

    Raises:
        ValueError: if there are none.
        TypeError: if ``tasks`` is a string or holds something else than strings.
    """
    if isinstance(tasks, str) or not all(isinstance(task, str) for task in tasks):
        raise TypeError(f"tasks must be a list of names; got {tasks!r}")
    names = [name for task in tasks for name in GROUPS.get(task, (task,))]
    if not names:
        raise ValueError("tasks is empty; name at least one, such as hestia_zeroshot")
    return list(dict.fromkeys(names))


def make_task_manager(include_path: str | Path | Sequence[str | Path] | None = None) -> Any:
    """lm-eval's ``TaskManager``, which reads every task's YAML (some seconds).

    Args:
        include_path: folders with task YAML files, searched before lm-eval's own.

    Raises:
        FileNotFoundError: naming the folder that does not exist.
        ImportError: if lm-eval is not installed.
    """
    lm_eval_installed()
    from lm_eval.tasks import TaskManager

    paths = [include_path] if isinstance(include_path, str | Path) else list(include_path or [])
    for path in paths:
        if not Path(path).is_dir():
            raise FileNotFoundError(
                f"include_path {path} is not a folder; it must hold the YAML files of tasks"
            )
    return TaskManager(include_path=[str(path) for path in paths] or None)


def check_tasks(names: Sequence[str], manager: Any) -> None:
    """Raises ValueError for a name that is no task, group, tag or YAML file, with near ones."""
    for name in names:
        if name in manager.task_index or (name.endswith(".yaml") and Path(name).is_file()):
            continue
        known = [*GROUPS, *manager.all_tasks]
        near = difflib.get_close_matches(name, known, n=5)
        hint = f"; near: {', '.join(near)}" if near else ""
        raise ValueError(
            f"unknown task {name!r}{hint}; `lm-eval ls tasks` lists all, and include_path adds "
            "folders of your own"
        )


def load_tasks(names: Sequence[str], manager: Any) -> list[Any]:
    """The tasks and groups of lm-eval by these names, their data loaded.

    Raises:
        ValueError: on an unknown name.
        ConnectionError: if rows are on a hub that cannot be reached.
    """
    check_tasks(names, manager)
    loaded: list[Any] = []
    for name in names:
        with hub_errors(f"the data of task {name}"):
            found = manager.load([name])
        loaded += list(found["groups"].values()) or list(found["tasks"].values())
    return loaded


@contextmanager
def hub_errors(what: str) -> Iterator[None]:
    """Turns a failure to reach the Hugging Face hub into one message that says what to do.

    Raises:
        ConnectionError: if the block failed for want of a network, whatever class said so.
    """
    try:
        yield
    except Exception as error:
        reason = _network_reason(error)
        if reason is None:
            raise
        raise ConnectionError(
            f"{what} is on the Hugging Face hub, which cannot be reached ({reason}); get it once "
            "where there is a network (it stays in HF_HOME), or use local files: tasks by "
            "include_path, text by its path. HF_HUB_OFFLINE=1 in the environment skips the "
            "waiting for a network that is not there"
        ) from error


def _network_reason(error: BaseException) -> str | None:
    seen: set[int] = set()
    todo: BaseException | None = error
    while todo is not None and id(todo) not in seen:
        seen.add(id(todo))
        kinds = {kind.__name__ for kind in type(todo).__mro__}
        # An offline hub raises one of both kinds.
        if kinds & _REFUSALS and "LocalEntryNotFoundError" not in kinds:
            return None
        if kinds & _NETWORK_ERRORS:
            return one_line(todo, 160)
        todo = todo.__cause__ or todo.__context__
    return None


@contextmanager
def quiet_lm_eval() -> Iterator[None]:
    """lm-eval's notes about options that do not concern us stay out; its warnings pass."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)
