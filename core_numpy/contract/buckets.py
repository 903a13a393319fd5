"""Where the buckets of relative positions begin: plain integers, so that no logarithm decides at an edge."""

from __future__ import annotations

import math


def bucket_starts(buckets: int, max_distance: int) -> tuple[int, ...]:
    """The smallest distance of each bucket but the first; the bucket of d is the number of starts at most d.

    One direction has `buckets` buckets. The first m = buckets // 2 hold one distance each; of the other
    N = buckets - m, number k begins where m + floor(N log(d / m) / log(M / m)) reaches m + k: at the smallest d with

        (d / m)^N >= (M / m)^k,   or, with g = gcd(N, k),   d^(N/g) m^(k/g) >= M^(k/g) m^(N/g)

    which whole numbers decide exactly. T5 takes float32 logarithms and truncates.
    """
    exact, rest = buckets // 2, buckets - buckets // 2
    starts = list(range(1, exact + 1))
    for k in range(1, rest):
        common = math.gcd(rest, k)
        a, b = rest // common, k // common
        limit = max_distance**b * exact**a
        d = max(exact, round(exact * (max_distance / exact) ** (k / rest)))
        while d**a * exact**b < limit:
            d += 1
        while d > exact and (d - 1) ** a * exact**b >= limit:
            d -= 1
        starts.append(d)
    return tuple(starts)
