"""Folders of twelve families: the same numbers as in their home library, in three packages and both directions."""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess
import sys
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import home_models as F  # noqa: E402
from three import PACKAGES, back, load, to  # noqa: E402

from core_numpy.contract.families import FAMILIES, Pretrained, expanded  # noqa: E402
from core_numpy.contract.families.family import INERT, Given, read_config, resolve  # noqa: E402

# BLOOM's home library cuts the constant of its GELU off after 8 digits: 1.5e-10 was measured.
EXACT = {"Bloom": 1e-9}
ONE_EACH = ["gpt2", "llama one key", "mistral", "qwen2 window", "qwen3", "gemma", "gemma2", "phi part", "gpt_neox",
            "bloom", "bert", "t5"]  # fmt: skip
TOLERANCES = {"float64": 1e-10, "float32": 2e-5}
# Compiling the others takes JAX longer than the default run allows.
CALLS = [(package, name, dtype) for package in ("core_numpy", "backend_torch") for name in F.MODELS
         for dtype in TOLERANCES] + [
    pytest.param("backend_jax", name, dtype, marks=() if (name, dtype) in (("gemma2", "float64"), ("t5", "float32"))
                 else pytest.mark.slow) for name in F.MODELS for dtype in TOLERANCES
]  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Folder, arguments and float64 answer of each model by name, made when first asked for."""
    made = {}

    def of(name, seed=0):
        if (name, seed) not in made:
            with F.in_double(name), quiet():
                model = F.build(name, seed)
                folder = tmp_path_factory.mktemp("family")
                model.save_pretrained(folder)
                context = F.batch(seed + 90, length=8) if F.stem(name) == "T5" else None
                tokens, lengths = F.batch(seed + 50)
                with torch.no_grad():
                    want = F.call(model, tokens, lengths, context).numpy()
            made[name, seed] = folder, tokens, lengths, context, want
        return made[name, seed]

    return of


class quiet(warnings.catch_warnings):
    """The home library's own warnings are not ours to judge."""

    def __enter__(self):
        super().__enter__()
        warnings.simplefilter("ignore")


def answer(package, model, tokens, lengths, context):
    given = {"kv_lengths": to(package, lengths)}
    if context is not None:
        given |= {"context": to(package, context[0]), "context_lengths": to(package, context[1])}
    return back(model(to(package, tokens), **given))


def error(got, want, tokens, lengths):
    real = np.arange(tokens.shape[1]) < lengths[:, None]
    return float(np.abs(got - want)[real].max() / np.abs(want[real]).max())


@pytest.fixture
def x64():
    """JAX computes in float64 for one test."""
    jax = pytest.importorskip("jax")
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.mark.parametrize(("package", "name", "dtype"), CALLS)
def test_a_folder_gives_the_numbers_of_its_home_library(package, name, dtype, home, request):
    """Explicit head sizes, unequal fused parts, (in, out) or (out, in) [bumblebee 364, vllm 13686, nntile 370]."""
    B = load(package)
    if dtype == "float64" and package == "backend_jax":
        request.getfixturevalue("x64")
    folder, tokens, lengths, context, want = home(name)
    model = B.Transformer.from_pretrained(folder, dtype=dtype)
    assert model.dtype == dtype
    got = answer(package, model, tokens, lengths, context)
    assert error(got, want, tokens, lengths) < max(TOLERANCES[dtype], EXACT.get(F.stem(name), 0.0))


@pytest.mark.parametrize("name", ONE_EACH)
@pytest.mark.parametrize("seed", [1, 2])
def test_other_weights_agree_too(name, seed, home):
    B = load("backend_torch")
    folder, tokens, lengths, context, want = home(name, seed)
    model = B.Transformer.from_pretrained(folder, dtype="float64")
    got = answer("backend_torch", model, tokens, lengths, context)
    assert error(got, want, tokens, lengths) < EXACT.get(F.stem(name), 1e-10)


def test_every_family_has_a_model_here():
    assert {F.MODELS[name][0].split("For")[0].removesuffix("LMHead").lower() for name in ONE_EACH} == {
        name.replace("_", "") for name in FAMILIES
    }


