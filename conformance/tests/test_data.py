"""Data that every backend reads alike, resumes from one integer, and refuses by name."""

import threading
import tracemalloc
import warnings

import numpy as np
import pytest

from core_numpy.contract import data, shuffle
from core_numpy.contract.data import (
    IGNORED,
    batches,
    byte_tokens,
    default_text,
    evaluation_batches,
    pack_documents,
    prefetch,
    read_text,
    read_tokens,
    repeat_task,
    split,
)
from core_numpy.contract.run_log import read_curve
from core_numpy.contract.shuffle import permutation, random_words, threefry2x32

# --- the shuffle


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [  # the known-answer vectors that Salmon et al. publish with Random123 (kat_vectors, threefry2x32 20)
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry_gives_the_published_answers(key, counter, expected):
    out = threefry2x32(key, *(np.array([word], np.uint32) for word in counter))
    assert tuple(int(word[0]) for word in out) == expected


def test_the_words_are_those_of_jax_random():
    jax = pytest.importorskip("jax")
    key = jax.random.fold_in(jax.random.key(7), 3)
    words = random_words(7, 3, 5)
    assert ((words >> np.uint64(32)) ^ (words & np.uint64(0xFFFFFFFF))).tolist() == np.asarray(
        jax.random.bits(key, (5,), "uint32")
    ).tolist()


def test_a_permutation_is_one_and_depends_on_seed_and_epoch_only():
    first = permutation(1, 0, 50)
    assert sorted(first) == list(range(50))
    assert np.array_equal(first, permutation(1, 0, 50))
    others = [permutation(2, 0, 50), permutation(1, 1, 50), permutation(1 + 2**32, 0, 50)]
    assert all(not np.array_equal(first, other) for other in others)


# --- texts and token files


def test_the_default_text_is_long_and_plain():
    text = default_text()
    assert len(text) > 300_000 and "assert" in text and text == default_text()


def test_byte_tokens_are_the_utf8_bytes():
    assert byte_tokens("aß").tolist() == [97, 0xC3, 0x9F]
    assert byte_tokens(b"\xff\x00").tolist() == [255, 0]
    with pytest.raises(TypeError, match="text must be str or bytes; got int"):
        byte_tokens(3)


def test_a_text_need_not_be_utf8_and_a_directory_is_read_in_order(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"\xff second")
    (tmp_path / "a.md").write_bytes(b"first")
    (tmp_path / "c.png").write_bytes(b"no text")
    assert read_text(tmp_path / "b.txt") == b"\xff second"
    assert read_text(tmp_path) == b"first\n\n\xff second"


def test_what_runs_write_below_a_directory_is_no_text_of_it(tmp_path):
    for name, text in {
        "a.txt": "mine", "runs/one/run.json": "{}", "runs/one/log.jsonl": "", "runs/one/notes.md": "of the run",
        "saved/step-00000004/checkpoint.json": "{}", "other/run.json": "mine too",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert read_text(tmp_path) == b"mine\n\nmine too"


def test_a_missing_an_empty_and_a_textless_path_are_told_apart(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read_text(tmp_path / "none")
    with pytest.raises(ValueError, match="holds no text files"):
        read_text(tmp_path)
    (tmp_path / "a.txt").write_text(" \n")
    with pytest.raises(ValueError, match="is empty"):
        read_text(tmp_path / "a.txt")


def test_token_files_are_mapped_and_their_ids_checked(tmp_path):
    ids = np.array([3, 0, 299], np.uint16)
    np.save(tmp_path / "t.npy", ids)
    ids.tofile(tmp_path / "t.bin")
    for name in ("t.npy", "t.bin"):
        tokens = read_tokens(tmp_path / name, vocab=300)
        assert isinstance(tokens, np.memmap) and tokens.tolist() == [3, 0, 299]
        with pytest.raises(ValueError, match="has token 299 at 2; the vocabulary is 299"):
            read_tokens(tmp_path / name, vocab=299)
    np.save(tmp_path / "f.npy", np.zeros(3))
    (tmp_path / "odd.bin").write_bytes(b"abc")
    for name, phrase in (("f.npy", "axis of integers"), ("odd.bin", "two bytes each"), ("x.csv", "does not exist")):
        with pytest.raises((ValueError, FileNotFoundError), match=phrase):
            read_tokens(tmp_path / name, vocab=300)


def test_an_archive_called_npy_is_refused(tmp_path):
    np.savez(tmp_path / "a.npz", ids=np.arange(4))
    (tmp_path / "a.npz").rename(tmp_path / "a.npy")
    with pytest.raises(ValueError, match=r"a\.npy is an archive of arrays"):
        read_tokens(tmp_path / "a.npy", vocab=9)


IDS = np.arange(40)
WINDOWS = {"batch": 2, "length": 3}


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: split(IDS * 0.5, length=3), TypeError, "tokens must be a NumPy array of integers; got float64"),
        (lambda: split(IDS.tolist(), length=3), TypeError, "tokens must be a NumPy array of integers; got list"),
        (lambda: split(IDS.reshape(20, 2), length=3), ValueError, "tokens must have one axis"),
        (lambda: split(IDS, length=3, share=float("nan")), ValueError, "share must be a number above 0 and below 1"),
        (lambda: split(IDS, length=3, share=1.0), ValueError, "share must be a number above 0 and below 1"),
        (lambda: batches(IDS * 0.5, seed=0, **WINDOWS), TypeError, "tokens must be a NumPy array of integers"),
        (lambda: batches(IDS.reshape(20, 2), seed=0, **WINDOWS), ValueError, "tokens must have one axis"),
        (lambda: next(batches(IDS + 2**32, seed=0, **WINDOWS)), ValueError, r"tokens must be ids below 2\*\*31"),
        (lambda: batches(IDS, seed=2**64, **WINDOWS), ValueError, r"seed must be below 2\*\*64"),
        (lambda: permutation(2**64, 0, 3), ValueError, r"seed must be below 2\*\*64"),
        (lambda: list(evaluation_batches(IDS * 0.5, **WINDOWS)), TypeError, "tokens must be a NumPy array of integers"),
        (
            lambda: list(evaluation_batches(IDS, limit=-1, **WINDOWS)),
            ValueError,
            "limit must be an integer of at least 0",
        ),
        (lambda: pack_documents([[1], [2, 2**40]], 4), ValueError, r"documents\[1\] must be ids below 2\*\*31"),
        (lambda: pack_documents([[1, -100]], 4), ValueError, r"documents\[0\] must be ids of at least 0; got -100"),
    ],
)
def test_no_id_or_seed_is_cut_short_in_silence(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_ids_of_the_other_byte_order_are_the_same_ids(tmp_path):
    np.save(tmp_path / "t.npy", IDS.astype(">i4"))
    (one, other) = (next(batches(x, seed=1, **WINDOWS)) for x in (read_tokens(tmp_path / "t.npy", vocab=40), IDS))
    assert one["tokens"].tolist() == other["tokens"].tolist() and one["tokens"].dtype == np.dtype("int32")


@pytest.mark.parametrize("damage", [(b"{", b"("), (b"'<", b"'\x01"), (b"(8,)", b"(8**9"), (b"False", b"Fa\nse")])
def test_a_damaged_npy_header_is_one_clear_error(tmp_path, damage):
    path = tmp_path / "t.npy"
    np.save(path, np.arange(8, dtype=np.uint16))
    path.write_bytes(path.read_bytes().replace(*damage, 1))
    with pytest.raises(ValueError, match=r"t\.npy is not a sound \.npy file"):
        read_tokens(path, vocab=8)


@pytest.mark.parametrize("line", ["{}", "12", "[1, 2]", '{"step": "1", "loss": 2.0}', '{"step": 1, "loss": null}'])
def test_a_line_of_a_log_that_is_no_update_is_named(tmp_path, line):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "lo\n' + line + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"log\.jsonl is damaged: line 3"):
        read_curve(path)


def test_a_pickled_npy_is_not_unpickled(tmp_path):
    np.save(tmp_path / "p.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match=r"not a sound \.npy file of numbers: .*Python objects"):
        read_tokens(tmp_path / "p.npy", vocab=3)


def test_the_split_is_contiguous_and_refuses_parts_shorter_than_a_window():
    train, validation = split(np.arange(50), length=4)
    assert train.tolist() == list(range(45)) and validation.tolist() == list(range(45, 50))
    with pytest.raises(ValueError, match="its validation part has 5 of 50 tokens and a window takes 6"):
        split(np.arange(50), length=5)


# --- batches


def test_every_window_comes_once_in_an_epoch_with_its_next_tokens():
    tokens = np.arange(100, 122, dtype=np.uint16)  # 22 tokens: 7 windows of 3, each with one token more
    stream = batches(tokens, batch=7, length=3, seed=5)
    batch = next(stream)
    assert batch["tokens"].dtype == batch["targets"].dtype == np.int32
    assert sorted(batch["tokens"][:, 0]) == [100, 103, 106, 109, 112, 115, 118]
    assert np.array_equal(batch["targets"], batch["tokens"] + 1)
    assert batch["tokens"][:, 0].tolist() != sorted(batch["tokens"][:, 0])
    assert next(stream)["tokens"].tolist() != batch["tokens"].tolist()  # another epoch, another order


def test_batches_reach_over_the_end_of_an_epoch_and_resume_from_their_position():
    tokens = np.arange(22)
    straight = batches(tokens, batch=4, length=3, seed=5)
    first = [next(straight)["tokens"].tolist() for _ in range(5)]
    rows = [row for batch in first for row in batch][:7]
    assert sorted(row[0] for row in rows) == [0, 3, 6, 9, 12, 15, 18]
    assert straight.position == 5
    resumed = batches(tokens, batch=4, length=3, seed=5, start=2)
    assert [next(resumed)["tokens"].tolist() for _ in range(3)] == first[2:]


def test_evaluation_sees_every_window_once_in_order_with_a_smaller_last_batch():
    found = list(evaluation_batches(np.arange(17), batch=3, length=4))
    assert [len(batch["tokens"]) for batch in found] == [3, 1]
    assert np.concatenate([batch["targets"] for batch in found]).ravel().tolist() == list(range(1, 17))
    assert len(list(evaluation_batches(np.arange(17), batch=3, length=4, limit=1))) == 1
    # sixteen tokens make three windows: the fourth would lack its last target
    assert sum(len(batch["tokens"]) for batch in evaluation_batches(np.arange(16), batch=3, length=4)) == 3


def test_a_text_shorter_than_one_window_is_refused():
    assert len(list(evaluation_batches(np.arange(5), batch=1, length=4))) == 1
    for make in (lambda: batches(np.arange(4), batch=1, length=4, seed=0), lambda: next(
        evaluation_batches(np.arange(4), batch=1, length=4))):  # fmt: skip
        with pytest.raises(ValueError, match="shorter than one window: 4 tokens, a window takes 5"):
            make()
    with pytest.raises(ValueError, match="batch must be an integer of at least 1"):
        batches(np.arange(9), batch=0, length=4, seed=0)


# --- packing


def test_documents_are_packed_with_segments_positions_and_targets_that_stay_inside():
    packed = pack_documents([[1, 2, 3], [4, 5], [], [6, 7, 8, 9, 10, 11, 12]], 6)
    assert packed["tokens"].tolist() == [[1, 2, 3, 4, 5, 0], [6, 7, 8, 9, 10, 11], [12, 0, 0, 0, 0, 0]]
    assert packed["segments"].tolist() == [[0, 0, 0, 1, 1, -1], [0] * 6, [0, -1, -1, -1, -1, -1]]
    assert packed["positions"].tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5], [0] * 6]
    # the long document's first piece knows the next token, 12, which stands in the next row
    assert packed["targets"].tolist() == [[2, 3, -100, 5, -100, -100], [7, 8, 9, 10, 11, 12], [-100] * 6]
    assert IGNORED == -100 and all(array.dtype == np.int32 for array in packed.values())


