"""The policy on failures, without Ray."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from pipeline.plan import Group, Shard
from pipeline.spec import TaskEntry
from pipeline.work import Agenda, Work
from workers.job import ModelSpec, TimingSpec


def group(task: str = "vt", model: str = "tiny", context: int = 1024) -> Group:
    return Group(ModelSpec(model, model), TaskEntry.model_construct(name=task), context, 0, 8, 4)


def shard(indices: Iterable[int], of: Group | None = None) -> Shard:
    return Shard(of or group(), {index: ("a", "b") for index in indices})


def take(agenda: Agenda, model: str = "tiny") -> Work:
    work = agenda.take(model, lambda group: True)
    assert work is not None
    return work


def test_rows_that_came_in_are_not_run_again() -> None:
    agenda = Agenda([shard([0, 1])], 20)
    work = take(agenda)
    assert work.received("a", 0)
    assert not work.received("a", 0)
    agenda.crashed(work)
    assert take(agenda).missing == {0: {"b"}, 1: {"a", "b"}}


def test_the_loss_of_a_node_is_never_counted() -> None:
    agenda = Agenda([shard([0, 1])], 1)
    for _ in range(5):
        agenda.lost(take(agenda))
    work = take(agenda)
    assert (work.crashes, work.attempt, agenda.tripped) == (0, 6, False)


def test_work_that_crashes_twice_is_split() -> None:
    agenda = Agenda([shard(range(5))], 20)
    for _ in range(2):
        assert not agenda.crashed(take(agenda))
    assert [sorted(take(agenda).missing) for _ in range(2)] == [[0, 1], [2, 3, 4]]


def test_a_sample_is_poison_only_when_it_crashes_twice_alone() -> None:
    agenda = Agenda([shard([0, 1])], 20)
    work = take(agenda)
    for cell in ("a", "b"):
        work.received(cell, 0)
    assert not agenda.crashed(work)  # sample 1 is left, but it was not alone
    assert not agenda.crashed(take(agenda))
    assert agenda.crashed(take(agenda))


def test_out_of_memory_halves_samples_then_the_cells_of_one_and_costs_no_try() -> None:
    agenda = Agenda([shard(range(3))], 1)
    assert not agenda.out_of_memory(take(agenda))
    first = take(agenda)
    assert (first.missing, first.crashes) == ({0: {"a", "b"}}, 0)
    assert not agenda.out_of_memory(first)
    halves = [take(agenda) for _ in range(2)]
    assert [half.missing for half in halves] == [{0: {"a"}}, {0: {"b"}}]
    assert all(agenda.out_of_memory(half) for half in halves)
    assert not agenda.tripped
    assert sorted(take(agenda).missing) == [1, 2]


def test_a_pair_is_too_large_only_when_it_was_sent_alone() -> None:
    agenda = Agenda([shard([0])], 1)
    work = take(agenda)
    work.received("a", 0)
    assert not agenda.out_of_memory(work)
    again = take(agenda)
    assert again.missing == {0: {"b"}}
    assert agenda.out_of_memory(again)


def test_a_group_is_open_until_the_last_of_its_halves_is_done() -> None:
    agenda = Agenda([shard(range(4))], 20)
    assert not agenda.out_of_memory(take(agenda))
    for left in (True, False):
        agenda.finished(take(agenda))
        assert agenda.is_open(group()) is left


@given(st.integers(1, 12), st.data())
def test_every_deadly_sample_is_found_and_no_other(samples: int, data: st.DataObject) -> None:
    deadly = data.draw(st.sets(st.integers(0, samples - 1)))
    agenda = Agenda([shard(range(samples))], 10_000)
    poison: set[int] = set()
    survived: set[int] = set()
    while agenda.waiting:
        work = take(agenda)
        for index in sorted(work.missing):
            if index in deadly:
                if agenda.crashed(work):
                    poison.add(index)
                    agenda.finished(work)
                break
            survived.add(index)
            for cell in ("a", "b"):
                work.received(cell, index)
        else:
            agenda.finished(work)
    assert (poison, survived) == (deadly, set(range(samples)) - deadly)
    assert not agenda.is_open(group())


def test_failures_in_a_row_trip_and_a_success_between_them_resets() -> None:
    agenda = Agenda([shard([0])], 3)
    for sample in range(2):
        agenda.failed(sample)
    agenda.succeeded()
    for sample in range(2):
        agenda.failed(sample)
    assert not agenda.tripped
    agenda.failed(2)
    assert agenda.tripped


def test_all_rows_of_a_failed_sample_are_one_failure() -> None:
    agenda = Agenda([shard([0])], 2)
    for _ in range(30):
        agenda.failed("one sample")
    assert not agenda.tripped


def test_a_model_that_does_not_load_twice_is_left_out_alone() -> None:
    agenda = Agenda([shard([0], group(model="bad")), shard([0, 1], group(model="good"))], 20)
    assert not agenda.load_failed("bad", "no weights")
    assert agenda.load_failed("bad", "no weights")
    assert [(part.what, part.pairs, part.reason) for part in agenda.left_out] == [("model bad", 2, "no weights")]
    assert agenda.next_model is not None
    assert agenda.next_model.label == "good"


def test_an_actor_gets_work_of_its_model_whose_samples_are_there() -> None:
    first, second = group("vt"), group("cwe")
    agenda = Agenda([shard([0], first), shard([1], second)], 20)
    assert agenda.take("other", lambda group: True) is None
    work = agenda.take("tiny", lambda group: group.task.name == "cwe")
    assert work is not None
    assert sorted(work.missing) == [1]


def test_samples_are_prepared_two_contexts_ahead() -> None:
    groups = [group(context=context) for context in (4096, 2048, 1024)]
    agenda = Agenda([shard([0], one) for one in groups], 20)
    assert [one.context for one in agenda.upcoming()] == [4096, 2048]
    agenda.finished(take(agenda))
    assert [one.context for one in agenda.upcoming()] == [2048, 1024]


def timed(cells: tuple[str, ...] = ("full", "kills", "snap")) -> Shard:
    isolated = replace(group("timing"), timing=TimingSpec(64, 4, 1))
    return Shard(isolated, dict.fromkeys(range(3), cells))


def test_a_repeat_of_isolated_runs_that_was_cut_short_runs_again_as_a_whole() -> None:
    agenda = Agenda([timed()], 20)
    work = take(agenda)
    for cell in ("full", "kills", "snap"):
        assert work.received(cell, 0)
    assert work.received("full", 1)
    agenda.lost(work)
    assert take(agenda).missing == {index: {"full", "kills", "snap"} for index in (1, 2)}


def test_an_isolated_method_that_kills_its_process_takes_no_other_along() -> None:
    agenda, done, poison, crashes = Agenda([timed()], 20), set(), set(), 0
    while agenda.waiting:
        work = take(agenda)
        pairs = {(cell, index) for index, cells in work.missing.items() for cell in cells}
        if any(cell == "kills" for cell, _ in pairs):
            crashes += 1
            if agenda.crashed(work):
                poison |= pairs
                agenda.finished(work)
        else:
            done |= pairs
            agenda.finished(work)
    assert poison == {("kills", index) for index in range(3)}
    assert done == {(cell, index) for cell in ("full", "snap") for index in range(3)}
    assert (crashes, agenda.tripped) == (4, False)
    assert not agenda.is_open(work.group)
