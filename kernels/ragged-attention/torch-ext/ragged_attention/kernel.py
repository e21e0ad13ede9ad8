"""
Attention of packed windows over slotted caches, as Triton kernels. `reference` says what is computed.

A verify step brings few queries and reads many keys, so the bytes of the cache are the cost. Two kernels share it:

    partial   one program for each row, key head, block of window tokens and split of the row's keys. The query heads
              that share a key head and the tokens of a window are one tile of queries, so keys are read once for all
              of them. Keeps, for each query, the running maximum m of the scores, l = sum exp2(s - m) and
              acc = sum exp2(s - m) v, scores being in units of log 2.
    combine   one program for each query: out = sum_i 2^(m_i - m) acc_i / (2^(b - m) + sum_i 2^(m_i - m) l_i) over its
              row's splits in their order, where m is the largest m_i, and of b where the head has a sink b.

The entries before a row's window are split evenly; the last split takes the window's own along. How many splits there
are follows from the row's own number of entries n and from constants alone, about sqrt(n / unit): so a row's bits
depend neither on the other rows nor on the room that the launch provides, and what the splits write and read again
stays small beside the keys. A row of one split needs no second kernel. Tokens of no row get zeros.

On devices that let a kernel begin before its predecessor has ended, each is launched early and waits before it reads
anything, which hides the time of the launch.

The constants of a launch are chosen by shape, never by timing at run time, see [`Tiling`].

What this file deliberately does not know: how positions are encoded, who owns the cache, and how it is written.
"""

import math
from typing import NamedTuple, Optional

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


class Tiling(NamedTuple):
    """
    The compile-time constants of a launch. A row's bits depend on the first three.

    Args:
        block_m (`int`): Queries of a tile, tokens times heads of a group; a power of two from 16.
        block_n (`int`): Entries of a loop step; a power of two from 16.
        unit (`int`): A row of n entries is cut into about sqrt(n / unit) splits.
        num_warps, num_stages (`int`): As Triton takes them.
    """

    block_m: int
    block_n: int
    unit: int = 32
    num_warps: int = 4
    num_stages: int = 3


def default_tiling(group: int, head_bytes: int) -> Tiling:
    """For `group` query heads to a key head, and heads of `head_bytes` bytes."""
    tokens = 8 if group <= 8 else 1  # of a window, in one tile
    block_m = max(16, triton.next_power_of_2(tokens * group))
    return Tiling(block_m, 64, 64, 4, 4) if head_bytes <= 256 else Tiling(block_m, 32)


def begins_early(device: torch.device) -> bool:
    """Whether a kernel can be launched before the one in front of it has ended."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    return nvidia and torch.cuda.get_device_capability(device)[0] >= 9


@triton.jit
def _split_size(entries, unit: tl.constexpr, block: tl.constexpr):
    """Entries of a split: about sqrt(entries * unit), in whole blocks."""
    blocks = tl.ceil(tl.sqrt(entries.to(tl.float32) * unit) / block).to(tl.int32)
    return tl.maximum(blocks, 1) * block


@triton.jit
def _row(lengths, offsets, row, sliding, has_sliding: tl.constexpr):
    """Begin of a row's window, its width, the oldest visible entry, the entries from there on."""
    begin = tl.load(offsets + row).to(tl.int32)
    width = tl.load(offsets + row + 1).to(tl.int32) - begin
    length = tl.load(lengths + row).to(tl.int32)
    oldest = 0
    if has_sliding:
        oldest = tl.maximum(length - sliding + 1, 0)
    return begin, width, length, oldest


@triton.jit
def _online(
    q,
    k,
    v,
    visible,
    top,
    total,
    acc,
    scaling,
    softcap,
    has_softcap: tl.constexpr,
    precision: tl.constexpr,
):
    """One loop step: keys `(BLOCK_N, D)` and values `(BLOCK_N, E)` join the running sums of `(BLOCK_M,)` queries."""
    scores = tl.dot(q, tl.trans(k), input_precision=precision) * scaling
    if has_softcap:
        small = tl.exp(-2.0 * tl.abs(scores) / softcap)  # tanh by one exponential that cannot overflow
        bound = softcap * (1.0 - small) / (1.0 + small)
        scores = tl.where(scores < 0, -bound, bound)
    scores = tl.where(visible, scores * 1.4426950408889634, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    # a query that has seen nothing yet has no maximum: -inf minus -inf would be NaN
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=precision)
    return higher, total, acc


# What differs from launch to launch must not make another kernel: compilation would take longer than the launches do.
_VIEWS = ["lengths", "offsets", "partial_sum"]  # which may begin anywhere


