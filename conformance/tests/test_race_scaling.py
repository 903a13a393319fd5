"""`conformance race --devices N`: its figures on paper, what it refuses, and a short one of each framework."""

from __future__ import annotations

import importlib.util
import json
import math

import pytest

from conformance import race
from conformance.race import command, documents, judging, lane, racing, scaling, team
from conformance.race.charts import scaling_charts
from conformance.race.pictures import draw
from conformance.race.process import WorkerFailed
from conformance.race.table import as_text, scaling_rows
from conformance.race.task import Task
from conformance.report.html import render

STEADY = [1.0, 1.01, 0.99, 1.0, 1.02, 0.98]
SECONDS = {("strong", 1): 1.0, ("strong", 2): 0.625, ("strong", 4): 0.6, ("weak", 1): 1.0, ("weak", 2): 1.25,
           ("weak", 4): 2.0, ("apart", 1): 1.0, ("apart", 2): 1.25, ("apart", 4): 2.5}  # fmt: skip


def measured(monkeypatch, processors: int = 2) -> dict:
    """A document of two kinds and 1, 2 and 4 devices, from times that divide on paper."""
    monkeypatch.setattr(scaling, "cores", lambda: processors)
    races = []
    for kind in scaling.KINDS:
        for count, task in scaling.tasks_of(Task("tiny"), kind, "data", 4).items():
            median = SECONDS[kind, count]
            rows = {"torch": {"status": "raced", "rounds": [median * x for x in STEADY], "losses": [5.5, 5.4],
                              "first_step_seconds": 1.0, "note": "", "group": "torch eager", "ours": True}}  # fmt: skip
            judging.judge(rows, {"torch": 1e-5})
            races.append({"task": task.to_dict(), "contestants": rows, **judging.conclude(rows, task, 1e11),
                          "at": count, "kind": kind})  # fmt: skip
    place = {"processor": "p", "threads": 1, "matmul_gflops": 100.0, "gbytes": 10.0, "versions": {}}
    rows = [row for one in races for row in scaling.figures(one, races, 1)]
    scaled = {"axis": "data", "cores": processors, "threads": 1, "rows": rows}
    return {"schema": racing.SCHEMA, "environment": place, "races": races, "interrupted": False, "scaling": scaled}


def test_speed_up_and_efficiency_are_those_on_paper(monkeypatch):
    rows = {(row["kind"], row["devices"]): row for row in measured(monkeypatch)["scaling"]["rows"]}
    assert {key: row["speedup"] for key, row in rows.items()} == pytest.approx({
        ("strong", 1): 1.0, ("strong", 2): 1.6, ("strong", 4): 1 / 0.6, ("weak", 1): 1.0, ("weak", 2): 1.6,
        ("weak", 4): 2.0, ("apart", 1): 1.0, ("apart", 2): 1.6, ("apart", 4): 1.6,
    })  # fmt: skip
    assert rows["strong", 2]["efficiency"] == pytest.approx(0.8) and rows["weak", 4]["efficiency"] == pytest.approx(0.5)
    assert [rows[key]["rows"] for key in (("strong", 4), ("weak", 2), ("weak", 4))] == [16, 32, 64]
    assert all(row["low"] <= row["speedup"] <= row["high"] for row in rows.values())
    # Four runs of 16 rows of 64 tokens each in 2.5 seconds.
    assert rows["apart", 4]["tokens_per_second"] == pytest.approx(4 * 16 * 64 / 2.5, rel=0.01)
    assert rows["apart", 4]["rows"] == 64 and rows["apart", 4]["sent"] == 0


def test_what_is_sent_is_what_the_cost_model_counts_for_the_layout(monkeypatch):
    rows = {(row["kind"], row["devices"]): row for row in measured(monkeypatch)["scaling"]["rows"]}
    from core_numpy.contract.parameters import model_parameters

    numbers = sum(math.prod(p.shape) for p in model_parameters(Task("tiny").model).values())
    assert rows["strong", 1]["sent"] == 0
    # An all-reduce of n bytes over p devices: 2 n (p - 1) / p leave each.
    assert rows["strong", 2]["sent"] == 4 * numbers and rows["weak", 4]["sent"] == 6 * numbers


def test_devices_that_share_processors_are_marked_and_said(monkeypatch):
    document = measured(monkeypatch)
    cells = scaling_rows(document, "strong")
    assert [row[1] for row in cells] == ["1", "2", "4*"]
    said = as_text(document)
    assert "oversubscribed: 4 devices share 2 processors" in said and "strong scaling over data" in said
    assert "strong: torch on 2 devices does 1.60 times the work of one" in said and "on 4 devices does" not in said
    plenty = as_text(measured(monkeypatch, processors=4))
    assert "oversubscribed" not in plenty and "torch on 4 devices does 1.67 times" in plenty


