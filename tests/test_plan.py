"""The plan: which cells a sweep means, what is left of them, in which order, and at what cost."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import stub_worker
import yaml
from stub_worker import row
from test_spec import sweep

from pipeline.estimate import COLUMNS, Costs, estimate
from pipeline.plan import Grid, Plan, Shard, expand, make_plan
from pipeline.show import _groups_table
from pipeline.spec import SpecError, load_sweep
from pipeline.store import row_schema
from tasks.sources import DataSources
from workers.row import Row

FEW_PROBLEMS = {"name": "gsm8k", "allow_partial": True}


@pytest.fixture(autouse=True)
def _stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    stub_worker.install(monkeypatch)


def grid(folder: Path, data_dir: Path | None = None, **changes: Any) -> Grid:
    file = folder / "sweep.yaml"
    file.write_text(yaml.safe_dump(sweep(**changes)))
    return expand(load_sweep(file), file, DataSources(data_dir))


def plan(
    folder: Path, rows: list[Row] | None = None, limit: int | None = None, retry: bool = False, **changes: Any
) -> Plan:
    return make_plan(grid(folder, **changes), table(rows or []), limit, retry)


def table(rows: list[Row]) -> pa.Table:
    return pa.Table.from_pylist([dataclasses.asdict(one) for one in rows], schema=row_schema())


def ids(folder: Path, **changes: Any) -> list[str]:
    return [cell.cell_id for cell in grid(folder, **changes).cells]


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    """A data folder with two word problems."""
    folder = tmp_path / "problems"
    (folder / "gsm8k").mkdir(parents=True)
    line = '{"question": "How much is 1 and 1?", "answer": "It is 2.\\n#### 2"}\n'
    (folder / "gsm8k" / "test.jsonl").write_text(line + line.replace("1 and 1", "2 and 0"))
    return folder


def test_the_full_cache_is_one_cell_whatever_the_budgets(tmp_path: Path) -> None:
    cells = grid(tmp_path, budgets=["10%", "128 tokens", "unlimited"]).cells
    assert [(cell.spec.method, cell.spec.budget) for cell in cells] == [
        ("full", "100%"),
        ("window", "10%"),
        ("window", "128 tokens"),
        ("window", "unlimited"),
    ]


def test_a_method_with_an_operating_point_is_one_cell_without_a_budget(tmp_path: Path) -> None:
    cells = grid(tmp_path, methods=["full", "codes", "window"], budgets=["10%", "20%"]).cells
    assert [(cell.spec.method, cell.spec.budget, cell.impossible) for cell in cells] == [
        ("full", "100%", None),
        ("codes", "unlimited", None),
        ("window", "10%", None),
        ("window", "20%", None),
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"samples": 7},
        {"name": "other", "output": "elsewhere"},
        {"models": [{"label": "renamed", "source": "tiny"}]},
        {"methods": ["full", {"name": "window", "label": "renamed"}]},
        {"methods": ["full", {"name": "window", "window": 32}]},
        {"cluster": {"samples_per_job": 2}},
        {"budgets": [0.1]},
    ],
)
def test_a_cell_is_the_same_where_no_number_can_change(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert ids(tmp_path, **changes) == ids(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"models": [{"label": "tiny", "source": "other"}]},
        {"models": [{"label": "tiny", "source": "tiny", "dtype": "float32"}]},
        {"models": [{"label": "tiny", "source": "tiny", "attention": "sdpa"}]},
        {"engine": {"row_width": 16}},
        {"protocol": {"question": "appended"}},
        {"contexts": [2048]},
        {"seeds": [1]},
        {"tasks": ["niah_single_2"]},
        {"tasks": [{"name": "niah_single_1", "max_new_tokens": 3}]},
    ],
)
def test_a_cell_is_another_where_a_number_can_change(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert not set(ids(tmp_path, **changes)) & set(ids(tmp_path))


def test_a_setting_and_a_budget_make_another_cell(tmp_path: Path) -> None:
    cells = {*ids(tmp_path), *ids(tmp_path, budgets=["20%"]), *ids(tmp_path, methods=[{"name": "window", "window": 8}])}
    assert len(cells) == 4


def test_seeds_that_change_nothing_collapse(tmp_path: Path, problems: Path) -> None:
    methods = ["full", "dice"]
    unseeded = grid(tmp_path, problems, tasks=[FEW_PROBLEMS], methods=methods, seeds=[0, 1, 2]).cells
    assert [(cell.spec.method, cell.data_seed, cell.spec.method_seed) for cell in unseeded] == [
        ("full", 0, 0),
        ("dice", 0, 0),
        ("dice", 0, 1),
        ("dice", 0, 2),
    ]
    seeded = grid(tmp_path, tasks=["niah_single_1"], methods=methods, seeds=[0, 1]).cells
    assert [(cell.spec.method, cell.data_seed, cell.spec.method_seed) for cell in seeded] == [
        ("full", 0, 0),
        ("dice", 0, 0),
        ("full", 1, 0),
        ("dice", 1, 1),
    ]


def test_a_task_has_no_more_samples_than_there_are(tmp_path: Path, problems: Path) -> None:
    cells = grid(tmp_path, problems, tasks=[FEW_PROBLEMS], samples=50).cells
    assert {(cell.context, cell.samples) for cell in cells} == {(0, 2)}


def test_two_labels_for_one_cell_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="methods: window and w32 are the same but for their labels"):
        grid(tmp_path, methods=["window", {"name": "window", "label": "w32", "window": 32}])
    twins = [{"label": "a", "source": "tiny"}, {"label": "b", "source": "tiny"}]
    with pytest.raises(SpecError, match="models: a and b are the same but for their labels"):
        grid(tmp_path, models=twins)


def test_what_cannot_run_says_why(tmp_path: Path) -> None:
    made = plan(tmp_path, contexts=[1024, 8192], budgets=["1%", "10%"])
    reasons = {(cell.context, cell.spec.method, cell.spec.budget): cell.impossible for cell in made.grid.cells}
    beyond = "context 8192 is beyond the model's 4096 positions"
    assert reasons == {
        (1024, "full", "100%"): None,
        (1024, "window", "1%"): "8 tokens do not hold the window of 32",
        (1024, "window", "10%"): None,
        (8192, "full", "100%"): beyond,
        (8192, "window", "1%"): beyond,
        (8192, "window", "10%"): beyond,
    }
    assert made.total == 2 * 50
    assert {job.group.context for job in made.jobs} == {1024}


def test_a_missing_model_is_named_with_its_field(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"sweep\.yaml: models\[1\]\.source: model 'b': no such folder missing/b"):
        grid(tmp_path, models=[{"label": "a", "source": "tiny"}, {"label": "b", "source": "missing/b"}])


def test_a_missing_file_of_a_task_is_named_with_its_field(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"sweep\.yaml: tasks\[0\]: gsm8k: .*gsm8k/test\.jsonl"):
        grid(tmp_path, tmp_path, tasks=["gsm8k"])


def shown(job: Shard) -> tuple[str, int, list[int]]:
    return job.group.task.name, job.group.context, list(job.pending)


def test_long_contexts_come_first_and_tasks_take_turns(tmp_path: Path) -> None:
    made = plan(
        tmp_path,
        contexts=[1024, 2048],
        samples=3,
        tasks=["niah_single_1", {"name": "vt", "samples": 2, "contexts": [2048]}],
        cluster={"samples_per_job": 2},
    )
    assert [shown(job) for job in made.jobs] == [
        ("niah_single_1", 2048, [0, 1]),
        ("vt", 2048, [0, 1]),
        ("niah_single_1", 2048, [2]),
        ("niah_single_1", 1024, [0, 1]),
        ("niah_single_1", 1024, [2]),
    ]


def test_a_model_is_finished_before_the_next(tmp_path: Path) -> None:
    models = [{"label": "a", "source": "a"}, {"label": "b", "source": "b"}]
    made = plan(tmp_path, models=models, contexts=[1024, 2048], samples=1)
    assert [(job.group.model.label, job.group.context) for job in made.jobs] == [
        ("a", 2048),
        ("a", 1024),
        ("b", 2048),
        ("b", 1024),
    ]


def test_only_missing_pairs_are_left(tmp_path: Path) -> None:
    full, window = ids(tmp_path)
    rows = [row(full, 0), row(window, 0), row(full, 1), row(window, 2, status="failed"), row("of another sweep", 3)]
    made = plan(tmp_path, rows, samples=4)
    assert made.jobs[0].pending == {1: (window,), 2: (full,), 3: (full, window)}
    assert (made.done[full], made.done[window], made.pending, made.total) == (2, 2, 4, 8)


def test_failed_rows_are_left_when_they_are_to_be_retried(tmp_path: Path) -> None:
    full, window = ids(tmp_path)
    rows = [row(full, 0), row(window, 0, status="failed")]
    assert plan(tmp_path, rows, samples=1).jobs == ()
    assert plan(tmp_path, rows, samples=1, retry=True).jobs[0].pending == {0: (window,)}


def test_a_limit_takes_the_first_samples_of_the_same_cells(tmp_path: Path) -> None:
    limited, whole = plan(tmp_path, limit=2, samples=5), plan(tmp_path, samples=5)
    assert limited.grid == whole.grid
    assert [list(job.pending) for job in limited.jobs] == [[0, 1]]
    assert (limited.total, whole.total) == (4, 10)


def test_the_manifest_says_how_many_samples_a_cell_is_to_have(tmp_path: Path) -> None:
    cells = plan(tmp_path, limit=2, samples=5).manifest()["cells"]
    assert [(cell["method"], cell["budget"], cell["expected"], cell["impossible"]) for cell in cells] == [
        ("full", "100%", 5, ""),
        ("window", "10%", 5, ""),
    ]


def costs(made: Plan, rows: list[Row]) -> Costs:
    return Costs(made, table(rows).select(COLUMNS))


def test_the_time_comes_from_earlier_rows_of_the_same_work(tmp_path: Path) -> None:
    full, _ = ids(tmp_path)
    where = {"model": "tiny", "task": "niah_single_1", "context": 1024}
    rows = [row(full, 0, prefill_s=2.0, compress_s=0.5, decode_s=30.0, batch_rows=20, **where)]
    made = plan(tmp_path, rows, samples=3)
    left = estimate(made, costs(made, rows))
    # Three prompts at 2 s, five rows at 0.5 s and a twentieth of 30 s.
    assert left.seconds == pytest.approx(3 * 2.0 + 5 * (0.5 + 1.5))
    assert left.measured == 1.0


def test_without_rows_the_time_is_rough(tmp_path: Path) -> None:
    made = plan(tmp_path, samples=3)
    left = estimate(made, costs(made, []))
    assert left.seconds > 0
    assert left.measured == 0.0


def test_failed_rows_say_nothing_on_time(tmp_path: Path) -> None:
    full, _ = ids(tmp_path)
    rows = [row(full, 0, status="failed", model="tiny", task="niah_single_1", context=1024)]
    made = plan(tmp_path, rows, samples=3)
    assert estimate(made, costs(made, rows)).measured == 0.0


def test_one_seed_is_shown_as_one_where_some_methods_have_no_use_for_it(tmp_path: Path) -> None:
    shown = _groups_table(plan(tmp_path, tasks=["niah_single_1"], methods=["full", "dice"], seeds=[7]))
    assert [*shown.columns[3].cells] == ["1"]
