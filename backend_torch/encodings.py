"""How a model knows the order of its tokens, in torch. Rules: core_numpy.encodings.

Tables and angles are float64, so that a position of a million keeps its angle; on a device without float64 they are
made on the CPU and moved. Everything traces under `torch.compile` and differentiates.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from core_numpy.contract.buckets import bucket_starts
from core_numpy.contract.checks.encodings import (
    check_apply_rotary,
    check_buckets,
    check_distances,
    check_embed,
    check_frequencies,
    check_permute,
    check_relative_table,
    check_sinusoidal,
    check_slopes,
    check_tables,
)
from core_numpy.contract.config import RotaryScaling

from .arrays import require_tensors, values
from .frequencies import scaled_frequencies


def embed(table: Tensor, ids: Tensor) -> Tensor:
    """Rows of a table (V, W), ids integers (...) -> (..., W). Native: `F.embedding`. Rules: core_numpy.encodings."""
    check_embed(table, ids, values)
    require_tensors(table=table, ids=ids)
    return F.embedding(_index(ids), table)


def sinusoidal_encoding(
    positions: Tensor,
    width: int,
    *,
    base: float = 10000.0,
    layout: str = "interleaved",
    dtype: str = "float32",
) -> Tensor:
    """Sines and cosines, positions integers (...) -> (..., width) on their device. Rules: core_numpy.encodings."""
    width, base = check_sinusoidal(positions, width, base, layout, dtype)
    require_tensors(positions=positions)
    exponents = torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width
    angles = _angles(positions, torch.pow(base, -exponents))
    sines, cosines = angles.sin(), angles[..., : width // 2].cos()
    if layout == "concatenated":
        out = torch.cat([sines, cosines], dim=-1)
    else:
        # An odd width has one sine more: pair it with a zero and cut that off.
        cosines = F.pad(cosines, (0, width % 2))
        out = torch.stack([sines, cosines], dim=-1).flatten(-2)[..., :width]
    return out.to(getattr(torch, dtype)).to(positions.device)


def rotary_frequencies(
    dim: int, *, base: float = 10000.0, scaling: RotaryScaling | None = None, length: int | None = None
) -> tuple[Tensor, float]:
    """float64 (dim/2,) on the CPU, and the attention factor. Rules: core_numpy.frequencies."""
    dim, base, length = check_frequencies(dim, base, scaling, length)
    return scaled_frequencies(dim, base, scaling, length)


def rotary_tables(positions: Tensor, frequencies: Tensor, *, attention_factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines, positions integers (...), frequencies (r,) -> two (..., r) on the positions' device.

    float64, or float32 where the device has no float64. Rules: core_numpy.encodings.
    """
    factor = check_tables(positions, frequencies, attention_factor)
    require_tensors(positions=positions, frequencies=frequencies)
    angles = _angles(positions, frequencies)
    dtype = torch.float64 if _has_float64(positions.device) else torch.float32
    cos, sin = factor * angles.cos(), factor * angles.sin()
    return cos.to(dtype).to(positions.device), sin.to(dtype).to(positions.device)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, *, layout: str = "half") -> Tensor:
    """Turn pairs of features of x (..., H, T, D) by tables (T, r) or (batch, T, r) -> x's shape and dtype.

    Computed in float32 at least, float64 for float64. Rules: core_numpy.encodings.
    """
    check_apply_rotary(x, cos, sin, layout)
    require_tensors(x=x, cos=cos, sin=sin)
    return rotate(x, cos, sin, layout)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """`apply_rotary` unchecked."""
    wide, rotated = torch.promote_types(x.dtype, torch.float32), 2 * cos.shape[-1]
    cos, sin = _over_heads(cos.to(wide)), _over_heads(sin.to(wide))
    turning, passing = x[..., :rotated].to(wide), x[..., rotated:]
    if layout == "half":
        a, b = turning.chunk(2, dim=-1)
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    else:
        a, b = turning.unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    turned = turned.to(x.dtype)
    return turned if passing.shape[-1] == 0 else torch.cat([turned, passing], dim=-1)


