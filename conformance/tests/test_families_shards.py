"""Models written in shards: read back by us and by the home library, whole or not at all, and what is refused."""

from __future__ import annotations

import itertools
import json
import os

import numpy as np
import pytest

from conformance.tests.three import PACKAGES, back, load, to
from core_numpy.contract.copies import copied
from core_numpy.contract.families import folder as files
from core_numpy.contract.tensor_file import check_header

INDEX = "model.safetensors.index.json"


def model_of(package, seed=0):
    B = load(package)
    fields = {"norm": "rms", "norm_bias": False, "activation": "swiglu", "attention_bias": False, "ffn_bias": False}
    return B.Transformer(B.ModelConfig(vocab=11, width=8, heads=2, layers=2, positions="rotary", **fields), seed=seed)


@pytest.mark.parametrize("package", PACKAGES)
def test_shards_are_read_back_and_are_as_full_as_the_limit_allows(package, tmp_path):
    B, model, limit = load(package), model_of(package), 1500
    model.save_pretrained(tmp_path, max_shard_size=limit)
    index = json.loads((tmp_path / INDEX).read_text())
    names = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert names == [f"model-{n:05}-of-{len(names):05}.safetensors" for n in range(1, len(names) + 1)]
    assert len(names) > 2 and not (tmp_path / "model.safetensors").exists()
    sizes = []
    for name in names:
        entries, metadata = check_header(tmp_path / name)
        assert metadata == {"format": "pt"} and {index["weight_map"][each] for each in entries} == {name}
        held = [entry["data_offsets"][1] - entry["data_offsets"][0] for entry in entries.values()]
        assert sum(held) <= limit or len(held) == 1
        sizes.append(held)
    assert all(sum(a) + b[0] > limit for a, b in itertools.pairwise(sizes))
    assert (
        index["metadata"]["total_size"] == sum(map(sum, sizes)) == sum(x.nbytes for x in B.get_params(model).values())
    )
    again = B.Transformer.from_pretrained(tmp_path)
    for name, x in B.get_params(model).items():
        assert np.array_equal(B.get_params(again)[name], x), name


def test_the_home_library_reads_our_shards(tmp_path):
    torch = pytest.importorskip("torch")
    H = pytest.importorskip("transformers")
    B, model = load("backend_torch"), model_of("backend_torch").eval()
    model.save_pretrained(tmp_path, max_shard_size="2KB")
    assert (tmp_path / INDEX).exists()
    there = H.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    tokens = to("backend_torch", np.array([[1, 5, 3, 10]]))
    with torch.no_grad():
        assert np.abs(back(model(tokens)) - there(tokens).logits.numpy()).max() < 1e-5
    assert B.Transformer.from_pretrained(tmp_path).family == "llama"


def test_what_fits_into_one_file_has_no_index(tmp_path):
    model_of("core_numpy").save_pretrained(tmp_path, max_shard_size="5GB")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("failing", [0, 2])
def test_a_disk_that_fills_up_leaves_nothing(failing, tmp_path, monkeypatch):
    """The write of one of the shards fails: no shard, no index, no config, no temporary file is left."""
    calls, real = [], os.fsync

    def full(handle):
        calls.append(handle)
        if len(calls) == failing + 1:
            raise OSError(28, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"cannot write .*model-0000"):
        model_of("core_numpy").save_pretrained(tmp_path, max_shard_size=1500)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_another_model_gets_no_shards(tmp_path):
    model = model_of("core_numpy")
    model.save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=r"holds model.safetensors of another model.*take an empty folder"):
        model_of("core_numpy", seed=1).save_pretrained(tmp_path, max_shard_size=1500)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize(
    ("size", "error"), [(0, ValueError), (-5, ValueError), ("5", ValueError), ("5 TB", ValueError), ("0KB", ValueError),
                        (1.5, TypeError), (True, TypeError), (b"5GB", TypeError)],
)  # fmt: skip
def test_a_size_that_is_none_is_refused_before_anything_is_written(package, size, error, tmp_path):
    with pytest.raises(error, match="max_shard_size must be None, a number of bytes of at least 1, or a text"):
        model_of(package).save_pretrained(tmp_path / "new", max_shard_size=size)
    assert not (tmp_path / "new").exists()


def test_units_are_those_of_the_home_library():
    sizes = {"1KB": 1000, "2MB": 2 * 10**6, "5GB": 5 * 10**9, "1KiB": 1024, "1.5 MiB": 3 << 19, "1gib": 1 << 30, 7: 7}
    assert {text: files._bytes_of(text) for text in sizes} == sizes


# The largest are turned in more than one block.
@pytest.mark.parametrize("shape", [(37, 21), (1, 40), (40, 1), (0, 5), (3, 4, 5), (7,), (), (130, 151)])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_copy_has_the_values_the_order_and_the_alignment(shape, dtype):
    x = np.random.default_rng(0).standard_normal(shape).astype("float32")
    sources = [x, x.T, x[::-1] if x.ndim else x]
    if x.ndim == 2:
        fused = np.random.default_rng(1).standard_normal((shape[1] * 3, shape[0])).astype("float32")
        sources.append(fused[shape[1] : 2 * shape[1]].T)
    for source in sources:
        got = copied(source, dtype)
        assert np.array_equal(got, source.astype(dtype)) and got.dtype == dtype and got.shape == source.shape
        assert got.flags.c_contiguous and got.flags.writeable and (not got.size or got.ctypes.data % 64 == 0)
        assert not np.shares_memory(got, source)
        as_it_lies = copied(source, dtype, order="K")
        assert np.array_equal(as_it_lies, got) and as_it_lies.flags.writeable and as_it_lies.dtype == dtype
        if source.ndim == 2 and source.strides[0] == source.itemsize < source.strides[1]:
            assert as_it_lies.T.flags.c_contiguous
