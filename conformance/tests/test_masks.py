"""The mask builders of the three packages: against plain loops, against each other, and what they refuse."""

from __future__ import annotations

import importlib
import itertools
from importlib.util import find_spec

import numpy as np
import pytest

import core_numpy

NEEDS = {"core_numpy": "numpy", "backend_torch": "torch", "backend_jax": "jax"}
LENGTHS = np.array([0, 2, 5], dtype=np.int32)
SHAPES = ((4, 4, None), (3, 5, 0), (3, 5, 2), (5, 2, -3), (2, 3, 9), (1, 4, 3), (0, 3, 1), (3, 0, 0))
OFFSETS = np.array([-2, 0, 1, 3], dtype=np.int32)


@pytest.fixture(scope="module", params=list(NEEDS))
def call(request):
    """call(name, *arguments, **keywords): a function of one package, NumPy arrays in and out."""
    if find_spec(NEEDS[request.param]) is None:
        pytest.skip(f"{NEEDS[request.param]} is not installed")
    module = importlib.import_module(request.param)
    if request.param == "core_numpy":
        return lambda name, *arguments, **keywords: getattr(module, name)(*arguments, **keywords)
    arrays = importlib.import_module(f"{request.param}.arrays")

    def convert(x):
        return arrays.from_numpy(x) if isinstance(x, np.ndarray) else x

    def run(name, *arguments, **keywords):
        keywords = {key: convert(x) for key, x in keywords.items()}
        result = getattr(module, name)(*map(convert, arguments), **keywords)
        return None if result is None else arrays.to_numpy(result)

    return run


def by_loops(shape, rule):
    """A boolean array of (..., T, S) from rule(b, i, j)."""
    mask = np.zeros(shape, dtype=np.bool_)
    for index in itertools.product(*map(range, shape)):
        mask[index] = rule(index[0], *index[-2:])
    return mask


def check_same(got, want):
    assert got.dtype == want.dtype and got.shape == want.shape
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("T", "S", "offset"), SHAPES)
def test_causal_is_key_up_to_query_plus_offset(call, T, S, offset):
    want = by_loops((T, S), lambda _, i, j: j <= i + (offset or 0))
    check_same(call("causal_mask", T, S, q_offset=offset), want)
    if T == S:
        check_same(call("causal_mask", T), want)


def test_causal_on_paper(call):
    check_same(call("causal_mask", 2, 3, q_offset=1), np.array([[1, 1, 0], [1, 1, 1]], dtype=bool))
    check_same(call("causal_mask", 2, 3, q_offset=0), np.array([[1, 0, 0], [1, 1, 0]], dtype=bool))


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.uint8])
def test_offsets_per_batch_element_give_the_full_rank(call, dtype):
    offsets = np.array([0, 100, 3], dtype=dtype) if dtype is np.uint8 else np.array([-2, 100, 3], dtype=dtype)
    want = by_loops((3, 1, 4, 6), lambda b, i, j: j <= i + int(offsets[b]))
    check_same(call("causal_mask", 4, 6, q_offset=offsets), want)
    want = by_loops((3, 1, 4, 6), lambda b, i, j: i + int(offsets[b]) - 2 <= j <= i + int(offsets[b]) + 1)
    check_same(call("sliding_window_mask", 4, 6, left=2, right=1, q_offset=offsets), want)
    # An array without axes is the same as the number.
    check_same(call("causal_mask", 4, 6, q_offset=np.asarray(offsets[2])), call("causal_mask", 4, 6, q_offset=3))


@pytest.mark.parametrize(("T", "S", "offset"), SHAPES)
@pytest.mark.parametrize(("left", "right"), [(0, 0), (2, 1), (1, None), (None, 0), (None, None), (0, 3)])
def test_a_window_counts_distances(call, T, S, offset, left, right):
    def rule(_, i, j):
        at = i + (offset or 0)
        return (left is None or at - left <= j) and (right is None or j <= at + right)

    check_same(call("sliding_window_mask", T, S, left=left, right=right, q_offset=offset), by_loops((T, S), rule))


def test_a_window_of_two_to_the_left_sees_three_keys(call):
    assert call("sliding_window_mask", 6, left=2, right=0).sum(axis=1).tolist() == [1, 2, 3, 3, 3, 3]


