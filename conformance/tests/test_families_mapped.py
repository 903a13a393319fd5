"""Parameters that lie in a file as they do in memory are read from there; whose numbers they are then."""

from __future__ import annotations

import copy
import json
import mmap
import sys

import numpy as np
import pytest
from three import PACKAGES, back, load, to

# Sizes of which every row is a multiple of 64 bytes: a tensor's place depends on those before it.
CONFIG = {"vocab": 11, "width": 16, "heads": 2, "layers": 2, "max_length": 5}
LLAMA = {"positions": "rotary", "norm": "rms", "activation": "swiglu", "attention_bias": False, "ffn_bias": False}
FAMILIES = {"gpt2": {"activation": "gelu_tanh", "tie_embeddings": True}, "llama": LLAMA}
MAPPED = ("core_numpy", "backend_torch")


def write(folder, family, seed=1, dtype="float32"):
    C = load("core_numpy")
    model = C.Transformer(C.ModelConfig(**CONFIG, **FAMILIES[family]), seed=seed, dtype=dtype)
    model.save_pretrained(folder, family=family)
    return C.get_params(model)


def check_holds(package, model, params):
    got = load(package).get_params(model)
    assert list(got) == list(params)
    for name, x in params.items():
        assert np.array_equal(got[name], x), name


def memory_of(x):
    """What an array's numbers lie in."""
    while isinstance(x, np.ndarray) and x.base is not None:
        x = x.base
    return x.obj if isinstance(x, memoryview) else x


