#!/usr/bin/env bash
# serve.sh WORK TOKENS_FILE [SGLang server argument...]: start a server of the tiny hybrid model,
# ask it prompts.py's questions, stop it. Needs one NVIDIA GPU and an SGLang that runs there.
#
# PYTHON  the interpreter (default python3); its PYTHONPATH decides whether the extension is active
# AT_ONCE how many prompts are under way at a time (default 16)
# GRAPHS  the argument for graph sizes, which is another one before 0.5.16 (default --cuda-graph-max-bs-decode 16)
# NAME    WORK/NAME.log is the server's log (default server)
# WORK    keeps the model and compiled kernels; several servers can share it, once the model is there
set -euo pipefail
work=$1 tokens=$2
shift 2
here=$(cd "$(dirname "$0")" && pwd)
py=${PYTHON:-python3} port=${PORT:-31999} log=$work/${NAME:-server}.log
mkdir -p "$work"
[ -e "$work/model/model.safetensors" ] || PYTHONPATH= "$py" "$here/tiny_model.py" "$work/model"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
export TRITON_CACHE_DIR=$work/cache/triton TVM_FFI_CACHE_DIR=$work/cache/tvm-ffi
export FLASHINFER_WORKSPACE_BASE=$work/cache TORCHINDUCTOR_CACHE_DIR=$work/cache/inductor
if [ -z "${CUDA_HOME:-}" ] && command -v nvcc >/dev/null; then
    CUDA_HOME=$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")
    export CUDA_HOME
fi
setsid "$py" -m sglang.launch_server --model-path "$work/model" --skip-tokenizer-init \
    --host 127.0.0.1 --port "$port" --attention-backend triton --sampling-backend pytorch \
    --grammar-backend none --page-size 16 --chunked-prefill-size 256 --context-length 2048 \
    --max-running-requests 16 --max-total-tokens 32768 --max-mamba-cache-size 96 \
    --mem-fraction-static 0.3 ${GRAPHS---cuda-graph-max-bs-decode 16} --random-seed 1 "$@" >"$log" 2>&1 &
pid=$!
disown "$pid"
stop() {
    kill -TERM "$pid" 2>/dev/null || true
    for _ in $(seq 40); do kill -0 "$pid" 2>/dev/null || break; sleep 0.5; done
    kill -KILL -- "-$pid" 2>/dev/null || true
}
trap stop EXIT
for _ in $(seq "${WAIT:-420}"); do
    kill -0 "$pid" 2>/dev/null || { echo "the server ended; the end of its log:"; tail -n 40 "$log"; exit 1; }
    if "$py" -S -c 'import sys, urllib.request as u; u.urlopen(sys.argv[1], timeout=25)' "http://127.0.0.1:$port/health" 2>/dev/null; then
        echo "[$SECONDS s] server ready"
        "$py" "$here/prompts.py" "http://127.0.0.1:$port" "$tokens" --at-once "${AT_ONCE:-16}"
        echo "[$SECONDS s] asked"
        states=${SGLANG_AITER_EXT_STATE_DIR:-}
        [ -z "$states" ] || [ ! -d "$states" ] || cp -r "$states" "$states.asked"
        exit 0
    fi
    sleep 1
done
echo "the server did not come up in ${WAIT:-420} s; the end of its log:"
tail -n 40 "$log"
exit 1
