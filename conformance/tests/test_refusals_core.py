"""What configurations, models, layers and training refuse by its name: checks that all three packages share."""

from __future__ import annotations

import numpy as np
import pytest

import core_numpy as C
from core_numpy.contract.communication import step_communication
from core_numpy.contract.parallel import Layout

FIELDS = {"vocab": 7, "width": 8, "heads": 2, "layers": 1, "max_length": 4}
LINES = {"short_factors": (1.0, 1.0), "long_factors": (2.0, 2.0), "original_max_length": 4, "factor": 2.0}


def model_of(**fields):
    return C.Transformer(C.ModelConfig(**{**FIELDS, **fields}), dtype="float64")


def scaled(**fields):
    return lambda: C.RotaryScaling(**fields)


def configured(**fields):
    return lambda: C.ModelConfig(**{**FIELDS, **fields})


CONFIGS = {
    "llama3": (
        scaled(kind="llama3", factor=2.0, original_max_length=8, low_freq_factor=4.0, high_freq_factor=4.0),
        ValueError, r"high_freq_factor must be above low_freq_factor \(4\)",
    ),
    "yarn": (
        scaled(kind="yarn", factor=2.0, original_max_length=8, beta_fast=1.0, beta_slow=2.0),
        ValueError, r"beta_fast must be above beta_slow \(2\)",
    ),
    "longrope": (
        scaled(kind="longrope", **{**LINES, "long_factors": (2.0,)}), ValueError, r"long_factors must be as many as sh",
    ),
    "longrope of another head": (
        configured(positions="rotary", rotary_dim=2, rotary_scaling=C.RotaryScaling(kind="longrope", **LINES)),
        ValueError, "rotary_scaling must",
    ),
    "cross-attention": (
        lambda: C.BlockConfig(width=8, heads=2, cross_attention=True, norm_place="parallel"),
        ValueError, "cross_attention must",
    ),
    "causality that a block alone would have to guess": (
        lambda: C.BlockConfig(width=8, heads=2, causal=None), TypeError, r"BlockConfig\.causal must be True or False",
    ),
    "layer windows": (
        configured(layer_windows=((1, 0), None)), ValueError, r"layer_windows must be None or one window per la",
    ),
    "rotary scaling": (
        configured(positions="rotary", rotary_scaling={"kind": "linear"}), TypeError, "rotary_scaling must be a Rotary",
    ),
    "rotary size": (
        configured(positions="rotary", rotary_dim=6), ValueError, r"rotary_dim must be at most the head size \(4\)",
    ),
    "causal both ways": (
        configured(kind="encoder_decoder", causal=True), ValueError, "causal must be None for kind='encoder_decoder'",
    ),
    "cross-attention of a model": (
        configured(cross_attention=True), ValueError, "cross_attention must be False: kind='encoder_decoder' adds it",
    ),
    "side": (lambda: configured(kind="encoder_decoder")().stack("left"), ValueError, "side must be 'encoder' or 'de"),
    "block": (lambda: configured()().block(1), ValueError, "layer must be from 0 to 0; got 1"),
    "a stack of two": (
        lambda: C.Block(configured(kind="encoder_decoder")()), ValueError, r"config must have one stack; got kind='enc",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_that_makes_no_sense_is_refused(name):
    make, error, words = CONFIGS[name]
    with pytest.raises(error, match=words):
        make()


IDS = np.array([[1, 2, 3], [4, 5, 6]])
MODEL = model_of(positions="rotary")
BOTH = model_of(kind="encoder_decoder")
ENCODER = model_of(kind="encoder")
BLOCK = C.Block(C.BlockConfig(width=8, heads=2), dtype="float64")
CROSS = C.Block(C.BlockConfig(width=8, heads=2, cross_attention=True), dtype="float64")
X = np.zeros((2, 3, 8))
TABLE = np.zeros((3, 2))

CALLS = {
    "context of other rows": (lambda: BOTH(IDS, context=IDS[:1]), r"context must have the batch of tokens, 2; got"),
    "context of a block": (lambda: CROSS(X, context=X[:1]), r"context must have the batch of x, 2; got \(1,"),
    "context past the table": (
        lambda: BOTH(IDS, context=np.zeros((2, 5), int)), r"context must have at most max_length \(4\) positions",
    ),
    "lengths without a context": (
        lambda: BLOCK(X, context_lengths=np.array([1, 2])), "context_lengths must be None without a context",
    ),
    "positions": (lambda: MODEL(IDS, positions=np.arange(4)), r"positions must have shape \(3,\) or \(2, 3\)"),
    "params": (lambda: C.set_params(MODEL, [1]), "params must be a dict of canonical names to NumPy arrays; got list"),
    "cache": (lambda: MODEL(IDS, cache={}), "cache must be a KVCache; got dict"),
    "cache of an encoder": (
        lambda: ENCODER(IDS, cache=C.KVCache(ENCODER.config, 2, dtype="float64")),
        "cache must be None where attention is not causal",
    ),
    "segments with a cache": (
        lambda: MODEL(IDS, segments=IDS, cache=C.KVCache(MODEL.config, 2, dtype="float64")),
        "segments must be None with a cache",
    ),
    "unsigned segments": (
        lambda: MODEL(IDS, segments=IDS.astype(np.uint8)), "segments must hold signed integers, a negative id is pad",
    ),
    "rotary": (lambda: BLOCK(X, rotary=TABLE), r"rotary must be the pair \(cos, sin\) of rotary_tables; got"),
    "rotary of other lengths": (
        lambda: BLOCK(X, rotary=(TABLE, TABLE[:2])), r"rotary sin must have shape \(3, pairs\) or \(2, 3, pairs\)",
    ),
    "a cache of nothing": (lambda: C.KVCache({"width": 8}, 2), "config must be a ModelConfig or a BlockConfig"),
    "a loss without a head": (
        lambda: C.loss_and_gradients(model_of(head="none"), {"tokens": IDS, "targets": IDS}),
        "model must have head='lm' or 'classifier' to have a loss",
    ),
    "the training's configuration": (
        lambda: C.Trainer(MODEL, {"steps": 1}), "config must be a TrainConfig; got dict"
    ),
    "the training's model": (lambda: C.Trainer(BLOCK, C.TrainConfig()), "model must be a Transformer; got Block"),
    "generate without a head": (
        lambda: C.generate(model_of(head="none"), IDS, max_new=1), "model must be a Transformer with head='lm'",
    ),
    "generate both ways": (
        lambda: C.generate(model_of(kind="encoder", head="lm"), IDS, max_new=1), "model must be causal to generate",
    ),
    "generate from nothing": (
        lambda: C.generate(MODEL, IDS[:, :0], max_new=1), "tokens must hold at least one token per row",
    ),
    "temperature": (
        lambda: C.generate(MODEL, IDS, max_new=1, temperature=-1.0), "temperature must be a number of at least 0",
    ),
    "top_p": (
        lambda: C.generate(MODEL, IDS, max_new=1, temperature=1.0, top_p=1.5, key=C.key(0)),
        "top_p must be a number above 0 and at most 1; got 1.5",
    ),
    "an axis": (lambda: C.softmax(X, axis="last"), "axis must be an integer; got"),
    "an offset of bool": (lambda: C.relative_buckets(3, 3, q_offset=True), "q_offset must be an integer or an integer"),
    "no classes": (lambda: C.cross_entropy(np.zeros((2, 0)), np.array([0, 0])), "logits must have a last axis of at"),
    "z_loss": (
        lambda: C.cross_entropy(np.zeros((1, 2)), np.array([0]), z_loss=-1.0), "z_loss must be a number of at least 0",
    ),
    "no features": (lambda: C.rms_norm(np.zeros((2, 0)), np.zeros(0), eps=1e-6), "x must have a last axis of at least"),
    "what an encoder-decoder sends": (
        lambda: step_communication(BOTH.config, Layout(data=2), 2, 4), "config.kind must be 'decoder' or 'encoder'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_makes_no_sense_is_refused(name):
    call, words = CALLS[name]
    with pytest.raises((TypeError, ValueError), match=words):
        call()


def test_a_cache_takes_its_source_again_as_a_copy_and_no_other():
    cache = C.KVCache(BOTH.config, 2, dtype="float64")
    want = BOTH(IDS, context=IDS)
    first = BOTH(IDS[:, :2], context=IDS, cache=cache)
    then = BOTH(IDS[:, 2:], context=IDS.copy(), cache=cache)
    np.testing.assert_allclose(np.concatenate([first, then], 1), want, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="context must be what the cache was begun with"):
        BOTH(IDS[:, :1], context=np.flip(IDS), cache=cache)
