"""Bad folders: one clear error each, before any model exists."""

from __future__ import annotations

import json
import pickle
import struct
import warnings

import numpy as np
import pytest
from three import PACKAGES, load, to

from core_numpy.contract.families import FAMILIES, Pretrained, family_of
from core_numpy.contract.families.family import FIXED, INERT
from core_numpy.contract.files import load_params, save_params

CONFIG = {"vocab": 11, "width": 6, "heads": 3, "layers": 2, "max_length": 5, "activation": "gelu_tanh",
          "tie_embeddings": True}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """A sound GPT-2."""
    C = load("core_numpy")
    C.Transformer(C.ModelConfig(**CONFIG), seed=1).save_pretrained(tmp_path, family="gpt2")
    return tmp_path


def fields(folder, **changes):
    """Change `config.json`; None leaves a field out."""
    path = folder / "config.json"
    stored = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in stored.items() if value is not ...}))


def tensors(folder, change):
    path = folder / "model.safetensors"
    stored = load_params(path)
    change(stored)
    save_params(path, stored)


def check_refused(folder, *words, kind=ValueError, packages=("core_numpy",)):
    for package in packages:
        with pytest.raises(kind) as caught:
            load(package).Transformer.from_pretrained(folder)
        for word in words:
            assert word in str(caught.value), str(caught.value)


def test_no_folder_and_no_config(folder, tmp_path):
    check_refused(tmp_path / "nowhere", "does not exist", kind=FileNotFoundError, packages=PACKAGES)
    check_refused("some-hub/some-model", "nothing is downloaded", kind=FileNotFoundError, packages=PACKAGES)
    (folder / "config.json").unlink()
    check_refused(folder, "config.json", kind=FileNotFoundError, packages=PACKAGES)


def test_a_config_that_is_no_object(folder):
    (folder / "config.json").write_text("[1, 2")
    check_refused(folder, "config.json", "JSON")
    (folder / "config.json").write_text("[1, 2]")
    check_refused(folder, "config.json", "object")


def test_an_unknown_family_lists_the_known_ones(folder):
    fields(folder, model_type="mamba")
    check_refused(folder, "mamba", *FAMILIES, packages=PACKAGES)


def test_an_unknown_architecture_lists_the_known_ones(folder):
    fields(folder, architectures=["GPT2ForSequenceClassification"])
    check_refused(folder, "GPT2ForSequenceClassification", "GPT2LMHeadModel")


def test_a_field_that_nobody_reads_is_refused(folder):
    fields(folder, rope_scaling={"type": "linear", "factor": 2.0})
    check_refused(folder, "rope_scaling", "gpt2")


def test_a_missing_field_and_a_wrong_one_are_named(folder):
    fields(folder, n_embd=...)
    check_refused(folder, "n_embd")
    fields(folder, n_embd=7)
    check_refused(folder, "width", "7")
    fields(folder, n_embd="six")
    check_refused(folder, "width", kind=TypeError)


@pytest.mark.parametrize(
    ("name", "value"),
    [("scale_attn_by_inverse_layer_idx", True), ("scale_attn_weights", False), ("add_cross_attention", True),
     ("activation_function", "quick_gelu")],
)  # fmt: skip
def test_what_no_field_of_ours_says_is_refused(folder, name, value):
    fields(folder, **{name: value})
    check_refused(folder, name)


def test_weights_that_are_pickles_are_never_opened(folder):
    """A pickle runs whatever code it holds [vllm 12366]."""
    marker = folder / "ran"

    class Bomb:
        def __reduce__(self):
            return open, (str(marker), "w")

    (folder / "model.safetensors").unlink()
    check_refused(folder, "safetensors", kind=FileNotFoundError)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    check_refused(folder, "pytorch_model.bin", "unpickling", packages=PACKAGES)
    assert not marker.exists()


