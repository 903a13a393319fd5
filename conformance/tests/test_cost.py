"""Costs that can be redone on paper."""

import math

import pytest

from core_numpy.contract.config import BlockConfig, ModelConfig
from core_numpy.contract.cost import attention_cost, feed_forward_cost, step_cost, visible_pairs
from core_numpy.contract.parameters import model_parameters

# B 2, T 3, W 6, H 4, G 2, D 5, Dv 7
GROUPED = BlockConfig(width=6, heads=4, kv_heads=2, head_dim=5, value_dim=7, attention_bias=False, causal=False)


def test_grouped_attention_is_the_sum_of_its_products():
    cost = attention_cost(GROUPED, 2, 3)
    queries, keys, values, output = 2 * 6 * 6 * 20, 2 * 6 * 6 * 10, 2 * 6 * 6 * 14, 2 * 6 * 28 * 6
    scores, weighted = 2 * 2 * 4 * 9 * 5, 2 * 2 * 4 * 9 * 7
    assert cost.forward == queries + keys + values + output + scores + weighted == 6912
    assert cost.backward == 2 * 6912 and cost.flops == 3 * 6912
    assert cost.parameters == 6 * 20 + 6 * 10 + 6 * 14 + 28 * 6 == 432
    # x read three times (q, k, v), result once: 4 * 36; q 120, k 60, v 84, out 168, each written and read
    assert cost.bytes_moved == 3 * 4 * (432 + 4 * 36 + 2 * (120 + 60 + 84 + 168))
    assert cost.activations == 4 * (36 + 120 + 60 + 84 + 168) + 4 * 24  # and B H T log-sum-exps
    stored = attention_cost(GROUPED, 2, 3, stored_weights=True)
    assert stored.activations - cost.activations == 4 * (2 * 4 * 3 * 3)
    assert attention_cost(GROUPED, 2, 3, itemsize=2).activations == cost.activations // 2 + 2 * 24


@pytest.mark.parametrize(
    ("causal", "window", "pairs"),
    [
        (False, None, 25),
        (True, None, 15),  # 1 + 2 + 3 + 4 + 5
        (True, (1, None), 9),  # 1 + 2 + 2 + 2 + 2
        (True, (1, 3), 9),  # causality bounds the right side
        (False, (1, 1), 13),  # 2 + 3 + 3 + 3 + 2
        (False, (None, 0), 15),
        (False, (0, 2), 12),  # 3 + 3 + 3 + 2 + 1
        (False, (99, 99), 25),
    ],
)
def test_only_pairs_that_may_attend_are_counted(causal, window, pairs):
    config = BlockConfig(width=4, heads=2, causal=causal, window=window)
    assert visible_pairs(config, 5) == pairs
    full = attention_cost(config.replace(causal=False, window=None), 1, 5)
    assert full.forward - attention_cost(config, 1, 5).forward == 2 * 2 * (25 - pairs) * (2 + 2)


def test_a_models_causality_follows_its_kind():
    config = ModelConfig(width=4, heads=2, vocab=3, layers=1)
    assert visible_pairs(config, 3) == 6
    assert visible_pairs(config.replace(kind="encoder"), 3) == 9


def test_cross_attention_sees_every_key_of_the_context():
    cost = attention_cost(GROUPED.replace(causal=True), 2, 3, context=8)
    projections = 2 * 6 * (2 * 3 * 20 + 2 * 8 * 10 + 2 * 8 * 14 + 2 * 3 * 28)
    assert cost.forward == projections + 2 * 2 * 4 * 24 * 12


@pytest.mark.parametrize(("activation", "products"), [("gelu", 2), ("swiglu", 3)])
def test_a_gated_feed_forward_has_three_products(activation, products):
    config = BlockConfig(width=6, heads=2, hidden=10, activation=activation)
    cost = feed_forward_cost(config, 2, 3)
    assert cost.forward == products * 2 * 6 * 6 * 10
    assert cost.parameters == products * 60 + (products - 1) * 10 + 6
    assert cost.activations == 4 * 6 * (6 + products * 10)
    assert cost.bytes_moved == 3 * 4 * (cost.parameters + products * 6 * 16)


def test_a_whole_step_of_a_small_model_is_what_paper_says():
    # B 2, T 3, W 4, H 2, V 5, F 16, one layer, causal: six visible pairs
    config = ModelConfig(width=4, heads=2, vocab=5, layers=1, max_length=9)
    cost = step_cost(config, 2, 3)
    assert [layer.name for layer in cost.layers] == [
        "embedding", "blocks.0.attention", "blocks.0.ffn", "blocks.0.norms", "head", "update",
    ]  # fmt: skip
    attention = 4 * 2 * 6 * 4 * 4 + 2 * 2 * 2 * 6 * (2 + 2)
    ffn, head = 2 * 2 * 6 * 4 * 16, 2 * 6 * 4 * 5
    assert cost.total.forward == attention + ffn + head == 768 + 192 + 1536 + 240
    assert cost.total.flops == 3 * cost.total.forward
    assert cost.layers[3].activations == 2 * 24 * 4  # the inputs of two norms
    assert cost.layers[4].activations == 4 * (24 + 24 + 30)
    assert cost.layers[5].bytes_moved == 28 * cost.total.parameters
    assert cost.total.activations == sum(layer.activations for layer in cost.layers)


@pytest.mark.parametrize(
    "config",
    [
        ModelConfig(width=8, heads=4, kv_heads=2, vocab=7, layers=3, positions="rotary", activation="geglu"),
        ModelConfig(width=8, heads=2, vocab=7, layers=2, tie_embeddings=True, norm_place="sandwich", qk_norm=True),
        ModelConfig(width=8, heads=2, vocab=7, layers=2, kind="encoder", head="classifier", classes=3, sinks=True),
        ModelConfig(width=8, heads=2, vocab=7, layers=2, positions="relative", norm_place="parallel", shared_norm=True),
        ModelConfig(width=8, heads=2, vocab=7, layers=2, kind="encoder_decoder", share_embedding=True),
        ModelConfig(width=8, heads=2, vocab=7, layers=2, kind="encoder_decoder", sinks=True, embedding_norm=True),
        ModelConfig(width=8, heads=2, vocab=7, layers=0, head="none", final_norm=False),
    ],
)  # fmt: skip
def test_every_parameter_is_counted_in_one_layer(config):
    cost = step_cost(config, 2, 3)
    assert cost.total.parameters == sum(math.prod(p.shape) for p in model_parameters(config).values())
    assert cost.to_dict()["total"]["flops"] == cost.total.flops


def test_each_layers_own_window_is_counted():
    config = ModelConfig(width=4, heads=2, vocab=5, layers=2, layer_windows=((0, 0), None))
    narrow, wide = (layer for layer in step_cost(config, 1, 5).layers if layer.name.endswith("attention"))
    assert wide.forward - narrow.forward == 2 * 2 * (15 - 5) * 4


def test_wrong_sizes_are_refused_by_name():
    with pytest.raises(ValueError, match="batch must be an integer of at least 1; got 0"):
        attention_cost(GROUPED, 0, 3)
    with pytest.raises(TypeError, match="length must be an integer"):
        step_cost(ModelConfig(width=4, heads=2, vocab=5, layers=1), 1, 2.0)
    with pytest.raises(TypeError, match="config must be a ModelConfig; got BlockConfig"):
        step_cost(GROUPED, 1, 2)
    for cost in (attention_cost, feed_forward_cost):
        with pytest.raises(TypeError, match=r"config must be a BlockConfig or ModelConfig; got dict \{'width': 6\}"):
            cost({"width": 6}, 2, 3)
