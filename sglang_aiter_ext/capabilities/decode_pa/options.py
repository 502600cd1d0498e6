"""What the user's options ask of the backend that decodes. The release is asked: its own checks, and its backends."""

import ast
import functools
import logging
import sys
from collections.abc import Iterator
from typing import Any

from ...names import BACKEND, REGISTRY, SGLANG
from ...source import Release

ARGUMENTS, GROUPS = f"{SGLANG}.server_args", f"{SGLANG}.arg_groups"


def unmet(release: Release, runner: Any, decode: Any) -> str | None:
    """What the user's options ask of the backend `decode` and SGLang's AITER backend does not do, or None."""
    return refusal(runner) or unheeded(release, runner, decode)


# ---- SGLang's own checks of its options ----


def refusal(runner: Any) -> str | None:
    """What SGLang's own checks say against decode on AITER, where they say nothing against the user's choice.

    The passes of releases from 0.5.15 on read a view of the options, change nothing, and raise what they refuse.
    """
    overrides = sys.modules.get(f"{GROUPS}.overrides")
    try:
        checks, view = overrides.POST_PROCESS_PASSES, overrides.ResolvedView  # type: ignore[union-attr]
        declared = overrides._declaration_overlay(runner.server_args)  # type: ignore[union-attr]
    except AttributeError:
        return None
    here, there = (
        view(runner.server_args, overlay={**declared, **chosen})
        for chosen in ({}, {"attention_backend": "aiter", "decode_attention_backend": "aiter"})
    )
    for check in checks:
        if any("attention_backend" in name for name in check.__code__.co_names) and _refused(check, here) is None:
            error = _refused(check, there)
            if error is not None:
                return f"SGLang refuses it: {error}"
    return None


def _refused(check: Any, view: Any) -> Exception | None:
    before = logging.root.manager.disable
    # What a check logs was logged when SGLang made it.
    logging.disable(logging.CRITICAL)
    try:
        check(view)
    except Exception as error:
        return error
    finally:
        logging.disable(before)
    return None


# ---- the options that the backends read ----


def unheeded(release: Release, runner: Any, decode: Any) -> str | None:
    """An option that is set, that the user's decode backend reads for decode, and that the AITER backend does not."""
    kind = type(decode)
    known = heeded(release, BACKEND, "AiterAttnBackend")
    # An option such as triton_attention_num_kv_splits is about the kernel that is replaced.
    about_kernels = tuple(f"{name}_" for name in sys.modules[REGISTRY].ATTENTION_BACKENDS)
    for name, expression in heeded(release, kind.__module__, kind.__name__).items():
        if name in known or name.startswith(about_kernels):
            continue
        try:
            value = eval(expression, vars(sys.modules[kind.__module__]), {"model_runner": runner, "self": decode})
        except Exception:
            # This process does not have it, so the backend has not read it either.
            continue
        if value != defaults(release)[name]:
            option = name.replace("_", "-")
            return f"--{option} is {value}: {kind.__name__} heeds it in decode, and SGLang's AITER backend does not"
    return None


@functools.cache
def defaults(release: Release) -> dict[str, Any]:
    """The options of the release and their defaults, as far as these are written as plain values."""
    found = {}
    folder = release.root / "srt" / "arg_groups" / "fields"
    modules = [ARGUMENTS, *(f"{GROUPS}.fields.{path.stem}" for path in sorted(folder.glob("*.py")))]
    for source in filter(None, map(release.source, modules)):
        for node in ast.walk(source.tree):
            if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Constant):
                found[ast.unparse(node.target)] = node.value.value
    return found


@functools.cache
def heeded(release: Release, module: str, name: str) -> dict[str, str]:
    """The options that the class `name` of `module` reads for decode -> the expression that reads each.

    What the class keeps of an option on itself counts where something that decode may need reads it.
    """
    source = release.source(module) if module.startswith(f"{SGLANG}.") else None
    classes = [n for n in (source.tree.body if source else ()) if isinstance(n, ast.ClassDef) and n.name == name]
    if not classes:
        return {}
    methods: dict[str, ast.AST] = {f.name: f for f in classes[-1].body if isinstance(f, ast.FunctionDef)}
    if module == BACKEND:
        used = _needed(methods)
        methods = {name: method for name, method in methods.items() if name in ("__init__", "forward_decode")}
    else:
        # Options of attention over a prompt are read in `__init__`, and what is kept of them only in extend.
        used = {a for name, f in methods.items() if name != "__init__" and "extend" not in name for a in _own(f)}
    assignments = [n for method in methods.values() for n in walk(method) if isinstance(n, ast.Assign)]
    found: dict[str, str] = {}
    for statement in assignments:
        kept = {target.attr for target in statement.targets if isinstance(target, ast.Attribute)}
        if not kept or kept & used:
            found.update(_options(release, statement.value))
    return found


def _options(release: Release, tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in (n for n in walk(tree) if isinstance(n, (ast.Attribute, ast.Call))):
        text, name = ast.unparse(node), None
        if isinstance(node, ast.Attribute) and text.startswith(("model_runner.server_args.", "get_")):
            # Of the GPUs of a parallel size, attention may have a part.
            name = node.attr.removeprefix("attn_")
        elif isinstance(node, ast.Call) and text.startswith("getattr(model_runner, "):
            name = getattr(node.args[1], "value", None)
        if name in defaults(release):
            yield name, text


def _own(tree: ast.AST) -> set[str]:
    """The attributes of `self` in `tree`."""
    nodes = (n for n in walk(tree) if isinstance(n, ast.Attribute))
    return {n.attr for n in nodes if isinstance(n.value, ast.Name) and n.value.id == "self"}


def _needed(methods: dict[str, ast.AST]) -> set[str]:
    """The attributes of `self` that `forward_decode` needs: through methods that it calls, and as `__init__` makes them."""
    needed, before = _own(methods["forward_decode"]), -1
    while len(needed) != before:
        before = len(needed)
        for name in needed & methods.keys():
            needed |= _own(methods[name])
        for node in walk(methods["__init__"]):
            targets = node.targets if isinstance(node, ast.Assign) else []
            if needed & {t.attr for t in targets if isinstance(t, ast.Attribute)}:
                needed |= _own(node.value)  # type: ignore[attr-defined]
    return needed


def walk(tree: ast.AST) -> Iterator[ast.AST]:
    """Like `ast.walk`, without what is done for MLA layers."""
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        yield node
        of_mla = isinstance(node, ast.If) and ast.unparse(node.test) == "self.use_mla"
        nodes += node.orelse if of_mla else ast.iter_child_nodes(node)  # type: ignore[attr-defined]
