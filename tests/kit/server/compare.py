#!/usr/bin/env python3
"""Compare the tokens of two runs of prompts.py, request by request: compare.py WITHOUT WITH.

A first difference is put down to rounding only where the two best tokens of the run without
the extension lie closer together than ROUNDING; exit status 1 for any other.
"""

import json
import sys

#: Log-probability: several times what bf16 attention outputs (8 bits) move these logits by.
ROUNDING = 0.05


def compare(without, with_us):
    """(requests with the same tokens, requests that part by rounding, [(request, position, distance)] of the others)."""
    same, near, wrong = 0, 0, []
    for number, (a, b) in enumerate(zip(without, with_us, strict=True)):
        first = next((i for i, (x, y) in enumerate(zip(a["tokens"], b["tokens"], strict=True)) if x != y), None)
        if first is None:
            same += 1
            continue
        best, second = a["top_logprobs"][first][:2]
        near += best - second < ROUNDING
        if best - second >= ROUNDING:
            wrong.append((number, first, best - second))
    return same, near, wrong


def main():
    without, with_us = (json.load(open(path)) for path in sys.argv[1:3])
    same, near, wrong = compare(without, with_us)
    print(
        f"{same} of {len(without)} requests have the same tokens, {near} part where two tokens are {ROUNDING} apart or less, {len(wrong)} differ: {wrong}"
    )
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
