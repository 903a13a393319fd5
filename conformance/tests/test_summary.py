"""What a run says: JUnit XML, the table on the terminal, the JSON document, sentences that any file can hold."""

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from conformance import summary, workers
from conformance.__main__ import main
from conformance.rows import load_cases
from conformance.runner import ABSENT, FAILED, KNOWN, PASSED, Result, printable, run_case
from conformance.targets.protocol import Target

CALL = Result(
    case="relu", rules=("layers-8",), function="relu", target="mine", dtype="float32", kernel="auto", status=PASSED,
    share=0.25, where="out[0]", comparisons=3, detail="", seconds=0.125,
)  # fmt: skip
RESULTS = [
    CALL,
    replace(CALL, dtype="float64", status=FAILED, share=7.0, detail="out[0] is off by <7> & more"),
    replace(CALL, case="gelu", function="gelu", status=ABSENT, detail="no function gelu", comparisons=0),
    replace(CALL, case="silu", function="silu", status=KNOWN, detail="a reason"),
    replace(CALL, target="other"),
]


def test_junit_has_one_case_per_call_and_says_what_failed_and_what_was_skipped(tmp_path):
    summary.write_junit(tmp_path / "result.xml", RESULTS)
    mine, other = ElementTree.parse(tmp_path / "result.xml").getroot()
    assert mine.attrib == {"name": "mine", "tests": "4", "failures": "1", "skipped": "2"}
    assert other.attrib == {"name": "other", "tests": "1", "failures": "0", "skipped": "0"}
    assert [(node.get("classname"), node.get("name"), node.get("time")) for node in mine] == [
        ("mine.relu", "relu[float32-auto]", "0.1250"), ("mine.relu", "relu[float64-auto]", "0.1250"),
        ("mine.gelu", "gelu[float32-auto]", "0.1250"), ("mine.silu", "silu[float32-auto]", "0.1250"),
    ]  # fmt: skip
    said = [[(inner.tag, inner.get("message")) for inner in node] for node in mine]
    assert said == [
        [], [("failure", "out[0] is off by <7> & more")], [("skipped", "no function gelu")], [("skipped", "a reason")]
    ]  # fmt: skip


def test_the_table_counts_by_group_and_lists_what_failed(capsys):
    summary.print_run(RESULTS, {"mine": {"framework": "numpy"}, "other": {}})
    said = capsys.readouterr().out
    row = next(line for line in said.splitlines() if "layers" in line)
    assert [cell.strip() for cell in row.split("│")[1:-1]] == [
        "layers", "1", "1", "1", "9", "700 %", "relu (float64, auto)"
    ]  # fmt: skip
    assert "FAILED mine relu (float64, auto): out[0] is off by <7> & more" in said
    assert said.strip().endswith("2 passed, 1 failed, 1 not offered, 1 known differences; 12 comparisons")


def test_a_failure_is_one_line_where_it_goes_into_a_file(capsys):
    long = replace(CALL, status=FAILED, detail="out must be exactly what it is " * 6)
    summary.print_run([long], {"mine": {}}, reasons={"relu": "a reason that goes on " * 9})
    said = capsys.readouterr().out.splitlines()
    assert f"FAILED mine relu (float32, auto): {long.detail}" in said
    assert "       " + "a reason that goes on " * 9 in said


def test_a_failure_without_a_number_has_a_dash_and_null_in_place_of_a_share(tmp_path, capsys):
    """Nothing used 0 % of its budget that came back in a wrong shape."""
    (case,) = [case for case in load_cases() if case.id == "relu"]
    kinds = {
        "shaped": lambda x: x[..., :1],
        "raises": lambda x: 1 / 0,
        "halves": lambda x: np.maximum(x, 0) / 2,
        "right": lambda x: np.maximum(x, 0),
    }
    shares = {}
    for name, relu in kinds.items():
        result = next(run_case(case, Target(type("T", (), {"relu": staticmethod(relu)})(), name)))
        assert (result.status == PASSED) is (name == "right")
        shares[name] = summary.document([result], {name: {}}, "quick")["targets"][name]["cases"][0]["share"]
        summary.print_run([result], {name: {}})
        row = next(line for line in capsys.readouterr().out.splitlines() if "layers" in line)
        budget = row.split("│")[1:-1][5].strip()
        assert (budget == "–") is (shares[name] is None), budget
    assert shares["shaped"] is shares["raises"] is None and shares["right"] == 0.0 and shares["halves"] > 1.0
    lost = workers.lost_call(case, "mine", "died")
    assert summary.document([lost], {"mine": {}}, "quick")["targets"]["mine"]["cases"][0]["share"] is None
    assert summary.rows([lost, replace(CALL, status=FAILED, share=7.0)], "mine")[0]["share"] == 7.0


