"""Parameter files and checkpoint folders: bits kept, damage found, nothing half written."""

import errno
import json
import os
import pickle
import subprocess
import sys
import warnings

import ml_dtypes
import numpy as np
import pytest

from core_numpy.contract import checkpoints, tensor_file
from core_numpy.contract.checkpoints import latest_checkpoint, read_checkpoint, write_checkpoint
from core_numpy.contract.config import ModelConfig, TrainConfig
from core_numpy.contract.files import load_config, load_metadata, load_params, save_params

CONFIG = ModelConfig(vocab=5, width=4, heads=2, layers=1, layer_windows=((3, None),))
TRAIN = TrainConfig(steps=7)


def craft(header, data=b"", length=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


def entry(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def write(folder, step=1, **changes):
    arguments = {
        "params": {"a.weight": np.arange(6, dtype=np.float32).reshape(2, 3)},
        "state": {"moment1": {"a.weight": np.ones((2, 3), np.float32)}},
        "config": CONFIG,
        "train_config": TRAIN,
        "extra": {"position": 3, "loss_scale": 1024.0, "key": [1, 2], "backend": "numpy 2.0"},
    }
    return write_checkpoint(folder, step=step, **{**arguments, **changes})


# --- parameter files


def test_every_dtype_comes_back_bit_for_bit(tmp_path):
    rng = np.random.default_rng(0)
    params = {}
    for name in tensor_file.DTYPES:
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        raw = rng.integers(0, 2 if name == "bool" else 256, size=2 * 3 * dtype.itemsize, dtype=np.uint8)
        params[name] = raw.view(dtype).reshape(2, 3)
    save_params(tmp_path / "p.safetensors", params)
    loaded = load_params(tmp_path / "p.safetensors")
    assert set(loaded) == set(params)
    for name, array in params.items():
        assert loaded[name].dtype == array.dtype and loaded[name].shape == (2, 3)
        assert loaded[name].tobytes() == array.tobytes(), name


def test_bfloat16_keeps_rounding_limits_negative_zero_and_nan(tmp_path):
    values = np.array([1, 1.0078125, 3.39e38, -0.0, np.nan], ml_dtypes.bfloat16)
    save_params(tmp_path / "p.safetensors", {"x": values})
    assert load_params(tmp_path / "p.safetensors")["x"].view(np.uint16).tolist() == values.view(np.uint16).tolist()


def test_transposed_strided_scalar_and_empty_arrays_keep_their_meaning(tmp_path):
    base = np.arange(12, dtype=np.float64).reshape(3, 4)
    params = {"transposed": base.T, "strided": base[:, ::2], "scalar": np.array(2.5), "empty": np.zeros((0, 3))}
    params["swapped"] = base.astype(">f8")
    save_params(tmp_path / "p.safetensors", params)
    loaded = load_params(tmp_path / "p.safetensors")
    for name, array in params.items():
        assert loaded[name].shape == array.shape
        assert np.array_equal(loaded[name], array), name
        loaded[name][...] = 0  # what is loaded may be written to
    assert base[1, 1] == 5


def test_the_config_travels_in_the_metadata(tmp_path):
    save_params(tmp_path / "p.safetensors", {"x": np.zeros(2)}, CONFIG, {"note": "hello"})
    assert load_config(tmp_path / "p.safetensors") == CONFIG
    assert load_metadata(tmp_path / "p.safetensors")["note"] == "hello"
    save_params(tmp_path / "q.safetensors", {"x": np.zeros(2)})
    assert load_config(tmp_path / "q.safetensors") is None


@pytest.mark.parametrize(
    ("params", "exception", "phrase"),
    [
        ({"x": [1.0]}, TypeError, r"params\['x'\] must be a NumPy array; got list"),
        ({"x": np.zeros(2, complex)}, TypeError, "complex128"),
        ({"x": np.array(["a"])}, TypeError, "<U1"),
        ({"": np.zeros(2)}, ValueError, "non-empty names"),
        ({3: np.zeros(2)}, ValueError, "non-empty names"),
        ([np.zeros(2)], TypeError, "params must be a dict"),
    ],
)
def test_what_cannot_be_stored_is_refused_before_a_file_appears(tmp_path, params, exception, phrase):
    with pytest.raises(exception, match=phrase):
        save_params(tmp_path / "p.safetensors", params)
    assert list(tmp_path.iterdir()) == []


ONE = b"\0\0\x80\x3f"
UNSOUND = {
    "empty": b"",
    "shorter than its first number": b"\x10\0\0",
    "header longer than the file": craft({"x": entry()}, ONE, length=2**62),
    "header over the limit": None,
    "data cut off": craft({"x": entry()}, ONE[:3]),
    "trailing bytes": craft({"x": entry()}, ONE + b"\0"),
    "header is no JSON": craft(b"{oops", b""),
    "header is no UTF-8": craft(b'{"\xff": 1}', b""),
    "header is no object": craft([1], b""),
    "header nests without end": craft(b"[" * 100_000, b""),
    "a name twice": craft(b'{"x": %s, "x": %s}' % ((json.dumps(entry()).encode(),) * 2), ONE),
    "overlapping": craft({"x": entry(), "y": entry()}, ONE),
    "partly overlapping": craft({"x": entry(), "y": entry(offsets=(2, 6))}, ONE + b"\0\0"),
    "a gap": craft({"x": entry(), "y": entry(offsets=(8, 12))}, ONE * 3),
    "inverted range": craft({"x": entry(shape=(), offsets=(4, 0))}, ONE),
    "negative range": craft({"x": entry(offsets=(-4, 0))}, b""),
    "negative shape": craft({"x": entry(shape=(-1,))}, ONE),
    "shape and range disagree": craft({"x": entry(shape=(2,))}, ONE),
    "shape whose product overflows": craft({"x": entry(shape=(2**62, 4), offsets=(0, 0))}, b""),
    "float in a shape": craft({"x": entry(shape=(1.0,))}, ONE),
    "true in a shape": craft({"x": entry(shape=(True,))}, ONE),
    "unknown dtype": craft({"x": entry(dtype="F31")}, ONE),
    "dtype is a list": craft({"x": entry(dtype=["F32"])}, ONE),
    "missing offsets": craft({"x": {"dtype": "F32", "shape": [1]}}, ONE),
    "metadata of numbers": craft({"__metadata__": {"a": 1}, "x": entry()}, ONE),
}


@pytest.mark.parametrize("fault", UNSOUND)
def test_an_unsound_file_is_one_error_naming_file_and_reason(tmp_path, fault, monkeypatch):
    path = tmp_path / "p.safetensors"
    if fault == "header over the limit":
        monkeypatch.setattr(tensor_file, "HEADER_LIMIT", 10)
        path.write_bytes(craft({"x": entry()}, ONE))
    else:
        path.write_bytes(UNSOUND[fault])
    with pytest.raises(ValueError, match="is not a sound safetensors file: ") as caught:
        load_params(path)
    assert str(path) in str(caught.value)


def test_the_crafted_file_without_a_fault_loads(tmp_path):
    (tmp_path / "p.safetensors").write_bytes(craft({"x": entry()}, ONE))
    assert load_params(tmp_path / "p.safetensors")["x"].tolist() == [1.0]


def test_every_truncation_of_a_file_is_refused(tmp_path):
    path = tmp_path / "p.safetensors"
    save_params(path, {"x": np.arange(3, dtype=np.float32), "y": np.ones((2, 1))})
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="not a sound safetensors file"):
            load_params(path)


class Trap:
    def __reduce__(self):
        return (open, (os.environ["TRAP"], "w"))


@pytest.mark.parametrize("name", ["model.bin", "model.pt", "model.pkl", "model.pth", "model"])
def test_a_pickle_is_refused_and_its_code_does_not_run(tmp_path, monkeypatch, name):
    monkeypatch.setenv("TRAP", str(tmp_path / "marker"))
    (tmp_path / name).write_bytes(pickle.dumps(Trap()))
    with pytest.raises(ValueError, match="unpickling runs whatever code"):
        load_params(tmp_path / name)
    assert not (tmp_path / "marker").exists()


def test_saving_under_a_pickles_name_a_missing_file_and_a_directory_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"must end in \.safetensors"):
        save_params(tmp_path / "m.bin", {"x": np.zeros(1)})
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_params(tmp_path / "none.safetensors")
    with pytest.raises(ValueError, match="is a directory"):
        load_params(tmp_path)
    with pytest.raises(OSError, match="cannot write"):
        save_params(tmp_path / "no" / "p.safetensors", {"x": np.zeros(1)})