@pytest.mark.parametrize("keep", [0, 4, 9, 40, 900, -1])
def test_a_file_that_is_cut_off_is_refused(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    check_refused(folder, "model.safetensors", "sound")


@pytest.mark.parametrize("length", [0, 1 << 62, 7])
def test_a_header_length_that_lies_is_refused(folder, length):
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
    check_refused(folder, "model.safetensors", packages=PACKAGES)


def test_offsets_that_lie_are_refused(folder):
    """Offsets and shapes that disagree, before anything is allocated [mlx 3363]."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"shape": [11, 6]', b'"shape": [12, 6]'))
    check_refused(folder, "transformer.wte.weight")


def test_shapes_that_contradict_the_config_are_listed(folder):
    """Names alone do not make a model fit [flax 2436]."""
    fields(folder, vocab_size=12, n_positions=6)
    check_refused(folder, "wte.weight has shape (11, 6)", "(12, 6)", "wpe.weight has shape (5, 6)", packages=PACKAGES)


def test_missing_and_surplus_tensors_are_listed(folder):
    """What is left over is never ignored unnamed [transformers 28122]."""

    def change(stored):
        stored["transformer.h.0.attn.rotary.weight"] = stored.pop("transformer.h.0.ln_1.weight")
        del stored["transformer.ln_f.bias"]

    tensors(folder, change)
    check_refused(
        folder, "h.0.attn.rotary.weight is not a tensor", "h.0.ln_1.weight is missing", "ln_f.bias is missing"
    )


def test_a_tied_tensor_that_differs_is_refused_and_an_equal_one_is_not(folder):
    def change(stored):
        stored["lm_head.weight"] = stored["transformer.wte.weight"].copy()

    tensors(folder, change)
    Pretrained(folder)

    def spoil(stored):
        stored["lm_head.weight"][3, 2] += 1.0

    tensors(folder, spoil)
    check_refused(folder, "lm_head.weight differs from wte.weight")


def test_the_same_tensor_twice_is_refused(folder):
    def change(stored):
        stored["wte.weight"] = stored["transformer.wte.weight"]

    tensors(folder, change)
    check_refused(folder, "wte.weight twice")


def test_integers_are_no_weights(folder):
    def change(stored):
        stored["transformer.ln_f.bias"] = np.arange(6)

    tensors(folder, change)
    check_refused(folder, "I64", "F32")


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_nan_is_named_in_a_warning_and_infinity_is_not(package, dtype, folder):
    import ml_dtypes

    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)

    def change(stored):
        for name in stored:
            stored[name] = stored[name].astype(kind)
        stored["transformer.h.1.attn.c_attn.weight"][2, 3] = -np.nan
        stored["transformer.ln_f.weight"][1] = np.inf
        stored["transformer.ln_f.bias"][1] = -np.inf

    tensors(folder, change)
    with pytest.warns(UserWarning, match=r"h\.1\.attn\.c_attn\.weight .*holds NaN") as caught:
        load(package).Transformer.from_pretrained(folder)
    assert len(caught) == 1
    # It points at the line that asked, not at one of ours.
    assert package == "backend_jax" or caught[0].filename == __file__


def test_an_index_that_does_not_fit_is_refused(folder):
    stored = load_params(folder / "model.safetensors")
    names = sorted(stored)
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    index = folder / "model.safetensors.index.json"
    place = dict.fromkeys(names, "one.safetensors")
    index.write_text(json.dumps({"weight_map": place}))
    Pretrained(folder)
    index.write_text(json.dumps({"weight_map": {**place, "ghost": "one.safetensors"}}))
    check_refused(folder, "ghost")
    index.write_text(json.dumps({"weight_map": {**place, names[0]: "../one.safetensors"}}))
    check_refused(folder, "../one.safetensors")
    index.write_text(json.dumps({"weight_map": {**place, names[0]: "two.safetensors"}}))
    check_refused(folder, "two.safetensors", kind=FileNotFoundError)
    index.write_text("{}")
    check_refused(folder, "weight_map")
    index.unlink()
    save_params(folder / "two.safetensors", {"x": np.ones(1)})
    check_refused(folder, "index.json")


@pytest.mark.parametrize("package", PACKAGES)
def test_a_prompt_longer_than_the_model_is_refused(package, folder):
    B = load(package)
    model = B.Transformer.from_pretrained(folder)
    with pytest.raises(ValueError, match=r"max_length \(5\)"):
        model(to(package, np.zeros((1, 6), np.int32)))
    with pytest.raises(ValueError, match="max_length"):
        B.generate(model, to(package, np.zeros((1, 4), np.int32)), max_new=3)


@pytest.mark.parametrize("package", PACKAGES)
def test_bad_arguments_are_refused(package, folder, tmp_path):
    B = load(package)
    with pytest.raises(ValueError, match="dtype"):
        B.Transformer.from_pretrained(folder, dtype="int8")
    model = B.Transformer.from_pretrained(folder)
    with pytest.raises(ValueError, match="family must be one of 'gpt2'"):
        model.save_pretrained(tmp_path / "new", family="gpt3")
    with pytest.raises(ValueError, match=r"llama cannot say|llama has no tensor"):
        model.save_pretrained(tmp_path / "new", family="llama")
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file"):
        model.save_pretrained(tmp_path / "file")


def test_a_configuration_no_family_can_say_is_refused_with_the_reasons():
    C = load("core_numpy")
    with pytest.raises(ValueError, match=r"gpt2 .*sinks"):
        family_of(C.ModelConfig(**CONFIG | {"sinks": True}))
    llama = {"positions": "rotary", "norm": "rms", "activation": "swiglu", "attention_bias": False, "ffn_bias": False}
    assert family_of(C.ModelConfig(**CONFIG | llama)).name == "llama"
    with pytest.raises(ValueError, match=r"llama .*softcap"):
        family_of(C.ModelConfig(**CONFIG | llama | {"softcap": 3.0}), "llama")
    with pytest.raises(ValueError, match="llama cannot say activation='relu'"):
        family_of(C.ModelConfig(**CONFIG | llama | {"activation": "relu"}), "llama")
    classifier = {"head": "classifier", "classes": 3, "head_bias": False, "tie_embeddings": False}
    with pytest.raises(ValueError, match="llama cannot say head='classifier'"):
        family_of(C.ModelConfig(**CONFIG | llama | classifier), "llama")


def test_rates_of_dropout_that_differ_are_said(folder):
    fields(folder, attn_pdrop=0.1, resid_pdrop=0.2)
    with pytest.warns(UserWarning, match="dropout is set to 0"):
        model = load("core_numpy").Transformer.from_pretrained(folder)
    assert model.config.dropout == 0.0


def test_the_copy_in_memory_is_not_the_file(folder):
    """A loaded model owns its numbers: writing into it does not change the file, nor the file's end the model."""
    C = load("core_numpy")
    before = (folder / "model.safetensors").read_bytes()
    model = C.Transformer.from_pretrained(folder)
    model.embedding.weight[...] = 0.0
    assert (folder / "model.safetensors").read_bytes() == before
    view = Pretrained(folder).read("embedding.weight")
    view[...] = 7.0
    assert (folder / "model.safetensors").read_bytes() == before


def test_every_fixed_and_inert_field_is_spelled_once():
    for family in FAMILIES.values():
        names = [line.stored for line in family.fields] + [name for rule in family.rules for name in rule.stored]
        names += [*family.fixed, *family.inert]
        assert len(names) == len(set(names)), family.name
        assert not set(names) & INERT - {"max_length"}, family.name
        assert not set(family.inert) & set(FIXED), family.name


def test_no_warning_comes_with_a_sound_folder(folder):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for package in PACKAGES:
            load(package).Transformer.from_pretrained(folder)
    assert [str(one.message) for one in said] == []


def test_a_trainers_checkpoint_is_named_with_what_reads_it(tmp_path):
    C = load("core_numpy")
    trainer = C.Trainer(C.Transformer(C.ModelConfig(vocab=8, width=8, heads=1, layers=1)), C.TrainConfig(steps=1))
    saved = trainer.save(tmp_path / "run")
    for folder in (saved, tmp_path / "run"):
        check_refused(folder, "checkpoint of a trainer", "Trainer.load", kind=FileNotFoundError, packages=PACKAGES)
