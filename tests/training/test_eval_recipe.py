"""Test ``hestia_eval``: all kinds of models, kept results, the preset, ranks, errors, training."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from eval_tasks_local import make_manager, make_task_folder
from omegaconf import OmegaConf
from ranks import run_forked
from tiny import logged, make_config, run, write_config
from torch import distributed

pytest.importorskip("lm_eval")


from hestia_tune.commands import evaluate as command  # noqa: E402
from hestia_tune.commands.convert import run_convert  # noqa: E402
from hestia_tune.commands.evaluate import run_evaluation  # noqa: E402
from hestia_tune.config.run_config import RunConfig  # noqa: E402
from hestia_tune.errors import InputError  # noqa: E402
from hestia_tune.evaluation import evaluator  # noqa: E402
from hestia_tune.evaluation.evaluator import PROMPTS  # noqa: E402
from hestia_tune.models.loading import load_model  # noqa: E402

FIVE = ["arc_easy", "arc_challenge", "hellaswag", "piqa", "winogrande"]
ALL = "[pretrained,naive,trained,packed,checkpoint,checkpoint_hard]"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    return make_task_folder(tmp_path_factory.mktemp("tasks"), official=FIVE)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "held_out.txt"
    file.write_text(
        "A held-out text, of some ninety bytes, which the models are to find likely. " * 2
    )
    return file


@pytest.fixture(scope="module")
def trained(model_dir, tmp_path_factory):
    """Return the folder of a finished run of 6 steps with a checkpoint of step 4, also packed."""
    folder = tmp_path_factory.mktemp("trained")
    cfg = make_config(model_dir, folder, "dataset_val=null", "save_every_n_steps=2")
    run(cfg)
    run_convert(cfg)
    return folder


@pytest.fixture(autouse=True)
def fast_manager(tasks, monkeypatch):
    monkeypatch.setattr(evaluator, "find_tasks", make_manager)
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)  # takes seconds
    yield
    if distributed.is_initialized():
        distributed.destroy_process_group()


def config(model_dir, output_dir, tasks, *overrides):
    section = {"tasks": ["tiny_choice"], "include_path": str(tasks)}
    base = make_config(model_dir, output_dir, *overrides)
    return OmegaConf.merge(base, {"eval": OmegaConf.merge(section, base.get("eval", {}))})


def test_every_kind_of_model_in_one_table(model_dir, trained, tasks, text, capsys):
    cfg = config(
        model_dir, trained, tasks, f"eval.models={ALL}", f"eval.perplexity.held_out.source={text}"
    )
    assert run_evaluation(cfg) == 0
    told = capsys.readouterr().out
    found = json.loads((trained / "evaluation.json").read_text())
    names = ALL.strip("[]").split(",")
    assert list(found["models"]) == names and all(f"| {name} " in told for name in names)
    samples = {n: m["tasks"]["samples"]["tiny_choice"] for n, m in found["models"].items()}
    losses = {n: m["perplexity"]["held_out"]["nll"] for n, m in found["models"].items()}
    # The packed model equals the hard model in every prediction, and in every bit of the loss.
    assert samples["packed"] == samples["trained"] and losses["packed"] == losses["trained"]
    # Equal models have equal predictions, and every model continues the same prompts.
    tables, prompts = found["tables"], [*PROMPTS]
    assert list(tables["kl_divergence"]) == names[1:]
    agreement = {name: row["held_out"]["value"] for name, row in tables["top1_agreement"].items()}
    assert agreement["packed"] == agreement["trained"] < 1
    ratio = tables["perplexity_ratio"]["trained"]["held_out"]["value"]
    tokens = found["models"]["trained"]["perplexity"]["held_out"]["tokens"]
    assert ratio == pytest.approx(
        math.exp((losses["trained"] - losses["pretrained"]) / tokens), rel=1e-9
    )
    continued = {n: m["continuations"] for n, m in found["models"].items()}
    assert all([*texts] == prompts for texts in continued.values())
    assert continued["packed"] == continued["trained"] != continued["pretrained"]
    # The last checkpoint is fully annealed. Only its embeddings and norms are still float32.
    assert losses["checkpoint"] == pytest.approx(losses["checkpoint_hard"], abs=1e-6)
    assert losses["checkpoint_hard"] == pytest.approx(losses["trained"], rel=1e-3)
    assert len({losses[n] for n in ("pretrained", "naive", "trained")}) == 3
    settings = {n: m["settings"] for n, m in found["models"].items()}
    assert settings["checkpoint"]["step"] == 6 and settings["checkpoint"]["pressure"] == 1
    assert settings["naive"]["quantizer"] == "ternary, group_size=32"
    installed = settings["naive"]["identity"]["versions"]["torch"]
    assert installed.split("+")[0] == torch.__version__.split("+")[0]


def test_a_checkpoint_in_the_middle_is_relaxed_at_its_own_temperature(model_dir, trained, tasks):
    step = trained / "checkpoints" / "step_4"
    cfg = config(model_dir, trained, tasks, f"eval.models=['{step}',checkpoint_hard]")
    model, about = load_model(
        str(step), RunConfig.parse(cfg), device=torch.device("cpu"), dtype=torch.float32
    )
    assert about["step"] == 4 and 0 < about["tau"][0] < 0.3
    quantizer = model.layers[0].mlp.w1.weight_fake_quantizer
    assert float(quantizer.tau) == pytest.approx(about["tau"][0])
    assert float(quantizer.pressure) == 1.0


def test_hugging_face_folders_and_paths(model_dir, trained, tasks, text):
    cfg = config(
        model_dir,
        trained,
        tasks,
        "eval.tasks=[]",
        f"eval.models=[trained,'{trained / 'hard_model'}','{trained / 'converted' / 'torchao'}']",
        f"eval.perplexity.held_out={{source: {text}, stride: 16}}",
        f"eval.output={trained / 'paths.json'}",
    )
    assert run_evaluation(cfg) == 0
    models = json.loads((trained / "paths.json").read_text())["models"]
    assert len({m["perplexity"]["held_out"]["nll"] for m in models.values()}) == 1
    files = {path.name: json.loads(path.read_text()) for path in (trained / "paths").glob("*.json")}
    assert len(files) == 3 and files["trained.json"] == models["trained"]
    assert {result["name"]: result for result in files.values()} == models


def test_paths_that_differ_in_one_character_have_different_files(
    model_dir, trained, tasks, text, tmp_path
):
    names = [str(tmp_path / "one" / "model"), str(tmp_path / "one_model")]
    for name, source in zip(names, (model_dir, trained / "hard_model"), strict=True):
        shutil.copytree(source, name)
    options = ("eval.tasks=[]", f"eval.perplexity.t.source={text}")
    cfg = config(model_dir, tmp_path, tasks, f"eval.models={names}", *options)
    assert run_evaluation(cfg) == 0
    files = [json.loads(path.read_text()) for path in (tmp_path / "evaluation").glob("*.json")]
    assert {result["name"] for result in files} == set(names)
    assert len({result["perplexity"]["t"]["nll"] for result in files}) == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("eval.models=[trained]", "no config.json in .*hard_model; run hestia_qat first"),
        ("eval.models=[packed]", "run hestia_convert first"),
        ("eval.models=[checkpoint]", "no complete checkpoint in"),
        ("eval.models=[pretraned]", "give a folder, or one of pretrained"),
        ("eval.models=[]", "must name at least one model"),
        ("eval.models=pretrained", "eval.models: give a list"),
        ("eval.tasks=[tiny_choise]", "tiny_choice"),
        ("eval.window=32", "unknown key eval.window"),
        ("eval.perplexity.x=3", "eval.perplexity.x must be a mapping of options; got 3"),
        ("eval.perplexity.x={sorce: y}", "did you mean source"),
        ("eval.perplexity.x={source: /nowhere.txt}", "/nowhere.txt does not exist"),
        (
            "eval.perplexity.x={source: y, stride: 65}",
            "x.stride must be in .1, 64.; got 65",
        ),
        ("eval.batch_size=0", "eval.batch_size must be at least 1; got 0"),
    ],
)
def test_errors_come_before_any_model_is_loaded(
    model_dir, tmp_path, tasks, override, message, monkeypatch
):
    def fail(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(command, "load_model", fail)
    with pytest.raises(InputError, match=message):
        run_evaluation(config(model_dir, tmp_path, tasks, "eval.models=[pretrained]", override))
    assert not (tmp_path / "evaluation.json").exists()


def test_the_validation_data_are_measured_if_no_text_is_named(model_dir, trained, tasks, caplog):
    options = ("eval.tasks=[]", "eval.models=[pretrained,trained]", "dataset_val.num=9")
    cfg = config(model_dir, trained, tasks, *options, f"eval.output={trained / 'val.json'}")
    cfg.dataset_val = {"_component_": "tiny.random_dataset", "num": 9, "seed": 1}
    assert run_evaluation(cfg) == 0
    found = json.loads((trained / "val.json").read_text())
    assert found["models"]["trained"]["perplexity"]["dataset_val"]["documents"] == 9
    assert found["tables"]["kl_divergence"]["trained"]["dataset_val"]["value"] > 0
    cfg.dataset_val["_component_"] = "tiny.nothing"
    with pytest.raises(InputError, match="eval needs tasks or perplexity; both are empty"):
        run_evaluation(cfg)
    assert "no text is measured: dataset_val could not be loaded" in caplog.text


def test_another_quantizer_or_artifact_than_the_checkpoints(model_dir, trained, tasks):
    cfg = config(model_dir, trained, tasks, "eval.models=[checkpoint]", "quantizer.group_size=16")
    with pytest.raises(ValueError, match="was trained with quantizer ternary, group_size=32"):
        run_evaluation(cfg)


def test_tasks_during_training_go_to_the_metric_logger(model_dir, tmp_path, tasks, text):
    options = ("eval.every_n_steps=2", f"eval.perplexity.t.source={text}")
    recipe = run(config(model_dir, tmp_path, tasks, *options))
    assert recipe.finished
    measured = logged(tmp_path, "eval/t/loss")
    assert list(measured) == [2, 4, 6]
    assert list(logged(tmp_path, "eval/tiny_choice/acc")) == [2, 4, 6]
    # The evaluation does not change the run.
    plain = tmp_path / "plain"
    run(make_config(model_dir, plain))
    assert logged(plain) == logged(tmp_path)
    # The last evaluation is the evaluation of the deployed model.
    cfg = config(model_dir, tmp_path, tasks, "eval.models=[checkpoint_hard]", *options)
    assert run_evaluation(cfg) == 0
    found = json.loads((tmp_path / "evaluation.json").read_text())["models"]["checkpoint_hard"]
    result = found["perplexity"]["t"]
    assert result["nll"] / result["tokens"] == pytest.approx(measured[6], rel=1e-5)


def test_a_finished_model_is_not_evaluated_again(
    model_dir, trained, tasks, text, tmp_path, monkeypatch
):
    path, folder = tmp_path / "evaluation.json", tmp_path / "evaluation"
    names, loaded, stops = ["pretrained", "naive", "trained"], [], [KeyboardInterrupt]

    def load_and_note(name, *args, **options):
        loaded.append(name)
        if name == "naive" and stops:
            raise stops.pop()
        return load_model(name, *args, **options)

    def evaluate(*overrides):
        """Return the names of the loaded models and the content of the final file."""
        loaded.clear()
        options = (f"eval.models={names}", f"eval.perplexity.t.source={text}")
        run_evaluation(
            config(model_dir, trained, tasks, *options, f"eval.output={path}", *overrides)
        )
        found = json.loads(path.read_text())
        assert set(found) == {"schema_version", "models", "tables"}
        assert list(found["models"]) == list(found["tables"]["acc"]) == names
        kept = {name: json.loads((folder / f"{name}.json").read_text()) for name in names}
        assert kept == found["models"]
        return list(loaded), found

    monkeypatch.setattr(command, "load_model", load_and_note)
    with pytest.raises(KeyboardInterrupt):
        evaluate()
    assert not path.exists() and [file.name for file in folder.iterdir()] == ["pretrained.json"]
    loaded_names, first = evaluate()
    assert loaded_names == ["naive", "pretrained", "trained"]  # the first model is the reference
    loaded_names, again = evaluate()
    assert loaded_names == [] and again == first
    # The order of the models changes the table, but no result of one model.
    names.reverse()
    loaded_names, turned = evaluate()
    assert loaded_names == ["naive", "trained", "pretrained"]
    assert turned["models"] == first["models"] and turned["tables"] != first["tables"]
    names.reverse()
    assert evaluate() == ([], first)
    everything = ["pretrained", "naive", "pretrained", "trained"]
    # Other settings and other texts replace the results.
    loaded_names, other = evaluate("eval.limit=5")
    assert loaded_names == everything and other["tables"] != first["tables"]
    loaded_names, back = evaluate()
    assert loaded_names == everything and back == first
    assert evaluate("eval.perplexity.t.max_tokens=40")[0] == everything
    text.write_text(text.read_text() + "More of it.")
    assert evaluate()[0] == everything
    # Another model or a damaged file replaces one result.
    (trained / "hard_model" / "config.json").touch()
    assert evaluate()[0] == ["trained", "pretrained"]
    (folder / "against_pretrained" / "naive.json").write_text("not JSON")
    assert evaluate()[0] == ["naive", "pretrained"]
    for damaged in ("not JSON", "[]", '{"name": "naive"}', '{"nom": 3}'):
        (folder / "naive.json").write_text(damaged)
        assert evaluate()[0] == ["naive"]


def with_ours(folder):
    """Return a manager of a folder's tasks and the packaged groups, without lm-eval's tasks."""
    from lm_eval.tasks import TaskManager

    ours = Path(evaluator.__file__).parent / "tasks"
    return TaskManager(include_path=[str(ours), str(folder)], include_defaults=False)


def test_the_preset_runs_on_models_and_at_the_end_of_training(
    model_dir, trained, tasks, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(evaluator, "find_tasks", with_ours)
    preset = ("eval.tasks=[hestia_zeroshot]", f"eval.output={tmp_path / 'five.json'}")
    cfg = config(model_dir, trained, tasks, "eval.models=[pretrained,trained]", *preset)
    assert run_evaluation(cfg) == 0
    told = capsys.readouterr().out
    assert all(f"| {name} " in told for name in [*FIVE, "average"])
    tables = json.loads((tmp_path / "five.json").read_text())["tables"]
    assert list(tables["acc"]["trained"]) == [*FIVE, "average"]
    run(config(model_dir, tmp_path / "run", tasks, "eval.every_n_steps=6", *preset))
    for name in [*FIVE, "average"]:
        logged_values = logged(tmp_path / "run", f"eval/{name}/acc")
        assert list(logged_values) == [6]
    # An unknown task raises an error before the first step.
    with pytest.raises(ValueError, match="did you mean hestia_zeroshot"):
        cfg = config(
            model_dir, tmp_path / "no", tasks, "eval.every_n_steps=6", "eval.tasks=[hestia_zero]"
        )
        run(cfg)
    assert not (tmp_path / "no" / "hard_model").exists()


@pytest.mark.slow
def test_two_ranks_equal_one_rank(model_dir, trained, tasks, text, tmp_path):
    options = ("eval.models=[pretrained,trained]", f"eval.perplexity.t.source={text}")
    one = config(model_dir, trained, tasks, *options, f"eval.output={tmp_path / 'one.json'}")
    assert run_evaluation(one) == 0
    two = config(model_dir, trained, tasks, *options, f"eval.output={tmp_path / 'two.json'}")
    path = write_config(two, tmp_path / "two.yaml")
    done = run_forked("--config", path, ranks=2, recipe="hestia_eval")
    assert done.returncode == 0, done.stderr
    found = [json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two")]
    first, second = (results["models"] for results in found)
    one, two = (results["tables"]["kl_divergence"]["trained"]["t"]["value"] for results in found)
    assert one == pytest.approx(two, rel=1e-5)
    for name in ("pretrained", "trained"):
        assert first[name]["tasks"]["samples"] == second[name]["tasks"]["samples"]
        assert first[name]["continuations"] == second[name]["continuations"]
        losses = [results[name]["perplexity"]["t"]["nll"] for results in (first, second)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)