def test_a_full_disk_leaves_the_old_file_whole(tmp_path, monkeypatch):
    path = tmp_path / "p.safetensors"
    save_params(path, {"x": np.zeros(2)})
    old = path.read_bytes()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"cannot write .*p\.safetensors.*No space left") as caught:
        save_params(path, {"x": np.ones(2)})
    assert caught.value.errno == errno.ENOSPC
    assert path.read_bytes() == old and os.listdir(tmp_path) == ["p.safetensors"]


def full(handle):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_missing_library_is_one_sentence_naming_it(tmp_path, monkeypatch):
    for name in ("safetensors", "safetensors.numpy"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match="needs the package safetensors: pip install safetensors"):
        save_params(tmp_path / "p.safetensors", {"x": np.zeros(1)})


# --- checkpoints


def test_a_checkpoint_comes_back_whole(tmp_path):
    path = write(tmp_path, 20)
    assert path == tmp_path / "step-00000020"
    found = read_checkpoint(path)
    assert (found.step, found.config, found.train_config) == (20, CONFIG, TRAIN)
    assert found.params["a.weight"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found.state["moment1"]["a.weight"].tolist() == [[1, 1, 1], [1, 1, 1]]
    assert found.extra == {"position": 3, "loss_scale": 1024.0, "key": [1, 2], "backend": "numpy 2.0"}
    assert load_config(path / "model.safetensors") == CONFIG


def test_every_flipped_bit_pattern_of_every_byte_of_a_checkpoint_is_caught(tmp_path):
    path = write(tmp_path, params={"a": np.zeros(1, np.float32)}, state={"ema": {"a": np.ones(1, np.float32)}})
    tried = 0
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        for i in range(len(whole)):
            # one low bit, the bit between upper and lower case, and all bits
            for flip in (0x01, 0x20, 0xFF) if file.suffix == ".json" else (0x01,):
                file.write_bytes(whole[:i] + bytes([whole[i] ^ flip]) + whole[i + 1 :])
                with pytest.raises(ValueError, match="step-00000001"):
                    read_checkpoint(path)
                tried += 1
        file.write_bytes(whole)
    read_checkpoint(path)
    assert tried > 1000


def test_the_damaged_tensor_is_named(tmp_path):
    path = write(tmp_path) / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged.*\(a\.weight\)"):
        read_checkpoint(path.parent)


def test_the_newest_sound_checkpoint_is_found_and_damaged_ones_are_named(tmp_path):
    for step in (1, 2, 10):
        write(tmp_path, step)
    assert latest_checkpoint(tmp_path).name == "step-00000010"
    (tmp_path / "step-00000010" / "optimizer.safetensors").unlink()
    with pytest.warns(RuntimeWarning, match="passed over a damaged checkpoint.*step-00000010.*optimizer"):
        assert latest_checkpoint(tmp_path).name == "step-00000002"
    assert read_checkpoint(tmp_path / "step-00000001").step == 1
    for step in (1, 2):
        (tmp_path / f"step-0000000{step}" / "checkpoint.json").write_text("{}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match="holds 3 checkpoints and every one is damaged"):
            latest_checkpoint(tmp_path)


def test_the_last_ones_are_kept_and_the_one_just_written_always(tmp_path):
    for step in (5, 6, 7, 8):
        write(tmp_path, step, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["step-00000007", "step-00000008"]
    write(tmp_path, 3, keep=2)  # somebody went back to an early one
    assert sorted(os.listdir(tmp_path)) == ["step-00000003", "step-00000008"]
    write(tmp_path, 9, keep=None)
    assert len(os.listdir(tmp_path)) == 3


def test_the_same_step_can_be_written_again(tmp_path):
    write(tmp_path, 4)
    write(tmp_path, 4, extra={"position": 9})
    assert os.listdir(tmp_path) == ["step-00000004"]
    assert read_checkpoint(tmp_path).extra == {"position": 9}


def test_another_configuration_is_refused_with_the_fields_that_differ(tmp_path):
    write(tmp_path)
    with pytest.raises(ValueError, match="of another model: width is 4 there and 8 here, layers is 1 there and 2 here"):
        read_checkpoint(tmp_path, model_config=CONFIG.replace(width=8, layers=2, layer_windows=((3, None),) * 2))
    assert read_checkpoint(tmp_path, model_config=CONFIG).step == 1


def test_a_newer_schema_says_that_it_is_newer(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "SCHEMA", 3)
    path = write(tmp_path)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="has schema 3, this version reads up to 2: a newer version wrote it"):
        read_checkpoint(path)


def test_no_folder_an_empty_one_a_file_and_a_half_one_are_told_apart(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read_checkpoint(tmp_path / "none")
    with pytest.raises(ValueError, match="holds no checkpoint"):
        read_checkpoint(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        read_checkpoint(tmp_path / "file")
    (tmp_path / "step-00000003").mkdir()
    with pytest.raises(ValueError, match=r"no whole checkpoint: it lacks checkpoint\.json"):
        read_checkpoint(tmp_path / "step-00000003")


@pytest.mark.parametrize("fails_at", range(5))
def test_a_full_disk_at_any_flush_names_the_path_and_leaves_the_last_checkpoint(tmp_path, monkeypatch, fails_at):
    write(tmp_path, 1)
    calls = []

    def fsync(handle):
        calls.append(handle)
        if len(calls) == fails_at + 1:
            full(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match=r"cannot write the checkpoint .*step-00000002.*No space left"):
        write(tmp_path, 2)
    # The last flush, of the folder, comes after the rename: the new one is then whole as well.
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []
    assert read_checkpoint(tmp_path).step == (2 if fails_at == 4 else 1)


def test_a_folder_that_cannot_be_made_names_the_path(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot write the checkpoint .*file/run/step-00000001"):
        write(tmp_path / "file" / "run")


def test_an_unfinished_directory_is_no_checkpoint_and_is_cleared_away_later(tmp_path):
    write(tmp_path, 1)
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    mine = tensor_file.temporary_name(tmp_path / "step-00000002")
    dead = mine.with_name(mine.name.replace(f".{os.getpid()}.", f".{done.pid}."))
    mine.mkdir()
    dead.mkdir()
    assert read_checkpoint(tmp_path).step == 1
    write(tmp_path, 3)
    assert mine.exists() and not dead.exists()


def test_a_killed_writer_leaves_a_whole_checkpoint(tmp_path):
    code = (
        "import sys; sys.path.insert(0, '.'); from conformance.tests.test_files import write\n"
        "import itertools\n"
        "for step in itertools.count(2):\n"
        "    write(sys.argv[1], step); print(step, flush=True)\n"
    )
    write(tmp_path, 1)
    for _ in range(3):
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=os.getcwd()
        )
        assert child.stdout is not None
        seen = int(child.stdout.readline())
        child.kill()
        child.communicate()
        assert read_checkpoint(tmp_path).step >= seen


@pytest.mark.parametrize(
    ("changes", "exception", "phrase"),
    [
        ({"step": -1}, ValueError, "step must be an integer of at least 0"),
        ({"keep": 0}, ValueError, "keep must be an integer of at least 1"),
        ({"config": {}}, TypeError, "config must be a ModelConfig"),
        ({"state": {"a/b": {}}}, ValueError, "without a slash"),
        ({"extra": {"x": float("nan")}}, TypeError, "extra must hold what JSON can say"),
        ({"extra": {"x": np.zeros(2)}}, TypeError, "extra must hold what JSON can say"),
        ({"params": {"x": 1.0}}, TypeError, "NumPy array"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_is_written(tmp_path, changes, exception, phrase):
    with pytest.raises(exception, match=phrase):
        write(tmp_path / "run", **changes)
    assert not (tmp_path / "run").exists()
