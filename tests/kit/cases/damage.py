"""A batch that changes what earlier batches wrote, and one that does not."""

from __future__ import annotations

from recording import harness, torch


def earlier_rows() -> dict:
    """What the harness says of a batch that flips one byte of an earlier request's V, and of its own."""
    said = {}
    for name, request in (("earlier", 1), ("its own", 2)):
        stack = harness.Stack(backend="aiter")
        stack.extend({1: 20})

        def flip(stack, batch, request=request):
            slot = int(stack.req_to_token_pool.req_to_token[request, 3])
            stack.token_to_kv_pool.full_kv_pool.v_buffer[-1].view(torch.uint8)[slot, 0, 7] ^= 1

        try:
            stack.extend({2: 20}, tamper=flip)
            said[name] = None
        except AssertionError as error:
            said[name] = str(error)
    return said
