"""The HTML page: complete, self-contained, escaped, and honest about what is missing."""

import json
import re
import subprocess
from html.parser import HTMLParser

import pytest

from conformance import demo
from conformance.lab.pages import read_results
from conformance.report.cases import case_entries
from conformance.report.html import percent, render, write_report

PNG = b"\x89PNG\r\n\x1a\nnot really"


def case(**changes):
    return {
        "id": "attention-scale", "rules": ["attention-1", "attention-2"], "function": "attention", "dtype": "float32",
        "kernel": "auto", "status": "passed", "share": 0.25, "detail": "", **changes,
    }  # fmt: skip


CONFORMANCE = {
    "targets": {
        "core_numpy": {"cases": [case(), case(id="masks-a", function="causal_mask", share=0.0)]},
        "backend_torch": {
            "cases": [
                case(share=0.5),
                case(id="bad<script>alert(1)</script>", status="failed", share=7.0, detail="off by <b>one</b>"),
                case(status="not offered", share=0.0, dtype="float16"),
            ]
        },
    },
    "environment": {"python": "3.11.9", "targets": {"core_numpy": {"version": "2.4"}}},
}
ROW = {
    "status": "raced", "rounds": [0.1], "q1": 0.1, "median": 0.11, "q3": 0.12, "ratio": 1.0, "ratio_low": 1.0,
    "ratio_high": 1.0, "tokens_per_second": 1234.0, "share_of_peak": 0.31, "first_step_seconds": 2.0,
    "memory_growth": 55.0, "loss_distance": 1e-7,
}  # fmt: skip
RACE = {
    "environment": {"processor": "A <fast> chip", "threads": 2, "matmul_gflops": 99.0},
    "races": [
        {
            "task": {"size": "tiny", "batch": 16, "length": 64, "flops": 10**9},
            "verdict": "torch wins",
            "contestants": {
                "torch": ROW,
                "jax": {**ROW, "ratio": 2.0, "median": 0.22},
                "ghost": {"status": "skipped", "reason": "not installed: ghost"},
            },
        }
    ],
}
TRAINING = {"curves": {"numpy": [[1, 5.5], [2, 5.25]], "torch": [[1, 5.5]]}, "validation": {"numpy": 3.5}, "png": PNG}


class Checker(HTMLParser):
    """Collects the tags and checks that they nest."""

    VOID = ("meta", "img", "br", "link", "input")

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.text = [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data):
        self.text.append(data)


def parsed(**sections):
    checker = Checker()
    checker.feed(render(**sections))
    assert checker.open == []
    return checker, " ".join(" ".join(checker.text).split())


def test_the_page_shows_every_section():
    _, text = parsed(conformance=CONFORMANCE, training=TRAINING, race=RACE, race_png=PNG)
    for phrase in ("core_numpy", "causal_mask", "1 failed", "1 not offered", "700 %", "attention-1, attention-2",
                   "numpy: 3.5000 bits per byte", "5.2500", "torch wins", "1,234", "not installed: ghost", "3.11.9",
                   "targets core_numpy version"):  # fmt: skip
        assert phrase in text, phrase


def test_every_combination_of_missing_sections_gives_a_page():
    sections = {"conformance": CONFORMANCE, "training": TRAINING, "race": RACE}
    for mask in range(8):
        _, text = parsed(**{name: part for i, (name, part) in enumerate(sections.items()) if mask >> i & 1})
        assert ("nothing to report" in text) == (mask == 0)
    empty = {"conformance": {"targets": {}}, "training": {}, "race": {"races": []}}
    parsed(**empty)
    parsed(conformance={"targets": {"a": {"cases": []}, "b": {"cases": [{"id": "x", "status": "passed"}]}}})


def test_the_page_needs_nothing_from_outside():
    checker, _ = parsed(conformance=CONFORMANCE, training=TRAINING, race=RACE, race_png=PNG)
    page = render(conformance=CONFORMANCE, training=TRAINING, race=RACE, race_png=PNG)
    assert "http://" not in page and "https://" not in page and "url(" not in page
    names = [tag for tag, _ in checker.tags]
    assert "link" not in names and names.count("script") == 1
    assert (
        "fetch(" not in page and "import(" not in page and "src=" not in page.split("<script>")[1].split("</script>")[0]
    )
    sources = [attributes["src"] for tag, attributes in checker.tags if tag == "img"]
    assert len(sources) == 2 and all(source.startswith("data:image/png;base64,iVBORw0KGg") for source in sources)
    assert all(attributes.get("alt") for tag, attributes in checker.tags if tag == "img")