@pytest.mark.parametrize("name", ONE_EACH)
def test_gradients_are_those_of_the_home_library(name):
    """The gradient of every stored tensor, carried over by the same table as the tensor."""
    B = load("backend_torch")
    tokens, lengths = F.batch(3)
    context = F.batch(4, length=8) if F.stem(name) == "T5" else None
    real = torch.from_numpy(np.arange(tokens.shape[1]) < lengths[:, None])
    with F.in_double(name), quiet():
        home = F.build(name, 5)
        out = F.call(home, tokens, lengths, context)
        weights = torch.from_numpy(np.random.default_rng(6).standard_normal(tuple(out.shape))) * real[:, :, None]
        (out * weights).sum().backward()
    grads = {key.removeprefix(home.base_model_prefix + "."): p.grad.numpy() for key, p in home.named_parameters()
             if p.grad is not None}  # fmt: skip
    mine = model_of(B, home)
    given = {"kv_lengths": torch.from_numpy(lengths)}
    if context is not None:
        given |= {"context": torch.from_numpy(context[0]), "context_lengths": torch.from_numpy(context[1])}
    (mine(torch.from_numpy(tokens), **given) * weights).sum().backward()
    from backend_torch.initial import turn
    from backend_torch.model import named

    own = {key: turn(mine, key, p.grad).numpy() for key, p in named(mine).items()}
    checked = 0
    for line in expanded(FAMILIES[mine.family], mine.config, own):
        stored = [grads[key] for key in line.stored]
        if line.operation.name == "folded row":
            assert np.abs(stored[0] - own["positions.weight"]).max() < 1e-10 * np.abs(stored[0]).max()
            checked += 1
            continue
        shapes = [own[key].shape for key in line.ours]
        for i, key in enumerate(line.ours):
            want = line.operation.load(stored, mine.config, shapes, i)
            tolerance = EXACT.get(F.stem(name), 1e-10) * max(np.abs(want).max(), 1e-3)
            assert np.abs(own[key] - want).max() < tolerance, key
            checked += 1
    assert checked == len(own)


def model_of(B, home):
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        home.save_pretrained(folder)
        return B.Transformer.from_pretrained(folder, dtype="float64")


@pytest.mark.parametrize("name", F.MODELS)
def test_what_is_written_is_read_by_the_home_library(name, home, tmp_path):
    C = load("core_numpy")
    import transformers

    folder, tokens, lengths, context, want = home(name)
    model = C.Transformer.from_pretrained(folder, dtype="float64")
    model.save_pretrained(tmp_path)
    again = C.Transformer.from_pretrained(tmp_path, dtype="float64")
    assert resolve(again.config) == resolve(model.config) and again.family == model.family
    for key, x in C.get_params(model).items():
        assert np.array_equal(C.get_params(again)[key], x), key
    kind = F.MODELS[name][0]
    with F.in_double(name), quiet():
        cls = getattr(transformers, kind if "For" in kind else f"{kind}Model")
        more = {"add_pooling_layer": False} if kind == "Bert" else {}
        there, facts = cls.from_pretrained(tmp_path, dtype=torch.float64, attn_implementation="eager",
                                           output_loading_info=True, **more)  # fmt: skip
        assert not facts["missing_keys"] and not facts["unexpected_keys"] and not facts["mismatched_keys"]
        with torch.no_grad():
            got = F.call(there.eval(), tokens, lengths, context).numpy()
    assert error(got, want, tokens, lengths) < 1e-10


@pytest.mark.parametrize("package", PACKAGES)
def test_the_three_write_the_same_bytes(package, home, tmp_path):
    B, C = load(package), load("core_numpy")
    folder = home("gpt_neox")[0]
    C.Transformer.from_pretrained(folder).save_pretrained(tmp_path / "core")
    B.Transformer.from_pretrained(folder).save_pretrained(tmp_path / "own")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "core" / name).read_bytes() == (tmp_path / "own" / name).read_bytes()


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_files_keep_every_bit(package, dtype, tmp_path):
    """NumPy has no bfloat16: nothing is widened or lost on the way [safetensors 598]."""
    B = load(package)
    config = B.ModelConfig(vocab=11, width=6, heads=3, layers=1, max_length=5, dropout=0.25, tie_embeddings=True,
                           activation="gelu_tanh")  # fmt: skip
    model = B.Transformer(config, seed=4, dtype=dtype)
    model.save_pretrained(tmp_path)
    again = B.Transformer.from_pretrained(tmp_path, dtype=dtype)
    wide = B.Transformer.from_pretrained(tmp_path)
    assert resolve(again.config) == resolve(config) and again.dtype == dtype and wide.dtype == "float32"
    for name, x in B.get_params(model).items():
        assert B.get_params(again)[name].tobytes() == x.tobytes()
        assert np.array_equal(B.get_params(wide)[name], x.astype(np.float32))