def permute_rotary(weight: Tensor, heads: int, *, source: str, target: str, rotary_dim: int | None = None) -> Tensor:
    """A canonical query or key weight (in, heads * D), or bias, reordered for the other layout. Rules: encodings."""
    heads, size, rotated = check_permute(weight, heads, source, target, rotary_dim)
    require_tensors(weight=weight)
    by_head = weight.unflatten(-1, (heads, size))
    turning, passing = by_head[..., :rotated], by_head[..., rotated:]
    if source != target:
        # (pair, member) in the interleaved layout is (member, pair) in the half layout.
        grid = (rotated // 2, 2) if source == "interleaved" else (2, rotated // 2)
        turning = turning.unflatten(-1, grid).transpose(-1, -2).flatten(-2)
    return torch.cat([turning, passing], dim=-1).flatten(-2)


def alibi_slopes(heads: int, *, dtype: str = "float32") -> Tensor:
    """How fast each head's attention falls with distance; (H,) on the CPU. Rules: core_numpy.encodings."""
    return torch.tensor(_slopes(check_slopes(heads, dtype)), dtype=getattr(torch, dtype))


def alibi_bias(
    heads: int, T: int, S: int | None = None, *, q_offset: int | Tensor = 0, dtype: str = "float32"
) -> Tensor:
    """-slope |i + q_offset - j|: (H, T, S), or (B, H, T, S), on the device of an offset that is a tensor.

    Rules: core_numpy.encodings.
    """
    heads = check_slopes(heads, dtype)
    distance = _relative(*check_distances(T, S, q_offset), q_offset).abs().unsqueeze(-3)
    wide = torch.float64 if _has_float64(distance.device) else torch.float32
    slopes = torch.tensor(_slopes(heads), dtype=wide, device=distance.device)
    return (slopes[:, None, None] * (-distance).to(wide)).to(getattr(torch, dtype))


def relative_buckets(
    T: int,
    S: int | None = None,
    *,
    buckets: int = 32,
    max_distance: int = 128,
    bidirectional: bool = True,
    q_offset: int | Tensor = 0,
) -> Tensor:
    """T5's bucket of every pair: int32 (T, S), or (B, T, S). Rules: core_numpy.encodings."""
    each, max_distance = check_buckets(buckets, max_distance, bidirectional)
    return _buckets(*check_distances(T, S, q_offset), each, max_distance, bidirectional, q_offset, None)


def relative_bias(
    table: Tensor,
    T: int,
    S: int | None = None,
    *,
    buckets: int = 32,
    max_distance: int = 128,
    bidirectional: bool = True,
    q_offset: int | Tensor = 0,
) -> Tensor:
    """T5's bias from a table (buckets, H): (H, T, S), or (B, H, T, S), on its device. Rules: core_numpy.encodings."""
    each, max_distance = check_buckets(buckets, max_distance, bidirectional)
    sizes = check_distances(T, S, q_offset)
    check_relative_table(table, buckets)
    require_tensors(table=table)
    bucket = _buckets(*sizes, each, max_distance, bidirectional, q_offset, table.device)
    return F.embedding(bucket, table).movedim(-1, -3)


def _index(ids: Tensor) -> Tensor:
    """F.embedding takes int32 and int64 alone."""
    return ids if ids.dtype in (torch.int32, torch.int64) else ids.to(torch.int64)


def _has_float64(device: torch.device) -> bool:
    return device.type != "mps"


def _angles(positions: Tensor, frequencies: Tensor) -> Tensor:
    """float64 position times frequency, where float64 is to be had."""
    place = positions.device if _has_float64(positions.device) else torch.device("cpu")
    return positions.to(place).to(torch.float64).unsqueeze(-1) * frequencies.to(place).to(torch.float64)


def _over_heads(table: Tensor) -> Tensor:
    """(batch, T, r) -> (batch, 1, T, r); (T, r) stays."""
    return table if table.ndim == 2 else table.unsqueeze(-3)


def _slopes(heads: int) -> list[float]:
    below = 1 << (heads.bit_length() - 1)
    own = [2.0 ** (-8.0 * h / below) for h in range(1, below + 1)]
    # Every second slope of the next power of two, beginning with its first.
    return own + [2.0 ** (-4.0 * h / below) for h in range(1, 2 * (heads - below), 2)]


def _relative(T: int, S: int, q_offset: int | Tensor, device: torch.device | None = None) -> Tensor:
    """j - (i + q_offset): int64 (T, S), or (B, T, S)."""
    start: int | Tensor = q_offset
    if isinstance(q_offset, Tensor):
        device = q_offset.device if device is None else device
        start = q_offset.to(device=device, dtype=torch.int64)[..., None, None]
    i = torch.arange(T, device=device)[:, None] + start
    return torch.arange(S, device=device)[None, :] - i


def _buckets(
    T: int,
    S: int,
    each: int,
    max_distance: int,
    bidirectional: bool,
    q_offset: int | Tensor,
    device: torch.device | None,
) -> Tensor:
    relative = _relative(T, S, q_offset, device)
    distance = relative.abs() if bidirectional else (-relative).clamp_min(0)
    starts = torch.tensor(bucket_starts(each, max_distance), dtype=torch.int64, device=relative.device)
    bucket = torch.bucketize(distance, starts, right=True, out_int32=True)
    return torch.where(relative > 0, bucket + each, bucket) if bidirectional else bucket
