"""Timing sweeps: what their file says, which runs it means, and what a run measures."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import stub_worker
import torch
import yaml
from models import tiny_llama
from stub_worker import StubWorker
from test_spec import complaint, sweep

import pipeline.cluster
import pipeline.plan
import workers.engine
from pipeline.cli import main
from pipeline.cluster import actor_request
from pipeline.estimate import COLUMNS, Costs, estimate
from pipeline.plan import Grid, expand, make_plan
from pipeline.run import Finished, Opened, RunOptions, open_sweep, run_sweep
from pipeline.spec import Cluster, load_sweep
from pipeline.store import row_schema
from tasks.sample import Sample
from tasks.sources import DataSources
from workers.actor import Worker
from workers.engine import Engine
from workers.job import CellSpec, EngineSpec, Job, ModelSpec, Protocol, TimingSpec
from workers.models import LoadedModel
from workers.row import Row
from workers.timing import measure, ordinary_tokens, time_job

TIMING: dict[str, Any] = {"prompt_tokens": [64, 512], "new_tokens": 8, "batch": [1, 4], "repeats": 3}
PROMPT, NEW, BATCH = 96, 12, 5
CELLS = (
    CellSpec("f", "full", {}, "100%"),
    CellSpec("s", "snapkv", {"window": 8}, "50%"),
    CellSpec("q", "qevict", {"recent": 8}, "50%"),
    CellSpec("l", "lorekv", {"window": 8, "particles": 2, "tokens": 4}, "50%"),
)


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    stub_worker.install(monkeypatch)


def write(folder: Path, **changes: Any) -> Path:
    own = {"tasks": None, "contexts": None, "timing": TIMING, "output": str(folder / "out"), **changes}
    file = folder / "sweep.yaml"
    file.write_text(yaml.safe_dump(sweep(**own)))
    return file


def grid(folder: Path, **changes: Any) -> Grid:
    file = write(folder, **changes)
    return expand(load_sweep(file), file, DataSources(None))


def table(rows: list[Row]) -> pa.Table:
    return pa.Table.from_pylist([dataclasses.asdict(one) for one in rows], schema=row_schema())


# -- the sweep file ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("stubs")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"timing": {**TIMING, "new_tokens": 1}}, "timing.new_tokens: Input should be greater than or equal to 2"),
        ({"timing": {**TIMING, "prompt_tokens": []}}, "timing.prompt_tokens: List should have at least 1 item"),
        ({"timing": {**TIMING, "batch": [2, 2]}}, "timing.batch: 2 is listed twice"),
        ({"timing": {**TIMING, "batches": [2]}}, "timing.batches: unknown key; did you mean batch?"),
        ({"timing": {"new_tokens": 8}}, "timing.prompt_tokens: is missing"),
        ({"tasks": ["vt"]}, "tasks: has no meaning in a timing sweep"),
        ({"contexts": [1024]}, "contexts: has no meaning in a timing sweep"),
        ({"seeds": [1]}, "seeds: has no meaning"),
        (
            {"timing": 5},
            "timing: must be a mapping, not 5; its keys: prompt_tokens, new_tokens, batch, repeats, warmup",
        ),
        ({"engine": {"row_width": 8}}, "engine.row_width: has no meaning"),
        ({"engine": {"row_width": EngineSpec.row_width}}, "engine.row_width: has no meaning"),
        ({"cluster": {"max_actors": 2}}, "cluster.max_actors: has no meaning"),
        ({"cluster": {"samples_per_job": 2}}, "cluster.samples_per_job: has no meaning"),
        (
            {"cluster": {"gpus_per_actor": 0.5}},
            "cluster.gpus_per_actor: must be a whole number of GPUs, 0 for none, or auto, not 0.5: an actor has",
        ),
        ({"protocol": {"question": "appended"}}, "protocol.question: has no meaning"),
        ({"mlflow": {"tracking_uri": "http://there"}}, "mlflow.tracking_uri: has no meaning"),
        ({"timing": None}, "tasks: is missing"),
    ],
)
def test_a_bad_timing_sweep_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], said: str
) -> None:
    own = {"tasks": None, "contexts": None, "timing": TIMING, **changes}
    assert complaint(tmp_path, **own).startswith(said)
    assert main(["plan", str(write(tmp_path, **changes))]) == 2
    assert capsys.readouterr().err.startswith(f"{tmp_path / 'sweep.yaml'}: {said}")


@pytest.mark.usefixtures("stubs")
def test_prefill_chunks_are_a_timing_sweeps_own(tmp_path: Path) -> None:
    groups = grid(tmp_path, engine={"prefill_chunk": 256}).groups
    assert {(group.engine.prefill_chunk, group.engine.row_width) for group in groups} == {(256, 1), (256, 4)}


# -- the plan ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("stubs")
def test_a_cell_for_every_method_budget_length_and_batch(tmp_path: Path) -> None:
    groups = grid(tmp_path, budgets=["20%", "50%"]).groups
    assert [(group.context, group.batch, group.engine.row_width, group.samples) for group in groups] == [
        (64, 1, 1, 3),
        (64, 4, 4, 3),
        (512, 1, 1, 3),
        (512, 4, 4, 3),
    ]
    for group in groups:
        assert [(cell.spec.method, cell.spec.budget) for cell in group.cells] == [
            ("full", "100%"),
            ("window", "20%"),
            ("window", "50%"),
        ]
        assert {cell.facts()["batch"] for cell in group.cells} == {group.batch}
        assert group.timing == TimingSpec(group.context, 8, 1)


@pytest.mark.usefixtures("stubs")
def test_a_cell_is_another_where_a_time_can_change(tmp_path: Path) -> None:
    def ids(**changes: Any) -> set[str]:
        return {cell.cell_id for cell in grid(tmp_path, timing={**TIMING, "batch": [2], **changes}).cells}

    assert len(ids()) == 4
    assert ids(repeats=9) == ids()
    for changes in ({"new_tokens": 9}, {"batch": [3]}, {"prompt_tokens": [65, 513]}, {"warmup": 2}):
        assert not ids(**changes) & ids()


def test_a_bounded_budget_can_be_timed_where_a_method_can_choose_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline.plan, "describe", stub_worker.describe)
    methods = ["full", {"name": "snapkv", "window": 8}, {"name": "lorekv", "window": 8}]
    asked = {"methods": methods, "budgets": ["50%"], "timing": {**TIMING, "prompt_tokens": [64], "batch": [2]}}
    bounded, grows = (grid(tmp_path, **asked, protocol={"growth": growth}).cells for growth in ("bounded", "grow"))
    assert [(cell.spec.method, cell.impossible is None) for cell in bounded] == [
        ("full", True),
        ("snapkv", True),
        ("lorekv", False),
    ]
    assert not {cell.cell_id for cell in bounded} & {cell.cell_id for cell in grows}


@pytest.mark.usefixtures("stubs")
def test_all_repeats_of_a_batch_are_one_job(tmp_path: Path) -> None:
    made = make_plan(grid(tmp_path, timing={**TIMING, "repeats": 20}), table([]))
    assert [(job.group.context, job.group.batch, len(job.pending)) for job in made.jobs] == [
        (512, 1, 20),
        (512, 4, 20),
        (64, 1, 20),
        (64, 4, 20),
    ]


@pytest.mark.usefixtures("stubs")
def test_a_repeat_that_was_cut_short_runs_again_as_a_whole(tmp_path: Path) -> None:
    made = grid(tmp_path, timing={**TIMING, "prompt_tokens": [512], "batch": [1]})
    full, window = (cell.cell_id for cell in made.cells)
    rows = [stub_worker.row(full, 0), stub_worker.row(window, 0), stub_worker.row(full, 1)]
    plan = make_plan(made, table(rows))
    assert [job.pending for job in plan.jobs] == [{1: (full, window), 2: (full, window)}]
    assert (plan.done[full], plan.done[window], plan.pending) == (1, 1, 4)


@pytest.mark.usefixtures("stubs")
def test_prompt_and_new_tokens_must_fit_the_model(tmp_path: Path) -> None:
    made = grid(tmp_path, timing={**TIMING, "prompt_tokens": [64, 4090], "batch": [1]})
    reasons = {(cell.context, cell.spec.method): cell.impossible for cell in made.cells}
    beyond = "context 4098 is beyond the model's 4096 positions"
    assert reasons[4090, "full"] == reasons[4090, "window"] == beyond
    assert reasons[64, "window"] == "6 tokens do not hold the window of 32"
    assert reasons[64, "full"] is None


@pytest.mark.usefixtures("stubs")
def test_the_time_left_is_that_of_earlier_runs_of_the_same_batch(tmp_path: Path) -> None:
    made = grid(tmp_path, timing={**TIMING, "prompt_tokens": [512], "batch": [4]})
    where = {"model": "tiny", "task": "timing", "context": 512, "row_width": 4, "timing": "isolated"}
    rows = [stub_worker.row(cell.cell_id, 0, ttft_s=2.0, decode_s=1.0, **where) for cell in made.cells]
    plan = make_plan(made, table(rows))
    left = estimate(plan, Costs(plan, table(rows).select(COLUMNS)))
    assert left.seconds == pytest.approx(2 * 2 * 3.0 * (1 + 1 / 3))  # two cells, two repeats, a third of a warm-up
    assert left.measured == 1.0
    rough = make_plan(made, table([]))
    assert estimate(rough, Costs(rough, table([]).select(COLUMNS))).measured == 0.0


# -- the runs ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny_llama()


def job(repeats: int = 2, cells: Sequence[CellSpec] = CELLS, batch: int = BATCH, new: int = NEW) -> Job:
    samples = tuple(Sample("timing", index, "", "", "", (), new, "", repeat=index) for index in range(repeats))
    pending = {sample.sample_id: tuple(cell.cell_id for cell in cells) for sample in samples}
    where = {"task": "timing", "context": PROMPT}
    spec, engine = ModelSpec("tiny", "memory", dtype="float32"), EngineSpec(batch, 64)
    timing = TimingSpec(PROMPT, new, 1)
    return Job("j", 1, spec, engine, Protocol(), samples, tuple(cells), pending, where, timing)


@pytest.fixture(scope="module")
def rows(model: LoadedModel) -> list[Row]:
    return list(time_job(model, job()))


def test_times_are_positive_and_add_up(rows: list[Row]) -> None:
    for row in rows:
        assert row.status == "ok", row.error
        assert row.ttft_s is not None
        assert row.tpot_s is not None
        assert min(row.prefill_s, row.compress_s, row.admit_s, row.decode_s, row.tpot_s) > 0
        assert row.ttft_s == pytest.approx(row.prefill_s + row.compress_s + row.admit_s)
        assert row.decode_s == pytest.approx(row.tpot_s * (NEW - 1))


def test_a_row_is_an_isolated_run_without_a_score(rows: list[Row], model: LoadedModel) -> None:
    assert {(row.timing, row.score, row.prediction, row.metric) for row in rows} == {("isolated", None, "", "")}
    assert {(row.batch_rows, row.row_width, row.prompt_tokens) for row in rows} == {(BATCH, BATCH, PROMPT)}
    held = {row.cell_id: row for row in rows}
    assert held["f"].kv_bytes_prefill == BATCH * model.layout.full_bytes(PROMPT)
    assert held["s"].kv_bytes_prefill <= held["f"].kv_bytes_prefill / 2
    assert held["s"].budget_bytes == BATCH * (model.layout.full_bytes(PROMPT) // 2)
    assert held["q"].workspace_bytes > 0 == held["f"].workspace_bytes
    assert not any(row.over_budget for row in rows)


def test_every_row_generates_exactly_its_tokens_whatever_the_model_says(model: LoadedModel) -> None:
    talkative = dataclasses.replace(model, stop_ids=frozenset(range(3, 110)))
    (row,) = time_job(talkative, job(1, CELLS[:1], new=40))
    assert (row.output_tokens, row.finish_reason) == (40, "length")
    assert row.kv_bytes_full == row.kv_bytes_end == BATCH * model.layout.full_bytes(PROMPT + 39)  # the last is not fed


def test_the_methods_take_turns_and_turn_round(rows: list[Row]) -> None:
    assert [(row.sample_index, row.cell_id) for row in rows] == [
        *((0, cell) for cell in "fsql"),
        *((1, cell) for cell in "lqsf"),
    ]
    rounds = {(row.sample_index, json.loads(row.sample_meta)["round"]) for row in rows}
    assert len(rounds) == 2


def test_the_batch_decodes_together_even_where_its_prompts_come_one_by_one(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shared run would decode the first prompts' rows while the others are still to come."""
    steps: list[int] = []

    def forward(self: Engine, *arguments: Any) -> Any:
        steps.append(sum(row is not None for row in self._rows))
        return original(self, *arguments)

    original = Engine._forward
    monkeypatch.setattr(Engine, "_forward", forward)
    monkeypatch.setattr(workers.engine, "PREFILLED_BYTES", 1)
    once = dataclasses.replace(job(1, CELLS[:1]), timing=TimingSpec(PROMPT, NEW, 0))
    assert [row.status for row in time_job(model, once)] == ["ok"]
    assert steps == [BATCH] * (NEW - 1)