def test_padding_masks_keys_at_and_past_the_length(call):
    check_same(call("padding_mask", LENGTHS, 5), by_loops((3, 1, 1, 5), lambda b, _, j: j < LENGTHS[b]))
    assert call("padding_mask", LENGTHS[:0], 5).shape == (0, 1, 1, 5)
    assert call("padding_mask", LENGTHS * 0, 0).shape == (3, 1, 1, 0)


def test_padding_from_tokens_masks_the_padding_token_wherever_it_stands(call):
    tokens = np.array([[7, 7, 1, 2, 7], [3, 7, 7, 7, 7]], dtype=np.int32)
    check_same(call("padding_mask_from_tokens", tokens, 7), by_loops((2, 1, 1, 5), lambda b, _, j: tokens[b, j] != 7))
    check_same(call("padding_mask_from_tokens", tokens, -1), np.ones((2, 1, 1, 5), dtype=bool))


def test_segments_match_equal_ids_and_padding_matches_nothing(call):
    of_q = np.array([[0, 0, 1, -1], [2, -2, -2, 0]], dtype=np.int32)
    of_k = np.array([[0, 1, -1, 0, 2], [-2, 2, 2, 0, -1]], dtype=np.int32)
    want = by_loops((2, 1, 4, 5), lambda b, i, j: of_q[b, i] == of_k[b, j] and of_q[b, i] >= 0)
    check_same(call("segment_mask", of_q, of_k), want)
    check_same(call("segment_mask", of_q), call("segment_mask", of_q, of_q))
    assert not call("segment_mask", of_q)[0, 0, 3].any()


@pytest.mark.parametrize("offset", [0, 2, OFFSETS[1:]], ids=str)
def test_a_prefix_is_open_and_the_rest_causal(call, offset):
    def rule(b, i, j):
        return j < LENGTHS[b] or j <= i + int(offset[b] if np.ndim(offset) else offset)

    check_same(call("prefix_mask", 4, 5, LENGTHS, q_offset=offset), by_loops((3, 1, 4, 5), rule))
    check_same(call("prefix_mask", 5, None, LENGTHS), call("prefix_mask", 5, 5, LENGTHS, q_offset=0))


def test_a_prefix_opens_causality_only(call):
    """(causal or prefix) and the rest: a padded key in the prefix stays masked."""
    prefix, padding = call("prefix_mask", 3, None, np.array([2, 3])), call("padding_mask", np.array([1, 3]), 3)
    want = np.array([[[1, 0, 0]] * 3, [[1, 1, 1]] * 3], dtype=bool)[:, None]
    check_same(call("combine_masks", prefix, padding), want)


def test_combining_is_the_logical_and_and_none_restricts_nothing(call):
    causal, padding = np.tri(3, 5, dtype=bool), np.array([[1, 0, 1, 1, 1], [1, 1, 1, 1, 0]], dtype=bool)[:, None, None]
    check_same(call("combine_masks", causal, None, padding), causal & padding)
    check_same(call("combine_masks", None, causal), causal)
    assert call("combine_masks", None, None) is None and call("combine_masks") is None


def test_from_blocked_turns_the_meaning_round(call):
    blocked = np.array([[0, 1, 1], [0, 0, 1]], dtype=bool)
    check_same(call("from_blocked", blocked), np.array([[1, 0, 0], [1, 1, 0]], dtype=bool))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_bias_from_a_mask_is_0_and_minus_infinity(call, dtype):
    bias = call("mask_to_bias", np.array([[True, False]]), dtype)
    assert bias.dtype.name == dtype and bias.tolist() == [[0.0, -np.inf]]


def test_a_float64_bias_is_float64_or_refused(call, request):
    if "backend_jax" in request.node.name:
        with pytest.raises(TypeError, match="jax_enable_x64"):
            call("mask_to_bias", np.array([[True, False]]), "float64")
    else:
        assert call("mask_to_bias", np.array([[True, False]]), "float64").dtype == np.float64


def test_positions_start_at_the_first_real_token(call):
    padding = np.array([[0, 0, 1, 1, 1], [1, 1, 0, 0, 0], [1, 0, 1, 0, 1], [0, 0, 0, 0, 0]], dtype=bool)
    want = [[0, 0, 0, 1, 2], [0, 1, 1, 1, 1], [0, 0, 1, 1, 2], [0, 0, 0, 0, 0]]
    check_same(call("positions_from_mask", padding), np.array(want, dtype=np.int32))


def test_inputs_are_not_written_to(call):
    mask = np.array([[True, False], [False, True]])
    for name, arguments in {"from_blocked": (), "combine_masks": (~mask,), "mask_to_bias": ("float32",)}.items():
        call(name, mask, *arguments)
    call("positions_from_mask", mask)
    check_same(mask, np.array([[True, False], [False, True]]))


