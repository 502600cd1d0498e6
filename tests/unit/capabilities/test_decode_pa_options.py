"""What the user's options ask of the backend that decodes: SGLang's own checks, and what the backends read."""

import ast
import logging
import sys
from types import ModuleType, SimpleNamespace

import environment
import matrix
import pytest

from sglang_aiter_ext.capabilities.decode_pa import options
from sglang_aiter_ext.names import ATTENTION, BACKEND, REGISTRY
from sglang_aiter_ext.source import Release

# ---- SGLang's own checks ----


class View:
    """SGLang's view of options, some of which its passes have resolved."""

    def __init__(self, arguments, overlay):
        self.__dict__.update(vars(arguments), **overlay)


def refuses_aiter(view):
    logging.getLogger("checks").warning("a check speaks")
    if "aiter" in (view.attention_backend, view.decode_attention_backend):
        raise ValueError("this option needs another attention_backend than aiter")


def refuses_all(view):
    if view.attention_backend is not None:
        raise ValueError("this option takes no attention_backend")


def looks_elsewhere(view):
    raise ValueError("this is about the tokenizer")


@pytest.fixture
def checks(monkeypatch):
    """The passes of a release, whose options chose the Triton backend."""
    overrides = ModuleType(f"{options.GROUPS}.overrides")
    overrides.ResolvedView, overrides._declaration_overlay = View, lambda arguments: {"attention_backend": "triton"}
    overrides.POST_PROCESS_PASSES = []
    monkeypatch.setitem(sys.modules, overrides.__name__, overrides)
    return overrides.POST_PROCESS_PASSES


RUNNER = SimpleNamespace(server_args=SimpleNamespace(attention_backend=None, decode_attention_backend=None))


def test_what_sglang_refuses_of_its_aiter_backend_is_refused_of_decode_on_it(checks, caplog):
    checks[:] = [looks_elsewhere, refuses_all, refuses_aiter]
    with caplog.at_level(logging.DEBUG):
        assert options.refusal(RUNNER) == ("SGLang refuses it: this option needs another attention_backend than aiter")
    assert caplog.records == []
    logging.getLogger("checks").warning("logging works as before")
    assert [record.message for record in caplog.records] == ["logging works as before"]


@pytest.mark.parametrize("passes", [[], [looks_elsewhere], [refuses_all]])
def test_a_check_that_says_nothing_of_aiter_or_refuses_the_users_own_choice_too_decides_nothing(checks, passes):
    checks[:] = passes
    assert options.refusal(RUNNER) is None


def test_a_release_without_such_checks_refuses_nothing(monkeypatch):
    monkeypatch.delitem(sys.modules, f"{options.GROUPS}.overrides", raising=False)
    assert options.refusal(RUNNER) is None


def test_a_refusal_comes_first_and_then_an_option_that_is_not_heeded(monkeypatch):
    monkeypatch.setattr(options, "unheeded", lambda release, runner, decode: f"{release} {runner} {decode}")
    monkeypatch.setattr(options, "refusal", {"one": "refused"}.get)
    assert options.unmet("a release", "one", "decode") == "refused"
    assert options.unmet("a release", "two", "decode") == "a release two decode"


# ---- the releases ----

#: The options that the Triton backend heeds in decode and SGLang's AITER backend does not -> the first release.
SINCE = {
    "enable_deterministic_inference": "0.5.6",
    "dcp_size": "0.5.15",
    "enable_lean_attention": "0.5.19",
    "dllm_algorithm": "0.5.21",
}


@pytest.mark.parametrize("version", environment.RELEASES)
def test_the_options_that_only_the_triton_backend_heeds_are_found_in_each_release(version):
    release = matrix.release(version)
    triton = options.heeded(release, f"{ATTENTION}.triton_backend", "TritonAttnBackend")
    aiter = options.heeded(release, BACKEND, "AiterAttnBackend")
    # Those of speculative decoding have no decode batches, and the kernel's own are gone with it.
    only = {name for name in triton.keys() - aiter.keys() if not name.startswith(("speculative_", "triton_"))}
    expected = {name for name, first in SINCE.items() if version in environment.since(first)}
    assert only == expected
    assert expected <= options.defaults(release).keys()


# ---- a release of a few lines ----

FIELDS = """
class Fields:
    alpha: int = 1
    beta: bool = False
    gamma: str = None
    delta: int = 7
    extent: int = 0
    triton_splits: int = 8
    size: int = 1
    computed: int = compute()
"""
MINE = """
class Mine:
    def __init__(self, model_runner):
        self.alpha = model_runner.server_args.alpha
        self.of_extend = model_runner.server_args.extent
        self.splits = model_runner.server_args.triton_splits
        self.size = get_parallel().attn_size
        if model_runner.server_args.computed:
            local = getattr(model_runner, "gamma")
        if self.use_mla:
            self.alpha = model_runner.server_args.delta

    def forward_extend(self):
        return self.of_extend

    def forward_decode(self):
        return self.alpha, self.splits, self.size
"""
AITER = """
class AiterAttnBackend:
    def __init__(self, model_runner):
        self.page = model_runner.server_args.alpha
        self.made = self.page + 1
        self.unused = model_runner.server_args.beta

    def _pages(self):
        return self.made

    def forward_decode(self):
        return self._pages()
"""