def test_warm_up_runs_every_cell_and_leaves_no_row(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def counted(model: LoadedModel, engine: EngineSpec, prompts: Any) -> Any:
        measured.append(prompts[0].forks[0].key.cell_id)
        return measure(model, engine, prompts)

    monkeypatch.setattr("workers.timing.measure", counted)
    asked = dataclasses.replace(job(1, CELLS[:2], batch=1), timing=TimingSpec(PROMPT, NEW, 2))
    assert len(list(time_job(model, asked))) == 2
    assert measured == ["f", "s", "f", "s", "f", "s"]


def test_methods_read_the_same_prompts_and_rows_other_ones(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    read: dict[str, list[list[int]]] = {}

    def noted(model: LoadedModel, engine: EngineSpec, prompts: Any) -> Any:
        read.setdefault(prompts[0].forks[0].key.cell_id, []).extend(prompt.ids for prompt in prompts)
        return measure(model, engine, prompts)

    monkeypatch.setattr("workers.timing.measure", noted)
    list(time_job(model, dataclasses.replace(job(1, CELLS[:2]), timing=TimingSpec(PROMPT, NEW, 0))))
    assert read["f"] == read["s"]
    assert len({tuple(ids) for ids in read["f"]}) == BATCH
    assert {len(ids) for ids in read["f"]} == {PROMPT}


def test_prompts_hold_no_special_token(model: LoadedModel) -> None:
    class Tokenizer:
        all_special_ids = (5, 6)

        def get_added_vocab(self) -> dict[str, int]:
            return {"<|turn|>": 7}

        def __len__(self) -> int:
            return 100

    assert ordinary_tokens(model) == list(range(3, 128))  # 0, 1 and 2 pad, begin and end
    assert ordinary_tokens(dataclasses.replace(model, tokenizer=Tokenizer())) == [3, 4, *range(8, 100)]


def test_what_fails_costs_its_own_rows(model: LoadedModel) -> None:
    bad = CellSpec("bad", "snapkv", {"window": 8}, "1%")
    found = list(time_job(model, job(2, (CELLS[0], bad), batch=2)))
    assert {(row.cell_id, row.status) for row in found} == {("f", "ok"), ("bad", "failed")}
    (error,) = {row.error for row in found if row.cell_id == "bad"}
    assert error.startswith("ValueError: snapkv must")


def test_an_exception_while_decoding_is_a_failed_row(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Engine, *arguments: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(Engine, "_forward", forward)
    (row,) = time_job(model, job(1, CELLS[:1]))
    assert (row.status, row.error, row.ttft_s) == ("failed", "OutOfMemoryError: no room", None)


class Meter:
    """Notes in ``seen`` what it is asked, and says 7."""

    def __init__(self, seen: list[str]) -> None:
        self.seen = seen

    def restart(self) -> None:
        self.seen.append("restart")

    def peak_bytes(self) -> int:
        self.seen.append("peak")
        return 7


def test_the_peak_is_that_of_the_run_alone(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    metered = dataclasses.replace(model, meter=Meter(seen))  # type: ignore[arg-type]
    once = dataclasses.replace(job(1, CELLS[:2], batch=1), timing=TimingSpec(PROMPT, NEW, 0))
    assert [row.peak_device_bytes for row in time_job(metered, once)] == [7, 7]
    assert seen == ["restart", "peak"] * 2


def test_a_bounded_method_is_timed_as_it_chooses_again(model: LoadedModel) -> None:
    """Its caches stay within the budget of the prompt, so it has done the work that is to be timed."""
    snapkv = job(1, (CELLS[1],))
    within = {}
    for protocol in (Protocol(growth="bounded"), Protocol(growth="grow")):
        (row,) = time_job(model, dataclasses.replace(snapkv, protocol=protocol))
        assert (row.status, row.error, row.growth, row.over_budget) == ("ok", "", protocol.growth, False)
        within[row.growth] = row.kv_bytes_peak <= row.budget_bytes
    assert within == {"bounded": True, "grow": False}


def test_on_a_gpu_every_run_begins_with_nothing_of_the_run_before(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    class Device:
        type = "cuda"

    class Batch:
        first = end = 0.0

        def __init__(self, *arguments: Any) -> None:
            seen.append("engine")

        def run(self, prompts: Any) -> Iterator[Any]:
            return iter(())

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.append("empty"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr("workers.timing._Batch", Batch)
    on_gpu = dataclasses.replace(model, meter=Meter(seen), device=Device())  # type: ignore[arg-type]
    for _ in range(2):
        measure(on_gpu, EngineSpec(0), [])
    assert seen == ["empty", "engine", "restart", "peak"] * 2


def test_an_actor_times_what_is_to_be_timed(model: LoadedModel) -> None:
    worker = Worker()
    worker._model = model
    found = [row for batch in worker.run(job(1, CELLS[:1])) for row in batch]
    assert [(row.job_id, row.timing, row.output_tokens) for row in found] == [("j", "isolated", NEW)]


# -- the driver --------------------------------------------------------------------------------------------------------


class TimedStub(StubWorker):
    """Says which process a row came from."""

    delay_s = 0.02

    def run(self, job: Job) -> Iterator[list[Row]]:
        assert job.timing is not None
        assert job.engine.row_width in TIMING["batch"]
        for rows in super().run(job):
            for row in rows:
                row.sample_meta, row.timing, row.score = json.dumps({"round": str(os.getpid())}), "isolated", None
                row.ttft_s, row.tpot_s = 0.5, 0.1
            yield rows


@pytest.fixture(scope="module")
def ray_of_two() -> Iterator[None]:
    import ray

    with pytest.MonkeyPatch.context() as patch:
        tests = Path(__file__).parent
        patch.setenv("PYTHONPATH", os.pathsep.join([str(tests.parent), str(tests)]))
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


def drive(file: Path, **options: Any) -> tuple[Opened, Finished]:
    chosen = RunOptions(**options)
    opened = open_sweep(file, chosen)
    return opened, run_sweep(opened, chosen, TimedStub, stub_worker.samples({0: "raise"}))  # no samples are asked for


@pytest.mark.usefixtures("stubs", "ray_of_two")
def test_one_actor_runs_at_a_time_and_a_stopped_sweep_goes_on(tmp_path: Path) -> None:
    """Two would fit: each asks for one of two cores."""
    file = write(tmp_path, budgets=["60%"], cluster={"cpus_per_actor": 1})
    opened, first = drive(file, limit=1)
    assert first.exit_code(failures_ok=False) == 0
    assert opened.store.rows().num_rows == 8
    _, rest = drive(file)
    assert sum(job.pairs for job in rest.plan.jobs) == 16
    found = opened.store.rows().to_pylist()
    assert {(one["cell_id"], one["sample_index"]) for one in found} == {
        (cell.cell_id, index) for cell in opened.grid.cells for index in range(3)
    }
    assert {one["status"] for one in found} == {"ok"}
    later = [one for one in found if one["sample_index"] > 0]
    assert len({one["sample_meta"] for one in later}) == 1, "one process"
    _, again = drive(file)
    assert again.plan.jobs == ()
    assert again.exit_code(failures_ok=False) == 0


@pytest.mark.parametrize(("gpus", "cpus"), [(0, 64), (8, 64)])
def test_an_actor_asks_for_all_cores_of_a_node(monkeypatch: pytest.MonkeyPatch, gpus: int, cpus: int) -> None:
    node = {"Alive": True, "Resources": {"CPU": cpus, "GPU": gpus}, "Labels": {}}
    monkeypatch.setattr(pipeline.cluster, "_nodes", lambda: [node])
    assert actor_request(Cluster(), whole_node=True).cpus == cpus
    assert actor_request(Cluster(), whole_node=True).gpus == min(gpus, 1)
    assert actor_request(Cluster()).cpus == (cpus // gpus if gpus else cpus)
    assert actor_request(Cluster(cpus_per_actor=3), whole_node=True).cpus == 3


def nodes(*sizes: tuple[int, int], **labels: str) -> list[dict[str, Any]]:
    return [{"Alive": True, "Resources": {"CPU": cpus, "GPU": gpus}, "Labels": labels} for cpus, gpus in sizes]


@pytest.mark.parametrize(
    ("there", "cpus"),
    [
        (nodes((0, 0), (16, 0), (64, 0)), 64),
        (nodes((16, 1), (64, 1), (96, 0)), 64),
        (nodes((16, 0)) + nodes((8, 0), zone="a"), 8),
    ],
    ids=["a large node", "a large node with a GPU", "a node with the label"],
)
def test_where_nodes_differ_an_actor_fits_on_the_largest_alone(
    monkeypatch: pytest.MonkeyPatch, there: list[dict[str, Any]], cpus: int
) -> None:
    monkeypatch.setattr(pipeline.cluster, "_nodes", lambda: there)
    labels = {"zone": "a"} if there[-1]["Labels"] else {}
    asked = actor_request(Cluster(labels=labels), whole_node=True)
    assert asked.cpus == cpus
    assert asked.fits() == 1