def test_what_comes_from_outside_is_escaped():
    page = render(conformance=CONFORMANCE, race=RACE, notes=["<i>note</i>"])
    assert "<script>alert" not in page and "<b>one</b>" not in page and "<i>" not in page and "<fast>" not in page
    assert "off by &lt;b&gt;one&lt;/b&gt;" in page


def test_the_page_is_readable_in_the_dark_and_on_a_phone():
    page = render(conformance=CONFORMANCE)
    assert "color-scheme: light dark" in page and "light-dark(" in page and 'name="viewport"' in page
    checker, _ = parsed(conformance=CONFORMANCE, training=TRAINING, race=RACE)
    boxes = sum(attributes.get("class") == "wide" for tag, attributes in checker.tags if tag == "div")
    assert boxes == sum(tag == "table" for tag, _ in checker.tags)  # a wide table scrolls in its own box


def test_an_unknown_status_is_never_a_pass_and_many_failures_are_cut():
    _, text = parsed(conformance={"targets": {"a": {"cases": [case(status="odd")]}}})
    assert "1 failed" in text and "0 passed" in text
    page = render(conformance={"targets": {"a": {"cases": [case(status="failed", detail="broken")] * 250}}})
    # The table of failures is cut; the list of cases has them all.
    assert page.count("broken") == 200 + 250 and "And 50 more" in page


def test_the_list_of_cases_says_what_was_asked_and_what_came():
    document = {"targets": {"t": {"cases": [
        case(id="attention-causal", function="attention_with_lse"),
        case(id="attention-causal", function="attention_with_lse", status="failed", detail="off by one"),
        case(id="gelu", function="gelu", status="known difference", detail="a reason"),
    ]}}}  # fmt: skip
    first, second = case_entries(document["targets"])
    assert (first["id"], first["status"], len(first["calls"])) == ("attention-causal", "failed", 2)
    given = {one["name"]: one["text"] for one in first["given"]}
    assert first["why"].startswith("causal, equal lengths") and given["q"] == "2×2×9×8; -3.2 to 2.72"
    assert given["causal"] == "True" and first["calls"][1]["detail"] == "off by one"
    assert second["status"] == "known difference"
    _, text = parsed(conformance=document)
    assert "1 known" in text and "a reason" in text and "2×2×9×8" in text


def test_the_matrix_has_the_features_of_attention_too():
    cases = [case(id="attention-causal", function="attention"), case(id="attention-plain", status="failed", share=3.0),
             case(id="gelu", function="gelu"), case(id="of another version", function="attention")]  # fmt: skip
    page = render(conformance={"targets": {"t": {"cases": cases}}})
    _, text = parsed(conformance={"targets": {"t": {"cases": cases}}})
    rows = text[text.index("attention with t") :].split("t: the cases that used")[0].split()
    assert " ".join(rows) == "attention with t plain 0 passed 1 failed 300 % causal 1 passed 25 %"
    assert '<a href="#cases" data-target="t" data-function="" data-feature="causal">' in page


def test_what_is_wrong_comes_first_and_what_nobody_offers_is_folded():
    cases = [case(id="attention-plain", function="attention", status="failed", share=3.0, detail="off")]
    cases += [case(id=name, function=name, status="not offered") for name in ("gelu", "relu", "silu")]
    diagnosis = {"guesses": [], "unexplained": ["attention-plain"]}
    targets = {"t": {"cases": cases, "diagnosis": diagnosis}}
    _, text = parsed(conformance={"targets": targets})
    order = [
        "Diagnosis",
        "Failures",
        "Functions",
        "all 0 passed 1 failed",
        "attention with",
        "3 functions that t does not",
    ]
    places = [text.index(words) for words in order]
    assert places == sorted(places)
    page = render(conformance={"targets": targets})
    folded = page[page.index('<details class="idle">') : page.index('<h2 id="cases">')]
    assert [f"<td>{name}</td>" in folded for name in ("gelu", "relu", "silu", "attention")] == [True] * 3 + [False]
    assert page.count("<td>gelu</td>") == 1
    # Of two targets the one that offers it keeps the row; and where everything is offered nothing is folded.
    both = targets | {"u": {"cases": [case(id=name, function=name) for name in ("gelu", "attention")]}}
    _, text = parsed(conformance={"targets": both})
    assert "2 functions that no target offers" in text
    assert '<details class="idle">' not in render(conformance={"targets": {"u": both["u"]}})