def test_documents_that_fit_a_row_exactly_share_it():
    assert pack_documents([[1, 2], [3]], 3)["tokens"].tolist() == [[1, 2, 3]]


def test_packing_refuses_nothing_and_floats():
    with pytest.raises(ValueError, match="at least one token"):
        pack_documents([[], []], 4)
    with pytest.raises(TypeError, match=r"documents\[1\] must be one axis of integers"):
        pack_documents([[1], [0.5]], 4)


# --- prefetch


def test_prefetch_gives_the_same_items_and_then_ends():
    assert list(prefetch(range(20), 3)) == list(range(20))
    ended = prefetch([1])
    assert list(ended) == [1] and list(ended) == []


def test_prefetch_raises_the_sources_error_where_it_came():
    def source():
        yield 1
        raise KeyError("broken at two")

    stream = prefetch(source())
    assert next(stream) == 1
    with pytest.raises(KeyError, match="broken at two"):
        next(stream)
    with pytest.raises(StopIteration):
        next(stream)


def test_prefetch_reads_ahead_no_further_than_its_size_and_stops_when_closed():
    read, third = [], threading.Event()

    def source():
        for i in range(1000):
            read.append(i)
            if i == 3:
                third.set()
            yield i

    with prefetch(source(), 2) as stream:
        assert next(stream) == 0
        assert third.wait(5)  # one taken, two queued, one in hand
        thread = stream._thread
    assert not thread.is_alive() and len(read) <= 5


