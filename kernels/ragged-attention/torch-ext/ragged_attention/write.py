"""Writing the keys and values of packed tokens to their places in slotted caches, as one Triton kernel."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .kernel import begins_early


@triton.jit(do_not_specialize_on_alignment=["slots", "entries"])  # views, which may begin anywhere
def _write(
    keys,
    values,
    key_cache,
    value_cache,
    slots,
    entries,
    k_token,
    k_head,
    v_token,
    v_head,
    kc_slot,
    kc_head,
    kc_entry,
    vc_slot,
    vc_head,
    vc_entry,
    early: tl.constexpr,
    head_dim: tl.constexpr,
    value_dim: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if early:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + token)
    entry = tl.load(entries + token)
    at = tl.arange(0, BLOCK)
    k = tl.load(keys + token * k_token + head * k_head + at, mask=at < head_dim)
    v = tl.load(values + token * v_token + head * v_head + at, mask=at < value_dim)
    tl.store(key_cache + slot * kc_slot + head * kc_head + entry * kc_entry + at, k, mask=at < head_dim)
    tl.store(value_cache + slot * vc_slot + head * vc_head + entry * vc_entry + at, v, mask=at < value_dim)


def write_entries(
    keys: torch.Tensor,
    values: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    entries: torch.Tensor,
) -> None:
    r"""
    Writes token `t` to entry `entries[t]` of slot `slots[t]`. Two tokens at one place leave either's there.

    Args:
        keys (`torch.Tensor` of shape `(total, kv_heads, head_dim)`): New keys, contiguous in the last dimension.
        values (`torch.Tensor` of shape `(total, kv_heads, value_dim)`): New values, likewise.
        key_cache (`torch.Tensor` of shape `(slots, kv_heads, capacity, head_dim)`): Written in place.
        value_cache (`torch.Tensor` of shape `(slots, kv_heads, capacity, value_dim)`): Written in place.
        slots, entries (`torch.LongTensor` of shape `(total,)`): Where each token belongs.
    """
    total, heads, head_dim = keys.shape
    value_dim = values.shape[-1]
    if total == 0:
        return
    early = begins_early(keys.device)
    _write[(total, heads)](
        keys,
        values,
        key_cache,
        value_cache,
        slots,
        entries,
        *keys.stride()[:2],
        *values.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        early=early,
        head_dim=head_dim,
        value_dim=value_dim,
        BLOCK=max(16, triton.next_power_of_2(max(head_dim, value_dim))),
        num_warps=1,
        **({"launch_pdl": True} if early else {}),
    )