@pytest.fixture
def small(tmp_path):
    def make(mine=MINE, aiter=AITER, fields=FIELDS):
        layers = tmp_path / "sglang/srt/layers/attention"
        layers.mkdir(parents=True, exist_ok=True)
        (layers / "mine.py").write_text(mine)
        (layers / "aiter_backend.py").write_text(aiter)
        folder = tmp_path / "sglang/srt/arg_groups/fields"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "all.py").write_text(fields)
        (tmp_path / "sglang/srt/server_args.py").write_text("class ServerArgs:\n    beta: bool = False\n")
        return Release(tmp_path / "sglang")

    return make


def test_the_defaults_are_those_that_are_written_as_values(small):
    found = options.defaults(small())
    assert found == {
        "alpha": 1, "beta": False, "gamma": None, "delta": 7, "extent": 0, "triton_splits": 8, "size": 1,
    }  # fmt: skip


def test_what_a_class_keeps_of_an_option_counts_where_decode_may_read_it(small):
    assert options.heeded(small(), f"{ATTENTION}.mine", "Mine") == {
        "alpha": "model_runner.server_args.alpha",
        "triton_splits": "model_runner.server_args.triton_splits",
        "size": "get_parallel().attn_size",
        "gamma": "getattr(model_runner, 'gamma')",
    }


def test_of_the_aiter_backend_what_its_forward_decode_needs_counts(small):
    assert options.heeded(small(), BACKEND, "AiterAttnBackend") == {"alpha": "model_runner.server_args.alpha"}


@pytest.mark.parametrize("module, name", [(f"{ATTENTION}.mine", "Other"), (f"{ATTENTION}.no", "Mine"), ("os", "Mine")])
def test_a_class_that_is_not_in_the_release_heeds_nothing_that_is_known(small, module, name):
    assert options.heeded(small(), module, name) == {}


@pytest.mark.parametrize(
    "code, left",
    [
        ("if self.use_mla:\n    a\nelse:\n    b", "b"),
        ("if self.use_mla:\n    a", ""),
        ("if self.use_mla and x:\n    a", "ax"),
        ("if x:\n    if self.use_mla:\n        a\n    b", "bx"),
        ("if a:\n    b\nelif self.use_mla:\n    c\nelse:\n    d", "abd"),
    ],
)
def test_what_a_method_does_for_mla_layers_is_left_out(code, left):
    names = {node.id for node in options.walk(ast.parse(code)) if isinstance(node, ast.Name)} - {"self"}
    assert "".join(sorted(names)) == left


class Decode:
    """The user's decode backend."""


@pytest.fixture
def asked(small, monkeypatch):
    """What is unheeded with these options of the runner."""
    mine = ModuleType(f"{ATTENTION}.mine")
    mine.Mine = type("Mine", (Decode,), {"__module__": mine.__name__})
    mine.get_parallel = lambda: SimpleNamespace(attn_size=asked.parallel)
    registry = ModuleType(REGISTRY)
    registry.ATTENTION_BACKENDS = {"triton": None, "aiter": None}
    monkeypatch.setitem(sys.modules, mine.__name__, mine)
    monkeypatch.setitem(sys.modules, REGISTRY, registry)

    def asked(aiter=AITER, parallel=1, gamma=None, **values):
        asked.parallel = parallel
        defaults = dict(alpha=1, beta=False, delta=7, extent=0, triton_splits=8, computed=0)
        runner = SimpleNamespace(server_args=SimpleNamespace(**{**defaults, **values}), gamma=gamma)
        if gamma == "missing":
            del runner.gamma
        return options.unheeded(small(aiter=aiter), runner, mine.Mine())

    return asked


@pytest.mark.parametrize(
    "values",
    [{}, {"alpha": 5}, {"triton_splits": 16}, {"delta": 1}, {"extent": 1}, {"gamma": "missing"}],
    ids=["defaults", "both heed it", "about the kernel", "of MLA layers", "of extend", "not in this process"],
)
def test_an_option_that_decode_does_not_lose_keeps_nothing_from_it(asked, values):
    assert asked(**values) is None


@pytest.mark.parametrize(
    "values, message",
    [
        ({"gamma": "g"}, "--gamma is g"),
        ({"parallel": 2}, "--size is 2"),
        ({"alpha": 5, "aiter": AITER.replace("server_args.alpha", "server_args.beta")}, "--alpha is 5"),
    ],
)
def test_an_option_that_is_set_and_only_the_users_backend_heeds_is_named(asked, values, message):
    said = "Mine heeds it in decode, and SGLang's AITER backend does not"
    assert asked(**values) == f"{message}: {said}"