# --- the course's task


@pytest.mark.parametrize("n", [1, 10, 1001])
def test_the_repeat_task_is_labelled_rightly_and_balanced(n):
    task = repeat_task(n, seed=3)
    tokens, targets = task["tokens"], task["targets"]
    assert tokens.shape == (n, 8) and tokens.dtype == targets.dtype == np.int32
    assert tokens.min() >= 1 and tokens.max() <= 9
    for row, target in zip(tokens.tolist(), targets.tolist(), strict=True):
        assert target == (row[0] in row[1:])
    assert targets.sum() == n // 2


def test_no_digit_or_place_gives_the_repeat_task_away():
    task = repeat_task(9000, seed=0)
    tokens, targets = task["tokens"], task["targets"]
    assert np.array_equal(tokens, repeat_task(9000, seed=0)["tokens"])
    assert not np.array_equal(tokens, repeat_task(9000, seed=1)["tokens"])
    for label in (0, 1):
        for column in range(8):  # about 500 of each digit in each column; the spread is about 21
            assert np.abs(np.bincount(tokens[targets == label, column], minlength=10)[1:] - 500).max() < 110
    steps = np.bincount((tokens[targets == 0, 1:] - tokens[targets == 0, :1]).ravel() % 9, minlength=9)
    assert steps[0] == 0 and np.abs(steps[1:] - 4500 * 7 / 8).max() < 300
    hits = (tokens[:, 1:] == tokens[:, :1])[targets == 1].mean(axis=0)
    assert np.abs(hits - (1 / 7 + 6 / 7 / 9)).max() < 0.03


