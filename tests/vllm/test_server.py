"""The OpenAI server on loopback, by our command and by vLLM's own module, with real weights."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

pytest.importorskip("vllm", exc_type=ImportError)
pytest.importorskip("openai")

import openai

from tests.vllm.conftest import ROOT, child_environment

pytestmark = pytest.mark.engine

START_SECONDS = 150
OPTIONS = ["--host", "127.0.0.1", "--max-model-len", "512", "--max-num-seqs", "4", "--enforce-eager"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def served(command: list[str], log: Path) -> Iterator[openai.OpenAI]:
    """A client of the server that `command` starts, once it answers; the whole process group is gone afterwards."""
    port = free_port()
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, *OPTIONS, "--port", str(port)],
            cwd=log.parent,
            env=child_environment(PYTHONPATH=""),  # what is installed must do
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not healthy(port):
            assert process.poll() is None, f"the server ended:\n{log.read_text()[-6000:]}"
            assert time.monotonic() < deadline, f"no answer in {START_SECONDS} s:\n{log.read_text()[-6000:]}"
            time.sleep(0.5)
        yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=60, max_retries=0)
    finally:
        stop_group(process)


def healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            return answer.status == 200
    except OSError:
        return False


def stop_group(process: subprocess.Popen) -> None:
    """SIGINT, on which the server ends its engine; then SIGKILL for whatever is left in the group."""
    process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=20)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=20)


def check_answers(client: openai.OpenAI) -> None:
    models = [model.id for model in client.models.list()]
    assert len(models) == 1
    completion = client.completions.create(
        model=models[0], prompt="The capital of France is", max_tokens=8, temperature=0
    )
    assert "Paris" in completion.choices[0].text
    question = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    chat = client.chat.completions.create(model=models[0], messages=question, max_tokens=64, temperature=0)
    assert "Paris" in chat.choices[0].message.content
    assert chat.choices[0].finish_reason == "stop", "the end-of-sequence id got lost"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="another", prompt="x", max_tokens=1)


def test_titan_adapters_serve(demo, tmp_path):
    command = [str(Path(sys.executable).with_name("titan-adapters")), "serve", str(demo / "native")]
    with served([*command, "--served-model-name", "smol"], tmp_path / "log") as client:
        assert [model.id for model in client.models.list()] == ["smol"]
        check_answers(client)
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_stock_server_module(demo, tmp_path):
    module = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    with served([*module, "--model", str(demo / "native"), "--config-format", "titan"], tmp_path / "log") as client:
        check_answers(client)


def test_serve_refuses_a_damaged_folder_at_once(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    done = subprocess.run(
        [Path(sys.executable).with_name("titan-adapters"), "serve", tmp_path],
        capture_output=True,
        text=True,
        env=child_environment(),
        cwd=ROOT,
        timeout=60,
    )
    assert done.returncode == 1
    assert "is not a checkpoint folder" in done.stderr and "Traceback" not in done.stderr
