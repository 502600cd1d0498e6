"""The documents under docs/ say what the source says."""

import ast
import graphlib
import itertools
import re
import subprocess

import documentation
import environment
import pytest

DOCS = environment.ROOT / "docs"
TROUBLESHOOTING = " ".join((DOCS / "troubleshooting.md").read_text().split())


def section(title):
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", (DOCS / "troubleshooting.md").read_text(), re.M | re.S)[1]


@pytest.mark.slow
def test_the_tables_of_capabilities_are_those_of_the_source():
    page = documentation.CAPABILITIES_PAGE.read_text()
    assert documentation.capabilities(page) == page
    named = [found[2] for found in documentation.PLACE.finditer(page)]
    assert named == [c.name for c in documentation.CAPABILITIES]


@pytest.mark.parametrize(
    "folder, title, number",
    [
        ("capabilities/asm_context_prefill/", "Prefill stays on the paged kernel", 25),
        ("capabilities/decode_pa/", "Decode stays on its own backend", 12),
    ],
)
def test_every_reason_in_the_source_is_explained_and_no_other(folder, title, number):
    found = documentation.reasons(folder)
    assert len(found) >= number
    first_column = re.findall(r"^\| (`.*?`) \|", section(title), re.M)
    assert sorted(re.findall(r"`(\w+)`", " ".join(first_column))) == sorted(found)


def test_every_log_line_and_error_is_there():
    found = documentation.messages()
    assert len(found) >= 25
    assert [message for message in sorted(found) if message not in TROUBLESHOOTING] == []


@pytest.mark.slow
def test_what_is_wrapped_is_on_the_page_of_how_it_works():
    page = (DOCS / "how-it-works.md").read_text()
    for capability in documentation.CAPABILITIES:
        (row,) = re.findall(rf"^\| `{capability.name}` \|(.*)\|$", page, re.M)
        for name in documentation.wraps(capability):
            assert name in row, (capability.name, name)


def test_the_picture_of_the_files_shows_every_import_and_no_circle():
    found = documentation.imports()
    graph = {}
    for importer, imported in found:
        graph.setdefault(importer, set()).add(imported)
    graphlib.TopologicalSorter(graph).prepare()
    rooms, arrows = documentation.picture((DOCS / "how-it-works.md").read_text())
    nodes = set().union(*rooms.values()) | {end for arrow in arrows for end in arrow} - rooms.keys()

    def node(module):
        name = {"__init__": "package", "__main__": "main"}.get(module, module.replace("/", "_"))
        # A folder that is drawn as one node stands for all of its files.
        return max((n for n in nodes if name == n or name.startswith(f"{n}_")), key=len)

    real = {(node(a), node(b)) for a, b in found} | {("sitecustomize", "bootstrap")}
    real = {(a, b) for a, b in real if a != b and (b not in rooms["bottom"] or a in rooms["bottom"])}
    files = {path.removesuffix(".py").removesuffix("/__init__") for path, _ in documentation.modules()}
    assert nodes == set(map(node, files)) | {"sitecustomize"}
    drawn = {arrow: set(itertools.product(*(rooms.get(end, {end}) for end in arrow))) for arrow in arrows}
    assert [arrow for arrow, stands_for in drawn.items() if not stands_for & real] == []
    assert real - set().union(*drawn.values()) == set()


def test_the_readme_lists_every_switch():
    assert documentation.switches() in (environment.ROOT / "README.md").read_text()


def outcomes():
    """(capability, outcome) of each call of `count` in a capability's file or folder."""
    for path, tree in documentation.modules():
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            if path.startswith("capabilities/") and getattr(call.func, "id", None) == "count":
                for outcome in ast.walk(call.args[1]):
                    if isinstance(outcome, ast.Constant):
                        yield path.split("/")[1].removesuffix(".py"), outcome.value


def test_every_outcome_that_is_counted_is_in_its_capabilitys_section():
    page = documentation.CAPABILITIES_PAGE.read_text()
    found = set(outcomes())
    assert len(found) >= 9
    for name, outcome in found:
        part = re.search(rf"^## `{name}`\n(.*?)(?=^## |\Z)", page, re.M | re.S)[1]
        assert f"| `{outcome}` |" in part, (name, outcome)


LIMITS = {
    "faults.md": 120,
    "how-it-works.md": 170,
    "capabilities.md": 35 * len(documentation.CAPABILITIES),
    "troubleshooting.md": 160,
}


@pytest.mark.parametrize(
    "page", sorted(DOCS.rglob("*.md")) + [environment.ROOT / "CONTRIBUTING.md"], ids=lambda p: p.name
)
def test_links_lead_somewhere_and_pages_are_short(page):
    text = page.read_text()
    assert len(text.splitlines()) <= LIMITS.get(page.name, 80)
    for target in re.findall(r"\]\((?!https?://)([^)]+)\)", text):
        name, _, anchor = target.partition("#")
        other = (page.parent / name) if name else page
        assert other.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", other.read_text(), re.M)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, target


def test_no_document_names_a_path_of_somebodys_machine():
    for page in (*DOCS.rglob("*.md"), environment.ROOT / "CONTRIBUTING.md", environment.ROOT / "CHANGELOG.md"):
        assert not re.search(r"/root/|/home/|/work/", page.read_text()), page


def test_commands_of_the_contributors_pages_name_targets_files_and_tests_that_exist():
    """`make` targets, Python files, and what pytest is asked to select."""
    makefile = (environment.ROOT / "Makefile").read_text()
    seen = 0
    for page in (
        DOCS / "adding-a-capability.md",
        DOCS / "supporting-a-release.md",
        environment.ROOT / "CONTRIBUTING.md",
    ):
        for block in re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.M | re.S):
            subprocess.run(["sh", "-n", "-c", block], check=True)
            for line in block.splitlines():
                seen += 1
                for target in re.findall(r"\bmake ([a-z-]+)", line):
                    assert re.search(rf"^{target}:", makefile, re.M), line
                for name in re.findall(r"[\w/-]+\.py\b", line):
                    assert (environment.ROOT / name).is_file(), line
    assert seen >= 8
