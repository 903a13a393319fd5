"""Tiny models of the library `transformers` in float64, for the tests of families."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import numpy as np

# One line per model: class, config class, fields. Sizes differ from one another and from every default.
SIZES = {"vocab_size": 23, "hidden_size": 12, "intermediate_size": 14, "num_hidden_layers": 3, "num_attention_heads": 3,
         "max_position_embeddings": 19}  # fmt: skip
GROUPED = {**SIZES, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 6, "rms_norm_eps": 3e-4}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8, "rope_theta": 500.0}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "rope_theta": 100.0,
        "beta_fast": 4.0, "beta_slow": 0.5}  # fmt: skip
LONG = {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0, 1.5, 2.5], "long_factor": [2.0, 3.0, 4.5],
        "original_max_position_embeddings": 8, "rope_theta": 100.0}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHead", {"vocab_size": 23, "n_positions": 13, "n_embd": 12, "n_layer": 3, "n_head": 3,
                            "layer_norm_epsilon": 2e-4}),
    "gpt2 relu": ("GPT2LMHead", {"vocab_size": 23, "n_positions": 13, "n_embd": 10, "n_layer": 2, "n_head": 5,
                                 "n_inner": 7, "activation_function": "relu", "tie_word_embeddings": False}),
    "gpt2 bare": ("GPT2", {"vocab_size": 23, "n_positions": 13, "n_embd": 12, "n_layer": 2, "n_head": 3}),
    "llama": ("LlamaForCausalLM", GROUPED),
    "llama one key": ("LlamaForCausalLM", {**GROUPED, "num_key_value_heads": 1, "num_attention_heads": 3,
                      "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "hidden_act": "gelu"}),
    "llama bare": ("Llama", {**SIZES, "hidden_act": "gelu_new"}),
    "llama linear": ("LlamaForCausalLM", {**GROUPED, "rope_parameters": {"rope_type": "linear", "factor": 3.0,
                                                                        "rope_theta": 100.0}}),
    "llama dynamic": ("LlamaForCausalLM", {**GROUPED, "max_position_embeddings": 5, "rope_parameters": {
                      "rope_type": "dynamic", "factor": 3.0, "rope_theta": 100.0}}),
    "llama yarn": ("LlamaForCausalLM", {**GROUPED, "rope_parameters": YARN}),
    "llama yarn mscale": ("LlamaForCausalLM", {**GROUPED, "rope_parameters": {**YARN, "mscale": 0.7,
                                                                             "mscale_all_dim": 1.3}}),
    "llama 3": ("LlamaForCausalLM", {**GROUPED, "rope_parameters": LLAMA3}),
    "llama longrope": ("LlamaForCausalLM", {**GROUPED, "rope_parameters": LONG}),
    "llama longrope short": ("LlamaForCausalLM", {**GROUPED, "rope_parameters": {
                             **LONG, "original_max_position_embeddings": 18}}),
    "mistral": ("MistralForCausalLM", {**GROUPED, "sliding_window": 3}),
    "mistral open": ("MistralForCausalLM", {**GROUPED, "sliding_window": None, "num_key_value_heads": 3}),
    "qwen2": ("Qwen2ForCausalLM", {**SIZES, "num_attention_heads": 6, "num_key_value_heads": 2}),
    "qwen2 window": ("Qwen2ForCausalLM", {**SIZES, "num_attention_heads": 6, "num_key_value_heads": 3,
                     "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1,
                     "tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", GROUPED),
    "qwen3 window": ("Qwen3ForCausalLM", {**GROUPED, "use_sliding_window": True, "sliding_window": 2,
                     "max_window_layers": 2, "attention_bias": True}),
    "gemma": ("GemmaForCausalLM", GROUPED),
    "gemma one key": ("GemmaForCausalLM", {**GROUPED, "num_key_value_heads": 1, "tie_word_embeddings": False}),
    "gemma2": ("Gemma2ForCausalLM", {**GROUPED, "query_pre_attn_scalar": 7, "sliding_window": 3,
               "attn_logit_softcapping": 2.5, "final_logit_softcapping": 1.5}),
    "gemma2 plain": ("Gemma2ForCausalLM", {**GROUPED, "query_pre_attn_scalar": 5, "attn_logit_softcapping": None,
                     "final_logit_softcapping": None, "attention_bias": True,
                     "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
                     "sliding_window": 4}),
    "phi": ("PhiForCausalLM", {**SIZES, "hidden_size": 24, "num_attention_heads": 3, "layer_norm_eps": 2e-4}),
    "phi part": ("PhiForCausalLM", {**SIZES, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2,
                 "hidden_act": "gelu", "rope_parameters": {"rope_theta": 50.0, "partial_rotary_factor": 0.3,
                                                           "rope_type": "default"}}),
    "gpt_neox": ("GPTNeoXForCausalLM", {**SIZES, "hidden_size": 24, "layer_norm_eps": 2e-4}),
    "gpt_neox in turn": ("GPTNeoXForCausalLM", {**SIZES, "hidden_size": 40, "num_attention_heads": 5,
                         "use_parallel_residual": False, "attention_bias": False, "hidden_act": "gelu_new",
                         "rope_parameters": {"rope_theta": 50.0, "partial_rotary_factor": 0.5,
                                             "rope_type": "default"}, "tie_word_embeddings": True}),
    "bloom": ("BloomForCausalLM", {"vocab_size": 23, "hidden_size": 12, "n_layer": 3, "n_head": 3,
                                   "layer_norm_epsilon": 2e-4}),
    "bloom four": ("BloomForCausalLM", {"vocab_size": 23, "hidden_size": 20, "n_layer": 2, "n_head": 4,
                                        "tie_word_embeddings": False}),
    "bert": ("Bert", {**SIZES, "type_vocab_size": 3, "layer_norm_eps": 2e-4}),
    "bert relu": ("Bert", {**SIZES, "hidden_size": 20, "num_attention_heads": 5, "hidden_act": "relu"}),
    "t5": ("T5ForConditionalGeneration", {"vocab_size": 23, "d_model": 12, "d_kv": 5, "d_ff": 14, "num_layers": 2,
           "num_heads": 3, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 9,
           "layer_norm_epsilon": 2e-4}),
    "t5 gated": ("T5ForConditionalGeneration", {"vocab_size": 23, "d_model": 12, "d_kv": 5, "d_ff": 14, "num_layers": 3,
                 "num_heads": 2, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "t5 gated silu": ("T5ForConditionalGeneration", {"vocab_size": 23, "d_model": 12, "d_kv": 4, "d_ff": 14,
                      "num_layers": 2, "num_heads": 3, "feed_forward_proj": "gated-silu"}),
}  # fmt: skip


def stem(name: str) -> str:
    kind = MODELS[name][0]
    return kind.removesuffix("ForCausalLM").removesuffix("LMHead").removesuffix("ForConditionalGeneration")


def build(name: str, seed: int, **changes: Any) -> Any:
    """The model in float64, every weight drawn, norms and biases too; eager attention, eval mode."""
    import torch
    import transformers

    kind, fields = MODELS[name]
    # Token ids outside the small vocabulary would be warned about.
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if kind.startswith("T5"):
        ids["decoder_start_token_id"] = 0
    config = getattr(transformers, f"{stem(name)}Config")(**{**ids, **fields, **changes})
    config._attn_implementation = "eager"
    cls = kind if "For" in kind else f"{kind}Model"
    model = getattr(transformers, cls)(config).double().eval()
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for key, p in model.named_parameters():
            spread = 0.6 if p.ndim == 1 else 1.0 / np.sqrt(p.shape[-1])
            middle = 1.0 if "norm" in key.lower().replace("layernorm", "norm") and key.endswith("weight") else 0.0
            if stem(name).startswith("Gemma"):
                middle = 0.0
            p.copy_(torch.from_numpy(middle + spread * rng.standard_normal(tuple(p.shape))))
    return model


class _Double:
    """The module `torch` with float64 where a model asks for float32: its norms, angles and softmax are exact then."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        return self._torch.float64 if name in ("float32", "float") else getattr(self._torch, name)