def test_many_failures_leave_the_tables_in_sight():
    many = [case(id=f"case-{i}", status="failed", detail=f"wrong {i}.") for i in range(25)]
    page = render(conformance={"targets": {"t": {"cases": many}}})
    assert page.index("wrong 9.") < page.index("15 more failures") < page.index("wrong 10.") < page.index(">Functions<")


def test_a_boolean_input_is_a_picture():
    (entry,) = case_entries({"t": {"cases": [case(id="attention-dead-row-mean")]}})
    (mask,) = [one for one in entry["given"] if one["name"] == "mask"]
    assert mask["rows"] == ["...", ".#."] and mask["text"].endswith("; 1 of 6 True")
    assert all(one["rows"] == [] for one in entry["given"] if one["name"] != "mask")


def test_error_maps_come_worst_first_one_for_each_dtype():
    def mapped(dtype, status, share, row):
        errors = {"name": "out", "shape": [3], "pool": [1, 1], "panels": [{"at": [], "rows": [row]}]}
        return case(dtype=dtype, status=status, share=share, errors=errors)

    calls = [mapped("float64", "passed", 0.5, ".5."), mapped("float32", "failed", 2.0, "a.0"),
             mapped("float32", "failed", 30.0, "b.x"), case()]  # fmt: skip
    (entry,) = case_entries({"t": {"cases": calls}})
    assert [(one["how"], one["said"]) for one in entry["maps"]] == [
        ("float32, auto", "2 of 3 squares over the budget"), ("float64, auto", "all within the budget"),
    ]  # fmt: skip
    _, text = parsed(conformance={"targets": {"t": {"cases": calls}}})
    assert "b.x" in text and "a.0" not in text


def test_a_diagnosis_stands_at_its_target_and_at_the_cases_that_it_explains():
    guess = {"fault": "f", "diagnosis": "it <leaks>", "stands_for": "a leak", "evidence": "Much.",
             "explained": ["one"], "contradicted": []}  # fmt: skip
    cases = [case(id=name, status="failed") for name in ("one", "two", "three")]
    document = {"targets": {"t": {"cases": cases, "diagnosis": {"guesses": [guess], "unexplained": ["two"]}}}}
    found = {entry["id"]: entry["diagnosis"] for entry in case_entries(document["targets"])}
    assert found == {"one": [("it <leaks>", "Much.")], "two": [("no known fault explains this case", "")], "three": []}
    page = render(conformance=document)
    assert page.count("it &lt;leaks&gt;") == 2 and "No known fault explains two." in page
    noted = render(conformance={"targets": {"t": {"cases": cases, "diagnosis": {"note": "it took too long"}}}})
    assert "it took too long" in noted


def test_the_lab_has_its_claims_pictures_and_link():
    claims = [{"text": "two see more", "measured": "91 %", "held": True},
              {"text": "four even more", "measured": "90 %", "held": False}]  # fmt: skip
    lab = {"backend": "core_numpy", "link": "lab/lab.html", "pictures": {"heads": PNG},
           "experiments": {"heads": {"claim": "c", "claims": claims}}}  # fmt: skip
    checker, text = parsed(lab=lab)
    assert "held : two see more Measured: 91 %." in text and "did not hold : four even more" in text
    assert any(attributes.get("href") == "lab/lab.html" for _, attributes in checker.tags)
    assert sum(tag == "img" for tag, _ in checker.tags) == 1 and "measures all" not in text
    assert "conformance lab --out <x> measures all" in parsed(lab=lab | {"rest": "conformance lab --out <x>"})[1]


def test_what_a_target_should_be_told_stands_on_the_page():
    said = "attention takes <lengths>, which is no argument of the contract; did you mean kv_lengths?"
    targets = CONFORMANCE["targets"]
    noted = {**CONFORMANCE, "targets": {**targets, "backend_torch": {**targets["backend_torch"], "notes": [said]}}}
    assert f"backend_torch : {said}" in parsed(conformance=noted)[1]
    assert "argument of the contract" not in parsed(conformance=CONFORMANCE)[1]


