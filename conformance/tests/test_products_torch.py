"""Linear layers by oneDNN's product say what torch's own layers say, and stand back where those alone will do."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import backend_torch  # noqa: E402
from backend_torch import products  # noqa: E402
from core_numpy.contract.config import ModelConfig  # noqa: E402

if not torch.backends.mkldnn.is_available():
    pytest.skip("this torch has no oneDNN", allow_module_level=True)

WIDTH = 256


@pytest.fixture
def made(monkeypatch):
    """How many products oneDNN made, wherever this runs."""
    count = []
    product = products._product
    monkeypatch.setattr(products, "FASTER", True)
    monkeypatch.setattr(products, "_product", lambda *a: (count.append(1), product(*a))[1])
    return count


def layers(*outputs, bias=True):
    torch.manual_seed(len(outputs))
    return [nn.Linear(WIDTH, n, bias=bias) for n in outputs]


def rows(*shape):
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(3)).requires_grad_()


def results(call, x, used):
    """Outputs, and the gradients of x and of every parameter for given cotangents."""
    out = call(x)
    cotangents = [1.0 + torch.cos(torch.arange(y.numel(), dtype=y.dtype)).view(y.shape) for y in out]
    wanted = [x, *(p for layer in used for p in layer.parameters())]
    return [*(y.detach() for y in out), *torch.autograd.grad(out, wanted, cotangents)]


def check_close(found, wide, terms):
    for y, exact in zip(found, wide, strict=True):
        # Sums of `terms` products, each rounded: a generous multiple of the expected growth with the root of terms.
        assert (y - exact).abs().max() <= 8 * terms**0.5 * 2**-24 * exact.abs().max() + 1e-30


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("outputs", [(WIDTH,), (WIDTH, 128, 128), (512, 512)])
def test_outputs_and_gradients_are_those_of_the_layers(made, outputs, bias):
    used, x = layers(*outputs, bias=bias), rows(8, 128)
    found = results(lambda x: products.project(x, *used), x, used)
    assert len(made) == 2 * len(outputs)
    wide = [nn.Linear(WIDTH, n, bias=bias, dtype=torch.float64) for n in outputs]
    for layer, own in zip(wide, used, strict=True):
        layer.load_state_dict(own.state_dict())
    exact = results(lambda x: [layer(x) for layer in wide], x.detach().double().requires_grad_(), wide)
    check_close(found, exact, 1024)


def test_frozen_weights_get_no_gradient_and_the_rows_get_theirs(made):
    used, x = layers(WIDTH, WIDTH), rows(512)
    used[0].requires_grad_(False)
    total = sum(y.square().sum() for y in products.project(x, *used))
    assert made
    total.backward()
    expected = torch.autograd.grad(sum(layer(x).square().sum() for layer in used), [x, used[1].weight])
    assert used[0].weight.grad is None and used[0].bias.grad is None
    torch.testing.assert_close([x.grad, used[1].weight.grad], list(expected), rtol=1e-4, atol=1e-2)


def test_derivatives_of_derivatives_are_those_of_the_layers(made):
    used, x = layers(WIDTH, WIDTH), rows(512)

    def twice(call):
        out = sum(y.square().mean() for y in call(x))
        first = torch.autograd.grad(out, [x, used[0].weight], create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), [x, used[0].weight, used[1].bias])

    found = twice(lambda x: products.project(x, *used))
    assert made
    expected = twice(lambda x: [layer(x) for layer in used])
    for a, b in zip(found, expected, strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()


def stands_back(made, x, *used):
    before = len(made)
    products.project(x, *used)
    return len(made) == before


def test_it_stands_back_where_torch_alone_will_do(made, monkeypatch):
    (layer,), x = layers(WIDTH), rows(1024)
    assert not stands_back(made, x, layer)
    assert stands_back(made, rows(32), layer)  # few rows
    assert stands_back(made, x.double(), nn.Linear(WIDTH, WIDTH, dtype=torch.float64))
    assert stands_back(made, x, nn.Sequential(layer))
    assert stands_back(made, x.to("meta"), nn.Linear(WIDTH, WIDTH, device="meta"))
    with torch.autocast("cpu", torch.bfloat16):
        assert products.project(x, layer)[0].dtype == torch.bfloat16
    with monkeypatch.context() as switched:
        switched.setattr(torch._C, "_get_mkldnn_enabled", lambda: False)
        assert stands_back(made, x, layer)
    out, _ = torch.func.vjp(lambda x: products.project(x, layer)[0], x.detach())
    torch.testing.assert_close(out, layer(x))
    with pytest.raises(RuntimeError, match="shape"):
        products.project(torch.randn(1024, 128), layer)


def test_hooks_of_a_layer_are_heard(made):
    used, x, heard = layers(WIDTH, WIDTH), rows(1024), []
    used[1].register_forward_hook(lambda *_: heard.append(1))
    assert stands_back(made, x, *used) and heard == [1]


@pytest.mark.parametrize("wanted", [True, False])
def test_a_model_means_the_same_with_it_and_without(made, monkeypatch, wanted):
    config = ModelConfig(vocab=160, width=128, heads=2, layers=2, max_length=128, activation="swiglu", kv_heads=1)
    model = backend_torch.Transformer(config, seed=1)
    tokens = torch.arange(1024).remainder(160).view(8, 128)
    batch = {"tokens": tokens.numpy(), "targets": tokens.roll(1, 1).numpy()}
    monkeypatch.setattr(products, "FASTER", wanted)
    loss, grads = backend_torch.loss_and_gradients(model, batch)
    assert bool(made) == wanted
    monkeypatch.setattr(products, "FASTER", False)
    other, expected = backend_torch.loss_and_gradients(model, batch)
    assert abs(loss - other) <= 1e-6 * abs(other)
    for name, g in grads.items():
        if not name.endswith("key.bias"):  # 0 but for rounding
            assert abs(g - expected[name]).max() <= 2e-5 * abs(expected[name]).max(), name


@pytest.mark.slow
def test_compiled_it_stays_one_operation_and_exported_it_is_torchs_own(monkeypatch):
    monkeypatch.setattr(products, "FASTER", True)
    monkeypatch.setattr(products, "LEAST_COMPILED", products.LEAST)
    used, x = layers(WIDTH, WIDTH), rows(1024)
    call = lambda x: products.project(x, *used)  # noqa: E731
    found = results(torch.compile(call, fullgraph=True, backend="aot_eager"), x, used)
    check_close(found, results(call, x, used), 1024)
    model = backend_torch.Transformer(ModelConfig(vocab=160, width=128, heads=2, layers=1, max_length=128), seed=1)
    program = torch.export.export(model, (torch.zeros(8, 128, dtype=torch.int64),))
    assert "backend_torch.product" not in str(program.graph) and "linear" in str(program.graph)
