"""Single changes of the reference's own lines: made one at a time, judged like any target, the reference untouched."""

import ast
import json
import marshal
import sys

import pytest

import core_numpy
from conformance.memory import remembering
from conformance.summary import GROUPS
from conformance.zoo.command import main
from conformance.zoo.mutation import PACKAGE, SEEN_BY, caught_by, compiled, imported, mutants, root, sample
from conformance.zoo.tested import caught_by_tests, modules_knowing


def of(file, text):
    return next(mutant for mutant in mutants(file) if text in mutant.text)


def test_every_file_of_arithmetic_is_changed_but_the_cache():
    files = {str(path.relative_to(root())) for path in [*root().glob("*.py"), *root().glob("gradients/*.py")]}
    assert files - set(SEEN_BY) == {
        "__init__.py",
        "__main__.py",
        "cache.py",
        "gradients/__init__.py",
        "public.py",
    }
    known = {function for _, functions in GROUPS for function in functions}
    assert all(set(functions) <= known for functions in SEEN_BY.values())
    assert len([mutant for file in SEEN_BY for mutant in mutants(file)]) > 1000


def test_a_mutant_differs_from_its_file_in_one_place():
    plain = ast.dump(ast.parse((root() / "layers.py").read_text(encoding="utf-8")))
    found = mutants("layers.py")
    assert [mutant.index for mutant in found] == list(range(len(found)))
    codes = {marshal.dumps(compiled(mutant)) for mutant in found[:20]}
    assert len(codes) == 20 and "compared" not in plain
    assert not [mutant for mutant in found if "must be" in mutant.text]  # the sentences of errors stay


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("layers.py", "1.0 + np.tanh(inner), with Sub"),
        ("masks.py", "j <= i, with Lt"),
        ("optimizer.py", "1.0 - config.ema, with Add"),
        ("encodings.py", "with"),
        ("random.py", "with"),
    ],
)
def test_a_changed_line_is_caught(file, text):
    with remembering():
        assert caught_by(of(file, text))


def test_a_changed_default_of_a_public_name_is_caught_by_its_signature():
    lines = (root() / "block.py").read_text(encoding="utf-8").splitlines()
    (seed, *_) = [m for m in mutants("block.py") if m.text == "0 made 1" and "seed: int = 0" in lines[m.line - 1]]
    assert caught_by(seed) == "signature-MultiHeadAttention"


def test_without_a_change_nothing_is_caught_and_nothing_stays():
    before = {name: getattr(core_numpy, name) for name in core_numpy.__all__}
    with imported(None) as module:
        assert module is not core_numpy and module.attention is not core_numpy.attention
        assert module.ModelConfig is core_numpy.ModelConfig
    assert caught_by(None, file="masks.py") == ""
    assert not [name for name in sys.modules if name.split(".")[0] == PACKAGE]
    assert {name: getattr(core_numpy, name) for name in core_numpy.__all__} == before


def test_samples_depend_on_the_seed_alone():
    assert sample(15, 2) == sample(15, 2) != sample(15, 3)
    assert len(sample(None, 0)) == len(sample(10**6, 0)) > 1000


def test_the_command_writes_the_score_by_file(tmp_path, capsys):
    assert main(["--mutate", "3", "--seed", "4", "--json", str(tmp_path / "m.json")]) == 0
    document = json.loads((tmp_path / "m.json").read_text(encoding="utf-8"))
    assert len(document["mutants"]) == 3 == sum(file["mutants"] for file in document["files"].values())
    assert "of 3 changed lines of the reference caught" in capsys.readouterr().out
    with pytest.raises(ValueError, match="--mutate and --seed must be 0 or more"):
        main(["--mutate", "-1"])


def test_every_changed_file_has_tests_that_know_it():
    folder = root().parent / "conformance" / "tests"
    for file in SEEN_BY:
        names = modules_knowing(file)
        assert names and all((folder / f"{name}.py").is_file() for name in names), file


def test_what_no_row_catches_is_asked_of_the_tests():
    assert caught_by_tests(of("masks.py", "j <= i, with Lt")).startswith("test_masks.py::")
    assert caught_by_tests(of("masks.py", "-np.inf without its sign")).startswith("test_masks.py::")
