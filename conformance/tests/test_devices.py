"""`conformance devices`: what it says, and that it can say no."""

from __future__ import annotations

import json

import pytest

from conformance import devices
from conformance.devices import Row, table
from conformance.devices.collectives import collectives, routes, summed

HLO = """
  %all-reduce.3 = (f32[128,64]{1,0}, bf16[64]{0}) all-reduce(%a, %b), channel_id=1, replica_groups={{0,1}}
  %all-gather-start.1 = (f32[8,4]{1,0}, f32[32,4]{1,0}) all-gather-start(%c), dimensions={0}
  %all-gather-done.1 = f32[32,4]{1,0} all-gather-done(%all-gather-start.1)
  %reduce-scatter.2 = f32[8,4]{1,0:T(8,128)} reduce-scatter(%d), dimensions={0}
  %collective-permute-start = (f32[5]{0}, f32[5]{0}, u32[], u32[]) collective-permute-start(%e)
  %fusion = f32[9]{0} fusion(%all-reduce.3), calls=%x
"""


def test_collectives_are_read_off_a_program_s_text_with_their_bytes():
    assert summed(collectives(HLO)) == {
        "all-reduce": {"count": 1, "bytes": 128 * 64 * 4 + 64 * 2},
        "all-gather": {"count": 1, "bytes": 32 * 4 * 4},
        "reduce-scatter": {"count": 1, "bytes": 8 * 4 * 4},
        "collective-permute": {"count": 1, "bytes": 20},
    }


LOOPS = """
%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %add.1 = f32[] add(%x, %y)
}

%inner (p: f32[4]) -> f32[4] {
  ROOT %collective-permute.1 = f32[4]{0} collective-permute(%p), source_target_pairs={{0,1}}
}

%outer (p: f32[4]) -> f32[4] {
  %all-reduce.9 = f32[2]{0} all-reduce(%p), to_apply=%add
  ROOT %while.1 = f32[4]{0} while(%p), condition=%c1, body=%inner, backend_config={"known_trip_count":{"n":"5"}}
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %all-gather.1 = f32[16]{0} all-gather(%p), dimensions={0}
  ROOT %while.2 = f32[4]{0} while(%p), condition=%c2, body=%outer, backend_config={"known_trip_count":{"n":"3"}}
}
"""


def test_what_a_loop_sends_is_counted_as_often_as_it_goes_round():
    assert summed(collectives(LOOPS)) == {
        "collective-permute": {"count": 15, "bytes": 15 * 16},
        "all-reduce": {"count": 3, "bytes": 3 * 8},
        "all-gather": {"count": 1, "bytes": 64},
    }


def test_who_sends_to_whom_is_read_off_a_program_s_text():
    text = """
  %a = f32[5]{0} collective-permute(%b), channel_id=3, source_target_pairs={{0,1},{1,2}}, metadata={}
  %c = f32[5]{0} collective-permute(%d), channel_id=4, source_target_pairs={{3,0}}
"""
    assert routes(text) == {(0, 1), (1, 2), (3, 0)} and routes(HLO) == set()


def test_a_failed_row_is_the_exit_status_and_stands_in_the_report(monkeypatch, capsys, tmp_path):
    found = [Row("step", "tpu", "lowered", "ok"), Row("step", "cuda", "lowered", "failed", "no rule for it")]
    monkeypatch.setattr(devices, "_rows", lambda aot: iter(found))
    assert devices.main(["--no-run", "--json", str(tmp_path / "d.json")]) == 1
    assert "no rule for it" in capsys.readouterr().out
    document = json.loads((tmp_path / "d.json").read_text())
    assert [row["status"] for row in document["rows"]] == ["ok", "failed"]
    monkeypatch.setattr(devices, "_rows", lambda aot: iter(found[:1]))
    assert devices.main(["--no-run"]) == 0


def test_what_is_absent_is_counted_and_is_no_failure(capsys):
    table.show([Row("step", "H200", "compiled for", "absent", "not installed")], None)
    assert "0 ok, 0 failed, 1 with something absent" in capsys.readouterr().out


def test_the_report_says_compiled_for_and_never_passed_on(capsys):
    figures = {"memory": 5e6, "flops": 2e9, "collectives": {"all-reduce": {"count": 2, "bytes": 1000}}}
    table.show([Row("train step", "TPU v5e", "compiled for", "ok", "", figures)], None)
    said = capsys.readouterr().out
    assert "compiled for" in said and "passed" not in said


COMPILER = """
import json, os, sys, time
skip = int(sys.argv[-1])
for i, name in enumerate(["one", "slow", "bad", "last"][skip:], skip):
    print("a library's noise", json.dumps({"begins": name}), sep="\\n", flush=True)
    if name == "slow":
        time.sleep(60)
    if name == "bad":
        print("first", "last words", sep="\\n", file=sys.stderr)
        os.abort()
    print(json.dumps({"program": name, "memory": i, "flops": 2, "collectives": {}}), flush=True)
"""


