"""Tests the comparison table, its tests of significance, and its JSON file."""

import json
import math
import re
from fractions import Fraction

import pytest
import torch

pytest.importorskip("scipy", reason="tests of significance are scipy's")

from hestia_tune.evaluation import ModelResult, compare  # noqa: E402
from hestia_tune.evaluation.compare import paired, z_test  # noqa: E402

NORM = 1.959963984540054
WIKI = {
    "nll": 200.0,
    "tokens": 100,
    "words": 50,
    "bytes": 400,
    "documents": 1,
    "window": 8,
    "stride": 4,
    "token_perplexity": math.exp(2),
    "word_perplexity": math.exp(4),
    "byte_perplexity": math.exp(0.5),
    "bits_per_byte": 0.5 / math.log(2),
}


def task_result(documents="same", **scores):
    """Return the result of evaluate_tasks for tasks with these accuracies per document."""
    results = {}
    for name, values in scores.items():
        n = len(values)
        mean = sum(values) / n
        stderr = math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1) / n)
        results[name] = {"alias": name, "acc,none": mean, "acc_stderr,none": stderr}
    return {
        "results": results,
        "group_subtasks": {},
        "samples": {
            name: {"documents": documents, "metrics": {"acc": [float(v) for v in values]}}
            for name, values in scores.items()
        },
        "versions": {name: 1.0 for name in scores},
    }


def random_scores(seed, n, p=0.5):
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(n, generator=generator) < p).double().tolist()


def p_of(wins, losses):
    scores = [1.0] * wins + [0.0] * losses + [1.0]
    return paired(scores, [0.0] * wins + [1.0] * losses + [1.0])["p_value"]


def test_mcnemar_is_the_binomial_tail():
    for wins in range(12):
        for losses in range(12):
            n = wins + losses
            tail = sum(math.comb(n, k) for k in range(min(wins, losses) + 1))
            expected = min(Fraction(1), Fraction(2 * tail, 2**n))
            assert p_of(wins, losses) == pytest.approx(float(expected), rel=1e-12)
    assert p_of(3000, 3000) == 1.0
    assert 0 < p_of(2800, 3200) < 1e-6


def test_z_test_has_the_usual_quantiles():
    assert z_test(NORM * 0.1, 0.1, "")["p_value"] == pytest.approx(0.05)
    assert z_test(-NORM * 0.1, 0.1, "")["p_value"] == pytest.approx(0.05)
    assert z_test(0.0, 0.0, "")["p_value"] == 1 and z_test(0.1, 0.0, "")["p_value"] == 0
    assert z_test(0.1, None, "")["p_value"] is None


@pytest.mark.parametrize("seed", range(5))
def test_paired_error_belongs_to_the_mean_difference(seed):
    a, b = random_scores(seed, 50), random_scores(seed + 100, 50)
    found = paired(a, b)
    d = torch.tensor(a).double() - torch.tensor(b).double()
    assert found["value"] == pytest.approx(d.mean().item())
    assert found["stderr"] == pytest.approx((d.std() / 50**0.5).item())
    assert found["test"] == "mcnemar"
    back = paired(b, a)
    assert back["value"] == -found["value"] and back["p_value"] == found["p_value"]
    c = [value + 0.25 for value in a]
    other = paired(c, b)
    assert other["test"] == "paired t"
    degrees = 49  # Student's density, integrated by the trapezoid rule
    edge = abs(other["value"] / other["stderr"])
    t = torch.linspace(0, edge, 200001, dtype=torch.float64)
    area = torch.trapezoid((1 + t**2 / degrees) ** (-(degrees + 1) / 2), t).item()
    scale = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)
    area *= math.exp(scale) / math.sqrt(degrees * math.pi)
    assert other["p_value"] == pytest.approx(1 - 2 * area, abs=1e-9)
    assert paired(c, a)["p_value"] == 0 and paired(c, c)["p_value"] == 1
    with pytest.raises(ValueError, match="shorter"):
        paired(a, b[1:])


def test_false_alarms_come_at_the_stated_rate():
    """If no model is better, p < 0.05 in about one of twenty comparisons at most."""
    alarms = {"mcnemar": 0, "average": 0}
    for seed in range(400):
        rows = [
            task_result(x=random_scores(4 * seed + i, 100), y=random_scores(4 * seed + i + 2, 100))
            for i in range(2)
        ]
        table = compare([ModelResult(name=n, tasks=t) for n, t in zip("ab", rows, strict=True)])
        row = table.tables["acc"]["b"]
        alarms["mcnemar"] += row["x"]["difference"]["p_value"] < 0.05
        alarms["average"] += row["average"]["difference"]["p_value"] < 0.05
    assert alarms["mcnemar"] <= 30  # exact tests are cautious
    assert 8 <= alarms["average"] <= 36


