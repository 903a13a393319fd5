"""ONNX's Attention (opsets 23 to 25) said in `attention`, `attention_weights` and `attention_with_lse`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]
Call = Callable[[str, dict[str, Any]], Arrays]

RAW, CAPPED, MASKED, WEIGHTS = range(4)  # qk_matmul_output_mode


def answer(attributes: dict[str, Any], inputs: Arrays, outputs: tuple[str, ...], call: Call) -> Arrays:
    """The outputs that are asked for. softmax_precision asks for nothing: softmax is computed in float32 at least."""
    q, k, v = inputs["Q"], inputs["K"], inputs["V"]
    together = q.ndim == 3
    if together:
        q = heads_apart(q, attributes["q_num_heads"])
        k, v = heads_apart(k, attributes["kv_num_heads"]), heads_apart(v, attributes["kv_num_heads"])
    if "past_key" in inputs:  # the cache inside the operator: old keys in front of new ones, and out again
        k = np.concatenate([inputs["past_key"], k], axis=2)
        v = np.concatenate([inputs["past_value"], v], axis=2)
    limits = restrictions(attributes, inputs, q.shape[2], k.shape[2])
    how = {"scale": attributes["scale"]} if "scale" in attributes else {}
    if attributes["softcap"]:  # 0 means none
        how["softcap"] = attributes["softcap"]
    out = call("attention", {"q": q, "k": k, "v": v, **limits, **how})["out"]
    answers = {"Y": heads_together(out) if together else out, "present_key": k, "present_value": v}
    mode = attributes["qk_matmul_output_mode"]
    if "qk_matmul_output" not in outputs:
        return answers
    if mode == WEIGHTS:
        answers["qk_matmul_output"] = call("attention_weights", {"q": q, "k": k, **limits, **how})["weights"]
    else:
        if mode == RAW:
            how.pop("softcap", None)
        answers["qk_matmul_output"] = scores(q, k, limits if mode == MASKED else {}, how, call)
    return answers


def restrictions(attributes: dict[str, Any], inputs: Arrays, T: int, S: int) -> dict[str, Any]:
    """attn_mask, is_causal, the windows and nonpad_kv_seqlen as keyword arguments of `attention`."""
    limits: dict[str, Any] = {}
    if "attn_mask" in inputs:
        mask = inputs["attn_mask"]
        missing = [(0, 0)] * (mask.ndim - 1) + [(0, S - mask.shape[-1])]
        boolean = mask.dtype == bool
        # A mask that ends early masks the keys past its end; axes that it lacks stand in front, as NumPy has it.
        mask = np.pad(mask, missing, constant_values=False if boolean else np.array(-np.inf, dtype=mask.dtype))
        mask = mask.reshape((1,) * (2 - mask.ndim) + mask.shape) if mask.ndim < 2 else mask
        limits["mask" if boolean else "bias"] = mask[None] if mask.ndim == 3 else mask
    left, right = attributes.get("left_window_size", -1), attributes.get("right_window_size", -1)
    if left >= 0 or right >= 0:
        limits["window"] = (left if left >= 0 else None, right if right >= 0 else None)
    if attributes["is_causal"]:
        limits["causal"] = True
    if "nonpad_kv_seqlen" in inputs:
        limits["kv_lengths"] = inputs["nonpad_kv_seqlen"].astype(np.int32)
    if "window" in limits or "causal" in limits:
        # The position of query 0 among the keys: after the cache, whichever way it came.
        past = inputs["past_key"].shape[2] if "past_key" in inputs else 0
        limits["q_offset"] = limits["kv_lengths"] - np.int32(T) if "kv_lengths" in limits else past
    return limits


def scores(q: np.ndarray, k: np.ndarray, limits: dict[str, Any], how: dict[str, Any], call: Call) -> np.ndarray:
    """What goes into the softmax, from a public name: the lse of a query that meets one key alone is its score.

    Each key becomes a batch element of its own, (B, G, S, D) -> (S * B, G, 1, D), with the masks' column that concerns
    it and its place taken off the offset and the length, so that whatever restricts it is the target's own reading too.
    """
    B, H, T, _ = q.shape
    S = k.shape[2]
    place = np.repeat(np.arange(S, dtype=np.int32), B)
    alone: dict[str, Any] = {name: limits[name] for name in ("causal", "window") if name in limits}
    for name in ("mask", "bias"):
        if name in limits:
            alone[name] = _keys_first(np.broadcast_to(limits[name], (B, H, T, S)), axis=3)
    if "q_offset" in limits:
        alone["q_offset"] = np.tile(np.broadcast_to(np.int32(limits["q_offset"]), (B,)), S) - place
    if "kv_lengths" in limits:
        alone["kv_lengths"] = (place < np.tile(limits["kv_lengths"], S)).astype(np.int32)
    key = _keys_first(k, axis=2)
    given = {"q": np.tile(q, (S, 1, 1, 1)), "k": key, "v": key, **alone, **how}
    lse = call("attention_with_lse", given)["lse"]
    return np.moveaxis(lse.reshape(S, B, H, T), 0, -1).astype(q.dtype)


def _keys_first(x: np.ndarray, axis: int) -> np.ndarray:
    """(B, n, ...) with S at `axis` -> (S * B, n, ...) with 1 there."""
    parts = np.moveaxis(x, axis, 0)
    return np.ascontiguousarray(np.expand_dims(parts.reshape(-1, *parts.shape[2:]), axis))


def heads_apart(x: np.ndarray, heads: int) -> np.ndarray:
    """(B, T, heads * D) -> (B, heads, T, D)."""
    B, T, width = x.shape
    return np.ascontiguousarray(x.reshape(B, T, heads, width // heads).swapaxes(1, 2))


def heads_together(x: np.ndarray) -> np.ndarray:
    """(B, heads, T, D) -> (B, T, heads * D)."""
    B, heads, T, D = x.shape
    return x.swapaxes(1, 2).reshape(B, T, heads * D)