def test_batches_give_no_warning_for_mapped_tokens(tmp_path):
    np.arange(40, dtype=np.uint16).tofile(tmp_path / "t.bin")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batch = next(batches(read_tokens(tmp_path / "t.bin", vocab=40), batch=2, length=5, seed=0))
    assert batch["tokens"].shape == (2, 5)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 100, 257])
def test_places_computed_alone_are_a_permutation_that_depends_on_seed_and_epoch(size):
    found = [shuffle.places_of(seed, epoch, size, np.arange(size)) for seed, epoch in ((0, 0), (0, 1), (5, 0))]
    for order in found:
        assert sorted(order) == list(range(size))
        for number in (0, size - 1):
            assert shuffle.places_of(0, 0, size, np.array([number]))[0] == found[0][number]
    if size > 16:
        assert len({order.tobytes() for order in found}) == 3 and not np.array_equal(found[0], np.arange(size))


def test_places_computed_alone_are_spread_evenly():
    order = shuffle.places_of(3, 0, 1000, np.arange(1000))
    # Thirds of the places in thirds of the order: 111 each but for chance, of which six standard deviations are 30.
    counts = np.histogram2d(np.arange(1000), order, bins=3, range=((0, 999), (0, 999)))[0]
    assert np.abs(counts - 1000 / 9).max() < 35
    assert abs(np.corrcoef(np.arange(1000), order)[0, 1]) < 0.15


def test_more_windows_than_an_order_holds_are_each_read_once_and_take_no_more_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(data, "ORDERED", 10)
    stream = data.batches(np.arange(200), batch=3, length=8, seed=1)
    assert stream.windows == 24
    firsts = np.concatenate([next(stream)["tokens"][:, 0] for _ in range(8)])
    assert sorted(firsts) == list(range(0, 192, 8))
    monkeypatch.undo()
    path = tmp_path / "tokens.bin"
    with open(path, "wb") as file:
        file.truncate(1 << 32)  # two thousand million ids, of which the disk holds none
    tokens = np.memmap(path, dtype="<u2", mode="r")
    tracemalloc.start()
    try:
        batch = next(data.batches(tokens, batch=4, length=128, seed=0, start=10**6))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert batch["tokens"].shape == (4, 128) and peak < 1_000_000
