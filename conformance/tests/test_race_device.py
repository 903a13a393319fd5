"""The device under a contestant, with stand-ins for the frameworks where the machine has no such device."""

from types import SimpleNamespace

import pytest

from conformance.race import device
from conformance.race.contestants import all_contestants
from conformance.race.task import Task


class Fake:
    """A torch with a CUDA device that only counts what it is asked, in order."""

    def __init__(self) -> None:
        self.said: list[str] = []
        fake = self

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                fake.said.append("record")

            def elapsed_time(self, end: "Event") -> float:
                assert fake.said[-1] == "synchronize"  # an event that was not waited for has no time yet
                return 250.0

        self.cuda = SimpleNamespace(
            Event=Event, synchronize=lambda: self.said.append("synchronize"), is_available=lambda: True,
            get_device_name=lambda: "H", memory_allocated=lambda: 3 * 2**20, max_memory_allocated=lambda: 7 * 2**20,
        )  # fmt: skip

    def get_float32_matmul_precision(self) -> str:
        return "high"

    def import_module(self, name: str):
        return self


def test_cuda_is_timed_by_events_around_the_work_and_waited_for(monkeypatch):
    fake = Fake()
    monkeypatch.setattr(device, "importlib", fake)
    work, finish = (lambda: fake.said.append("work") or [1.5]), (lambda: fake.said.append("finish"))
    assert device.stopwatch(work, finish, "torch", "cuda") == (0.25, [1.5])
    assert fake.said == ["finish", "record", "work", "record", "synchronize"]


def test_the_clock_of_a_cpu_stops_after_everything_is_there():
    said: list[str] = []
    seconds, results = device.stopwatch(
        lambda: said.append("work") or [2.0], lambda: said.append("finish"), "numpy", "cpu"
    )
    assert said == ["finish", "work", "finish"] and results == [2.0] and seconds >= 0.0


def test_jax_is_waited_for_with_its_results(monkeypatch):
    said: list[str] = []
    fake = SimpleNamespace(block_until_ready=lambda x: said.append("block") or x)
    monkeypatch.setattr(device, "importlib", SimpleNamespace(import_module=lambda name: fake))
    device.stopwatch(lambda: said.append("work") or [1.0], lambda: said.append("finish"), "jax", "tpu")
    assert said == ["finish", "work", "block", "finish"]


def test_memory_of_a_device_is_its_allocators(monkeypatch):
    monkeypatch.setattr(device, "importlib", Fake())
    assert device.memory("torch", "cuda") == {"now": 3.0, "peak": 7.0}
    statistics = {"bytes_in_use": 2**20, "peak_bytes_in_use": 2**21}
    for found, expected in ((statistics, {"now": 1.0, "peak": 2.0}), (None, {})):  # None where a platform keeps none
        chip = SimpleNamespace(memory_stats=lambda found=found: found)
        jax = SimpleNamespace(devices=lambda chip=chip: [chip])
        monkeypatch.setattr(device, "importlib", SimpleNamespace(import_module=lambda name, jax=jax: jax))
        assert device.memory("jax", "tpu") == expected
    assert device.memory("numpy", "cpu")["peak"] > 0


def test_products_in_tf32_are_shown(monkeypatch):
    fake = Fake()
    monkeypatch.setattr(device, "importlib", fake)
    assert device.probe("torch", "cuda") == {"device": "H", "products": "TF32"}
    fake.get_float32_matmul_precision = lambda: "highest"
    assert device.probe("torch", "cuda") == {"device": "H", "products": "float32"}
    fake.cuda.is_available = lambda: False
    with pytest.raises(RuntimeError, match="torch sees no CUDA device on this machine"):
        device.probe("torch", "cuda")


def test_jax_without_the_platform_says_so(monkeypatch):
    def devices():
        raise RuntimeError("Unable to initialize backend 'tpu': no TPU\nand more")

    jax = SimpleNamespace(devices=devices)
    monkeypatch.setattr(device, "importlib", SimpleNamespace(import_module=lambda name: jax))
    with pytest.raises(RuntimeError, match=r"JAX has no device 'tpu' on this machine: Unable to initialize .* no TPU$"):
        device.probe("jax", "tpu")
    assert device.variables("jax", "tpu") == {"JAX_PLATFORMS": "tpu"} and device.variables("torch", "cuda") == {}


def test_every_torch_and_jax_contestant_takes_the_devices_of_its_framework():
    for contestant in all_contestants().values():
        architecture = contestant.architectures[0]
        where = {
            name for name in ("cpu", "cuda", "tpu") if not contestant.cannot(Task("tiny", architecture, device=name))
        }
        assert (
            where == {"numpy": {"cpu"}, "torch": {"cpu", "cuda"}, "jax": {"cpu", "cuda", "tpu"}}[contestant.framework]
        )


def test_a_speed_is_of_the_best_of_some_calls():
    calls = []
    assert 0.0 < device._best(lambda: calls.append(1)) < 1.0
    assert len(calls) == 1 + device.PEAK_REPEATS
    found = device.peaks()
    assert found["flops_per_second"] > 1e8 and found["bytes_per_second"] > 1e7
