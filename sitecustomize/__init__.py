"""Imported by `site` at interpreter start, from the PYTHONPATH entry this package lies in.

Hands over to `sglang_aiter_ext.bootstrap` unless SGLANG_AITER_EXT says off, then runs the
sitecustomize it shadows, module or package, once; `import sitecustomize` gives that one.
Standard library only, prints nothing, and no exception of ours leaves it.
"""


def _hand_over():
    import os

    if os.environ.get("SGLANG_AITER_EXT", "").strip().lower() in ("0", "false", "no", "off"):
        return False
    try:
        try:
            from sglang_aiter_ext import bootstrap
        except ModuleNotFoundError as error:
            installed = os.path.basename(os.path.dirname(os.path.dirname(__file__))) == "preload"
            if error.name != "sglang_aiter_ext" or not installed:
                raise
            _load_package()
            from sglang_aiter_ext import bootstrap

        bootstrap.install()
    except Exception:
        # A broken installation of ours may not stop Python, and there is no log yet.
        return False
    return True


def _load_package():
    """For a Python that has nothing but our entry: the package around this folder, without its neighbours."""
    import os
    import sys
    from _frozen_importlib import module_from_spec
    from _frozen_importlib_external import spec_from_file_location

    name, package = "sglang_aiter_ext", os.path.realpath(f"{os.path.dirname(__file__)}/../..")
    path = f"{package}/__init__.py"
    spec = spec_from_file_location(name, path, submodule_search_locations=[package])
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def _shadowed():
    """The spec of the next sitecustomize on sys.path that has not run yet, or None."""
    import os
    import sys

    finder = next((f for f in sys.meta_path if getattr(f, "__name__", "") == "PathFinder"), None)
    if finder is None:
        return None
    here = os.path.realpath(os.path.dirname(os.path.dirname(__file__)))
    entries = [os.path.realpath(entry or os.getcwd()) for entry in sys.path]
    later = sys.path[entries.index(here) + 1 :] if here in entries else sys.path
    # Another one that chains may reach us a second time: what ran once is passed over.
    ran = sys.__dict__.setdefault("_sglang_aiter_ext_chained", {here})
    for entry in later:
        place = os.path.realpath(entry or os.getcwd())
        if place not in ran and (spec := finder.find_spec("sitecustomize", [entry])) and spec.loader:
            ran.add(place)
            return spec
    return None


def _run_shadowed(active):
    import os
    import sys

    try:
        spec = _shadowed()
    except Exception:
        return
    if spec is not None:
        from _frozen_importlib import module_from_spec

        module = module_from_spec(spec)
        sys.modules[spec.name] = module
        before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        try:
            # What it raises is its own, and site reports it as it always did.
            spec.loader.exec_module(module)
        finally:
            after = os.environ.get("PYTHONPATH", "").split(os.pathsep)
            here = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
            ours = next((entry for entry in before if entry and os.path.realpath(entry) == here), None)
            if active and ours in after and after.index(ours) > before.index(ours):
                # OpenTelemetry's moves its entry to the front, where it would hide ours from the processes we start.
                after.remove(ours)
                after.insert(before.index(ours), ours)
                os.environ["PYTHONPATH"] = os.pathsep.join(after)


_run_shadowed(_hand_over())
