"""Loading holds about one shard besides the model, and reads what it needs. Measured from the kernel's accounts."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

import titan_adapters as ta
from tests.conftest import random_model
from titan_adapters.checkpoint import open_weights

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


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
def test_of_rows_that_only_name_and_cut_a_rank_reads_its_own_part(tmp_path):
    """Two tensors of 32 MiB, of which the second of four ranks takes its rows, as an engine's loaders do."""
    _read_quarters(tmp_path / "tiny", rows=8)  # maps the code that does it
    before = _mapped_mib()
    native, parts = _read_quarters(tmp_path / "large", rows=8192)
    read = _mapped_mib() - before
    assert len(native) == 3 and sum(part.nbytes for part in parts) == 16 * MIB
    # Of 64 MiB. At each end of the three parts, the kernel may map up to 2 MiB more.
    assert 15 < read < 28, f"{read:.1f} MiB were read"


def _read_quarters(folder, rows):
    """Native tensors, which keep the file mapped, and of each the second quarter."""
    folder.mkdir()
    save_file({"gate_up": torch.ones(rows, 1024), "down": torch.ones(rows, 1024)}, folder / "model.safetensors")
    half = rows // 2
    session = ta.StateDictAdapter(
        ta.Split("gate_up", ["w1", "w3"], sizes=[half, half]), ta.Rename("down", "w2")
    ).session()
    native = [tensor for item in open_weights(folder).tensors() for _, tensor in session.feed(*item)]
    return native, [tensor.chunk(4)[1].clone() for tensor in native]


def _mapped_mib() -> float:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssFile:")) / 1024
