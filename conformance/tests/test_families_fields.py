"""Fields of other people's configurations that contradict each other, or that a family has no word for."""

from __future__ import annotations

import json

import numpy as np
import pytest

import core_numpy as C
from core_numpy.contract.families import Pretrained, family_of
from core_numpy.contract.families.folder import has_nan, read_entries, view, write_folder
from core_numpy.contract.files import load_params, save_params

SIZES = {"vocab": 11, "width": 8, "heads": 2, "layers": 2, "max_length": 8}
LLAMA = {"positions": "rotary", "norm": "rms", "activation": "swiglu", "attention_bias": False, "ffn_bias": False,
         "norm_eps": 1e-6}  # fmt: skip
GEMMA = {**LLAMA, "activation": "geglu_tanh", "unit_offset": True, "embedding_scale": 8**0.5, "tie_embeddings": True}
GEMMA2 = {**GEMMA, "norm_place": "sandwich"}
GPT2 = {"activation": "gelu_tanh", "tie_embeddings": True}
BLOOM = {"positions": "alibi", "activation": "gelu_tanh", "tie_embeddings": True, "embedding_norm": True}
T5 = {"kind": "encoder_decoder", "positions": "relative", "norm": "rms", "activation": "relu", "attention_bias": False,
      "ffn_bias": False, "scale": 1.0, "share_embedding": True, "norm_eps": 1e-6}  # fmt: skip
FAMILIES = {"llama": LLAMA, "mistral": LLAMA, "qwen2": {**LLAMA, "attention_bias": True, "output_bias": False},
            "gemma": GEMMA, "gemma2": GEMMA2, "gpt2": GPT2, "bloom": BLOOM, "t5": T5}  # fmt: skip


def config_of(family, **changes):
    return C.ModelConfig(**{**SIZES, **FAMILIES[family], **changes})


def saved(folder, family, fields, **changes):
    """A folder of the family whose config.json has these fields too; `...` takes one out."""
    C.Transformer(config_of(family, **changes), seed=1).save_pretrained(folder, family=family)
    path = folder / "config.json"
    stored = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({name: value for name, value in stored.items() if value is not ...}))
    return folder


YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4}
READ = {
    "rope_parameters of a list": ("llama", {"rope_parameters": [1]}, "rope_parameters must be an object or null"),
    "two factors": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}, "rope_scaling": {"type": "linear", "factor": 3.0}},
        "factor must be the same in rope_parameters and rope_scaling; got 2.0 and 3.0",
    ),
    "two bases": (
        "llama", {"rope_parameters": {"rope_theta": 10.0}, "rope_theta": 20.0}, "rope_theta must be the same in all pl",
    ),
    "dynamic of another length": (
        "llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 4}},
        "original_max_position_embeddings must be max_position_embeddings for dynamic scaling",
    ),
    "what linear scaling has no use for": (
        "llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "beta_fast": 4.0}},
        "linear rotary scaling has no use for beta_fast = 4.0",
    ),
    "no window": ("mistral", {"sliding_window": 0}, "sliding_window must be a positive integer or null; got 0"),
    "query_pre_attn_scalar": ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a positive"),
    "two widths": ("bloom", {"hidden_size": 8, "n_embed": 12}, r"hidden_size \(or n_embed, its older name\) must be"),
    "feed_forward_proj": ("t5", {"feed_forward_proj": "tanh"}, r"feed_forward_proj must be gelu\|.*; got 'tanh'"),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_a_field_that_contradicts_or_is_none_is_refused(name, tmp_path):
    family, fields, words = READ[name]
    with pytest.raises(ValueError, match=words) as refused:
        Pretrained(saved(tmp_path / "model", family, fields))
    assert "config.json: " in str(refused.value)