@triton.jit(do_not_specialize=["total_tokens", "token_blocks", "splits"], do_not_specialize_on_alignment=_VIEWS)
def _partial(
    query,
    key_cache,
    value_cache,
    lengths,
    offsets,
    sinks,
    out,
    partial_acc,
    partial_top,
    partial_sum,
    scaling,
    softcap,
    sliding,
    q_token,
    q_head,
    kc_row,
    kc_head,
    kc_entry,
    vc_row,
    vc_head,
    vc_entry,
    total_tokens,
    heads,
    token_blocks,
    splits,
    early: tl.constexpr,
    causal: tl.constexpr,
    has_sliding: tl.constexpr,
    has_softcap: tl.constexpr,
    has_sinks: tl.constexpr,
    precision: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    value_dim: tl.constexpr,
    unit: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    if early:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0) // token_blocks
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    m = tl.arange(0, BLOCK_M)
    e = tl.arange(0, BLOCK_E)
    in_e = e < value_dim
    if split == 0:
        behind = tl.load(offsets + tl.num_programs(0) // token_blocks).to(tl.int32)  # the last window
        nothing = tl.zeros([BLOCK_M, BLOCK_E], out.dtype.element_ty)
        for at in range(behind + tl.program_id(0), total_tokens, tl.num_programs(0)):
            to = (m.to(tl.int64) + at * heads + kv_head * group)[:, None] * value_dim + e[None, :]
            tl.store(out + to, nothing, mask=(m < group)[:, None] & in_e[None, :])
    tokens: tl.constexpr = BLOCK_M // group
    first = (tl.program_id(0) % token_blocks) * tokens
    begin, width, length, oldest = _row(lengths, offsets, row, sliding, has_sliding)
    if first >= width:
        return
    size = _split_size(length - oldest, unit, BLOCK_N)
    count = tl.maximum(tl.cdiv(length - oldest, size), 1)
    if split >= count:
        return

    token = first + m // group  # in the window
    head = kv_head * group + m % group
    valid = (m < tokens * group) & (token < width)
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    in_d = d < head_dim
    packed = (begin + token).to(tl.int64)
    q = tl.load(
        query + packed[:, None] * q_token + head[:, None] * q_head + d[None, :],
        mask=valid[:, None] & in_d[None, :],
        other=0.0,
    )
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)

    keys = key_cache + row.to(tl.int64) * kc_row + kv_head * kc_head
    values = value_cache + row.to(tl.int64) * vc_row + kv_head * vc_head
    start = oldest + split * size
    stop = start + size
    if split == count - 1:  # with the window, as far as this block of tokens may look
        stop = length + width
        if causal:
            stop = tl.minimum(stop, length + first + tokens)
    for at in range(start, stop, BLOCK_N):
        entry = at + n
        inside = entry < stop
        where = entry.to(tl.int64)
        k = tl.load(keys + where[:, None] * kc_entry + d[None, :], mask=inside[:, None] & in_d[None, :], other=0.0)
        v = tl.load(values + where[:, None] * vc_entry + e[None, :], mask=inside[:, None] & in_e[None, :], other=0.0)
        visible = valid[:, None] & inside[None, :]
        if causal:
            visible = visible & (entry[None, :] <= (length + token)[:, None])
        if has_sliding:
            visible = visible & (entry[None, :] > (length + token - sliding)[:, None])
        top, total, acc = _online(q, k, v, visible, top, total, acc, scaling, softcap, has_softcap, precision)

    index = packed * heads + head
    if count == 1:
        if has_sinks:
            sink = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * 1.4426950408889634
            higher = tl.maximum(top, sink)
            shrink = tl.exp2(top - higher)
            total = total * shrink + tl.exp2(sink - higher)
            acc = acc * shrink[:, None]
        result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(
            out + index[:, None] * value_dim + e[None, :],
            result.to(out.dtype.element_ty),
            mask=valid[:, None] & in_e[None, :],
        )
    else:
        index = index * splits + split
        tl.store(partial_top + index, top, mask=valid)
        tl.store(partial_sum + index, total, mask=valid)
        tl.store(partial_acc + index[:, None] * value_dim + e[None, :], acc, mask=valid[:, None] & in_e[None, :])