def test_a_failure_without_a_number_has_a_dash_on_the_page():
    shaped = {**case(status="failed", share=None, detail="out must have shape (2,); got (3,)"), "comparisons": 1}
    page = render(conformance={"targets": {"mine": {"cases": [shaped]}}})
    assert "<td>–</td>" in page and ">0 %" not in page


def test_shares_are_percentages():
    assert percent(0.1234) == "12.3 %" and percent(float("inf")) == "beyond measure" and percent(None) == "–"


def test_the_file_is_written_whole(tmp_path):
    write_report(tmp_path / "sub" / "report.html", conformance=CONFORMANCE)
    assert (tmp_path / "sub" / "report.html").read_text().endswith("</html>")
    assert re.match(r"<!doctype html>\n<html lang=.en.>", (tmp_path / "sub" / "report.html").read_text())


# --- the demo


def finished(stdout="", stderr="", code=0):
    return subprocess.CompletedProcess([], code, stdout, stderr)


def test_the_demo_goes_on_without_a_framework_and_after_a_failure(tmp_path, monkeypatch, capsys):
    def run(arguments, timeout):
        if "train" not in arguments:
            return finished(stderr="boom\nthe last words", code=2)
        if "backend_torch" in arguments:
            raise subprocess.TimeoutExpired("train", timeout)
        return finished('{"step": 1, "loss": 5.5}\n{"step": 1, "validation_loss": 3.0, "bits_per_byte": 4.3}\n')

    monkeypatch.setattr(demo, "_run", run)
    monkeypatch.setattr(demo.race, "run", lambda *arguments, **more: {**RACE, "names": arguments[1]})
    # Whatever is installed here, the demo is told that torch is and jax is not.
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None if name == "jax" else object())
    assert demo.main(["--out", str(tmp_path / "demo")]) == 1
    page = (tmp_path / "demo" / "report.html").read_text()
    assert "jax is not installed, so backend_jax is left out." in page
    assert "conformance gave no result: the last words" in page
    assert "training in torch took longer" in page
    assert "numpy: 4.3000 bits per byte" in page and "torch wins" in page
    assert "Part of this failed: the lab: the last words" in page
    assert str(tmp_path / "demo" / "report.html") in capsys.readouterr().out
    # With --json - nothing but the document is on standard output.
    assert demo.main(["--out", str(tmp_path / "demo"), "--json", "-"]) == 1
    said = capsys.readouterr()
    document = json.loads(said.out)
    assert document["schema"] == 1 and document["failed"] is True and document["lab"] is None
    assert document["training"]["validation"] == {"numpy": 4.3} and "png" not in document["training"]
    assert document["race"]["names"] == ["numpy", "torch"] and document["report"].endswith("report.html")
    assert "bits per byte" in said.err
    with pytest.raises(ValueError, match="--steps must be an integer of at least 1; got 0"):
        demo.main(["--steps", "0"])


def test_the_demo_puts_the_labs_results_and_pictures_into_the_page(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "LAB", ("average",))
    notes = []
    document = demo.lab_part({"numpy": "core_numpy"}, tmp_path, notes)
    page = render(lab=document)
    assert notes == [] and (tmp_path / "lab" / "lab.html").exists()
    assert "Equal scores give the plain mean." in page and page.count("data:image/png;base64,") == 1
    assert "<code>conformance lab --backend core_numpy --out lab</code> measures all." in page
    (tmp_path / "lab" / "lab.json").write_text("{}")
    with pytest.raises(ValueError, match="must be the lab's document of schema 1"):
        read_results(tmp_path / "lab")


@pytest.mark.parametrize("part", ["training_part", "race_part"])
def test_without_matplotlib_the_demo_leaves_pictures_out(part, monkeypatch, tmp_path):
    def missing(*arguments, **more):
        raise ImportError("No module named 'matplotlib'")

    notes = []
    monkeypatch.setattr(
        demo, "_run", lambda arguments, timeout: finished('{"step": 1, "loss": 5.5, "bits_per_byte": 4}')
    )
    monkeypatch.setattr(demo, "draw_losses", missing)
    monkeypatch.setattr(demo.race, "draw", missing)
    monkeypatch.setattr(demo.race, "run", lambda *arguments, **more: RACE)
    if part == "training_part":
        assert demo.training_part({"numpy": "core_numpy"}, 1, notes)["png"] is None
    else:
        assert demo.race_part(["numpy"], 1, tmp_path, notes)[1] is None
    assert notes == ["Pictures are left out: matplotlib is not installed."]
