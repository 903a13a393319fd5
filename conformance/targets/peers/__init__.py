"""Attention that others wrote, as targets: one small adapter each, which offers what its original can be asked for.

An adapter has `attention` with the arguments that the original has, and raises NotOffered for a combination that it
documents as its own. It adds no arithmetic: reordering axes, naming arguments and spelling a mask in the original's way
is all it does. Where an original then differs from the contract, `conformance/differences` says so.
"""

# Name on the command line: module in this folder.
PEERS: dict[str, str] = {
    "torch-sdpa": "torch_sdpa",
    "torch-mha": "torch_mha",
    "torch-flex": "torch_flex",
    "jax-nn": "jax_nn",
    "flax-nnx": "flax_nnx",
    "flax-linen": "flax_linen",
    "equinox": "equinox_attention",
    "keras-torch": "keras_torch",
    "keras-jax": "keras_jax",
    "transformers-sdpa": "transformers_sdpa",
    "transformers-eager": "transformers_eager",
    "x-transformers": "x_transformers_attend",
    "onnx-reference": "onnx_reference",
    "onnxruntime": "onnxruntime_attention",
    "mlx": "mlx_fast",
    "tinygrad": "tinygrad_attention",
}