def test_a_failing_case_says_its_reason_once(capsys):
    twice = [*RESULTS, replace(CALL, status=FAILED, detail="again")]
    summary.print_run(twice, {"mine": {}, "other": {}}, reasons={"relu": "layers-8: it [leaks]", "gelu": "not this"})
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if "leaks" in line or "FAILED" in line]
    assert lines == [
        "FAILED mine relu (float64, auto): out[0] is off by <7> & more", "layers-8: it [leaks]",
        "FAILED mine relu (float32, auto): again",
    ]  # fmt: skip


def test_what_a_target_says_can_be_written_to_any_file(tmp_path, monkeypatch):
    def rude(x):
        raise ValueError("bad \x00 \x1b[31mred\x1b[0m \ud800 <b>&\n second ]]> line")

    (case,) = [case for case in load_cases() if case.id == "relu"]
    result = next(run_case(case, Target(type("Rude", (), {"relu": staticmethod(rude)})(), "rude")))
    assert result.detail == r"ValueError: bad \x00 \x1b[31mred\x1b[0m \ud800 <b>& second ]]> line"
    summary.write_junit(tmp_path / "result.xml", [result])
    failure = ElementTree.parse(tmp_path / "result.xml").getroot()[0][0][0]
    assert failure.get("message") == result.detail
    assert printable("einfach schön: 2 × 3 ≤ 7\t\n…") == "einfach schön: 2 × 3 ≤ 7 …"


def test_the_same_run_gives_the_same_document_seconds_aside(tmp_path):
    documents = []
    for name in ("a", "b"):
        path = tmp_path / f"{name}.json"
        assert main(["run", "core_numpy", "--case", "relu", "--json", str(path), "--jobs", "1"]) == 0
        found = json.loads(path.read_text())
        for call in found["targets"]["core_numpy"]["cases"]:
            assert call.pop("seconds") >= 0
        documents.append(json.dumps(found, sort_keys=True))
    assert documents[0] == documents[1] and '"errors"' in documents[0]


def test_a_run_diagnoses_what_fails_when_asked(tmp_path, monkeypatch, capsys):
    (tmp_path / "leaks.py").write_text(
        "import core_numpy\n"
        "def rms_norm(x, weight, *, eps, unit_offset=False):\n"
        "    return core_numpy.rms_norm(x, weight, eps=eps)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    command = ["run", "leaks", "core_numpy", "--case", "rms_norm", "--jobs", "1", "--json", "found.json"]
    assert main([*command, "--diagnose"]) == 1
    found = json.loads((tmp_path / "found.json").read_text())["targets"]
    assert "diagnosis" not in found["core_numpy"]
    (guess,) = found["leaks"]["diagnosis"]["guesses"]
    assert guess["fault"] == "rms-norm-offset-forgotten" and found["leaks"]["diagnosis"]["unexplained"] == []
    failed = {call["id"] for call in found["leaks"]["cases"] if call["status"] == "failed"}
    assert set(guess["explained"]) == failed == set(found["leaks"]["diagnosis"]["failing"])
    assert f"1. {guess['diagnosis']}." in capsys.readouterr().out
    assert main([*command, "--html", "page.html", "--no-diagnose"]) == 1
    assert "diagnosis" not in json.loads((tmp_path / "found.json").read_text())["targets"]["leaks"]


def test_a_diagnosis_that_hangs_or_dies_is_a_note(tmp_path, monkeypatch):
    from conformance import diagnose

    (tmp_path / "dies.py").write_text("import os\nos._exit(7)\n")
    (tmp_path / "hangs.py").write_text(
        "import os, pathlib, time\npathlib.Path('hangs.pid').write_text(str(os.getpid()))\ntime.sleep(1000)\n"
    )
    monkeypatch.chdir(tmp_path)
    dead = "conformance diagnose: target 'dies': its process died (exit code 7)"
    assert diagnose.separately("dies", "quick", "relu") == {"note": f"there is no diagnosis: {dead}"}
    assert "cannot be imported" in diagnose.separately("nowhere", "quick", None)["note"]
    monkeypatch.setattr(diagnose, "TIMEOUT", 8.0)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in what a shell started in the background
    try:
        note = diagnose.separately("hangs", "quick", None)["note"]
    finally:
        signal.signal(signal.SIGINT, before)
    assert note == "the diagnosis took longer than 8 seconds and was ended"
    if (tmp_path / "hangs.pid").exists():  # a crowded machine may not have come so far
        left = int((tmp_path / "hangs.pid").read_text())
        for _ in range(200):
            if not alive(left):
                break
            time.sleep(0.05)
        assert not alive(left)


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")  # what nobody has waited for yet is no more than a name
    return not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] != "Z"
