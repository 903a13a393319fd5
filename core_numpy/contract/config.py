"""Configurations: frozen, checked when they are made, lossless as dictionaries.

They are defined here once and re-exported by every backend, because a default that differs
between two frameworks is a fault that no comparison of numbers can see.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from .checked import Checked, positive
from .train_config import TrainConfig

__all__ = ["BlockConfig", "ModelConfig", "RotaryScaling", "TrainConfig"]

ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu", "swiglu", "geglu", "geglu_tanh")
GATED = ("swiglu", "geglu", "geglu_tanh")
NORMS = ("layer", "rms")
NORM_PLACES = ("pre", "post", "sandwich", "parallel")
POSITIONS = ("learned", "sinusoidal", "rotary", "alibi", "relative", "none")
HEADS = ("lm", "classifier", "none")
POOLS = ("mean", "first", "last")
KINDS = ("decoder", "encoder", "encoder_decoder")
ROTARY_LAYOUTS = ("half", "interleaved")
SINUSOIDAL_LAYOUTS = ("interleaved", "concatenated")
SCALINGS = ("linear", "ntk", "dynamic", "yarn", "llama3", "longrope")

Window = tuple[int | None, int | None]


@dataclass(frozen=True, kw_only=True)
class RotaryScaling(Checked):
    """How rotary frequencies are stretched for longer texts; `encodings.rotary_frequencies` has the formulas.

    kind: "linear" (position interpolation), "ntk" (base stretched by factor), "dynamic" (NTK by the
    running length), "yarn", "llama3", "longrope" (one factor per frequency, short or long).
    """

    kind: str
    factor: float = 1.0
    original_max_length: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    short_factors: tuple[float, ...] | None = None
    long_factors: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        self._unwrap()
        self._choice("kind", SCALINGS)
        self._number("factor", above=0.0)
        self._integer("original_max_length", 1, optional=True)
        for field in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
            self._number(field, above=0.0)
        self._number("attention_factor", above=0.0, optional=True)
        if self.kind in ("dynamic", "yarn", "llama3", "longrope") and self.original_max_length is None:
            self._fail("original_max_length", f"given for kind={self.kind!r}: the length the model was trained at")
        if self.kind == "llama3" and not self.high_freq_factor > self.low_freq_factor:
            self._fail("high_freq_factor", f"above low_freq_factor ({self.low_freq_factor:g})")
        if self.kind == "yarn" and not self.beta_fast > self.beta_slow:
            self._fail("beta_fast", f"above beta_slow ({self.beta_slow:g})")
        for field in ("short_factors", "long_factors"):
            factors = getattr(self, field)
            if self.kind != "longrope":
                if factors is not None:
                    self._fail(field, f"None for kind={self.kind!r}: only longrope reads it")
                continue
            numbers = isinstance(factors, tuple) and factors and all(positive(item) for item in factors)
            if not numbers:
                self._fail(field, "a tuple of positive numbers, one per frequency, for kind='longrope'")
        if self.kind == "longrope" and len(self.short_factors or ()) != len(self.long_factors or ()):
            self._fail("long_factors", f"as many as short_factors ({len(self.short_factors or ())})")


@dataclass(frozen=True, kw_only=True)
class BlockConfig(Checked):
    """One transformer block: attention, feed-forward, their norms and where these stand.

    Sizes are in features. `kv_heads=None` means as many as heads, `head_dim=None` means width / heads,
    `value_dim=None` means head_dim, `hidden=None` means 4 * width, `output_bias=None` means as
    `attention_bias`. `norm_bias` concerns layer norm; RMS norm has no bias. `qk_norm` is an RMS norm over
    the head size of queries and keys. `shared_norm` lets a parallel block feed both branches from norm1.
    """

    width: int
    heads: int
    kv_heads: int | None = None
    head_dim: int | None = None
    value_dim: int | None = None
    hidden: int | None = None
    activation: str = "gelu"
    norm: str = "layer"
    norm_place: str = "pre"
    norm_eps: float = 1e-5
    unit_offset: bool = False
    attention_bias: bool = True
    ffn_bias: bool = True
    norm_bias: bool = True
    qk_norm: bool = False
    causal: bool | None = True
    window: Window | None = None
    softcap: float | None = None
    scale: float | None = None
    sinks: bool = False
    dropout: float = 0.0
    cross_attention: bool = False
    output_bias: bool | None = None
    shared_norm: bool = False

    def __post_init__(self) -> None:
        self._unwrap()
        self._check_block()
        self._flag("causal")

    def _check_block(self) -> None:
        for field in ("width", "heads"):
            self._integer(field, 1)
        for field in ("kv_heads", "head_dim", "value_dim", "hidden"):
            self._integer(field, 1, optional=True)
        if self.head_dim is None and self.width % self.heads:
            self._fail("width", f"a multiple of heads ({self.heads}) unless head_dim is given")
        if self.kv_heads is not None and self.heads % self.kv_heads:
            self._fail(
                "kv_heads",
                f"a divisor of heads ({self.heads}): each key/value head serves a whole group of query heads",
            )
        self._choice("activation", ACTIVATIONS)
        self._choice("norm", NORMS)
        self._choice("norm_place", NORM_PLACES)
        self._number("norm_eps", above=0.0)
        for field in (
            "unit_offset",
            "attention_bias",
            "ffn_bias",
            "norm_bias",
            "qk_norm",
            "sinks",
            "cross_attention",
            "shared_norm",
        ):
            self._flag(field)
        self._flag("causal", optional=True)
        self._flag("output_bias", optional=True)
        self._window("window", self.window)
        self._number("softcap", above=0.0, optional=True)
        self._number("scale", optional=True)
        self._number("dropout", least=0.0, most=1.0)
        if self.cross_attention and self.norm_place in ("sandwich", "parallel"):
            self._fail(
                "cross_attention",
                f"False with norm_place={self.norm_place!r}: no published block defines the combination",
            )
        if self.shared_norm and self.norm_place != "parallel":
            self._fail("shared_norm", "False unless norm_place='parallel': other blocks have one norm per branch")

    @property
    def groups(self) -> int:
        """Key/value heads, G."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def key_size(self) -> int:
        """Head size of queries and keys, D."""
        return self.width // self.heads if self.head_dim is None else self.head_dim

    @property
    def value_size(self) -> int:
        """Head size of values, Dv."""
        return self.key_size if self.value_dim is None else self.value_dim

    @property
    def hidden_size(self) -> int:
        """Width of the feed-forward's middle."""
        return 4 * self.width if self.hidden is None else self.hidden

    @property
    def gated(self) -> bool:
        """Whether the feed-forward has a gate beside its up projection."""
        return self.activation in GATED

    @property
    def has_output_bias(self) -> bool:
        return self.attention_bias if self.output_bias is None else self.output_bias

    @property
    def has_norm_bias(self) -> bool:
        return self.norm == "layer" and self.norm_bias


