"""The queue: one job at a time, stages, cancel, errors as data."""

from __future__ import annotations

import threading

import pytest

from rebind.errors import InputError, UnknownNameError
from rebind.studio.jobs import MAX_FINISHED, JobQueue


@pytest.fixture
def jobs():
    jobs = JobQueue()
    yield jobs
    jobs.close()


def test_a_job_reports_its_stages_and_its_result(jobs):
    def work(control):
        control.stage("first", 0.5)
        control.stage("first", 1.0)
        control.stage("second")
        control.publish([1, 2])
        control.note("careful")
        return {"answer": 42}

    job = jobs.wait(jobs.submit("work", work).id, 10)
    shown = job.to_json()
    assert (shown["status"], shown["result"], shown["data"], shown["notes"]) == (
        "done",
        {"answer": 42},
        [1, 2],
        ["careful"],
    )
    assert [stage["text"] for stage in shown["stages"]] == ["first", "second"]


def test_one_at_a_time_in_order(jobs):
    running, most, order = 0, 0, []

    def work(control, number):
        nonlocal running, most
        running += 1
        most = max(most, running)
        order.append(number)
        control.stage("busy")
        running -= 1

    submitted = [jobs.submit("work", lambda control, n=n: work(control, n)) for n in range(20)]
    for job in submitted:
        assert jobs.wait(job.id, 10).status == "done"
    assert most == 1
    assert order == list(range(20))


def test_cancel_a_waiting_and_a_running_job(jobs):
    started, go = threading.Event(), threading.Event()

    def slow(control):
        started.set()
        go.wait(10)
        control.stage("after the cancel")
        raise AssertionError("unreachable")

    running, waiting = jobs.submit("slow", slow), jobs.submit("next", lambda control: 1)
    assert waiting.stages[0]["text"] == "waiting for 1 other job"
    assert started.wait(10)
    assert jobs.cancel(waiting.id).status == "cancelled"
    jobs.cancel(running.id)
    go.set()
    assert jobs.wait(running.id, 10).status == "cancelled"
    assert jobs.wait(jobs.submit("later", lambda control: 3).id, 10).result == 3, "the worker goes on"


def test_after_its_commit_a_job_is_not_cancelled(jobs):
    started, go = threading.Event(), threading.Event()

    def work(control):
        control.commit()
        started.set()
        go.wait(10)
        control.stage("asking")
        return "written"

    job = jobs.submit("work", work)
    assert started.wait(10)
    jobs.cancel(job.id)
    go.set()
    assert jobs.wait(job.id, 10).result == "written"


def test_a_cancel_abandons_work_without_stages_and_the_next_job_waits_for_its_end(jobs):
    started, go, order = threading.Event(), threading.Event(), []

    def load():
        started.set()
        go.wait(10)
        order.append("abandoned")
        return 1

    abandoned = jobs.submit("load", lambda control: control.abandonable(load))
    assert started.wait(10)
    jobs.cancel(abandoned.id)
    assert jobs.wait(abandoned.id, 10).status == "cancelled", "before the work has ended"
    assert not order
    unwanted, following = (jobs.submit("next", lambda control: order.append("next")) for _ in range(2))
    assert jobs.cancel(unwanted.id).status == "cancelled"
    go.set()
    assert jobs.wait(following.id, 10).status == "done"
    assert order == ["abandoned", "next"]


def test_abandonable_work_returns_its_result_or_raises_its_error(jobs):
    def refused():
        raise InputError("Bad", code="bad")

    assert jobs.wait(jobs.submit("work", lambda control: control.abandonable(lambda: 2)).id, 10).result == 2
    assert jobs.wait(jobs.submit("work", lambda control: control.abandonable(refused)).id, 10).error["code"] == "bad"


def test_errors_are_data_and_the_worker_survives(jobs, caplog):
    def refused(control):
        raise InputError("Bad", advice="Use {force}", settings={"force": True}, code="bad")

    def broken(control):
        raise ZeroDivisionError("internal detail")

    error = jobs.wait(jobs.submit("refused", refused).id, 10).error
    assert error == {"problem": "Bad", "expected": "", "advice": "Use “Write it anyway”", "code": "bad", "field": ""}
    error = jobs.wait(jobs.submit("broken", broken).id, 10).error
    assert error["code"] == "internal_error"
    assert "internal detail" not in str(error)
    assert "internal detail" in caplog.text
    assert jobs.wait(jobs.submit("fine", lambda control: 1).id, 10).result == 1


def test_old_jobs_are_forgotten(jobs):
    ids = [jobs.submit("work", lambda control: 1).id for _ in range(MAX_FINISHED)]
    jobs.wait(ids[-1], 10)
    more = [jobs.submit("work", lambda control: 1).id for _ in range(2)]
    jobs.wait(more[-1], 10)
    jobs.submit("work", lambda control: 1)
    with pytest.raises(UnknownNameError):
        jobs.get(ids[0])
    assert jobs.get(more[-1]).result == 1
