"""A server's processes without its HTTP API: a main process with /metrics and a spawned scheduler."""

from __future__ import annotations

import json
import multiprocessing
import sys
import types


def scheduler(results, stop) -> None:
    """As SGLang's: imports first, then the title and logging, then the model; here three batches."""
    import setproctitle
    from recording import harness
    from sglang.srt.layers.attention import attention_registry  # noqa: F401 - as ModelRunner's module does
    from sglang.srt.utils.common import configure_logger

    setproctitle.setproctitle("sglang::scheduler_TP0")
    configure_logger(types.SimpleNamespace(log_level="info"), prefix=" TP0")
    stack = harness.Stack(backend="aiter", layers=4, full_interval=2, page_size=16)
    stack.extend({1: 40, 2: 20})
    stack.extend({1: 24, 2: 35})
    stack.decode([1, 2])
    import sglang_aiter_ext

    results.put(sglang_aiter_ext.counters())
    stop.recv()


def server() -> dict:
    """Prints `PORT n`, then serves until its input ends."""
    import threading

    import fastapi
    import stand_ins  # noqa: F401
    import uvicorn
    from sglang.srt.utils.common import add_prometheus_middleware, configure_logger, set_prometheus_multiproc_dir

    configure_logger(types.SimpleNamespace(log_level="info"))
    set_prometheus_multiproc_dir()
    context = multiprocessing.get_context("spawn")
    results, (stopped, stop) = context.Queue(), context.Pipe(duplex=False)
    process = context.Process(target=scheduler, args=(results, stopped))
    process.start()
    counters = results.get(timeout=300)
    app = fastapi.FastAPI()
    add_prometheus_middleware(app)
    http = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    threading.Thread(target=http.run, daemon=True).start()
    while not http.started:
        pass
    port = http.servers[0].sockets[0].getsockname()[1]
    print(json.dumps({"port": port, "scheduler": process.pid, "counters": counters}), flush=True)
    sys.stdin.read()
    if process.is_alive():
        stop.send(True)
    process.join()
    return {"exit": process.exitcode}