@triton.jit(do_not_specialize=["max_width", "splits"], do_not_specialize_on_alignment=_VIEWS)
def _combine(
    lengths,
    offsets,
    sinks,
    out,
    partial_acc,
    partial_top,
    partial_sum,
    sliding,
    heads,
    max_width,
    splits,
    early: tl.constexpr,
    has_sliding: tl.constexpr,
    has_sinks: tl.constexpr,
    value_dim: tl.constexpr,
    unit: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    if early:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0) // max_width
    token = tl.program_id(0) % max_width
    head = tl.program_id(1)
    begin, width, length, oldest = _row(lengths, offsets, row, sliding, has_sliding)
    if token >= width:
        return
    size = _split_size(length - oldest, unit, BLOCK_N)
    count = tl.maximum(tl.cdiv(length - oldest, size), 1)
    if count == 1:
        return
    s = tl.arange(0, BLOCK_S)
    e = tl.arange(0, BLOCK_E)
    in_e = e < value_dim
    index = (begin + token).to(tl.int64) * heads + head
    # in blocks of one size, so that the order of a row's sums follows from its own splits
    top = float("-inf")
    for at in range(0, count, BLOCK_S):
        tops = tl.load(partial_top + index * splits + at + s, mask=at + s < count, other=float("-inf"))
        top = tl.maximum(top, tl.max(tops, 0))
    if has_sinks:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(top, sink)
    total = 0.0
    acc = tl.zeros([BLOCK_E], tl.float32)
    for at in range(0, count, BLOCK_S):
        inside = at + s < count
        tops = tl.load(partial_top + index * splits + at + s, mask=inside, other=float("-inf"))
        shares = tl.exp2(tops - top)  # 0 where a split had nothing to see
        sums = tl.load(partial_sum + index * splits + at + s, mask=inside, other=0.0)
        total += tl.sum(shares * sums, 0)
        accs = tl.load(
            partial_acc + (index * splits + at + s)[:, None] * value_dim + e[None, :],
            mask=inside[:, None] & in_e[None, :],
            other=0.0,
        )
        acc += tl.sum(accs * shares[:, None], 0)
    if has_sinks:
        total += tl.exp2(sink - top)
    result = acc / total
    tl.store(out + index * value_dim + e, result.to(out.dtype.element_ty), mask=in_e)


def ragged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    lengths: torch.Tensor,
    offsets: torch.Tensor,
    scaling: float,
    causal: bool = True,
    sliding_window: Optional[int] = None,
    softcap: Optional[float] = None,
    sinks: Optional[torch.Tensor] = None,
    max_width: Optional[int] = None,
    max_length: Optional[int] = None,
    tiling: Optional[Tiling] = None,
) -> torch.Tensor:
    r"""
    Attention of packed windows over slotted caches. Nothing is read back to the host.

    Args:
        query, key_cache, value_cache, lengths, offsets, scaling, causal, sliding_window, softcap, sinks: As in
            [`ragged_attention_reference`]. All tensors are on one device, and contiguous in the last dimension. The
            caches may have more rows than there are windows.
        max_width (`int`, *optional*): At least the tokens of the longest window. Defaults to all packed tokens, which
            launches more programs than needed.
        max_length (`int`, *optional*): At least the entries before the longest row's window. Defaults to the capacity.
        tiling (`Tiling`, *optional*): Defaults to [`default_tiling`] of the shape.

    Returns:
        `torch.Tensor` of shape `(total, heads, value_dim)`, with the query's dtype.

    Source: split keys and their combination as in Flash-Decoding (Dao et al., 2023).
    """
    total, heads, head_dim = query.shape
    _, kv_heads, capacity, value_dim = value_cache.shape
    rows, group = offsets.shape[0] - 1, heads // kv_heads
    max_width = total if max_width is None else max(1, min(max_width, total))
    max_length = capacity if max_length is None else min(max_length, capacity)
    if total == 0 or rows == 0:
        return query.new_zeros(total, heads, value_dim)
    out = query.new_empty(total, heads, value_dim)

    if tiling is None:
        tiling = default_tiling(group, max(head_dim, value_dim) * query.element_size())
    token_blocks = triton.cdiv(max_width, tiling.block_m // group)
    entries = max_length if sliding_window is None else min(max_length, sliding_window - 1)
    splits = math.isqrt(max(0, entries - 1) // tiling.unit) + 2  # a bound, with one to spare for rounding
    accs = torch.empty(total, heads, splits, value_dim, dtype=torch.float32, device=query.device)
    tops, sums = torch.empty(2, total, heads, splits, dtype=torch.float32, device=query.device)
    early = begins_early(query.device)
    common = {
        "early": early,
        "has_sliding": sliding_window is not None,
        "has_sinks": sinks is not None,
        "value_dim": value_dim,
        "unit": tiling.unit,
        "BLOCK_N": tiling.block_n,
        "BLOCK_E": max(16, triton.next_power_of_2(value_dim)),
    }
    _partial[(rows * token_blocks, kv_heads, splits)](
        query,
        key_cache,
        value_cache,
        lengths,
        offsets,
        sinks,
        out,
        accs,
        tops,
        sums,
        scaling,
        1.0 if softcap is None else softcap,
        1 if sliding_window is None else sliding_window,
        *query.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        total,
        heads,
        token_blocks,
        splits,
        causal=causal,
        has_softcap=softcap is not None,
        precision="ieee" if query.dtype == torch.float32 else "tf32",
        group=group,
        head_dim=head_dim,
        BLOCK_M=tiling.block_m,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **common,
        **({"launch_pdl": True} if early else {}),
    )
    if splits > 1:
        _combine[(rows * max_width, heads)](
            lengths,
            offsets,
            sinks,
            out,
            accs,
            tops,
            sums,
            1 if sliding_window is None else sliding_window,
            heads,
            max_width,
            splits,
            BLOCK_S=16,
            num_warps=4,
            **common,
            **({"launch_pdl": True} if early else {}),
        )
    return out