def test_table_holds_averages_and_differences():
    first = task_result(x=[1, 1, 1, 1, 0, 1, 1, 1], y=[1, 0, 1, 0])
    second = task_result(x=[0, 0, 0, 0, 0, 0, 0, 1], y=[1, 0, 1, 0])
    other = task_result(documents="others", x=[0, 0, 0, 0, 0, 0, 0, 1], y=[1, 0, 1, 0])
    rows = [
        ModelResult(name=name, tasks=tasks)
        for name, tasks in (("full", first), ("hard", second), ("else", other))
    ]
    table = compare(rows).tables["acc"]
    assert list(table) == ["full", "hard", "else"] and list(table["full"]) == ["x", "y", "average"]
    assert all(cell["difference"] is None for cell in table["full"].values())
    hard = table["hard"]
    assert hard["x"]["difference"]["value"] == -0.75
    assert hard["x"]["difference"]["p_value"] == pytest.approx(2 / 2**6)
    assert hard["average"]["value"] == (0.125 + 0.5) / 2
    errors = [hard[task]["stderr"] for task in "xy"]
    assert hard["average"]["stderr"] == pytest.approx(math.hypot(*errors) / 2)
    assert hard["average"]["difference"]["value"] == -0.375
    assert hard["average"]["difference"]["stderr"] == pytest.approx(
        hard["x"]["difference"]["stderr"] / 2
    )
    assert hard["average"]["difference"]["test"] == "paired z"
    unpaired = table["else"]["x"]["difference"]
    assert unpaired["test"] == "unpaired z" and unpaired["value"] == -0.75
    assert unpaired["stderr"] == pytest.approx(
        math.hypot(table["full"]["x"]["stderr"], hard["x"]["stderr"])
    )
    assert table["else"]["average"]["difference"]["test"] == "unpaired z"


def test_markdown_shows_stars_and_all_rows():
    good, bad = task_result(x=[1.0] * 19 + [0.0], y=[0, 1]), task_result(x=[0.0] * 20, y=[0, 1])
    table = compare(
        [
            ModelResult(name="full", tasks=good, perplexity={"wiki|text": WIKI}),
            ModelResult(name="hard", tasks=bad),
        ]
    )
    lines = [line for line in table.markdown().splitlines() if line.startswith("|")]
    cells = [[c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    assert cells[0] == ["task or text", "measure", "full", "hard"]
    assert len({len(row) for row in cells}) == 1
    rows = {tuple(row[:2]): row[2:] for row in cells[2:]}
    assert [row[0] for row in cells[2:5]] == ["x", "y", "average"]
    assert rows["x", "acc, %"][1] == "0.0 ± 0.0 (-95.0\\*\\*\\*)"
    assert rows["y", "acc, %"][1] == "50.0 ± 50.0 (+0.0)"
    assert rows["wiki\\|text", "token perplexity"] == ["7.3891", ""]
    assert "the difference from full" in table.markdown()


def test_tasks_without_accuracy_and_groups_have_their_own_tables():
    result = task_result(x=[0, 1], part=[0, 1])
    result["results"]["roll"] = {"alias": "roll", "bits,none": 1.5, "bits_stderr,none": "N/A"}
    result["results"]["whole"] = {"acc,none": 0.5, "acc_stderr,none": 0.1}
    result["results"]["preset"] = {"alias": "a group without a value of its own"}
    result["group_subtasks"] = {"whole": ["part"], "preset": ["x"]}
    table = compare([ModelResult(name=n, tasks=result) for n in ("a", "b")])
    assert list(table.tables["acc"]["a"]) == ["x", "whole", "average"]
    assert list(table.tables["bits"]["a"]) == ["roll"]
    assert table.tables["bits"]["b"]["roll"]["difference"]["p_value"] is None
    assert "1.5000 (+0.0000?)" in table.markdown()


def test_json_on_disk_holds_everything(tmp_path):
    result = task_result(x=random_scores(0, 30), y=random_scores(1, 30))
    result["results"]["x"] |= {"odd,none": float("nan"), "odd_stderr,none": float("inf")}
    wiki = WIKI | {"nll": 9e9, "word_perplexity": math.inf}
    settings = {"path": tmp_path, "tau": 0.1}
    table = compare(
        [ModelResult(name="a", tasks=result, settings=settings, perplexity={"wiki": wiki})]
    )
    path = tmp_path / "results.json"
    table.save(path)
    text = path.read_text()
    found = json.loads(text)
    assert "NaN" not in text and "Infinity" not in text
    model = found["models"]["a"]
    assert model["settings"] == {"path": str(tmp_path), "tau": 0.1}
    assert model["tasks"]["samples"] == result["samples"]
    assert model["tasks"]["versions"] == {"x": 1.0, "y": 1.0}
    assert model["tasks"]["results"]["x"]["odd,none"] is None
    assert model["perplexity"]["wiki"]["nll"] == 9e9
    assert model["perplexity"]["wiki"]["word_perplexity"] is None
    assert found["tables"]["acc"]["a"]["x"]["value"] == result["results"]["x"]["acc,none"]
    again = compare([ModelResult(**model)])  # a resumed evaluation reads this
    again.save(tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text())["models"] == found["models"]
    assert "odd" not in again.tables and again.markdown()
    assert len(text.splitlines()) < 150  # the scores of a task are on one line


def test_without_tasks_and_texts_there_are_no_rows():
    assert compare([ModelResult(name="a")]).tables == {}