def test_a_program_that_does_not_end_or_ends_its_process_is_one_row_and_the_next_are_compiled(monkeypatch):
    """A stand-in for the compiling process: its second program never ends and its third kills it."""
    from conformance.devices import aot

    asked, real = [], aot.subprocess.Popen

    def start(command, env, **more):
        asked.append((command[-1], env))
        return real([aot.sys.executable, "-c", COMPILER, command[-1]], **more)

    monkeypatch.setattr(aot.subprocess, "Popen", start)
    monkeypatch.setattr(aot, "TIMEOUT", 2.0)
    rows = list(aot._compiled(aot.PLACES[0]))
    assert [(row.program, row.status) for row in rows] == [
        ("one", "ok"), ("slow", "failed"), ("bad", "failed"), ("last", "ok"),
    ]  # fmt: skip
    assert rows[1].detail == "not compiled within 2 s; it was given up"
    assert rows[2].detail == "its process ended with -6: last words"
    assert [row.figures.get("memory") for row in rows] == [0, None, None, 3]
    assert all(row.target == "TPU v5e, 1 chip" and row.check == "compiled for" for row in rows)
    assert [skip for skip, _ in asked] == ["0", "2", "3"]
    # It takes no chip, and asks no metadata server.
    assert all(env["ALLOW_MULTIPLE_LIBTPU_LOAD"] == "1" and env["JAX_PLATFORMS"] == "cpu" for _, env in asked)


def test_a_compiling_process_that_cannot_begin_is_said_once(monkeypatch):
    from conformance.devices import aot

    real = aot.subprocess.Popen
    for code, said in (("raise ImportError('no plug-in')", "1: ImportError: no plug-in"), ("", "0: it said nothing")):
        monkeypatch.setattr(
            aot.subprocess,
            "Popen",
            lambda command, env, code=code, **more: real([aot.sys.executable, "-c", code], **more),
        )
        (row,) = aot._compiled(aot.PLACES[0])
        assert row.status == "failed" and row.detail == f"its process ended with {said}"


class TestTorch:
    """Under `meta`."""

    @pytest.fixture
    def meta(self):
        pytest.importorskip("torch")
        from conformance.devices import meta

        return meta

    def step(self, meta, name):
        config = meta.ModelConfig(**{**meta.BASE, **meta.CONFIGS[name], "layers": 1})
        return meta.step_under_meta(name, config, meta.TRAIN)

    def test_a_training_step_runs_where_tensors_have_no_values(self, meta):
        assert self.step(meta, "alibi").status == "ok"

    def test_a_bias_made_on_the_host_is_seen(self, meta, monkeypatch):
        import backend_torch.model as model

        right = model.alibi_bias
        monkeypatch.setattr(
            model, "alibi_bias", lambda *a, q_offset, **k: right(*a, q_offset=0, **k).to(q_offset.device)[None]
        )
        row = self.step(meta, "alibi")
        assert row.status == "failed" and "encodings.py" in row.detail

    def test_a_step_that_reads_a_value_is_seen(self, meta, monkeypatch):
        monkeypatch.setattr(meta, "clip", lambda grads, norm, clip_norm: grads.mul_(clip_norm / grads.norm().item()))
        row = self.step(meta, "learned, layer norm")
        assert row.status == "failed" and "meta" in row.detail

    def test_the_control_fails_as_it_must(self, meta):
        assert meta.control().status == "ok"


class TestJax:
    """By jax.export."""

    @pytest.fixture
    def lowering(self):
        pytest.importorskip("jax")
        pytest.importorskip("flatbuffers")
        from conformance.devices import lowering

        return lowering

    def test_a_forward_pass_lowers_is_written_and_read_back_for_every_platform(self, lowering):
        (item,) = [item for item in lowering.items(lowering.SMALL) if item.name == "forward"]
        assert [lowering.lowered(item, platform).status for platform in ("tpu", "cuda", "rocm")] == ["ok"] * 3

    def test_an_operation_that_a_platform_lacks_is_a_failure(self, lowering):
        import jax
        import jax.numpy as jnp

        item = lowering.Item("eig", lambda: (jax.jit(jnp.linalg.eig), (jnp.eye(2),)))
        assert lowering.lowered(item, "tpu").status == "failed"

    def test_a_program_that_gives_other_numbers_after_loading_is_a_failure(self, lowering, monkeypatch):
        import jax

        item = lowering.Item("sin", lambda: (jax.jit(jax.numpy.sin), (jax.numpy.ones(3),)))
        assert lowering.called(item).status == "ok"
        right = jax.export.export
        monkeypatch.setattr(
            jax.export, "export", lambda f, platforms: right(jax.jit(lambda x: 1.001 * f(x)), platforms=platforms)
        )
        assert lowering.called(item).status == "failed"

    def test_the_controls_fail_as_they_must(self, lowering):
        assert lowering.refused("eig", lowering._eig_for_tpu, NotImplementedError).status == "ok"
        assert lowering.refused("tpu", lowering._tpu_on_cpu, ValueError).status == "ok"
        assert lowering.refused("sin", lambda: None, ValueError).status == "failed"

    def test_kernels_are_those_of_the_platform_that_is_lowered_for(self, lowering):
        from backend_jax.kernels import lowering_for, platform_of

        with lowering_for("cuda"):
            assert platform_of(object()) == "gpu"
        with lowering_for("tpu"):
            assert platform_of(object()) == "tpu"
        assert platform_of(object()) == "cpu"

    @pytest.mark.slow
    def test_everything_lowers_and_what_a_cpu_can_run_runs(self, lowering):
        found = list(lowering.rows())
        assert len(found) > 30 and not [row for row in found if row.status == "failed"]


@pytest.mark.slow
def test_the_suite_and_the_race_run_on_a_device_that_is_here(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    from conformance.devices import here

    monkeypatch.setattr(here, "devices", lambda: ["cpu"])
    document = here.run("cpu", say=lambda text: None)
    assert not document["failed"] and document["suite"]["document"] and document["race"]["document"]