BOOLS, INTS, FLOATS = np.ones((2, 3), bool), np.ones((2, 3), np.int32), np.ones((2, 3), np.float32)
REFUSALS = [
    ("causal_mask", (2.0,), {}, TypeError, "T must be an integer of at least 0"),
    ("causal_mask", (True,), {}, TypeError, "T must be an integer of at least 0"),
    ("causal_mask", (-1,), {}, ValueError, "T must be an integer of at least 0"),
    ("causal_mask", (2, -1), {"q_offset": 0}, ValueError, "S must be an integer of at least 0"),
    ("causal_mask", (2, 3), {}, ValueError, "q_offset=0 is the top-left reading"),
    ("causal_mask", (2, 3), {}, ValueError, "q_offset=1 the bottom-right one"),
    ("causal_mask", (2, 3), {"q_offset": 1.0}, TypeError, "q_offset must be an integer or an integer array"),
    ("causal_mask", (2, 3), {"q_offset": True}, TypeError, "q_offset must be an integer"),
    ("causal_mask", (2, 3), {"q_offset": FLOATS[0]}, TypeError, "q_offset must hold integers"),
    ("causal_mask", (2, 3), {"q_offset": INTS}, ValueError, "q_offset must be an integer or an integer array of shape"),
    ("sliding_window_mask", (2, 3), {"left": 1, "right": 1}, ValueError, "q_offset must be given where T != S"),
    ("sliding_window_mask", (3,), {"left": -1, "right": 1}, ValueError, "left must be an integer of at least 0"),
    ("sliding_window_mask", (3,), {"left": 1, "right": 0.5}, TypeError, "right must be an integer of at least 0"),
    ("padding_mask", ([1, 2], 3), {}, TypeError, "lengths must be an array"),
    ("padding_mask", (FLOATS[0], 3), {}, TypeError, "lengths must hold integers"),
    ("padding_mask", (INTS, 3), {}, ValueError, "lengths must have shape (B,)"),
    ("padding_mask", (LENGTHS, 4), {}, ValueError, "lengths must be from 0 to the key length 4"),
    ("padding_mask", (LENGTHS - 1, 5), {}, ValueError, "got values from -1 to 4"),
    ("padding_mask_from_tokens", (FLOATS, 0), {}, TypeError, "tokens must hold integers"),
    ("padding_mask_from_tokens", (INTS[0], 0), {}, ValueError, "tokens must have shape (batch, length)"),
    ("padding_mask_from_tokens", (INTS, None), {}, TypeError, "pad_id must be an integer"),
    ("segment_mask", (FLOATS,), {}, TypeError, "q_segments must hold integers"),
    ("segment_mask", (INTS[0],), {}, ValueError, "q_segments must have shape (batch, length)"),
    ("segment_mask", (INTS, INTS[:1]), {}, ValueError, "kv_segments must have shape (2, 3)"),
    ("segment_mask", (INTS.astype(np.uint8),), {}, TypeError, "q_segments must hold signed integers"),
    ("prefix_mask", (3, None, FLOATS[0]), {}, TypeError, "prefix_lengths must hold integers"),
    ("prefix_mask", (3, None, LENGTHS), {}, ValueError, "prefix_lengths must be from 0 to the key length 3"),
    ("prefix_mask", (3, 5, LENGTHS), {}, ValueError, "q_offset must be given where T != S"),
    ("prefix_mask", (3, 5, LENGTHS), {"q_offset": OFFSETS}, ValueError, "q_offset must have shape (3,)"),
    ("combine_masks", (BOOLS, INTS), {}, TypeError, "masks[1] must be boolean"),
    ("combine_masks", (BOOLS, BOOLS.T), {}, ValueError, "masks must broadcast to one shape"),
    ("combine_masks", (BOOLS[None], BOOLS[None, None]), {}, ValueError, "one common full rank"),
    ("from_blocked", (FLOATS,), {}, TypeError, "mask must be boolean"),
    ("from_blocked", (INTS,), {}, TypeError, "mask must be boolean"),
    ("mask_to_bias", (FLOATS, "float32"), {}, TypeError, "mask must be boolean"),
    ("mask_to_bias", (BOOLS, "int32"), {}, ValueError, "dtype must be one of 'float16'"),
    ("mask_to_bias", (BOOLS, np.float32), {}, TypeError, "dtype must be a name"),
    ("positions_from_mask", (INTS,), {}, TypeError, "padding must be boolean"),
    ("positions_from_mask", (BOOLS[None, None],), {}, ValueError, "padding must have shape (batch, length)"),
]