WRITTEN = {
    "gemma": ({"activation": "geglu"}, "gemma cannot say activation='geglu'"),
    "llama": ({"rotary_scaling": C.RotaryScaling(kind="ntk", factor=2.0)}, "no word for rotary_scaling of kind 'ntk'"),
    "mistral": ({"layer_windows": ((2, 0), None)}, "sliding_window serves all layers or none"),
    "gemma2": ({"layer_windows": ((2, 0), (3, 0))}, r"the files have one window size for all layers; got \[3, 4\]"),
    "gpt2": ({"head": "classifier", "classes": 2, "tie_embeddings": False}, "gpt2 "),
    "t5": ({"activation": "geglu"}, "t5 cannot say activation='geglu': its 'gated-gelu' is the tanh form"),
    "bloom": ({"activation": "relu"}, "bloom cannot say "),
}


@pytest.mark.parametrize("family", WRITTEN)
def test_what_a_family_has_no_word_for_is_refused(family):
    changes, words = WRITTEN[family]
    assert family_of(config_of(family), family).name == family
    with pytest.raises(ValueError, match=words):
        family_of(config_of(family, **changes), family)


def test_a_truncation_that_is_the_usual_one_and_zero_betas_are_read(tmp_path):
    fields = {"rope_parameters": {**YARN, "truncate": True, "beta_fast": None, "beta_slow": 0}}
    scaling = Pretrained(saved(tmp_path / "model", "llama", fields)).config.rotary_scaling
    assert scaling == C.RotaryScaling(kind="yarn", factor=2.0, original_max_length=4)


def test_layers_from_one_on_have_the_window_where_no_types_are_listed(tmp_path):
    fields = {"layer_types": ..., "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
    found = Pretrained(saved(tmp_path / "model", "qwen2", fields, layer_windows=(None, (2, 0)))).config
    assert [found.block(i).window for i in range(2)] == [None, (2, 0)]


@pytest.mark.parametrize(("tied", "head"), [(True, "lm"), (False, "none")])
def test_without_an_architecture_the_tensors_say_which_head_it_is(tied, head, tmp_path):
    folder = saved(tmp_path / "model", "gpt2", {"architectures": ..., "tie_word_embeddings": tied})
    assert Pretrained(folder).config.head == head


def test_a_single_file_of_any_name_is_read_and_a_tensor_in_two_files_is_refused(tmp_path):
    folder = saved(tmp_path / "model", "gpt2", {})
    whole = C.get_params(C.Transformer.from_pretrained(folder))
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    again = C.get_params(C.Transformer.from_pretrained(folder))
    assert all(np.array_equal(whole[name], x) for name, x in again.items())
    stored = load_params(folder / "weights.safetensors")
    first = next(iter(stored))
    save_params(folder / "more.safetensors", {first: stored[first]})
    index = dict.fromkeys(stored, "weights.safetensors") | {"extra": "more.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(ValueError, match="is in both "):
        Pretrained(folder)


def test_a_tied_tensor_of_another_shape_is_refused(tmp_path):
    folder = saved(tmp_path / "model", "gpt2", {})
    stored = load_params(folder / "model.safetensors")
    save_params(folder / "model.safetensors", {**stored, "lm_head.weight": np.zeros((3, 8), np.float32)})
    with pytest.raises(ValueError, match=r"lm_head.weight differs from wte.weight, which the config ties it to"):
        Pretrained(folder)


def test_a_folder_with_an_index_is_not_written_into(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"holds model\.safetensors\.index\.json of another model"):
        C.Transformer(config_of("gpt2")).save_pretrained(tmp_path)


def test_empty_tensors_hold_no_nan_and_are_read_and_written(tmp_path):
    assert not has_nan(np.zeros((0, 3), np.float32))
    write_folder(
        tmp_path, {"model_type": "none"}, [("a", "float32", (0, 3))], iter([np.zeros((0, 3), np.float32)]), None
    )

    assert view(read_entries(tmp_path)["a"]).shape == (0, 3)
    with pytest.raises(ValueError, match=r"a must be float32 \(0, 3\); got float64 \(0, 3\)"):
        write_folder(tmp_path / "b", {}, [("a", "float32", (0, 3))], iter([np.zeros((0, 3))]), None)
