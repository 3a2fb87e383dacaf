"""Loading holds about one shard besides the model. Measured in a process of its own, from the kernel's accounts."""

import json
import subprocess
import sys

import pytest

import titan_adapters as ta
from tests.conftest import random_model

MIB = 2**20

SCRIPT = """
import json, sys
import titan_adapters as ta
from titan_adapters.checkpoint import read_identity

def kib(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field + ":"))

def resident():
    # Anonymous memory, and file pages that are mapped at this moment.
    return kib("RssAnon") + kib("RssFile")

ta.load_model(sys.argv[2])  # a tiny one: code that torch imports when it first sees a meta tensor is 70 MiB
identity = read_identity(sys.argv[1])
model = identity.model(identity.config)
for parameter in model.parameters():
    parameter.data.fill_(1.0)  # touch every page, so that the model itself is paid for
before = resident()
peak = 0
def progress(done, total, name):
    global peak
    peak = max(peak, resident())
ta.load_checkpoint(model, sys.argv[1], progress=progress)
print(json.dumps([before, peak, resident()]))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
@pytest.mark.parametrize("format", ["native", "hf"])
def test_loading_holds_about_one_shard_besides_the_model(format, tmp_path):
    """Eight large tensors of 16 MiB each: two layers of w1, w2, w3, the embedding and the head."""
    cls = ta.get_model("llama")
    config = next(iter(cls.tiny_configs().values())).model_copy(
        update={"dim": 516, "hidden_dim": 8192, "vocab_size": 8192, "num_layers": 2}
    )
    model = random_model(cls, config)
    ta.save_checkpoint(model, tmp_path / "sharded", format, max_shard_bytes=18 * MIB)
    files = list((tmp_path / "sharded").glob("*.safetensors"))
    assert len(files) >= 8 and max(file.stat().st_size for file in files) < 19 * MIB
    tiny = next(iter(cls.tiny_configs().values()))
    ta.save_checkpoint(random_model(cls, tiny), tmp_path / "tiny", format)
    command = [sys.executable, "-c", SCRIPT, tmp_path / "sharded", tmp_path / "tiny"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    before, peak, after = (kib / 1024 for kib in json.loads(done.stdout))
    assert peak - before < 1.5 * 18, f"{peak - before:.1f} MiB at the peak"
    assert after - before < 4, f"{after - before:.1f} MiB stay"
