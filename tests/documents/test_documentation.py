"""The documents under docs/ say what the source says."""

import re
import subprocess

import documentation
import environment
import pytest

DOCS = environment.ROOT / "docs"
TROUBLESHOOTING = " ".join((DOCS / "troubleshooting.md").read_text().split())


def section(title):
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", (DOCS / "troubleshooting.md").read_text(), re.M | re.S)[1]


def test_the_tables_of_capabilities_are_those_of_the_source():
    page = documentation.CAPABILITIES_PAGE.read_text()
    assert documentation.capabilities(page) == page
    named = [found[2] for found in documentation.PLACE.finditer(page)]
    assert named == [c.name for c in documentation.CAPABILITIES]


@pytest.mark.parametrize(
    "module, title, number",
    [
        ("capabilities/asm_context_prefill.py", "Prefill stays on the paged kernel", 26),
        ("capabilities/decode_pa.py", "Decode stays on its own backend", 12),
    ],
)
def test_every_reason_in_the_source_is_explained_and_no_other(module, title, number):
    found = documentation.reasons(module)
    assert len(found) >= number
    first_column = re.findall(r"^\| (`.*?`) \|", section(title), re.M)
    assert sorted(re.findall(r"`(\w+)`", " ".join(first_column))) == sorted(found)


def test_every_log_line_and_error_is_there():
    found = documentation.messages()
    assert len(found) >= 25
    assert [message for message in sorted(found) if message not in TROUBLESHOOTING] == []


def test_what_is_wrapped_is_on_the_page_of_how_it_works():
    page = (DOCS / "how-it-works.md").read_text()
    for capability in documentation.CAPABILITIES:
        for name in capability.wraps:
            assert f"`{name}`" in page, (capability.name, name)


def outcomes():
    """(capability, outcome) of each call of `count`."""
    import ast

    for path, tree in documentation.modules():
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            if path.startswith("capabilities/") and getattr(call.func, "id", None) == "count":
                yield path.rpartition("/")[2].removesuffix(".py"), call.args[1].value


def test_every_outcome_that_is_counted_is_in_its_capabilitys_section():
    page = documentation.CAPABILITIES_PAGE.read_text()
    found = set(outcomes())
    assert len(found) >= 9
    for name, outcome in found:
        part = re.search(rf"^## `{name}`\n(.*?)(?=^## |\Z)", page, re.M | re.S)[1]
        assert f"| `{outcome}` |" in part, (name, outcome)


LIMITS = {"faults.md": 120, "how-it-works.md": 120, "capabilities.md": 150, "troubleshooting.md": 150}


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
