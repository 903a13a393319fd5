"""Attention in torch under torch.compile, torch.export, torch.func, meta and fake tensors."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from backend_torch.attention import attention, attention_with_lse  # noqa: E402

B, H, G, T, D = 2, 4, 2, 12, 8
SEGMENTS = torch.arange(T).div(5, rounding_mode="floor").expand(B, T)
CALLS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (3, 0), "q_offset": 1},
    "lengths": {"kv_lengths": torch.tensor([5, 12])},
    "offsets": {"causal": True, "q_offset": torch.tensor([0, 2])},
    "segments": {"q_segments": SEGMENTS, "kv_segments": SEGMENTS},
    "mask": {"mask": torch.arange(B * T * T).reshape(B, 1, T, T) % 3 > 0},
    "bias": {"bias": torch.linspace(-1, 1, H * T).reshape(1, H, T, 1)},
    "cap and sinks": {"softcap": 2.0, "sinks": torch.linspace(-1, 1, H)},
    "dropout": {"dropout_rate": 0.3, "dropout_key": torch.tensor([0, 7])},
}
KERNELS = {
    (name, kernel)
    for name in CALLS
    for kernel in ("auto", "dense", "sdpa", "blockwise")
    if kernel != "sdpa" or name not in ("cap and sinks", "dropout")
}
EVERY = pytest.mark.parametrize(("name", "kernel"), sorted(KERNELS))
# Compiling costs a second or more a time: by default one call per kernel and what it adds, the rest on request.
QUICK = {("causal", "sdpa"), ("lengths", "sdpa"), ("window", "blockwise"), ("segments", "blockwise"), ("mask", "dense")}
SOME = pytest.mark.parametrize(
    ("name", "kernel"),
    [pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.slow) for pair in sorted(KERNELS)],
)


def _qkv(length: int = T, **options):
    generator = torch.Generator().manual_seed(length)
    shapes = ((B, H, length, D), (B, G, length, D), (B, G, length, D))
    return [torch.randn(shape, generator=generator).requires_grad_(**options) for shape in shapes]


@SOME
def test_a_compiled_call_is_one_graph_and_gives_the_same_numbers_and_gradients(name, kernel):
    torch._dynamo.reset()

    def call(q, k, v):
        return attention(q, k, v, **CALLS[name], kernel=kernel)

    eager, compiled = _qkv(), _qkv()
    expected = call(*eager)
    out = torch.compile(call, fullgraph=True, backend="aot_eager")(*compiled)
    torch.testing.assert_close(out, expected)
    expected.square().sum().backward()
    out.square().sum().backward()
    for ours, theirs in zip(compiled, eager, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("kernel", ["auto", pytest.param("dense", marks=pytest.mark.slow), "blockwise"])
@pytest.mark.parametrize("keywords", [{"causal": True}, pytest.param({}, marks=pytest.mark.slow)], ids=str)
def test_a_new_length_does_not_compile_again(kernel, keywords):
    torch._dynamo.reset()
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(
        lambda q, k, v: attention(q, k, v, **keywords, kernel=kernel), dynamic=True, fullgraph=True, backend=count
    )
    for length in (12, 13, 20, 31, 47):
        with torch.no_grad():
            qkv = _qkv(length)
            torch.testing.assert_close(compiled(*qkv), attention(*qkv, **keywords, kernel="dense"))
    assert len(graphs) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["causal", "window", "lengths", "cap and sinks"])
def test_the_default_compiler_gives_the_same_numbers(name):
    torch._dynamo.reset()
    for keywords in (CALLS[name], CALLS[name] | {"scale": 2.83}, CALLS[name] | {"scale": 0.0}):
        qkv = _qkv()
        compiled = torch.compile(lambda q, k, v, a=keywords: attention(q, k, v, **a), fullgraph=True)
        out = compiled(*qkv)
        torch.testing.assert_close(out, attention(*qkv, **keywords, kernel="dense"))
        out.sum().backward()


@SOME
def test_an_exported_call_gives_the_same_numbers(name, kernel):
    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return attention(q, k, v, **CALLS[name], kernel=kernel)

    qkv = [x.detach() for x in _qkv()]
    exported = torch.export.export(Module(), tuple(qkv)).module()
    torch.testing.assert_close(exported(*qkv), attention(*qkv, **CALLS[name], kernel=kernel))


@pytest.mark.parametrize(("name", "kernel"), sorted(pair for pair in KERNELS if pair[1] != "sdpa"))
def test_vmap_and_grad_of_vmap_equal_a_loop(name, kernel):
    _, k, v = (x.detach() for x in _qkv())
    qs = torch.randn(3, B, H, T, D, generator=torch.Generator().manual_seed(1))

    def call(q):
        return attention(q, k, v, **CALLS[name], kernel=kernel)

    torch.testing.assert_close(torch.func.vmap(call)(qs), torch.stack([call(q) for q in qs]))
    mapped = torch.func.vmap(torch.func.grad(lambda q: call(q).square().sum()))(qs)
    leaves = [q.clone().requires_grad_() for q in qs]
    for leaf in leaves:
        call(leaf).square().sum().backward()
    torch.testing.assert_close(mapped, torch.stack([leaf.grad for leaf in leaves]))


@pytest.mark.parametrize("kernel", ["auto", "dense", "blockwise"])
def test_vmap_over_lengths_bias_and_sinks_equals_a_loop(kernel):
    q, k, v = (x.detach() for x in _qkv())
    lengths = torch.tensor([[3, 12], [0, 5], [12, 1]])
    bias = torch.randn(3, T, T, generator=torch.Generator().manual_seed(2))
    sinks = torch.randn(3, H, generator=torch.Generator().manual_seed(3))

    def loss(bias, sinks, lengths):
        out, lse = attention_with_lse(q, k, v, bias=bias, sinks=sinks, kv_lengths=lengths, kernel=kernel)
        return out.square().sum() + lse.sum()

    both = torch.func.grad(loss, argnums=(0, 1))
    mapped = torch.func.vmap(both)(bias, sinks, lengths)
    loop = [both(bias[i], sinks[i], lengths[i]) for i in range(3)]
    for place in (0, 1):
        torch.testing.assert_close(mapped[place], torch.stack([one[place] for one in loop]))


@EVERY
def test_meta_and_fake_tensors_go_through_without_values(name, kernel):
    from torch._subclasses.fake_tensor import FakeTensorMode

    def convert(turn):
        keywords = {key: turn(x) if isinstance(x, torch.Tensor) else x for key, x in CALLS[name].items()}
        return attention(*(turn(x.detach()) for x in _qkv()), **keywords, kernel=kernel)

    assert convert(lambda x: x.to("meta")).shape == (B, H, T, D)
    with FakeTensorMode() as mode:
        assert convert(mode.from_tensor).shape == (B, H, T, D)


@pytest.mark.parametrize("kernel", ["sdpa", "blockwise"])
def test_a_second_derivative_names_the_kernel_that_has_one(kernel):
    q, k, v = _qkv()
    with pytest.raises(RuntimeError, match="kernel='dense'"):
        (first,) = torch.autograd.grad(attention(q, k, v, kernel=kernel).square().sum(), q, create_graph=True)
        first.sum().backward()


def test_recording_the_first_derivative_without_using_it_again_is_no_error():
    q, k, v = _qkv()
    (kept,) = torch.autograd.grad(attention(q, k, v, kernel="sdpa").sum(), q, create_graph=True)
    (plain,) = torch.autograd.grad(attention(q, k, v, kernel="sdpa").sum(), q)
    assert torch.equal(kept, plain)


def test_the_formula_can_be_differentiated_twice():
    q, k, v = (x.detach().double()[:1, :, :4].requires_grad_() for x in _qkv())
    sinks = torch.zeros(H, dtype=torch.float64, requires_grad=True)

    def call(q, k, v, sinks):
        return attention(q, k, v, sinks=sinks, causal=True, q_offset=-1, softcap=1.0, kernel="dense")

    assert torch.autograd.gradgradcheck(call, (q, k, v, sinks))
