"""GB/s of the gather over tokens, as a PNG."""

from __future__ import annotations

import pathlib


def gather(result: dict, target: pathlib.Path) -> str:
    """Write the plot; returns what was written, or why not."""
    try:
        import matplotlib
    except ImportError:
        return "no plot: matplotlib is not installed"
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [r for r in result["rows"] if (r["heads"], r["page"], r["requests"]) == (2, 16, 1)]
    names = {
        "copy": "contiguous copy",
        "ours": "this gather",
        "index_select": "index_select, ready indices",
        "rebuilt": "index build + index_select",
    }
    figure, axes = plt.subplots(figsize=(7, 4.2))
    for name, label in names.items():
        axes.plot([r["tokens"] for r in rows], [r["gbs"][name] for r in rows], marker="o", label=label)
    axes.set(
        xscale="log",
        xlabel="tokens in the batch",
        ylabel="GB/s, read and written",
        title=f"Gather of fp8 K/V, 2 KV heads of 256, {result['where']['gpu']}",
    )
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(target, dpi=130)
    return f"wrote {target}"