def copies_of(package, folder, monkeypatch, dtype="float32"):
    """How many parameters of the folder's model are copied, not counting conversions in torch."""
    module = pytest.importorskip(f"{package}.modules" if package == "backend_jax" else f"{package}.model")
    copied, made = module.copied, []

    def counted(x, *arguments, **more):
        made.append(x.shape)
        return copied(x, *arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(module, "copied", counted)
        load(package).Transformer.from_pretrained(folder, dtype=dtype)
    return made


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("package", MAPPED)
def test_nothing_of_a_llama_is_copied(package, dtype, tmp_path, monkeypatch):
    load(package)
    write(tmp_path, "llama", dtype=dtype)
    assert copies_of(package, tmp_path, monkeypatch, dtype) == []


def test_numpy_reads_from_the_mapped_file(tmp_path):
    C = load("core_numpy")
    write(tmp_path, "llama")
    model = C.Transformer.from_pretrained(tmp_path)
    assert {type(memory_of(x)) for x in model.parameters().values()} == {mmap.mmap}


@pytest.mark.parametrize("package", PACKAGES)
def test_of_a_gpt2_the_matrices_that_lie_otherwise_are_copied(package, tmp_path, monkeypatch):
    """Turned for torch, cut out of their rows for NumPy; JAX also needs a multiple of 64 bytes, and so we write."""
    load(package)
    params = write(tmp_path, "gpt2")
    made = copies_of(package, tmp_path, monkeypatch)
    matrices = [x.shape for name, x in params.items() if name.startswith("blocks") and x.ndim == 2]
    parts = [x.shape for name, x in params.items() if any(part in name for part in ("query.w", "key.w", "value.w"))]
    assert made == ([shape[::-1] for shape in matrices] if package == "backend_torch" else parts)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("more", [0, 1, 2, 4, 7])
def test_a_file_whose_numbers_lie_across_words_is_read_all_the_same(package, family, more, tmp_path):
    """The header's length decides where the data begin; nothing says that it is a multiple of anything."""
    B = load(package)
    params = write(tmp_path, family)
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8 : 8 + length])).encode()
    header += b" " * ((more - len(header)) % 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
    model = B.Transformer.from_pretrained(tmp_path)
    check_holds(package, model, params)
    if package != "backend_jax":  # which has copied them to where it wants them
        ids = to(package, np.array([[1, 2, 3]], np.int32))
        direct = B.Transformer(model.config)
        B.set_params(direct, params)
        assert np.allclose(back(model(ids)), back(direct(ids)), atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("package", PACKAGES)
def test_a_model_outlives_the_file_that_is_replaced_or_removed(package, family, tmp_path):
    """`save_pretrained` renames a whole file over the old one, whose memory the model keeps."""
    B = load(package)
    params = write(tmp_path, family)
    model = B.Transformer.from_pretrained(tmp_path)
    other = write(tmp_path, family, seed=2)
    check_holds(package, model, params)
    check_holds(package, B.Transformer.from_pretrained(tmp_path), other)
    model.save_pretrained(tmp_path)
    check_holds(package, B.Transformer.from_pretrained(tmp_path), params)
    (tmp_path / "model.safetensors").unlink()
    check_holds(package, model, params)


@pytest.mark.parametrize("package", PACKAGES)
def test_writing_into_a_model_does_not_change_the_file_nor_another_model(package, tmp_path):
    B = load(package)
    params = write(tmp_path, "llama")
    before = (tmp_path / "model.safetensors").read_bytes()
    model, second = (B.Transformer.from_pretrained(tmp_path) for _ in range(2))
    B.set_params(model, {name: np.zeros_like(x) for name, x in params.items()})
    check_holds(package, second, params)
    check_holds(package, model, {name: np.zeros_like(x) for name, x in params.items()})
    assert (tmp_path / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("package", MAPPED)
def test_a_deep_copy_is_a_model_in_memory_of_its_own(package, tmp_path):
    """What to make where a file will be written over in place."""
    B = load(package)
    params = write(tmp_path, "llama")
    model = copy.deepcopy(B.Transformer.from_pretrained(tmp_path))
    path = tmp_path / "model.safetensors"
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.write(bytes(size))
    check_holds(package, model, params)


@pytest.mark.parametrize("package", [*MAPPED, pytest.param("backend_jax", marks=pytest.mark.slow)])
def test_a_trained_step_leaves_the_file_alone(package, tmp_path):
    B = load(package)
    write(tmp_path, "llama")
    before = (tmp_path / "model.safetensors").read_bytes()
    model = B.Transformer.from_pretrained(tmp_path)
    trainer = B.Trainer(model, B.TrainConfig(steps=1, batch=1))
    ids = np.array([[1, 2, 3, 4]])
    first = trainer.evaluate([{"tokens": ids, "targets": ids}])["loss"]
    trainer.step({"tokens": ids, "targets": ids})
    assert trainer.evaluate([{"tokens": ids, "targets": ids}])["loss"] < first
    assert (tmp_path / "model.safetensors").read_bytes() == before


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pages are asked for on Linux")
def test_memory_for_copies_comes_with_its_pages():
    """At their first touch they would cost half as much again. 2 MiB: for more, NumPy would ask for larger pages."""
    import resource

    from core_numpy.contract.copies import _POPULATE, _madvise, empty

    probe = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.uint8)
    call = _madvise()
    if call is None or call(probe.ctypes.data, mmap.PAGESIZE, _POPULATE) != 0:
        pytest.skip("the system does not know the call")

    def faults(size):
        memory = empty((size,), "uint8")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        memory[:: mmap.PAGESIZE] = 1
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    pages = (2 << 20) // mmap.PAGESIZE
    assert faults(2 << 20) < pages // 4
    assert empty((3, 5), "float32").ctypes.data % 64 == 0


@pytest.mark.parametrize("lacking", ["the system", "the call"])
def test_where_no_system_gives_pages_at_once_copies_are_made_all_the_same(lacking, monkeypatch):
    from core_numpy.contract import copies

    if lacking == "the system":
        monkeypatch.setattr(copies.sys, "platform", "win32")
    else:
        monkeypatch.setattr(copies.ctypes, "CDLL", lambda name: object())
    copies._madvise.cache_clear()
    try:
        x = np.arange(copies.LARGE, dtype=np.float32)
        assert np.array_equal(copies.copied(x, "float32"), x)
        assert copies._madvise() is None
    finally:
        copies._madvise.cache_clear()


def test_memory_is_given_back_to_no_other_c_library_than_the_one_that_takes_it(monkeypatch):
    from core_numpy.contract import memory

    asked = []
    monkeypatch.setattr(memory.platform, "libc_ver", lambda: ("", ""))  # as with musl, or on Windows
    monkeypatch.setattr(memory.ctypes, "CDLL", asked.append)
    memory.return_freed_memory()
    assert asked == [] and not memory.share_one_arena()
