"""The completion script knows every verb, its options and its choices."""

from __future__ import annotations

import shutil
import subprocess

import pytest

pytest.importorskip("shtab")

from conformance.__main__ import VERBS, main
from conformance.completion import SHELLS, parser_of, script


def completed(words: list[str]) -> list[str]:
    """What bash offers for the last word."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    line = " ".join(f"'{word}'" for word in ["conformance", *words])
    before = (["conformance", *words])[-2]
    call = f"COMP_WORDS=({line}); COMP_CWORD={len(words)}; _shtab_conformance conformance '{words[-1]}' '{before}'"
    text = f'{script("bash")}\n{call}\nprintf "%s\\n" "${{COMPREPLY[@]}}"'
    return subprocess.run([bash], input=text, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_a_parser_of_its_own_name(verb):
    assert parser_of(verb).prog == f"conformance {verb}"


def test_bash_completes_verbs_options_and_choices():
    assert completed(["ra"]) == ["race"]
    assert completed(["race", "--si"]) == ["--size"]
    assert completed(["race", "--size", ""]) == ["tiny", "small", "long"]
    assert completed(["run", "--level", "ex"]) == ["exhaustive"]
    assert completed(["vectors", "c"]) == ["check"]


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_has_a_script_with_all_verbs(shell, capsys):
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert all(verb in text for verb in VERBS)


def test_another_shell_is_refused_with_the_known_ones(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["completion", "dos"])
    assert ended.value.code == 2
    assert "'bash', 'zsh', 'tcsh'" in capsys.readouterr().err.replace("bash, zsh, tcsh", "'bash', 'zsh', 'tcsh'")
