"""NumPy arrays handed to torch, the commonest slip of all: one sentence that names the argument, in every function."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import backend_torch as B  # noqa: E402 (after the skip)

X, IDS, BOOLS = np.ones((2, 3), np.float32), np.array([[0, 1]]), np.ones((2, 2), bool)
ROWS = np.ones((1, 2, 4), np.float32)
Q, FREQUENCIES = torch.ones(2, 3), torch.ones(2)
KEY = np.array([0, 1])
CONFIG = B.ModelConfig(vocab=3, width=4, heads=2, layers=1, max_length=4)

CALLS = {
    "attention": (lambda: B.attention(X, X, X), "q"),
    "attention, its mask": (lambda: B.attention(Q, Q, Q, mask=BOOLS), "mask"),
    "attention, its bias": (lambda: B.attention(Q, Q, Q, bias=X[:, :2]), "bias"),
    "attention, its lengths": (
        lambda: B.attention(torch.ones(1, 1, 2, 3), torch.ones(1, 1, 2, 3), torch.ones(1, 1, 2, 3), kv_lengths=KEY[:1]),
        "kv_lengths",
    ),
    "attention, its key": (lambda: B.attention(Q, Q, Q, dropout_rate=0.5, dropout_key=KEY), "dropout_key"),
    "attention_weights": (lambda: B.attention_weights(X, X), "q"),
    "attention_with_lse": (lambda: B.attention_with_lse(Q, Q, X), "v"),
    "explain_kernel": (lambda: B.explain_kernel(X, X, X), "q"),
    "merge_attention": (lambda: B.merge_attention([Q], [X[:, 0]]), "lses"),
    "padding_mask": (lambda: B.padding_mask(KEY, 3), "lengths"),
    "padding_mask_from_tokens": (lambda: B.padding_mask_from_tokens(IDS, 0), "tokens"),
    "segment_mask": (lambda: B.segment_mask(IDS), "q_segments"),
    "prefix_mask": (lambda: B.prefix_mask(2, None, KEY), "prefix_lengths"),
    "combine_masks": (lambda: B.combine_masks(B.causal_mask(2), BOOLS), r"masks\[1\]"),
    "from_blocked": (lambda: B.from_blocked(BOOLS), "mask"),
    "mask_to_bias": (lambda: B.mask_to_bias(BOOLS, "float32"), "mask"),
    "positions_from_mask": (lambda: B.positions_from_mask(BOOLS), "padding"),
    "embed": (lambda: B.embed(Q, IDS), "ids"),
    "sinusoidal_encoding": (lambda: B.sinusoidal_encoding(IDS, 4), "positions"),
    "rotary_tables": (lambda: B.rotary_tables(IDS, FREQUENCIES), "positions"),
    "apply_rotary": (lambda: B.apply_rotary(ROWS, torch.ones(2, 2), torch.ones(2, 2)), "x"),
    "permute_rotary": (lambda: B.permute_rotary(ROWS[0], 1, source="half", target="interleaved"), "weight"),
    "relative_bias": (lambda: B.relative_bias(np.ones((32, 2), np.float32), 3), "table"),
    "softmax": (lambda: B.softmax(X), "x"),
    "layer_norm": (lambda: B.layer_norm(Q, X[0], None, eps=1e-5), "weight"),
    "rms_norm": (lambda: B.rms_norm(X, None, eps=1e-5), "x"),
    "gelu": (lambda: B.gelu(X), "x"),
    "silu": (lambda: B.silu(X), "x"),
    "relu": (lambda: B.relu(X), "x"),
    "dropout": (lambda: B.dropout(X, 0.5, B.key(0)), "x"),
    "cross_entropy": (lambda: B.cross_entropy(Q, KEY), "targets"),
    "split": (lambda: B.split(KEY), "key"),
    "fold_in": (lambda: B.fold_in(KEY, 1), "key"),
    "uniform": (lambda: B.uniform(KEY, (2,)), "key"),
    "uniform_at": (lambda: B.uniform_at(KEY, torch.arange(2)), "key"),
    "categorical": (lambda: B.categorical(B.key(0), X), "logits"),
    "MultiHeadAttention": (lambda: B.MultiHeadAttention(CONFIG)(ROWS), "x"),
    "FeedForward": (lambda: B.FeedForward(CONFIG)(ROWS), "x"),
    "Block": (lambda: B.Block(CONFIG)(torch.ones(1, 2, 4), mask=BOOLS), "mask"),
    "Transformer": (lambda: B.Transformer(CONFIG)(IDS), "tokens"),
    "attention_maps": (lambda: B.Transformer(CONFIG).attention_maps(IDS), "tokens"),
    "generate": (lambda: B.generate(B.Transformer(CONFIG), IDS, max_new=1), "tokens"),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_array_of_numpys_is_told_what_it_is_and_what_makes_a_tensor_of_it(name):
    call, argument = CALLS[name]
    with pytest.raises(TypeError, match=rf"^{argument} must be a tensor of torch; got an array of numpy, .*from_numpy"):
        call()


def test_a_batch_for_training_may_be_of_either():
    batch = {"tokens": IDS, "targets": IDS}
    tensors = {name: torch.as_tensor(x) for name, x in batch.items()}
    model = B.Transformer(CONFIG)
    assert B.loss_and_gradients(model, batch)[0] == B.loss_and_gradients(model, tensors)[0]
