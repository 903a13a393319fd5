"""The hand-derived gradient of each function, as vector-Jacobian products named `<name>_vjp`."""

from .attention import attention_vjp, attention_weights_vjp, attention_with_lse_vjp, merge_attention_vjp

__all__ = [
    "attention_vjp",
    "attention_weights_vjp",
    "attention_with_lse_vjp",
    "merge_attention_vjp",
]
