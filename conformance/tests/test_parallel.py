"""Layouts over devices: what is refused, with which words, before the first step."""

from __future__ import annotations

import signal

import numpy as np
import pytest

import core_numpy as C
from core_numpy.contract import parallel as P

MODEL = C.ModelConfig(vocab=11, width=12, heads=6, kv_heads=3, hidden=9, layers=1, max_length=16)


def laid_out(parallel, devices=None, model=MODEL, **train):
    layout = P.Layout.of(parallel)
    train = {"batch": 12, **train}
    P.check_layout(layout, model, C.TrainConfig(parallel=parallel, **train), devices or layout.devices, "processes")
    return layout


@pytest.mark.parametrize(
    ("parallel", "more", "words"),
    [
        ({"data": 2, "fsdp": 2}, {"devices": 3}, r"number of processes \(3\); {\"data\": 2, \"fsdp\": 2} needs 4"),
        ({"tensor": 4}, {}, r"heads must be a multiple of the tensor axis \(4\).*got 6"),
        ({"tensor": 2}, {}, r"kv_heads must be a multiple of the tensor axis \(2\).*got 3"),
        ({"tensor": 3}, {"model": MODEL.replace(hidden=10)}, r"hidden must be a multiple of the tensor axis.*got 10"),
        ({"data": 5}, {}, r"batch / accumulate must be a multiple of data x fsdp \(5\).*got 12 / 1 = 12"),
        ({"data": 4}, {"accumulate": 6}, r"got 12 / 6 = 2"),
        ({"context": 2}, {"model": MODEL.replace(kind="encoder_decoder")}, "context axis must be 1 for an encoder-dec"),
        ({"context": 2}, {"model": MODEL.replace(head="classifier", classes=3)}, "context axis must be 1 for a class"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_with_the_number_that_is_wrong(parallel, more, words):
    with pytest.raises(ValueError, match=words):
        laid_out(parallel, **more)


def test_layouts_that_fit_are_taken():
    assert laid_out({"data": 2, "fsdp": 3, "tensor": 3, "context": 2}).devices == 36
    assert laid_out({"data": 3}, accumulate=4).devices == 3


@pytest.mark.parametrize(
    ("parallel", "shape", "words"),
    [
        ({"data": 2}, (3, 4), r"multiple of accumulate x data x fsdp \(2\) rows; got 3"),
        ({"context": 2}, (2, 6), r"a multiple of 4, the pieces that 2 devices of the context axis share; got 6"),
    ],
)
def test_a_batch_that_cannot_be_dealt_out_is_refused(parallel, shape, words):
    with pytest.raises(ValueError, match=words):
        P.check_parallel_batch(P.Layout.of(parallel), MODEL, {"tokens": np.zeros(shape, int)}, 1)


def test_every_device_has_a_place_of_its_own_and_a_tensor_axis_is_of_neighbours():
    layout = P.Layout(data=2, fsdp=3, context=2, tensor=4)
    places = [layout.place(device) for device in range(layout.devices)]
    assert len({tuple(place.items()) for place in places}) == 48
    assert [place["tensor"] for place in places[:5]] == [0, 1, 2, 3, 0]
    assert places[4] == {"data": 0, "fsdp": 0, "context": 1, "tensor": 0}


def test_early_and_late_pieces_are_paired_so_that_causal_work_is_even():
    pieces = [P.pieces_of(place, 4, causal=True) for place in range(4)]
    assert sorted(sum(pieces, ())) == list(range(8))
    assert {sum(pair) for pair in pieces} == {7}
    assert [P.pieces_of(place, 3, causal=False) for place in range(3)] == [(0,), (1,), (2,)]


def test_a_process_with_another_configuration_or_version_is_named():
    alike = {"version of torch": "2.13", "TrainConfig": {"lr": 1.0}}
    P.check_alike({0: alike, 1: dict(alike)}, 0)
    with pytest.raises(ValueError, match=r"same version of torch: process 2 has '2.11', process 1 has '2.13'"):
        P.check_alike({0: alike, 1: alike, 2: {**alike, "version of torch": "2.11"}}, 1)


def test_of_two_configurations_the_fields_that_differ_are_said_and_no_others():
    alike = {"ModelConfig": {"width": 4}, "TrainConfig": {"batch": 8, "lr": 1.0, "ema": None}}
    other = {**alike, "TrainConfig": {"batch": 8, "lr": 2.0, "ema": 0.9}}
    with pytest.raises(ValueError) as refused:
        P.check_alike({0: alike, 1: other}, 0)
    assert str(refused.value) == (
        "all processes must have the same TrainConfig: process 1 has {'lr': 2.0, 'ema': 0.9}, "
        "process 0 has {'lr': 1.0, 'ema': None}"
    )


def test_processes_that_were_given_other_batches_are_told_which_array_differs():
    batch = {"tokens": np.arange(6).reshape(2, 3), "targets": np.ones((2, 3), int)}
    other = {**batch, "tokens": batch["tokens"] + [[0, 0, 0], [0, 0, 1]]}
    alike, unlike = ({"first batch": P.batch_digests(x)} for x in (batch, other))
    P.check_alike({0: alike, 1: {"first batch": P.batch_digests({n: x.copy() for n, x in batch.items()})}}, 0)
    words = r"same first batch: process 1 has {'tokens': 'int64 \(2, 3\) of digest \w{8}'}, process 0 has {'tokens': "
    with pytest.raises(ValueError, match=words):
        P.check_alike({0: alike, 1: unlike}, 0)
    assert P.batch_digests({"x": batch["tokens"].reshape(3, 2)}) != P.batch_digests({"x": batch["tokens"]})


def test_processes_that_have_not_come_are_named():
    P.check_present([], 4, 60)
    with pytest.raises(TimeoutError, match="process 1, 3 of 4 has not come within 60 s"):
        P.check_present([1, 3], 4, 60)


@pytest.mark.parametrize("parallel", [{"rows": 2}, {"data": 0}, {"data": True}, {"data": 1.5}])
def test_axes_that_do_not_exist_and_sizes_that_are_none_are_refused(parallel):
    with pytest.raises(ValueError, match="axes are data, fsdp, tensor and context"):
        C.TrainConfig(parallel=parallel)


def test_a_layout_on_a_command_line_is_read_or_refused():
    assert P.parse_parallel("data=2, fsdp=4") == {"data": 2, "fsdp": 4}
    for wrong in ("data", "data=", "data=x", "data=2,data=3", "data=-1", ""):
        with pytest.raises(ValueError, match="--parallel must be axes and sizes"):
            P.parse_parallel(wrong)


def test_numpy_refuses_a_layout_of_a_new_run_and_of_a_resumed_one(tmp_path):
    with pytest.raises(ValueError, match=r"config\.parallel must be None: NumPy has one device"):
        C.Trainer(C.Transformer(MODEL), C.TrainConfig(parallel={"data": 2}))
    trainer = C.Trainer(C.Transformer(MODEL), C.TrainConfig())
    trainer.save(tmp_path)
    with pytest.raises(ValueError, match=r"config\.parallel must be None: NumPy has one device"):
        C.Trainer.load(tmp_path, parallel={"data": 2})


def test_a_press_that_comes_twice_is_one_and_a_second_one_stops_at_once(monkeypatch, capsys):
    from core_numpy.contract import training_run

    with training_run._interruptible() as interrupted:
        signal.raise_signal(signal.SIGINT)
        try:
            signal.raise_signal(signal.SIGINT)  # as torchrun passes it on
        except KeyboardInterrupt:
            pytest.fail("the same press, passed on, stopped at once")
        assert interrupted.is_set()
        assert capsys.readouterr().err.count("finishing this update") == 1
        monkeypatch.setattr(training_run, "ONE_PRESS", 0.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_processes_stop_when_any_of_them_is_interrupted(tmp_path, monkeypatch):
    """A stand-in for the process that Ctrl-C did not reach: another one says that it was interrupted."""
    from core_numpy.contract import cli

    asked = []

    class Trainer(C.Trainer):
        def said_by_any(self, flag):
            asked.append(flag)
            return len(asked) > 2

    monkeypatch.setattr(C, "Trainer", Trainer)
    words = ["train", "--steps", "9", "--batch", "1", "--plain", "--out", str(tmp_path / "run")]
    assert cli.main(C, words) == 130
    assert asked == [False] * 3 and C.Trainer.load(tmp_path / "run").updates == 2


def test_processes_that_would_each_train_by_themselves_are_refused(tmp_path, monkeypatch, capsys):
    from core_numpy.contract import cli

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for start in (["--steps", "1", "--out", str(tmp_path / "run")], ["--resume", str(tmp_path / "run")]):
        assert cli.main(C, ["train", *start]) == 2
        assert "--parallel must say how the 2 processes that were started share the run" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_windows_that_do_not_fall_into_equal_parts_are_refused_before_there_is_a_folder(tmp_path, monkeypatch, capsys):
    """A stand-in for a backend that has layouts."""
    from core_numpy.contract import cli

    class Trainer(C.Trainer):
        def __init__(self, model, config):
            super().__init__(model, config.replace(parallel=None))

    monkeypatch.setattr(C, "Trainer", Trainer)
    words = ["train", "--steps", "1", "--batch", "2", "--length", "6", "--parallel", "context=2"]
    assert cli.main(C, [*words, "--out", str(tmp_path / "run")]) == 2
    assert "tokens must have a length that is a multiple of 4" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_run_says_what_its_processes_must_have_alike_and_ends_where_they_have_not(tmp_path, monkeypatch, capsys):
    """A stand-in for a backend with processes, another one of which trains on longer windows."""
    from core_numpy.contract import cli

    said = {}

    class Trainer(C.Trainer):
        def check_same(self, name, own):
            said.update(own)
            P.check_alike({0: {name: own}, 1: {name: {**own, "length": 128}}}, 0)

    monkeypatch.setattr(C, "Trainer", Trainer)
    words = ["train", "--steps", "1", "--length", "16", "--evaluate-every", "7", "--out", str(tmp_path / "run")]
    assert cli.main(C, words) == 2
    words = (
        "error: all processes must have the same settings: process 1 has {'length': 128}, process 0 has {'length': 16}"
    )
    assert capsys.readouterr().err.splitlines() == [words]
    assert said["evaluate_every"] == 7 and said["checkpoint_every"] == 100 and said["updates"] == 0
    # Where the text lies may differ from machine to machine, and what stands in it may not.
    assert len(said["digest of the text"]) == 64 and not said.keys() & {"text", "data"}
    assert not (tmp_path / "run").exists()


def test_other_processes_are_joined_before_anything_else_and_only_where_there_is_a_layout(
    tmp_path, monkeypatch, capsys
):
    from core_numpy.contract import cli

    def join():
        raise TimeoutError("process 1 of 2 has not come within 60 s")

    monkeypatch.setattr(C, "Transformer", None)
    words = ["train", "--steps", "1", "--out", str(tmp_path / "run")]
    assert cli.main(C, [*words, "--parallel", "data=2"], join=join) == 2
    assert capsys.readouterr().err == "error: process 1 of 2 has not come within 60 s\n"
    monkeypatch.undo()
    assert cli.main(C, [*words, "--batch", "1", "--plain"], join=join) == 0
    assert (tmp_path / "run" / "step-00000001").is_dir()


def test_of_two_runs_that_begin_in_the_same_folder_at_the_same_time_one_is_refused(tmp_path, monkeypatch, capsys):
    from core_numpy.contract import cli

    out = tmp_path / "run"

    class Trainer(C.Trainer):
        def __init__(self, model, config):
            super().__init__(model, config)
            out.mkdir()
            (out / "run.json").write_text("of the other one, which was not there when this one looked")

    monkeypatch.setattr(C, "Trainer", Trainer)
    assert cli.main(C, ["train", "--steps", "1", "--batch", "1", "--plain", "--out", str(out)]) == 2
    assert f"{out} holds a run already: go on with --resume {out}" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["run.json"]
