"""
Linear layers of the same few tokens, as Triton kernels. `reference` says what is computed.

With few tokens every weight takes part in few products, so reading the weights once is the cost. Two kernels share it:

    product   one program for each tile of a weight's rows and each split of its columns. It forms the transposed
              product `tile @ states.T`, so that the weights fill the long side of the matrix instructions and tokens
              their short side, padded to 16, 32 or 64. Copies of the next tiles are under way throughout.
    combine   only where the columns are split: adds the splits' float32 sums in their order.

Narrow weights have too few rows to keep a device busy, hence the splits. Weights that multiply the same states, as
those of queries, keys and values do, share one launch, as if they were one weight of all their rows. The number of
splits, and what else decides in which order a token's products are added, follows from the weights' shapes alone (see
[`Tiling`]): a token's bits depend neither on how many tokens ride along, nor on the device's size, nor on which
program was first.

Weights are known before the states are. On devices that let a kernel begin before its predecessor has ended, a program
asks for its first weights to be brought to the last-level cache, and only then waits. A hint, so weights that the
predecessor writes are read correctly as well.

The constants of a launch come from `tuned.json` or, for other shapes, from a rule; nothing is timed at run time.
"""

import json
from pathlib import Path
from typing import List, NamedTuple, Optional, Sequence, Tuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .reference import MAX_WEIGHTS, check_all


MAX_TOKENS = 64
NARROW = 16  # up to so many tokens the first tiling of a pair serves, beyond them the second
_PROGRAMS = 264  # the rule's aim: two for each of 132 multiprocessors; a constant, as bits depend on the splits
_AHEAD = 528  # programs that may be among the first to run; those after them have nothing to wait for


class Tiling(NamedTuple):
    """
    The compile-time constants of a launch. A token's bits depend on the first two, and on whether `block_n` is a
    multiple of 64, which decides about the instruction.

    Args:
        splits (`int`): Parts into which the columns are cut.
        block_k (`int`): Columns of a loop step; a power of two from 16.
        block_n (`int`): Rows of a tile; a power of two from 16.
        num_warps (`int`): As Triton takes it.
        shared (`int`): KiB of shared memory for tiles: as many stages as fit. Programs that take less than half of a
            multiprocessor's run in pairs.
    """

    splits: int
    block_k: int
    block_n: int
    num_warps: int
    shared: int

    def stages(self, block_t: int, size: int, item_size: int) -> int:
        """
        Tiles of weights and `block_t` tokens in shared memory: one in use, one just come, the others on their way. No
        more than a split has blocks, which leaves room for other programs.
        """
        fitting = self.shared * 1024 // ((self.block_n + block_t) * self.block_k * item_size)
        return max(3, min(fitting, triton.cdiv(triton.cdiv(size, self.block_k), self.splits) + 1))


