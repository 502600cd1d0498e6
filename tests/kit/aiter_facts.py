"""What each AITER has, from its history: `python tests/kit/aiter_facts.py /path/to/aiter [--check]`.

Writes aiter_facts.json: for each release from v0.1.4 on, and each commit that an image pins or that had a known
fault, what the package itself reads of its files. Then writes the tables of docs/aiter.md, which need no AITER.
Without a path only the tables are written. With --check nothing is written, and a difference ends with status 1.
"""

from __future__ import annotations

import hashlib
import io
import json
import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile

import environment
import matrix

from sglang_aiter_ext import aiter_installed
from sglang_aiter_ext.aiter_kernels import ASM_PREFILL, PAGED_PREFILL, RAGGED_DECODE
from sglang_aiter_ext.capabilities import CAPABILITIES

KIT = pathlib.Path(__file__).resolve().parent
FACTS, IMAGES = KIT / "aiter_facts.json", KIT / "aiter_images.json"
PAGE = environment.ROOT / "docs" / "aiter.md"
#: What the package reads of an AITER: its Python files, and its gfx950 attention kernels.
READ = ("aiter/__init__.py", "aiter/ops/mha.py", "aiter/ops/attention.py", aiter_installed.KERNELS)
#: First and last commit with a code object that leaves rows unwritten, and the one that mends it.
FAULTY = ("75c5e0f0b3", "e1369bfa67", "2e7856a0f8")
#: A change that a release may have taken over under another commit -> words of its first line.
CHANGES = {"past_2_gib": "(#2893)"}
GPUS = ("gfx942", "gfx950")


def git(repository: str, *arguments: str) -> bytes:
    return subprocess.run(["git", "-C", repository, *arguments], capture_output=True, check=True).stdout


def references(repository: str) -> list[str]:
    """Releases from v0.1.4 on in their order, then the commits, in theirs."""
    tags = git(repository, "tag", "--list", "v0.1.*").decode().split()
    releases = [tag for tag in tags if re.fullmatch(r"v0\.1\.\d+(\.post\d+)?", tag)]
    numbered = sorted(([int(n) for n in re.findall(r"\d+", tag)], tag) for tag in releases)
    pinned = {name for image in images() for name in image["aiter"] if not name.startswith("v")}
    dated = sorted((git(repository, "log", "-1", "--format=%cI", name), name) for name in {*pinned, *FAULTY})
    return [tag for number, tag in numbered if number >= [0, 1, 4]] + [name for _, name in dated]


def facts(repository: str, reference: str) -> dict:
    """What the package reads of the AITER at `reference`, and what its history says of known faults."""
    commit, day = git(repository, "log", "-1", "--format=%h %cs", "--abbrev=10", reference).decode().split()
    there = [path for path in READ if git(repository, "ls-tree", reference, path)]
    with tempfile.TemporaryDirectory() as place:
        archive = io.BytesIO(git(repository, "archive", reference, "--", *there))
        with tarfile.open(fileobj=archive) as files:
            files.extractall(place, filter="data")
        root = pathlib.Path(place)
        # Its presence is how AITER finds its kernels.
        (root / "csrc").mkdir()
        kernels = aiter_installed.kernel_problems(root / "aiter")
        problem = aiter_installed.asm_problem(root / "aiter")
        objects = sorted((root / aiter_installed.KERNELS).glob("*hd256_fp8*.co"))
        digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in objects}
    words = problem and re.sub(rf"{re.escape(place)}/(aiter\b)?", "", problem).replace("AITER at  ", "AITER ")
    lines = git(repository, "log", "--format=%s", reference).decode().splitlines()
    changes = {name: any(text in line for line in lines) for name, text in CHANGES.items()}
    return {"commit": commit, "date": day, "kernels": kernels, "asm": words, "objects": digests, **changes}


def images() -> list[dict]:
    return json.loads(IMAGES.read_text())