def test_it_is_drawn_on_a_page_and_compared_kind_by_kind(monkeypatch, tmp_path):
    document = measured(monkeypatch)
    draw(document, tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").read_bytes()[:4] == b"\x89PNG"
    page = render(race=document)
    assert "weak scaling over data" in page and "oversubscribed" in page
    assert len(scaling_charts(document["scaling"])) == 3
    slower = json.loads(json.dumps(document))
    row = next(one for one in slower["races"] if (one["kind"], one["at"]) == ("weak", 1))["contestants"]["torch"]
    row["rounds"] = [2 * x for x in row["rounds"]]
    compared = {row["race"]: row["ratio"] for row in documents.compare(document, slower)["rows"]}
    assert compared["tiny at 1 weak"] == pytest.approx(2.0) and compared["tiny at 1 strong"] == pytest.approx(1.0)
    assert len(compared) == 9


def test_somebody_who_failed_has_no_figures_and_is_said(monkeypatch):
    document = measured(monkeypatch)
    one = next(one for one in document["races"] if (one["kind"], one["at"]) == ("weak", 2))
    one["contestants"] = {"torch": {"status": "failed", "reason": "process 1 of 2: it died", "rounds": []}}
    assert scaling.figures(one, document["races"], 1) == []
    assert "weak, 2 devices: torch  failed: process 1 of 2: it died" in as_text(document)


def test_devices_are_counted_in_powers_of_two_up_to_the_last():
    assert [scaling.counts_of(n) for n in (2, 3, 4, 6)] == [[1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 4, 6]]


@pytest.mark.parametrize(
    ("words", "phrase"),
    [
        (["--devices", "1"], "devices must be at least 2 and at most 16, 8 for each of the processors here"),
        (["--devices", "0"], "devices must be at least 2"),
        (["--devices", "-2"], "got -2"),
        (["--devices", "17"], "at most 16"),
        (["--devices", "4", "--threads", "2"], None),
        (["--devices", "9", "--threads", "2"], "at most 8, 8 for each of the processors here (2, 2 a device); got 9"),
        (["--devices", "3"], "batch / accumulate must be a multiple of data x fsdp (3)"),
        (["--devices", "8", "--layout", "tensor"], "heads must be a multiple of the tensor axis (8)"),
        (["--devices", "5", "--layout", "context"], "tokens must have a length that is a multiple of 10"),
        (["--devices", "2", "--with", "numpy,torch-compiled"], "no chosen contestant trains on several devices; those"),
        (["--devices", "2", "--measure", "decode"], "--measure step and --device cpu; got decode"),
        (["--devices", "2", "--device", "cuda"], "got step, cuda"),
        (["--devices", "2", "--architecture", "lstm"], "of a transformer"),
        (["--devices", "2", "--sweep", "length"], "goes with neither --sweep nor --profile"),
        (["--devices", "2", "--size", "tiny", "--size", "small"], "one --size"),
        (["--devices", "2", "--threads", "0"], "threads must be at least 1"),
        (["--layout", "fsdp"], "--layout is of --devices"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anybody_starts(words, phrase, monkeypatch, capsys):
    monkeypatch.setattr(scaling, "cores", lambda: 2)
    monkeypatch.setattr(team, "Process", None)
    monkeypatch.setattr(lane, "Process", None)
    if phrase is None:  # it goes on to the first process
        with pytest.raises(TypeError):
            command.main(words)
        return
    assert race.main(words) == 2
    assert phrase in capsys.readouterr().err


def test_a_number_that_is_none_and_an_unknown_layout_are_refused(capsys):
    for words in (["--devices", "two"], ["--devices", "2", "--layout", "rows"]):
        with pytest.raises(SystemExit) as ended:
            race.main(words)
        assert ended.value.code == 2
    assert "invalid int value: 'two'" in capsys.readouterr().err


class Runner:
    """A lane that notes what it is asked."""

    def __init__(self, name: str, log: list, status: str = "raced", stop: bool = False) -> None:
        self.name, self.log, self.row, self.stop = name, log, {"status": status}, stop

    def prepare(self, seconds):
        self.log.append(f"{self.name} prepares")
        return "ready"

    def turn(self):
        self.log.append(self.name)
        if self.stop:
            raise KeyboardInterrupt

    def close(self):
        self.log.append(f"{self.name} closes")


def test_all_take_one_turn_in_each_round_in_an_order_drawn_anew():
    log: list[str] = []
    lanes = {name: Runner(name, log, status) for name, status in (("a", "raced"), ("b", "failed"), ("c", "raced"))}
    said: list[str] = []
    found = racing.take_turns(
        lanes, lambda key: f"lane {key}", "title", 9, 1.0, said.append, lambda: log.append("first")
    )
    assert found == (["a", "b", "c"], False)
    assert log[:4] == ["first", "a prepares", "b prepares", "c prepares"] and log[-3:] == [f"{n} closes" for n in "abc"]
    turns = ["".join(log[i : i + 2]) for i in range(4, len(log) - 3, 2)]
    assert len(turns) == 9 and set(turns) == {"ac", "ca"}
    assert said[0] == "lane a ready" and said[-1] == "title: round 9 of 9"


def test_who_was_never_come_to_is_not_named_and_all_are_closed():
    log: list[str] = []
    lanes = {"a": Runner("a", log), "b": Runner("b", log, stop=True)}
    said: list[str] = []
    begun, interrupted = racing.take_turns(lanes, str, "title", 3, 1.0, said.append, lambda: None)
    assert interrupted and begun == ["a", "b"] and said[-1] == "title: interrupted; what was measured so far stays"
    assert log[-2:] == ["a closes", "b closes"]

    def stop() -> None:
        raise KeyboardInterrupt

    assert racing.take_turns(lanes, str, "title", 3, 1.0, said.append, stop) == ([], True)


class Member:
    """A process that answers as it is told to."""

    def __init__(self, answer: dict | str) -> None:
        self.said, self.closed, self.sent = answer, False, []

    def send(self, command):
        self.sent.append(command["do"])

    def answer(self, what):
        if isinstance(self.said, str):
            raise WorkerFailed(self.said)
        return self.said

    def close(self):
        self.closed = True


def test_a_team_takes_as_long_as_its_slowest_and_holds_what_all_hold():
    answers = [{"seconds": s, "losses": [1.0], "memory": {"peak": 10.0 * s, "now": 1.0}} for s in (1.0, 3.0, 2.0)]
    group = team.Team([Member(answer) for answer in answers])
    assert group.ask({"do": "turn"}) == {"seconds": 3.0, "losses": [1.0], "memory": {"peak": 60.0, "now": 3.0}}
    assert all(member.sent == ["turn"] for member in group.members)


def test_one_of_a_team_that_fails_ends_the_others_and_is_named():
    group = team.Team([Member({"seconds": 1.0}), Member("it died"), Member({"seconds": 1.0})])
    with pytest.raises(WorkerFailed, match="process 1 of 3: it died"):
        group.ask({"do": "turn"})
    assert all(member.closed for member in group.members)


def test_runs_that_are_apart_are_processes_that_know_nothing_of_one_another(monkeypatch):
    made = []
    monkeypatch.setattr(team, "Process", lambda **options: made.append(options) or Member({}))
    monkeypatch.setattr(team, "cores", lambda: 2)
    team.started("torch", Task("tiny"), 1, 60, {}, copies=2)
    assert [options["variables"] for options in made] == [{"RACE_FIRST": "0"}, {"RACE_FIRST": "1"}]
    made.clear()
    team.started("torch", Task("tiny", parallel={"data": 2}), 1, 60, {})
    assert [options["variables"]["RANK"] for options in made] == ["0", "1"]
    assert len({options["variables"]["MASTER_PORT"] for options in made}) == 1
    made.clear()
    team.started("jax", Task("tiny", parallel={"data": 4}), 1, 60, {"JAX_PLATFORMS": "cpu"})
    (options,) = made
    assert options["threads"] == 2 and "--xla_force_host_platform_device_count=4" in options["variables"]["XLA_FLAGS"]


def test_every_device_has_processors_of_its_own_while_there_are_as_many(monkeypatch):
    from conformance.race import worker

    kept = []
    monkeypatch.setattr(worker.os, "sched_getaffinity", lambda pid: {2, 3, 5, 7}, raising=False)
    monkeypatch.setattr(worker.os, "sched_setaffinity", lambda pid, which: kept.append(which), raising=False)
    for rank in range(6):
        worker.pin(1, rank)
    worker.pin(2, 2)
    assert kept == [{2}, {3}, {5}, {7}, {2}, {3}, {5, 7}]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["torch", "jax"])
@pytest.mark.parametrize("layout", ["data", "fsdp"])
def test_a_short_one_gives_a_table_a_picture_and_a_document(name, layout, tmp_path, capsys):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    files = {kind: tmp_path / f"scaling.{kind}" for kind in ("json", "png", "html")}
    words = ["--devices", "2", "--layout", layout, "--with", name, "--rounds", "2", "--seconds", "0.05"]
    status = race.main([*words, *(word for kind, path in files.items() for word in (f"--{kind}", str(path)))])
    printed = capsys.readouterr()
    assert status == 0, printed.out + printed.err
    assert f"weak scaling over {layout}" in printed.out
    rows = json.loads(files["json"].read_text())["scaling"]["rows"]
    assert len(documents.read(str(files["json"]))["races"]) == 6
    assert [(row["kind"], row["devices"]) for row in rows] == [
        (kind, count) for kind in ("strong", "weak", "apart") for count in (1, 2)
    ]
    assert all(row["loss_distance"] < 4e-6 and row["speedup"] > 0 for row in rows)
    assert all(path.stat().st_size > 1000 for path in files.values())