@pytest.mark.parametrize(("name", "arguments", "keywords", "exception", "phrase"), REFUSALS)
def test_what_is_wrong_is_refused_with_a_sentence_that_names_it(call, name, arguments, keywords, exception, phrase):
    with pytest.raises(exception) as caught:
        call(name, *arguments, **keywords)
    assert phrase in str(caught.value) and type(caught.value) is exception


# ---------------------------------------------------------------- masks and attention say the same


def test_a_mask_and_the_keyword_it_stands_for_give_the_same_attention():
    r = np.random.default_rng(0)
    q, k, v = r.normal(size=(3, 2, 4, 6)), r.normal(size=(3, 2, 5, 6)), r.normal(size=(3, 2, 5, 7))
    offsets = OFFSETS[:3]
    of_q, of_k = r.integers(-1, 2, size=(3, 4)), r.integers(-1, 2, size=(3, 5))
    mask = core_numpy.combine_masks(
        core_numpy.causal_mask(4, 5, q_offset=offsets),
        core_numpy.sliding_window_mask(4, 5, left=2, right=None, q_offset=offsets),
        core_numpy.padding_mask(LENGTHS, 5),
        core_numpy.segment_mask(of_q, of_k),
    )
    keywords = {"causal": True, "window": (2, None), "q_offset": offsets, "kv_lengths": LENGTHS}
    got = core_numpy.attention(q, k, v, **keywords, q_segments=of_q, kv_segments=of_k)
    np.testing.assert_allclose(got, core_numpy.attention(q, k, v, mask=mask), atol=1e-14)


def test_jax_builds_masks_from_traced_values():
    jax = pytest.importorskip("jax")
    import backend_jax

    built = jax.jit(
        lambda offset, lengths, ids, tokens: (
            backend_jax.causal_mask(4, 5, q_offset=offset),
            backend_jax.sliding_window_mask(4, 5, left=1, right=0, q_offset=offset),
            backend_jax.padding_mask(lengths, 5),
            backend_jax.prefix_mask(4, 5, lengths, q_offset=offset),
            backend_jax.segment_mask(ids),
            backend_jax.padding_mask_from_tokens(tokens, 1),
            backend_jax.positions_from_mask(tokens != 1),
            backend_jax.mask_to_bias(tokens != 1, "bfloat16"),
        )
    )(OFFSETS[:3], LENGTHS, OFFSETS[None], np.array([[1, 2, 3]], dtype=np.int32))
    check_same(np.asarray(built[0]), core_numpy.causal_mask(4, 5, q_offset=OFFSETS[:3]))
    check_same(np.asarray(built[1]), core_numpy.sliding_window_mask(4, 5, left=1, right=0, q_offset=OFFSETS[:3]))
    check_same(np.asarray(built[2]), core_numpy.padding_mask(LENGTHS, 5))
    check_same(np.asarray(built[3]), core_numpy.prefix_mask(4, 5, LENGTHS, q_offset=OFFSETS[:3]))
    check_same(np.asarray(built[4]), core_numpy.segment_mask(OFFSETS[None]))
    check_same(np.asarray(built[5]), np.array([[[[False, True, True]]]]))
    check_same(np.asarray(built[6]), np.array([[0, 0, 1]], dtype=np.int32))
    assert np.asarray(built[7]).astype(np.float32).tolist() == [[-np.inf, 0, 0]]


def test_a_traced_number_may_be_the_offset_in_jax():
    jax = pytest.importorskip("jax")
    import backend_jax

    check_same(np.asarray(jax.jit(lambda n: backend_jax.causal_mask(2, 5, q_offset=n))(3)), np.tri(2, 5, 3, dtype=bool))


def test_torch_masks_live_where_their_tensors_do():
    torch = pytest.importorskip("torch")
    import backend_torch

    lengths = torch.zeros(3, dtype=torch.int64, device="meta")
    for mask in (
        backend_torch.padding_mask(lengths, 4),
        backend_torch.prefix_mask(2, 4, lengths, q_offset=0),
        backend_torch.causal_mask(2, 4, q_offset=lengths),
        backend_torch.sliding_window_mask(2, 4, left=1, right=1, q_offset=lengths),
    ):
        assert mask.device.type == "meta"