@contextlib.contextmanager
def in_double(name: str) -> Any:
    """`transformers` without its float32 islands, so that float64 means float64."""
    import torch

    package = {"GPT2": "gpt2", "GPTNeoX": "gpt_neox"}.get(stem(name), stem(name).lower())
    modules = [importlib.import_module("transformers.modeling_rope_utils"),
               importlib.import_module(f"transformers.models.{package}.modeling_{package}")]  # fmt: skip
    old, default = torch.Tensor.float, torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    for module in modules:
        module.torch = _Double(torch)
    torch.Tensor.float = torch.Tensor.double
    try:
        yield
    finally:
        torch.Tensor.float = old
        torch.set_default_dtype(default)
        for module in modules:
            module.torch = torch


def batch(seed: int, rows: int = 3, length: int = 11) -> tuple[np.ndarray, np.ndarray]:
    """Token ids (rows, length) and how many of each row are real; one row is whole."""
    rng = np.random.default_rng(seed)
    lengths = np.array([length, length - 3, 2][:rows])
    return rng.integers(3, 23, (rows, length)).astype(np.int32), lengths.astype(np.int32)


def call(model: Any, tokens: np.ndarray, lengths: np.ndarray, context: tuple[np.ndarray, np.ndarray] | None) -> Any:
    """The model's logits or hidden states, padding masked as its library wants it."""
    import torch

    def long(x: np.ndarray) -> Any:
        return torch.from_numpy(x.astype(np.int64))

    def padding(x: np.ndarray, n: np.ndarray) -> Any:
        return long(np.arange(x.shape[1]) < n[:, None])

    if context is not None:
        source, source_lengths = context
        sides = {"input_ids": long(source), "attention_mask": padding(source, source_lengths)}
        own = {"decoder_input_ids": long(tokens), "decoder_attention_mask": padding(tokens, lengths)}
        return model(**sides, **own).logits
    out = model(input_ids=long(tokens), attention_mask=padding(tokens, lengths))
    return out.logits if hasattr(out, "logits") else out.last_hidden_state