def default_tilings(features: int, size: int, item_size: int) -> Tuple[Tiling, Tiling]:
    """For a weight of `features` rows and `size` columns of `item_size` bytes: up to 16 tokens, and more."""
    block_k = max(16, min(128 // item_size, triton.next_power_of_2(size)))
    splits = max(1, min(_PROGRAMS // triton.cdiv(features, 64), size // (8 * block_k)))
    # tokens are read anew for each tile of weights: with many tokens, larger tiles
    return Tiling(splits, block_k, 64, 4, 100), Tiling(splits, block_k, 128, 8, 200)


def _read(path: Path) -> dict:
    """Pairs of tilings by (rows, columns, bytes of an element)."""
    entries = json.loads(path.read_text(encoding="utf-8"))["tilings"]
    return {
        tuple(int(number) for number in key.split("x")): tuple(Tiling(**tiling) for tiling in pair)
        for key, pair in entries.items()
    }


TUNED = _read(Path(__file__).with_name("tuned.json"))


def tilings_for(features: int, size: int, item_size: int) -> Tuple[Tiling, Tiling]:
    """The tuned constants for a weight of that shape, or the rule's: up to 16 tokens, and more."""
    key = (features, size, item_size)
    return TUNED.get(key) or default_tilings(*key)


@triton.jit(do_not_specialize=["tokens", "splits"])
def _product(
    states,
    weights,
    biases,
    outs,
    partial,
    tokens,
    features,
    total,
    size,
    splits,
    s_token,
    s_column,
    w_row,
    w_column,
    whole: tl.constexpr,
    even: tl.constexpr,
    has_bias: tl.constexpr,
    early: tl.constexpr,
    followed: tl.constexpr,
    precision: tl.constexpr,
    WEIGHTS: tl.constexpr,
    AHEAD: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    program = tl.program_id(0)
    split = tl.program_id(1)
    weight = weights[0]
    bias = biases[0]
    out = outs[0]
    count = features[0]
    tile = program
    begin = 0  # rows of the weights in front
    first_tile = tl.cdiv(features[0], BLOCK_N)
    rows_before = features[0] + 0
    for i in tl.static_range(1, WEIGHTS):
        if program >= first_tile:
            weight = weights[i]
            bias = biases[i]
            out = outs[i]
            count = features[i]
            tile = program - first_tile
            begin = rows_before
        first_tile += tl.cdiv(features[i], BLOCK_N)
        rows_before += features[i]
    blocks = tl.cdiv(size, BLOCK_K)
    first = blocks * split // splits
    last = blocks * (split + 1) // splits
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = weight + tl.minimum(n, count - 1).to(tl.int64)[:, None] * w_row  # beyond the end: read, never written
    if followed:
        gdc_launch_dependents()
    if early:
        if split * tl.num_programs(0) + program < AHEAD:
            lines = first * BLOCK_K + tl.arange(0, LINES) * (1024 // weight.dtype.element_ty.primitive_bitwidth)
            lines = tl.minimum(lines, tl.minimum(last * BLOCK_K, size) - 1)
            ask: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
            tl.inline_asm_elementwise(ask, "=r,l", [rows + lines.to(tl.int64)[None, :] * w_column], tl.int32, False, 1)
        gdc_wait()
    k = tl.arange(0, BLOCK_K)
    t = tl.arange(0, BLOCK_T)
    in_t = t < tokens
    w_at = rows + (first * BLOCK_K + k).to(tl.int64)[None, :] * w_column
    s_at = states + t[:, None] * s_token + (first * BLOCK_K + k)[None, :] * s_column
    acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for block in range(first, last):
        if even:
            w = tl.load(w_at)
            s = tl.load(s_at, mask=in_t[:, None], other=0.0)
        else:
            in_k = (block * BLOCK_K + k < size)[None, :]
            w = tl.load(w_at, mask=in_k, other=0.0)
            s = tl.load(s_at, mask=in_t[:, None] & in_k, other=0.0)
        acc = tl.dot(w, tl.trans(s), acc, input_precision=precision)
        w_at += BLOCK_K * w_column
        s_at += BLOCK_K * s_column
    if has_bias:  # noqa: SIM102  # known when the kernel is compiled, unlike the other
        if split == 0:
            acc += tl.load(bias + n, mask=n < count, other=0.0).to(tl.float32)[:, None]
    inside = (n < count)[:, None] & in_t[None, :]
    at = t.to(tl.int64)[None, :] * count + n[:, None]
    if whole:
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside)
    else:  # a section of `(tokens, count)` for each weight, and all of them for each split
        tl.store(partial + split.to(tl.int64) * tokens * total + tokens * begin + at, acc, mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _combine(
    partial,
    outs,
    tokens,
    features,
    total,
    splits: tl.constexpr,
    early: tl.constexpr,
    WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if early:  # after the product, and so after all that the product waited for
        gdc_launch_dependents()
        gdc_wait()
    block = tl.program_id(0)
    for i in tl.static_range(WEIGHTS):
        numbers = tokens * features[i]
        blocks = tl.cdiv(numbers, BLOCK)
        if (block >= 0) & (block < blocks):
            at = block * BLOCK + tl.arange(0, BLOCK)
            inside = at < numbers
            sums = tl.zeros((BLOCK,), tl.float32)
            for split in tl.static_range(splits):
                sums += tl.load(partial + split * tokens * total + at, mask=inside, other=0.0)
            tl.store(outs[i] + at, sums.to(outs[i].dtype.element_ty), mask=inside)
        block -= blocks
        partial += numbers


def few_rows_linear(
    states: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional[torch.Tensor] = None,
    tilings: Optional[Tuple[Tiling, Tiling]] = None,
    early: Optional[bool] = None,
) -> torch.Tensor:
    r"""
    `states @ weight.T + bias` for 1 to 64 tokens. For inference: it has no backward. Nothing is read back to the host.

    Args:
        states (`torch.Tensor` of shape `(..., size)`): bfloat16, float16 or float32; 1 to 64 tokens in all.
        weight (`torch.Tensor` of shape `(features, size)`): Of the same dtype. Quickest where rows are contiguous and
            begin at multiples of 16 bytes.
        bias (`torch.Tensor` of shape `(features,)`, *optional*): Of the same dtype.
        tilings (pair of `Tiling`, *optional*): For up to 16 tokens, and for more. Defaults to `tuned.json`'s of the
            weight's shape, or [`default_tilings`].
        early (`bool`, *optional*): Whether to begin while the kernel before is still running. Defaults to whether the
            device can, which takes compute capability 9.0.

    Returns:
        `torch.Tensor` of shape `(..., features)`, with the states' dtype.

    Raises:
        `ValueError`: Shapes or dtypes that do not belong together, or another number of tokens.
    """
    biases = None if bias is None else [bias]
    return few_rows_linears(states, [weight], biases, tilings, early)[0]


def few_rows_linears(
    states: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Optional[Sequence[torch.Tensor]] = None,
    tilings: Optional[Tuple[Tiling, Tiling]] = None,
    early: Optional[bool] = None,
) -> List[torch.Tensor]:
    r"""
    As [`few_rows_linear`] for several weights in one launch.

    Args:
        states, tilings, early: As there; the tilings are those of one weight with all rows.
        weights (sequence of 1 to 16 `torch.Tensor` of shape `(features of each, size)`): With the same strides.
        biases (sequence of `torch.Tensor` of shape `(features of each,)`, *optional*): For all of the weights.

    Returns:
        list of `torch.Tensor` of shape `(..., features of each)`.

    Raises:
        `ValueError`: As there; too many weights, or strides that differ.
    """
    check_all(states, weights, biases)
    if len(weights) > MAX_WEIGHTS or len({weight.stride() for weight in weights}) > 1:
        raise ValueError(f"{len(weights)} weights: up to {MAX_WEIGHTS} with the same strides can share a launch.")
    features, size = [weight.shape[0] for weight in weights], weights[0].shape[1]
    flat, total = states.reshape(-1, size), sum(features)
    tokens = flat.shape[0]
    if not 1 <= tokens <= MAX_TOKENS:
        raise ValueError(f"{tokens} tokens: this kernel takes 1 to {MAX_TOKENS}; use torch.nn.functional.linear.")
    nvidia = states.is_cuda and torch.version.hip is None
    overlaps = nvidia and torch.cuda.get_device_capability(states.device)[0] >= 9
    early = overlaps if early is None else early
    item_size = states.element_size()
    tiling = (tilings or tilings_for(total, size, item_size))[tokens > NARROW]
    outs = tuple(states.new_empty(*states.shape[:-1], rows) for rows in features)
    whole = tiling.splits == 1
    partial = None if whole else states.new_empty(tiling.splits, tokens * total, dtype=torch.float32)
    block_t = max(16, triton.next_power_of_2(tokens))
    stages = tiling.stages(block_t, size, item_size)
    tiles = sum(triton.cdiv(rows, tiling.block_n) for rows in features)
    _product[(tiles, tiling.splits)](
        flat,
        tuple(weights),
        tuple(weights) if biases is None else tuple(bias.contiguous() for bias in biases),
        outs,
        partial,
        tokens,
        tuple(features),
        total,
        size,
        tiling.splits,
        *flat.stride(),
        *weights[0].stride(),
        whole=whole,
        even=size % tiling.block_k == 0,
        has_bias=biases is not None,
        early=early,
        followed=overlaps,
        precision="ieee" if states.dtype == torch.float32 else "tf32",
        WEIGHTS=len(weights),
        AHEAD=_AHEAD,
        LINES=triton.next_power_of_2(triton.cdiv(stages * tiling.block_k * item_size, 128)),
        BLOCK_T=block_t,
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        num_warps=tiling.num_warps,
        num_stages=stages,
        **({"launch_pdl": True} if early else {}),
    )
    if not whole:
        block = 256
        _combine[(sum(triton.cdiv(tokens * rows, block) for rows in features),)](
            partial,
            outs,
            tokens,
            tuple(features),
            total,
            splits=tiling.splits,
            early=overlaps,
            WEIGHTS=len(weights),
            BLOCK=block,
            num_warps=2,
            **({"launch_pdl": True} if overlaps else {}),
        )
    return list(outs)
