"""What a person reads when a real SGLang server must refuse to start, or keeps its own decode backend.

test_gpu_server.py has the same with every kind of unusable AITER, on a GPU.
"""

import pytest
import servers

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("refusals")]
RELEASE = "0.5.18"
CPU = {"SERVER_ON_CPU": "1", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}


def start(tmp_path, *arguments, **options):
    return servers.run(tmp_path, "server", *servers.ON_CPU, *arguments, **{"release": RELEASE, **CPU, **options})


@pytest.mark.parametrize("kind", ["absent", pytest.param("namespace", marks=pytest.mark.nightly)])
def test_a_server_without_a_usable_aiter_stops_with_that_message_as_its_last_line(tmp_path, kind):
    aiter = servers.folder_of(kind, tmp_path / "path")
    server = start(tmp_path, aiter=aiter, SGLANG_USE_AITER_PA="1")
    message = server.last_lines()[-1]
    assert "SGLANG_USE_AITER_PA=1 needs AITER's paged_attention_ragged, and it cannot be used: " in message
    assert servers.UNUSABLE[kind][1] in message and "SGLANG_USE_AITER_PA=0" in message


def test_a_server_with_a_switch_that_cannot_be_read_stops_with_that_message_as_its_last_line(tmp_path):
    server = start(tmp_path, SGLANG_USE_AITER_PA="2")
    assert server.last_lines()[-1].endswith(
        "SGLANG_USE_AITER_PA='2' is not accepted: use 1/true/yes/on or 0/false/no/off, in any case"
    )


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        pytest.param(
            "window",
            "decode stays on its own backend (layer): layer 3 has a sliding window of 64, ",
            marks=pytest.mark.nightly,
        ),
        ("sinks", "decode stays on its own backend (sinks): the model has attention sinks (model.layers.3.attn.sinks), "),
    ],
)  # fmt: skip
def test_a_server_whose_layers_the_kernel_lacks_says_so_and_goes_on(tmp_path, layers, said):
    server = start(tmp_path, SGLANG_USE_AITER_PA="1", SERVER_LAYERS=layers)
    assert server.log.count("decode_pa: " + said) == 1
    assert "Uvicorn running on" in server.log


def test_a_server_whose_release_would_cast_an_fp8_cache_whole_says_so(tmp_path):
    server = start(tmp_path, "--kv-cache-dtype", "fp8_e4m3", release="0.5.11", SGLANG_USE_AITER_PA="1", GRAPHS="")
    assert (
        server.log.count("decode_pa: decode stays on its own backend (fp8_pool_cast): this release casts the whole")
        == 1
    )
