"""Model sizes: the named shapes, their exact parameter counts, and the checks on a user's own shape."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from lmbench.errors import UsageError, check_at_least, unknown

DEFAULT_VOCAB_SIZE = 10_000


@dataclass(frozen=True)
class ModelShape:
    """Shape of a decoder-only Transformer (RMSNorm, RoPE, SwiGLU, untied embedding and head, no biases).

    Raises:
        UsageError: a value below 1, heads that do not divide the width, or an odd head_dim (RoPE rotates
            pairs).
    """

    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int
    vocab_size: int = DEFAULT_VOCAB_SIZE

    def __post_init__(self) -> None:
        check_at_least(1, **asdict(self))
        if self.d_model % self.num_heads:
            raise UsageError(f"num_heads {self.num_heads} does not divide d_model {self.d_model}; change one of them")
        if self.head_dim % 2:
            raise UsageError(
                f"head_dim is {self.head_dim} (d_model {self.d_model} / num_heads {self.num_heads}); "
                "rotary embeddings need an even head_dim: change num_heads or d_model"
            )

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.num_heads

    @property
    def parameter_count(self) -> int:
        """Exact number of parameters.

        Embedding and head 2 * vocab * d_model; each layer 4 * d_model^2 (q, k, v, output), 3 * d_model * d_ff
        (gate, up, down) and two norms of d_model; one last norm of d_model.
        """
        layer = 4 * self.d_model**2 + 3 * self.d_model * self.d_ff + 2 * self.d_model
        return 2 * self.vocab_size * self.d_model + self.num_layers * layer + self.d_model


#: The named sizes, each with its d_model, d_ff, num_layers and num_heads.
_TABLE = """
tiny     64    128   2   4
small   768   3072  12  12
medium 1024   4096  24  16
large  1280   5120  36  20
xl     1600   6400  48  25
2.7B   2560  10240  32  32
"""
SIZES = {name: ModelShape(*map(int, numbers)) for name, *numbers in map(str.split, _TABLE.strip().splitlines())}


def resolve_shape(size: str | None, vocab_size: int = DEFAULT_VOCAB_SIZE, **dimensions: int | None) -> ModelShape:
    """Take a named size and let each dimension given override it; with ``size=None`` all four are needed.

    Args:
        size: a name of `SIZES`, or None.
        vocab_size: number of token ids.
        dimensions: d_model, d_ff, num_layers and num_heads, each None where it is not set.

    Raises:
        UsageError: an unknown size, a missing dimension, or a shape that :class:`ModelShape` refuses.
    """
    overrides = {name: value for name, value in dimensions.items() if value is not None}
    if size is not None and size not in SIZES:
        raise unknown("model size", size, SIZES, ", or give all dimensions")
    shape = asdict(SIZES[size]) if size is not None else {}
    missing = [name for name in ("d_model", "d_ff", "num_layers", "num_heads") if name not in {**shape, **overrides}]
    if missing:
        raise UsageError(f"without a model size, {', '.join(missing)} must be given too (sizes: {', '.join(SIZES)})")
    return ModelShape(**{**shape, **overrides, "vocab_size": vocab_size})


def size_name(shape: ModelShape) -> str | None:
    """The name of a shape's size, whatever its vocabulary; None for any other shape."""
    return next((name for name, named in SIZES.items() if replace(named, vocab_size=shape.vocab_size) == shape), None)