def acts(release: str, aiter: dict, gpu: str) -> list[str]:
    """The capabilities that act on `gpu` with these two, where they are turned on."""
    verdicts = matrix.verdicts(release)
    return [
        c.name
        for c in CAPABILITIES
        if verdicts[c.name][0] == "apply"
        and (not c.architectures or gpu in c.architectures)
        and not any(aiter["kernels"][kernel] for kernel in c.kernels)
        and not (c.aiter_problem and aiter["asm"])
    ]


def runs(rows: list[tuple[str, list[str]]]) -> str:
    """Rows of a table: those that follow each other and say the same are one."""
    merged: list[tuple[list[str], list[str]]] = []
    for name, cells in rows:
        if merged and merged[-1][1] == cells:
            merged[-1][0].append(name)
        else:
            merged.append(([name], cells))
    return "".join(
        f"| {names[0]}{f' to {names[-1]}' * (len(names) > 1)} | {' | '.join(cells)} |\n" for names, cells in merged
    )


def of_images(known: dict[str, dict]) -> str:
    rows = []
    for image in images():
        for release in image["sglang"]:
            cells = []
            for gpu in GPUS:
                found = {", ".join(f"`{name}`" for name in acts(release, known[name], gpu)) for name in image["aiter"]}
                assert len(found) < 2, (release, found)
                cells.append(found.pop() if found else "ask `doctor`")
            rows.append((release, [" to ".join(image["aiter"]) or "not known", image["known"], *cells]))
    head = "| SGLang's image | AITER | how it is known | on MI300X, MI325X (gfx942) | on MI350X, MI355X (gfx950) |\n"
    return head + "| --- | --- | --- | --- | --- |\n" + runs(rows)


def of_versions(known: dict[str, dict]) -> str:
    def word(problem: str | None, kernel: str) -> str:
        if problem is None:
            return "yes"
        if problem == f"lacks {kernel}":
            return "no"
        # Where it is and which release is right is said elsewhere on the page.
        why = re.sub(rf"^AITER has [^:]*: |^.*\.co |^{kernel} |, in AITER's main branch [^)]*", "", problem)
        return f"no: it {why.partition(';')[0]}".replace("it its", "its").replace(f"it {ASM_PREFILL}", "it")

    rows = []
    for name, fact in known.items():
        cells = [word(fact["kernels"][kernel], kernel) for kernel in (RAGGED_DECODE, PAGED_PREFILL, ASM_PREFILL)]
        cells += [word(fact["asm"], ASM_PREFILL), "right" if fact["past_2_gib"] else "zeros"]
        rows.append((name, cells))
    head = f"| AITER | `{RAGGED_DECODE}` | `{PAGED_PREFILL}` | `{ASM_PREFILL}` | ASM kernel for head_dim 256 | paged prefill past 2 GiB |\n"
    return head + "| --- | --- | --- | --- | --- | --- |\n" + runs(rows)


def page(text: str) -> str:
    """The text of docs/aiter.md with the tables made anew."""
    known = json.loads(FACTS.read_text())
    for name, table in (("images", of_images(known)), ("versions", of_versions(known))):
        mark = f"<!-- {name}: written by tests/kit/aiter_facts.py -->\n"
        before, _, rest = text.partition(mark)
        text = f"{before}{mark}\n{table}\n<!-- end -->\n{rest.partition('<!-- end -->' + chr(10))[2]}"
    return text


def main(arguments: list[str]) -> int:
    check, places = "--check" in arguments, [a for a in arguments if a != "--check"]
    if places:
        found = {name: facts(places[0], name) for name in references(places[0])}
        if check:
            return int(found != json.loads(FACTS.read_text()))
        FACTS.write_text(json.dumps(found, indent=1) + "\n")
    if check:
        return int(page(PAGE.read_text()) != PAGE.read_text())
    PAGE.write_text(page(PAGE.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
