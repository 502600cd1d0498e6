"""This starts SGLang's engine with the extension in a Ray actor, and raises an error if the extension is not active.

    python3 ray_engine.py MODEL "A prompt"

The workers of a cluster do not inherit the driver's PYTHONPATH. `runtime_env` sets it for the actor before
its Python starts, and the processes that the engine spawns inherit it from the actor.
"""

import sys

import ray

#: The extension is in this folder on every node, and wrapt is installed for the Python of the nodes.
ENVIRONMENT = {"PYTHONPATH": "/opt/sglang-aiter-ext", "SGLANG_USE_AITER_PA": "1"}


def check_active():
    """Raises RuntimeError if SGLang will not be wrapped in this process."""
    try:
        from sglang_aiter_ext.bootstrap import waiting
    except ImportError:
        active = False
    else:
        active = waiting()
    if not active:
        raise RuntimeError(
            "sglang-aiter-ext is not active here: is PYTHONPATH in runtime_env, and SGLANG_AITER_EXT not off?"
        )


@ray.remote
class Engine:
    def __init__(self, **arguments):
        check_active()
        import sglang

        self.engine = sglang.Engine(**arguments)

    def generate(self, prompt):
        return self.engine.generate(prompt)


if __name__ == "__main__":
    engine = Engine.options(runtime_env={"env_vars": ENVIRONMENT}).remote(model_path=sys.argv[1])
    print(ray.get(engine.generate.remote(sys.argv[2])))
