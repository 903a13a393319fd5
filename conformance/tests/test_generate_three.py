"""One key, one text: the three packages write the same tokens, ragged batches, rings that wrap, and samples."""

from __future__ import annotations

import numpy as np
import pytest

from conformance.tests.models_core import config_of, make
from conformance.tests.three import back, load, to
from core_numpy import generate, get_params, key

MODELS = {
    "rings": ("rotary-part", {"window": (3, 0)}),
    "rings and whole": ("grouped", {"layer_windows": ((2, 0), None)}),
    "rings with biases": ("alibi", {"window": (4, 0)}),
    "pair": ("encoder-decoder-shared", {}),
}
SAMPLING = {
    "greedy": {},
    "temperature": {"temperature": 0.9},
    "top k": {"temperature": 1.3, "top_k": 4},
    "top p": {"temperature": 1.1, "top_p": 0.8},
    "both": {"temperature": 1.1, "top_k": 6, "top_p": 0.9},
}


# JAX compiles two programs for each model and kind of sampling: one model by default.
PAIRS = [
    pytest.param(
        (package, name), marks=[pytest.mark.slow] if package == "backend_jax" and name != "rings with biases" else []
    )
    for package in ("backend_torch", "backend_jax")
    for name in MODELS
]


@pytest.fixture(scope="module", params=PAIRS, ids=lambda pair: " ".join(pair))
def models(request):
    """A package, the reference and the package's model, float32, all weights random, and a batch of ragged rows."""
    package, (name, changes) = request.param[0], MODELS[request.param[1]]
    config = config_of(name, max_length=40, **changes)
    reference, B = make(config, dtype="float32"), load(package)
    model = B.Transformer(config)
    B.set_params(model, get_params(reference))
    rng = np.random.default_rng(3)
    batch = {"tokens": rng.integers(0, 11, (3, 9)), "lengths": np.array([9, 2, 5])}
    if config.kind == "encoder_decoder":
        batch |= {"context": rng.integers(0, 11, (3, 7)), "context_lengths": np.array([7, 2, 4])}
    return package, reference, model, batch


@pytest.mark.parametrize("sampling", SAMPLING)
def test_one_key_gives_one_text_in_the_three(models, sampling):
    package, reference, model, batch = models
    options, B = SAMPLING[sampling], load(package)
    for seed, ragged in ((5, True), (6, False)):
        given = {name: x for name, x in batch.items() if name != "tokens" and (ragged or name != "lengths")}
        want = generate(
            reference, batch["tokens"], max_new=12, **given, **options, **({"key": key(seed)} if options else {})
        )
        mine = to(package, {name: np.array(x) for name, x in given.items()})
        mine |= {"key": B.key(seed)} if options else {}
        got = back(B.generate(model, to(package, batch["tokens"]), max_new=12, **mine, **options))
        assert np.array_equal(got, want)
        # Not a text of one letter, in which a wrong position could hide.
        assert len(set(want[:, 9:].reshape(-1).tolist())) > (2 if options else 1)


def test_a_row_writes_what_it_writes_alone(models):
    package, _, model, batch = models
    B, lengths = load(package), batch["lengths"]
    sources = {name: x for name, x in batch.items() if name.startswith("context")}
    together = back(
        B.generate(
            model, to(package, batch["tokens"]), max_new=12, lengths=to(package, lengths), **to(package, sources)
        )
    )
    for row, n in enumerate(lengths):
        alone = to(package, {name: x[row : row + 1] for name, x in sources.items()})
        text = back(B.generate(model, to(package, batch["tokens"][row : row + 1, :n].copy()), max_new=12, **alone))
        assert np.array_equal(text[0, n:], together[row, 9:])
