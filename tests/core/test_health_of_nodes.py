"""How a node is, and what is said of it: each change once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.health import exposition
from launcher.health.exposition import Running
from launcher.health.node_health import (
    GIB,
    MIB,
    Disk,
    HealthState,
    MemoryUse,
    Nic,
    NodeReading,
    Throttling,
    before_end,
    evaluate,
    next_sample_s,
)
from launcher.health.page import phase_times
from launcher.machine.gpu_state import Gpu
from launcher.machine.xids import Xid
from launcher.settings.values import BadValue, health_address, stragglers
from rendezvous.values.rank_time import PhaseTimes
from rendezvous.values.rank_view import Histogram, ProcessView, RankPhase, RankView, Totals
from rendezvous.values.types import StragglerPolicy, StragglerRule

LIMIT = 64 * GIB
WELL = NodeReading(
    0.0,
    MemoryUse("the cgroup's limit", 10 * GIB, LIMIT),
    throttling=Throttling(0, 0, 4.0),
    nics=(Nic("eth0", 0, 0, carrier=True),),
    gpus=(Gpu(0, temperature=60),),
    disks=(Disk("/logs", 100 * GIB, 500 * GIB),),
)


def with_memory(share: float) -> NodeReading:
    return replace(WELL, memory=MemoryUse("the cgroup's limit", int(share * LIMIT), LIMIT))


def story(*looks: NodeReading) -> list[tuple[str, ...]]:
    """A look every five seconds -> what is said after each."""
    health, said = HealthState(), []
    for n, look in enumerate((WELL, *looks)):
        health, news = evaluate(health, replace(look, at=5.0 * n))
        said.append(news)
    assert said[0] == ()
    return said[1:]


def alike(said: list[tuple[str, ...]], phrases: list[tuple[str, ...]]) -> bool:
    """Whether each line contains its phrase, and there is no other line."""
    return [len(each) for each in said] == [len(each) for each in phrases] and all(
        phrase in line
        for lines, expected in zip(said, phrases, strict=True)
        for line, phrase in zip(lines, expected, strict=True)
    )


def test_memory_near_its_limit_is_told_at_once_and_its_end_only_well_below() -> None:
    said = story(*map(with_memory, (0.94, 0.96, 0.99, 0.93, 0.96, 0.89, 0.96)))
    assert alike(
        said,
        [
            (),
            ("memory use is high: 96 % of the cgroup's limit (61.4 of 64.0 GiB)",),
            *[()] * 3,
            ("89 % of the cgroup's limit (57.0 of 64.0 GiB)",),
            ("memory use is high: 96 % of the cgroup's limit (61.4 of 64.0 GiB)",),
        ],
    )


@given(st.lists(st.floats(0.0, 1.0), max_size=40))
def test_beginning_and_end_are_told_in_turns(shares: list[float]) -> None:
    said = [line for news in story(*map(with_memory, shares)) for line in news]
    assert ["is high" in line for line in said] == [n % 2 == 0 for n in range(len(said))]


def grown(n: int, **counters: int) -> NodeReading:
    """The n-th look of a node whose counters grow by so much in each five seconds."""
    eth0 = Nic("eth0", n * counters.get("errors", 0), n * counters.get("drops", 0), carrier=True)
    throttling = Throttling(n * 50, n * counters.get("throttled", 0), 4.0)
    return replace(WELL, nics=(eth0,), throttling=throttling, swapped=n * counters.get("swapped", 0))


@pytest.mark.parametrize(
    ("counter", "much", "text", "over"),
    [
        ("errors", 50, "network interface eth0: 10 errors", "network interface eth0: no more errors"),
        (
            "drops",
            1000,
            "network interface eth0: 200 dropped packets",
            "network interface eth0: no more dropped packets",
        ),
        ("throttled", 20, "4 CPUs is used up in 40 %", "the cgroup's CPU quota is sufficient again"),
        ("swapped", 500 * MIB, "swaps 100 MiB", "the machine no longer swaps"),
    ],
)
def test_a_rate_is_told_when_it_lasts(counter: str, much: int, text: str, over: str) -> None:
    spike = [grown(1, **{counter: much})] * 2
    assert story(*spike) == [()] * 2
    lasting = [grown(n, **{counter: much}) for n in (1, 2, 3)]
    # The counter stands still from here on, while the scheduler's periods go on.
    after = replace(lasting[-1], throttling=replace(lasting[-1].throttling, periods=1000))  # type: ignore[type-var]
    assert alike(story(*lasting, after), [(), (text,), (), (over,)])


def test_a_cable_pulled_is_told_and_a_port_that_never_had_one_is_not() -> None:
    def links(*up: bool) -> NodeReading:
        return replace(WELL, nics=tuple(Nic(f"eth{i}", 0, 0, carrier=each) for i, each in enumerate(up)))

    said = story(links(True, False), links(False, False), links(True, False), replace(WELL, nics=()))
    assert alike(
        said,
        [(), ("network interface eth0 is down",), ("eth0 is up again",), ("network interface eth0 is down",)],
    )


def test_a_disk_is_full_by_share_on_a_small_one_and_by_size_on_a_large_one() -> None:
    def disk(free: int, total: int) -> NodeReading:
        return replace(WELL, disks=(Disk("/logs", free, total),))

    assert story(disk(10 * MIB, 64 * MIB)) == [()]
    assert alike(story(disk(1 * MIB, 64 * MIB)), [("the disk of /logs is nearly full: 1 MiB",)])
    assert story(disk(50 * GIB, 10_000 * GIB)) == [()]
    full = disk(1 * GIB, 10_000 * GIB)
    assert alike(
        story(full, disk(int(2.5 * GIB), 10_000 * GIB), disk(4 * GIB, 10_000 * GIB)),
        [
            ("the disk of /logs is nearly full: 1.0 GiB",),
            (),
            ("the disk of /logs has enough space again: 4.0 GiB",),
        ],
    )


def test_memory_pressure_and_a_hot_gpu_must_last() -> None:
    stalled, hot = (
        replace(WELL, stalled=40.0),
        replace(WELL, gpus=(Gpu(0, temperature=93, slowed_by=("heat",)),)),
    )
    assert alike(
        story(stalled, WELL, stalled, stalled, WELL),
        [*[()] * 3, ("memory pressure",), ("memory pressure has ended",)],
    )
    assert alike(
        story(hot, hot, WELL),
        [(), ("GPU 0 runs slower because of heat (93 C)",), ("GPU 0 runs at full speed again",)],
    )
    lost = replace(WELL, gpus=(Gpu(0, lost="GPU is lost"),))
    assert alike(story(lost, lost, WELL), [(), ("GPU is lost",), ("GPU 0 responds again",)])
    ends = story(hot, hot, lost, lost)[2:]
    assert alike(ends, [(), ("GPU is lost",)]), "whether it is slow is not known any more"


def _with_errors(ecc: int, xids: tuple[int, ...] = ()) -> Gpu:
    return Gpu(0, ecc_uncorrected=ecc, xids=tuple(Xid("0000:18:00", code) for code in xids))


def test_rows_to_retire_and_a_worn_out_gpu_are_reported_once() -> None:
    rows = replace(WELL, gpus=(Gpu(0, reset_needed=True),))
    worn = replace(WELL, gpus=(Gpu(0, reset_needed=True, worn_out=True),))
    assert alike(
        story(rows, rows, worn, WELL),
        [
            ("GPU 0 has faulty memory rows",),
            (),
            ("GPU 0 has no spare memory rows left",),
            ("GPU 0 has spare memory rows again", "GPU 0 no longer waits for a reset"),
        ],
    )


@pytest.mark.parametrize(
    ("gpu", "looks", "unfit"),
    [
        (Gpu(0, lost="GPU is lost"), 2, True),
        (Gpu(0, worn_out=True), 1, True),
        (_with_errors(0, (79,)), 1, True),
        (_with_errors(0, (31,)), 1, False),
        (_with_errors(0, (94,)), 1, False),
        (_with_errors(3), 1, False),
        (Gpu(0, reset_needed=True), 1, False),
        (Gpu(0, temperature=95, slowed_by=("heat",)), 2, False),
    ],
)
def test_what_keeps_a_node_out_of_the_next_world(gpu: Gpu, looks: int, unfit: bool) -> None:
    health, _ = evaluate(HealthState(), WELL)
    for n in range(looks):
        health, _ = evaluate(health, replace(WELL, at=5.0 * (n + 1), gpus=(gpu,)))
    assert health.texts
    assert bool(health.unfit) is unfit
    health, _ = evaluate(health, replace(WELL, at=5000.0))
    assert health.unfit == ""


def test_what_happens_is_told_each_time_and_mentioned_for_a_while() -> None:
    def look(kills: int, xids: tuple[int, ...] = (), ecc: int = 0) -> NodeReading:
        memory = MemoryUse("the cgroup's limit", 10 * GIB, LIMIT, kills)
        return replace(WELL, memory=memory, gpus=(_with_errors(ecc, xids),))

    assert alike(
        story(look(0), look(1), look(1), look(3), look(3, (79,)), look(3, ecc=2)),
        [
            (),
            ("killer ended a process",),
            (),
            ("killer ended 2 processes",),
            ("GPU 0: the driver reports Xid 79: the GPU has fallen off the bus; reboot the machine",),
            ("GPU 0: 2 uncorrectable memory errors (ECC)",),
        ],
    )
    health, _ = evaluate(HealthState(), look(0))
    health, _ = evaluate(health, replace(look(1), at=5.0))
    assert health.texts
    health, news = evaluate(health, replace(look(1), at=5000.0))
    assert (health.texts, news) == ((), ())


def test_a_death_is_explained_by_what_was_seen_just_before() -> None:
    health, _ = evaluate(HealthState(), with_memory(0.91))
    assert "91 % of the cgroup's limit (58.2 of 64.0 GiB) 3 s before" in before_end(health, 3.2)
    assert before_end(health, 300.0) == ""
    freed, _ = evaluate(health, replace(WELL, at=1.0))  # by the end of the rank, which is reported after that
    assert before_end(freed, 3.2) == before_end(health, 3.2)
    well, _ = evaluate(HealthState(), WELL)
    assert before_end(well, 1.0) == ""
    assert before_end(HealthState(), 1.0) == ""
    full, _ = evaluate(HealthState(), replace(WELL, disks=(Disk("/logs", 0, GIB),)))
    assert "the disk of /logs is nearly full: 0 MiB" in before_end(full, 300.0)


def test_it_looks_more_often_where_memory_runs_short() -> None:
    assert next_sample_s(HealthState(), 5.0) == 5.0
    assert next_sample_s(evaluate(HealthState(), with_memory(0.5))[0], 5.0) == 5.0
    assert next_sample_s(evaluate(HealthState(), with_memory(0.9))[0], 5.0) == 1.0


# --- ranks ---------------------------------------------------------------------------------------------

VIEW = RankView(
    3,
    known=True,
    step=12,
    mean_step_s=0.25,
    quiet_s=0.5,
    phase_times=((RankPhase.DATA, 1.5), (RankPhase.COMMUNICATE, 0.5), (RankPhase.CHECKPOINT, 9.0)),
)


def test_a_pace_is_made_of_what_belongs_to_steps() -> None:
    dead, unknown = replace(VIEW, process=ProcessView(alive=False)), replace(VIEW, known=False)
    assert phase_times([VIEW, dead, unknown, replace(VIEW, step=0)]) == (
        PhaseTimes(3, 12, data_s=1.5, waiting_s=0.5),
    )


def test_the_exposition_is_what_prometheus_reads() -> None:
    vitals = replace(WELL, disks=(Disk('/a "b"\\', 7, 9),))
    health, _ = evaluate(HealthState(), vitals)
    text = exposition.text(Running(4, 2, 1, ready=True), [VIEW, RankView(0)], health)
    lines = text.splitlines()
    assert text.endswith("\n")
    assert 'ddp_launch_steps_total{rank="3"} 12' in lines
    assert 'ddp_launch_phase_seconds_total{rank="3",phase="data"} 1.5' in lines
    assert 'ddp_launch_own_seconds_total{rank="3"} 1.5' in lines
    assert 'ddp_launch_disk_free_bytes{path="/a \\"b\\"\\\\"} 7' in lines
    assert "ddp_launch_restarts_total 2" in lines
    named = [line.split("{")[0].split(" ")[0] for line in lines if not line.startswith("#")]
    typed = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert list(dict.fromkeys(named)) == typed == [line.split()[2] for line in lines if "# HELP" in line]


# --- options -------------------------------------------------------------------------------------------


def test_stragglers_are_asked_for_in_one_word_or_more() -> None:
    assert stragglers("OFF") == StragglerRule(StragglerPolicy.OFF)
    assert stragglers("exclude,factor=2,window=1m") == StragglerRule(StragglerPolicy.EXCLUDE, 2.0, 60.0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "kill",
        "report,factor=1",
        "report,factor=nan",
        "report,factor=inf",
        "report,window=0",
        "report,x=1",
    ],
)
def test_what_is_wrong_with_it_is_said(text: str) -> None:
    with pytest.raises(BadValue):
        stragglers(text)


def test_a_port_alone_is_for_this_machine_only() -> None:
    assert health_address("9410") == ("127.0.0.1", 9410)
    assert health_address("0.0.0.0:9410") == ("0.0.0.0", 9410)
    assert health_address("[::]:0") == ("::", 0)
    for text in ("70000", "somewhere", ""):
        with pytest.raises(BadValue):
            health_address(text)


def test_a_histogram_is_what_prometheus_reads() -> None:
    bins = (0, 3, 0, 2)
    busy = replace(VIEW, totals=Totals(steps=Histogram(bins, 1.5), calls=Histogram((0,) * 24)))
    lines = exposition.text(Running(1, 0, 1, ready=True), [busy], HealthState()).splitlines()
    name = "ddp_launch_step_duration_seconds"
    assert [line for line in lines if name in line and "# HELP" not in line] == [
        f"# TYPE {name} histogram",
        f'{name}_bucket{{rank="3",le="1.5625e-05"}} 0',
        f'{name}_bucket{{rank="3",le="3.125e-05"}} 3',
        f'{name}_bucket{{rank="3",le="6.25e-05"}} 3',
        f'{name}_bucket{{rank="3",le="+Inf"}} 5',
        f'{name}_sum{{rank="3"}} 1.5',
        f'{name}_count{{rank="3"}} 5',
    ]
    assert "collective_duration" not in "".join(lines)  # nothing has been measured


def test_the_use_of_a_node_is_that_between_two_readings() -> None:
    was = replace(
        WELL,
        throttling=None,
        cpu=(100, 1000),
        disk=(512, 0),
        nics=(Nic("eth0", 0, 0, True, 1000, 9), Nic("gone", 0, 0, True, 5, 5)),
    )
    gpus = (
        Gpu(0, utilization=90, temperature=60),
        Gpu(1, utilization=10, temperature=71),
        Gpu(2, lost="gone"),
    )
    now = replace(
        was, at=5.0, cpu=(150, 1200), disk=(1024, 5120), nics=(Nic("eth0", 0, 0, True, 6000, 9),), gpus=gpus
    )
    health, _ = evaluate(evaluate(HealthState(), was)[0], now)
    assert health.use == {
        **{"cpu_percent": 25.0, "memory_percent": 15.625},
        **{"gpu_percent": 50.0, "gpu_least_percent": 10.0, "gpu_celsius": 71.0},
        **{"received_bytes": 1000.0, "sent_bytes": 0.0, "read_bytes": 102.4, "written_bytes": 1024.0},
    }
    metrics = exposition.text(Running(1, 0, 1, ready=True), [], health)
    assert "ddp_launch_cpu_percent 25" in metrics
    assert 'ddp_launch_network_bytes_total{interface="eth0",direction="received"} 6000' in metrics
    assert 'ddp_launch_disk_bytes_total{direction="written"} 5120' in metrics


def test_cpu_time_is_that_of_a_quota_if_there_is_one() -> None:
    was = replace(WELL, cpu=(0, 0), throttling=Throttling(0, 0, 4.0, 100.0))
    now = replace(was, at=5.0, cpu=(99, 100), throttling=Throttling(0, 0, 4.0, 110.0))
    assert evaluate(evaluate(HealthState(), was)[0], now)[0].use["cpu_percent"] == 50.0
    counted_anew = replace(now, throttling=Throttling(0, 0, 4.0, 1.0))
    assert evaluate(evaluate(HealthState(), was)[0], counted_anew)[0].use["cpu_percent"] == 0.0