def test_a_sharded_folder_is_the_single_one(home, tmp_path):
    C = load("core_numpy")
    folder, *_ = home("llama one key")
    with F.in_double("llama"), quiet():
        F.build("llama one key", 0).save_pretrained(tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    one, many = C.Transformer.from_pretrained(folder), C.Transformer.from_pretrained(tmp_path)
    for name, x in C.get_params(one).items():
        assert np.array_equal(C.get_params(many)[name], x)


def test_older_fields_say_the_same_as_newer_ones(home, tmp_path):
    folder = home("llama yarn")[0]
    new = Pretrained(folder).config
    assert new.rotary_scaling.kind == "yarn" and new.rotary_base == 100.0
    fields = json.loads((folder / "config.json").read_text())
    rope = fields.pop("rope_parameters")
    fields["rope_theta"] = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    fields["rope_scaling"], fields["torch_dtype"] = rope, fields.pop("dtype")
    assert Pretrained(copied(folder, tmp_path, fields)).config == new


def test_older_names_of_tensors_are_read(home, tmp_path):
    """BERT's gamma and beta, NeoX's embed_out, GPT-2 without a prefix and with its buffers, T5's tables twice."""
    changes = {
        "bert": lambda name: name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias",
                                                                                        "LayerNorm.beta"),
        "gpt_neox": lambda name: name.replace("lm_head", "embed_out"),
        "gpt2": lambda name: name.removeprefix("transformer."),
    }  # fmt: skip
    more = {
        "gpt2": {"h.0.attn.bias": np.ones((1, 1, 13, 13), bool), "h.0.attn.masked_bias": np.array(-1e4, np.float32)},
        "t5": {},
    }
    for name, change in changes.items():
        folder = home(name)[0]
        target = tmp_path / name
        shutil.copytree(folder, target)
        tensors = {change(key): x for key, x in read(folder).items()}
        write(target, tensors | more.get(name, {}))
        check_same(folder, target)
    folder = home("t5")[0]
    target = tmp_path / "t5"
    shutil.copytree(folder, target)
    tensors = read(folder)
    table = tensors.pop("shared.weight")
    write(target, tensors | dict.fromkeys(("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"), table))
    check_same(folder, target)


def check_same(first, second):
    a, b = Pretrained(first), Pretrained(second)
    assert a.config == b.config
    for name in a.shapes:
        assert np.array_equal(a.read(name), b.read(name)), name


def read(folder):
    C = load("core_numpy")
    return C.load_params(folder / "model.safetensors")


def write(folder, tensors):
    load("core_numpy").save_params(folder / "model.safetensors", tensors)


def copied(folder, target, fields):
    shutil.copytree(folder, target, dirs_exist_ok=True)
    (target / "config.json").write_text(json.dumps(fields))
    return target


def other(value):
    """A value of the same kind that is not this one; None where no other is known."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value * 1.5 + 0.125
    if isinstance(value, str):
        return "relu" if value != "relu" else "silu"
    return None


@pytest.mark.parametrize("name", F.MODELS)
def test_every_field_is_read_or_refused(name, home):
    """No field of `config.json` is dropped: another value is another configuration or an error [Megatron-LM 6305]."""
    fields = json.loads((home(name)[0] / "config.json").read_text())
    family = FAMILIES[fields["model_type"]]
    tensors = frozenset(line for entry in family.tensors for line in entry.stored)
    head = "lm" if "For" in fields["architectures"][0] or "LMHead" in fields["architectures"][0] else "none"
    # Read together with another field alone: the layers' own types say which of them have a window, where any has.
    idle = {"max_window_layers", "type_vocab_size"}
    if "sliding_attention" not in fields.get("layer_types", ["sliding_attention"]):
        idle |= {"sliding_window", "use_sliding_window"}
    # T5's gated files tie where no head is stored, whatever they say.
    if head == "none" or fields.get("scale_decoder_outputs") is False:
        idle.add("tie_word_embeddings")

    def read_with(**changes):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return resolve(read_config(family, Given({**fields, **changes}, tensors, head)))

    plain = read_with()
    checked = 0
    for key, value in fields.items():
        if key in INERT | set(family.inert) | idle or other(value) is None:
            continue
        try:
            changed = read_with(**{key: other(value)})
        except (ValueError, TypeError, UserWarning):
            changed = None
        assert changed != plain, key
        checked += 1
    for key, value in (fields.get("rope_parameters") or {}).items():
        if other(value) is None or key == "partial_rotary_factor":
            continue
        try:
            changed = read_with(rope_parameters={**fields["rope_parameters"], key: other(value)})
        except ValueError:
            changed = None
        assert changed != plain, key
    assert checked > 5
    with pytest.raises(ValueError, match="unheard_of"):
        read_with(unheard_of=1)


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_loading_takes_less_than_a_third_more_than_the_model(package, tmp_path):
    """In a fresh process: the peak of resident memory, less what the imports took."""
    load(package)
    from core_numpy.contract.families import write_pretrained
    from core_numpy.contract.parameters import model_parameters

    config = load("core_numpy").ModelConfig(vocab=8000, width=768, heads=12, layers=8, positions="rotary", norm="rms",
                                            activation="swiglu", attention_bias=False, ffn_bias=False)  # fmt: skip
    shapes = {name: p.shape for name, p in model_parameters(config).items()}
    write_pretrained(tmp_path, config, lambda name: np.full(shapes[name], 0.5, np.float32))
    code = f"""
import importlib
def read(what):
    return int(next(line for line in open("/proc/self/status") if line.startswith(what)).split()[1]) * 1024
P = importlib.import_module({package!r})
P.get_params(P.Transformer(P.ModelConfig(vocab=4, width=4, heads=1, layers=1)))
before = read("VmRSS")
model = P.Transformer.from_pretrained({str(tmp_path)!r})
print(read("VmHWM") - before)
"""
    if not pathlib.Path("/proc/self/status").exists():
        pytest.skip("this system does not say how much memory a process has had")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    size = 4 * sum(int(np.prod(shape)) for shape in shapes.values())
    assert int(done.stdout) < 1.3 * size