@dataclass(frozen=True, kw_only=True)
class ModelConfig(BlockConfig):
    """A whole model: the block's fields, how many blocks, what goes in and what comes out.

    `causal=None` follows `kind`: a decoder is causal, an encoder is not. `max_length` bounds the learned
    position table and is the default size of a cache; other encodings have no longest length.
    `embedding_scale` multiplies the token embeddings, `logit_scale` the logits. `head_bias=None` means a
    bias for the classifier and none for the language model. `layer_windows` gives each layer its window
    in place of `window`. In an encoder-decoder `share_embedding` lets both sides read the decoder's table.
    """

    _nested: ClassVar[dict[str, type[Checked]]] = {"rotary_scaling": RotaryScaling}

    vocab: int
    layers: int
    max_length: int = 1024
    positions: str = "learned"
    rotary_base: float = 10000.0
    rotary_dim: int | None = None
    rotary_layout: str = "half"
    rotary_scaling: RotaryScaling | None = None
    relative_buckets: int = 32
    relative_max_distance: int = 128
    head: str = "lm"
    classes: int | None = None
    pool: str = "mean"
    tie_embeddings: bool = False
    embedding_scale: float | None = None
    embedding_norm: bool = False
    final_norm: bool = True
    logit_softcap: float | None = None
    layer_windows: tuple[Window | None, ...] | None = None
    kind: str = "decoder"
    causal: bool | None = None
    logit_scale: float | None = None
    head_bias: bool | None = None
    share_embedding: bool = False

    def __post_init__(self) -> None:
        self._unwrap()
        self._check_block()
        for field in ("vocab", "max_length"):
            self._integer(field, 1)
        self._integer("layers", 0)
        self._choice("positions", POSITIONS)
        self._choice("head", HEADS)
        self._choice("pool", POOLS)
        self._choice("kind", KINDS)
        self._choice("rotary_layout", ROTARY_LAYOUTS)
        self._check_rotary()
        self._check_relative()
        for field in ("tie_embeddings", "embedding_norm", "final_norm", "share_embedding"):
            self._flag(field)
        self._flag("head_bias", optional=True)
        self._integer("classes", 1, optional=True)
        if (self.head == "classifier") != (self.classes is not None):
            self._fail("classes", "given with head='classifier' and only then")
        if self.tie_embeddings and self.head != "lm":
            self._fail("tie_embeddings", "False unless head='lm': there is no other matrix of the vocabulary's size")
        self._number("embedding_scale", above=0.0, optional=True)
        self._number("logit_scale", above=0.0, optional=True)
        self._number("logit_softcap", above=0.0, optional=True)
        self._check_kind()
        if self.layer_windows is not None:
            if not isinstance(self.layer_windows, tuple) or len(self.layer_windows) != self.layers:
                self._fail("layer_windows", f"None or one window per layer ({self.layers})")
            for window in self.layer_windows:
                self._window("layer_windows", window)

    def _check_rotary(self) -> None:
        self._number("rotary_base", above=0.0)
        self._integer("rotary_dim", 2, optional=True)
        if self.rotary_scaling is not None and not isinstance(self.rotary_scaling, RotaryScaling):
            self._fail("rotary_scaling", "a RotaryScaling or None", TypeError)
        if self.positions != "rotary":
            return
        if self.rotary_size % 2:
            self._fail("rotary_dim", f"even: rotary turns pairs of features; head size is {self.key_size}")
        if self.rotary_size > self.key_size:
            self._fail("rotary_dim", f"at most the head size ({self.key_size})")
        scaling = self.rotary_scaling
        if (
            scaling is not None
            and scaling.kind == "longrope"
            and len(scaling.short_factors or ()) != self.rotary_size // 2
        ):
            self._fail(
                "rotary_scaling",
                f"with {self.rotary_size // 2} short and long factors, one per pair of rotated features",
            )

    def _check_relative(self) -> None:
        self._integer("relative_buckets", 2)
        self._integer("relative_max_distance", 1)
        if self.positions != "relative":
            return
        bidirectional = self.kind != "decoder" or self.causal is False
        if bidirectional and (self.relative_buckets % 2 or self.relative_buckets < 4):
            self._fail(
                "relative_buckets", "even and at least 4 where attention looks both ways: half serve each direction"
            )
        # An encoder-decoder's decoder looks one way, with twice as many buckets for it.
        exact = self.relative_buckets // (4 if bidirectional and self.kind != "encoder_decoder" else 2)
        if self.relative_max_distance <= exact:
            self._fail("relative_max_distance", f"above {exact}, the distances that have a bucket each")

    def _check_kind(self) -> None:
        if self.kind == "encoder_decoder":
            if self.causal is not None:
                self._fail(
                    "causal", "None for kind='encoder_decoder': the encoder sees both ways, the decoder does not"
                )
            if self.norm_place in ("sandwich", "parallel"):
                self._fail("norm_place", "'pre' or 'post' for kind='encoder_decoder'")
        if self.cross_attention:
            self._fail("cross_attention", "False: kind='encoder_decoder' adds it to its decoder's blocks")
        if self.share_embedding and self.kind != "encoder_decoder":
            self._fail("share_embedding", "False unless kind='encoder_decoder'")

    @property
    def rotary_size(self) -> int:
        """How many features of each head are rotated."""
        return self.key_size if self.rotary_dim is None else self.rotary_dim

    @property
    def is_causal(self) -> bool:
        """Whether the (decoder's) self-attention is causal."""
        return self.kind != "encoder" if self.causal is None else self.causal

    @property
    def has_head_bias(self) -> bool:
        return (self.head == "classifier") if self.head_bias is None else self.head_bias

    def stack(self, side: str) -> ModelConfig:
        """The encoder's or decoder's own configuration in an encoder-decoder: side is "encoder" or "decoder"."""
        if side not in ("encoder", "decoder"):
            raise ValueError(f"side must be 'encoder' or 'decoder'; got {side!r}")
        if side == "encoder":
            return self.replace(kind="encoder", head="none", classes=None, tie_embeddings=False, share_embedding=False,
                                logit_softcap=None, logit_scale=None, head_bias=None)  # fmt: skip
        return self.replace(kind="decoder", share_embedding=False)

    def block(self, layer: int, *, cross_attention: bool = False) -> BlockConfig:
        """The configuration of block `layer`: its own window, causality resolved."""
        if not 0 <= layer < self.layers:
            raise ValueError(f"layer must be from 0 to {self.layers - 1}; got {layer}")
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(BlockConfig)}
        fields["causal"] = self.is_causal
        fields["cross_attention"] = cross_attention
        if self.layer_windows is not None:
            fields["window"] = self.layer_windows[layer]
        return BlockConfig(**fields)
