"""Files of pretrained models keep every bit: payloads of NaN, -0.0, denormal numbers, in every dtype and both ways."""

from __future__ import annotations

import warnings

import ml_dtypes
import numpy as np
import pytest
from three import PACKAGES, load

from core_numpy.contract.files import load_params

KINDS = {
    "float16": (np.dtype(np.float16), np.uint16),
    "bfloat16": (np.dtype(ml_dtypes.bfloat16), np.uint16),
    "float32": (np.dtype(np.float32), np.uint32),
    "float64": (np.dtype(np.float64), np.uint64),
}
# By dtype: quiet and signalling NaNs of both signs with payloads, infinities, -0.0, the least and the largest denormal
# of both signs, the least normal and the largest number.
ODD = {
    "float16": [0x7E00, 0x7E5A, 0xFE01, 0x7C01, 0xFD23, 0x7C00, 0xFC00, 0x8000, 0x0001, 0x83FF, 0x0400, 0x7BFF],
    "bfloat16": [0x7FC0, 0x7FDA, 0xFFC1, 0x7F81, 0xFFA3, 0x7F80, 0xFF80, 0x8000, 0x0001, 0x807F, 0x0080, 0x7F7F],
    "float32": [0x7FC00000, 0x7FC12345, 0xFFC00001, 0x7F800001, 0xFFA12345, 0x7F800000, 0xFF800000, 0x80000000,
                0x00000001, 0x807FFFFF, 0x00800000, 0x7F7FFFFF],
    "float64": [0x7FF8 << 48, 0x7FF8123456789ABC, 0xFFF8000000000001, 0x7FF0000000000001, 0xFFF4123456789ABC,
                0x7FF << 52, 0xFFF << 52, 1 << 63, 1, 0x800FFFFFFFFFFFFF, 1 << 52, 0x7FEFFFFFFFFFFFFF],
}  # fmt: skip
NANS = 5  # of each list, the first


def patterns(dtype, shape, seed, *, nan):
    """Random bits with the odd ones among them: everything that fits into the dtype, with NaN or without."""
    kind, bits = KINDS[dtype]
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape).astype(kind)
    odd = np.array(ODD[dtype] if nan else ODD[dtype][NANS:], bits)
    places = rng.permutation(x.size)[: odd.size]
    x.reshape(-1).view(bits)[places] = odd[: places.size]
    return x


# One family whose matrices are stored as they are and fused, one whose are turned, one with a row folded in.
FAMILIES = {
    "gpt2": {"activation": "gelu_tanh", "tie_embeddings": True},
    "llama": {"positions": "rotary", "norm": "rms", "activation": "swiglu", "attention_bias": False,
              "ffn_bias": False, "kv_heads": 1},
}  # fmt: skip
# Where a family keeps the embedding, layer 0's way down and layer 1's keys.
NAMED = {
    "gpt2": ["h.0.mlp.c_proj.weight", "h.1.attn.c_attn.weight", "wte.weight"],
    "llama": ["embed_tokens.weight", "layers.0.mlp.down_proj.weight", "layers.1.self_attn.k_proj.weight"],
}


@pytest.fixture
def x64():
    """JAX has float64 in this file."""
    jax = pytest.importorskip("jax")
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("package", PACKAGES)
def test_a_model_comes_back_from_its_folder_bit_for_bit(package, dtype, family, tmp_path, request):
    """Nothing is widened, quieted or flushed on the way; the tensors with NaN, and no other, are named."""
    if package == "backend_jax":
        request.getfixturevalue("x64")
    B = load(package)
    config = B.ModelConfig(vocab=13, width=6, heads=3, layers=2, max_length=5, **FAMILIES[family])
    model = B.Transformer(config, dtype=dtype)
    with_nan = {"embedding.weight", "blocks.0.ffn.down.weight", "blocks.1.attention.key.weight"}
    params = {
        name: patterns(dtype, x.shape, seed, nan=name in with_nan)
        for seed, (name, x) in enumerate(B.get_params(model).items())
    }
    B.set_params(model, params)
    model.save_pretrained(tmp_path, family=family)
    stored = load_params(tmp_path / "model.safetensors")
    assert {x.dtype for x in stored.values()} == {KINDS[dtype][0]}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again = B.Transformer.from_pretrained(tmp_path, dtype=dtype)
    named = sorted(str(each.message).split()[0] for each in caught)
    assert named == NAMED[family]
    for name, x in B.get_params(again).items():
        assert x.dtype == params[name].dtype
        assert x.tobytes() == params[name].tobytes(), name
    again.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("package", PACKAGES)
def test_half_precision_read_into_float32_is_exact(package, dtype, tmp_path):
    """Denormal numbers, -0.0 and infinities too; a NaN stays one, and is named."""
    B = load(package)
    config = B.ModelConfig(vocab=13, width=6, heads=3, layers=1, max_length=5, **FAMILIES["llama"])
    model = B.Transformer(config, dtype=dtype)
    params = {
        name: patterns(dtype, x.shape, seed, nan=name == "head.weight")
        for seed, (name, x) in enumerate(B.get_params(model).items())
    }
    B.set_params(model, params)
    model.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"lm_head\.weight .* holds NaN") as caught:
        wide = B.get_params(B.Transformer.from_pretrained(tmp_path))
    assert len(caught) == 1
    for name, x in wide.items():
        want = params[name].astype(np.float32)
        assert x.dtype == np.float32 and np.array_equal(x, want, equal_nan=True)
        assert np.array_equal(np.signbit(x), np.signbit(want)), name


def test_each_parameter_of_torch_has_a_storage_of_its_own(tmp_path):
    """They may share a file, and nothing that torch knows of: copies of one hold that one alone."""
    B = load("backend_torch")
    config = B.ModelConfig(vocab=13, width=6, heads=3, layers=1, max_length=5, **FAMILIES["gpt2"])
    B.Transformer(config).save_pretrained(tmp_path)
    model = B.Transformer.from_pretrained(tmp_path)
    storages = [p.untyped_storage() for p in model.parameters()]
    assert [len(each) for each in storages] == [p.nbytes for p in model.parameters()]
    assert len({each.data_ptr() for each in storages}) == len(storages)
    assert all(p.is_leaf and p.requires_grad and p.is_contiguous() for p in model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model.to("meta").embedding.weight.is_meta
