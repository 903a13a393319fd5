"""Compiled training steps with dropout: one graph, quick to compile, and the eager step's numbers."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import backend_torch as B  # noqa: E402

MODEL = B.ModelConfig(vocab=16, width=16, heads=4, layers=2, max_length=16, dropout=0.25, positions="rotary",
                      window=(3, 0))  # fmt: skip


def batch(seed):
    tokens = torch.randint(0, 16, (4, 9), generator=torch.Generator().manual_seed(seed))
    return {"tokens": tokens, "targets": tokens.roll(-1, 1)}


def test_a_compiler_sees_the_random_rounds_as_one_operation():
    torch._dynamo.reset()
    if torch.compile(lambda x: x + torch.compiler.is_exporting(), backend="eager")(torch.zeros(())):
        pytest.skip("this torch calls every compilation an export, which keeps the rounds")
    seen = []

    def look(graph, inputs):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op.startswith("call"))
        return graph

    model, tokens = B.Transformer(MODEL), batch(0)["tokens"]
    compiled = torch.compile(model, backend=look, fullgraph=True)
    out = compiled(tokens, dropout_key=B.key(1))
    torch.testing.assert_close(out, model(tokens, dropout_key=B.key(1)))
    # One for the embeddings; in each block one for its keys and four for what it drops.
    assert sum("threefry" in name for name in seen) >= 9
    assert not [name for name in seen if "lshift" in name]  # a rotation shifts to the left, and nothing else does


@pytest.mark.parametrize("batched", ["key", "counter"])
def test_the_whole_operation_has_a_batch_axis(batched):
    from backend_torch.random import _rounds, _whole

    keys = torch.stack([B.key(1), B.key(2)])
    low = torch.arange(6).reshape(2, 3)
    if batched == "key":
        got = torch.func.vmap(lambda k: _whole(k, torch.zeros_like(low), low))(keys)
        want = [_rounds(k, torch.zeros_like(low), low) for k in keys]
    else:
        got = torch.func.vmap(lambda x: _whole(keys[0], torch.zeros_like(x), x), in_dims=1)(low)
        want = [_rounds(keys[0], torch.zeros_like(x), x) for x in low.unbind(1)]
    for place in (0, 1):
        assert torch.equal(got[place], torch.stack([words[place] for words in want]))


@pytest.mark.slow
# torch's own compiler still uses its old one while it is imported.
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_compiled_steps_with_dropout_rotation_and_a_window_are_the_eager_steps():
    torch._dynamo.reset()
    runs = []
    for compiled in (False, True):
        trainer = B.Trainer(B.Transformer(MODEL, seed=2), B.TrainConfig(steps=3, batch=4, lr=1e-2, compile=compiled))
        assert trainer.compiled is compiled
        runs.append([trainer.step(batch(n)) for n in range(3)])
    for eager, fused in zip(*runs, strict=True):
        assert fused["loss"] == pytest.approx(eager["loss"], rel=1e-5)
        assert fused["grad_norm"] == pytest.approx(eager["grad_norm"], rel=1e-4)


def test_a_run_compiles_its_step_once(monkeypatch):
    """Updates, keys, rates and norms differ from step to step; the program does not."""
    graphs, own = [], torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function: own(function, backend=lambda graph, inputs: graphs.append(graph) or graph)
    )
    config = B.TrainConfig(steps=9, batch=4, compile=True, warmup=3, ema=0.9, clip_norm=0.01)
    trainer = B.Trainer(B.Transformer(MODEL.replace(layers=1), seed=1), config)
    made = []
    for n in range(4):
        trainer.step(batch(n))
        made.append(len(graphs))
    assert made[0] >= 1 and made == made[:1] * 4
