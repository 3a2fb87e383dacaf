"""Safetensors folders: reading that obeys the index, and writing that is atomic and sharded.

`open_weights` also opens folders of torch.distributed.checkpoint, which `titan_adapters.checkpoint.dcp` reads.
"""

import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from titan_adapters.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DCP_METADATA = ".metadata"
"""By this file a DCP folder is known."""
CONFIG_DIGEST = "titan_config_digest"
"""Ties weights to the config they were written with: a key in each safetensors file's metadata, an entry of a DCP
folder."""
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip

Progress = Callable[[int, int, str], None]
"""Called as progress(bytes done, bytes in all, tensor name)."""


@dataclass(frozen=True)
class Header:
    """What a file says about one tensor, without its data."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class WeightsFolder:
    """A folder whose headers, sizes and index have been checked against one another."""

    path: Path
    headers: dict[str, Header]
    metadata: dict[str, dict[str, str]]
    """Free-form metadata of each file."""

    @property
    def nbytes(self) -> int:
        return sum(header.nbytes for header in self.headers.values())

    def meta_tensors(self) -> dict[str, Tensor]:
        return {n: torch.empty(h.shape, dtype=h.dtype, device="meta") for n, h in self.headers.items()}

    def model_part(self, required: Collection[str], prefix: str | None = None) -> Self:
        """This folder without what a trainer saved besides the model; in safetensors folders there is nothing else.

        Args:
            required: Names of the model's tensors.
            prefix: What precedes them in the folder, such as "model.", where the folder does not show it.
        """
        if prefix is not None:
            raise CheckpointError(f"{self.path} is not a DCP folder.", fix="leave out prefix.")
        return self

    def tensor(self, name: str) -> Tensor:
        """One tensor, memory-mapped."""
        with safe_open(self.path / self.headers[name].file, framework="pt") as handle:
            return handle.get_tensor(name)

    def tensors(self, progress: Progress | None = None) -> Iterator[tuple[str, Tensor]]:
        """Every tensor, file by file; data is memory-mapped, so at most one file is resident."""
        by_file: dict[str, list[str]] = {}
        for name, header in self.headers.items():
            by_file.setdefault(header.file, []).append(name)
        done, total = 0, self.nbytes
        for file, names in by_file.items():
            with safe_open(self.path / file, framework="pt") as handle:
                for name in names:
                    yield name, handle.get_tensor(name)
                    done += self.headers[name].nbytes
                    if progress is not None:
                        progress(done, total, name)


def open_weights(path: str | Path) -> WeightsFolder:
    """Read the headers of a folder's safetensors files and check them against the index; or those of a DCP folder.

    Raises:
        CheckpointError: names every missing shard, file or tensor outside the index, tensor in two files, truncated
            file and size that does not add up.
    """
    path = Path(path)
    if (path / DCP_METADATA).is_file():
        from titan_adapters.checkpoint.dcp import open_dcp  # which builds on this module

        return open_dcp(path)
    files = sorted(p.name for p in path.glob("*.safetensors"))
    index_file = path / INDEX
    problems: list[str] = []
    weight_map: dict[str, str] | None = None
    total_size = None
    if index_file.exists():
        weight_map, total_size = _read_index(index_file)
        indexed = set(weight_map.values())
        problems += [f"shard {file} is named in {INDEX}, but missing" for file in sorted(indexed - set(files))]
        problems += [f"file {file} is not named in {INDEX}" for file in files if file not in indexed]
    elif len(files) != 1:
        listed = f": {', '.join(files)}" if files else ""
        problems.append(f"there are {len(files)} *.safetensors files, but no {INDEX}{listed}")
    headers: dict[str, Header] = {}
    metadata: dict[str, dict[str, str]] = {}
    for file in files:
        if weight_map is not None and file not in indexed:
            continue
        try:
            found, metadata[file] = _read_headers(path, file)
        except (SafetensorError, OSError) as error:
            problems.append(f"{file} is damaged or truncated ({error})")
            continue
        for name, header in found.items():
            home = file if weight_map is None else weight_map.get(name)
            if home is None:
                problems.append(f"tensor {name} in {file} is not named in {INDEX}")
            elif home != file:
                problems.append(f"tensor {name} is in {file}, but {INDEX} places it in {home}")
            else:
                headers[name] = header
    if weight_map is not None:
        intact = set(metadata)
        problems += [
            f"tensor {name} is not in {file}, where {INDEX} places it"
            for name, file in weight_map.items()
            if file in intact and name not in headers
        ]
        size = sum(header.nbytes for header in headers.values())
        if total_size is not None and not problems and size != total_size:
            problems.append(f"{INDEX} says {total_size} bytes in all, the tensors have {size}")
    if problems:
        raise CheckpointError(
            f"The weights in {path} are not usable.",
            problems,
            fix="copy the folder again from its source, or remove what does not belong to it. Nothing was loaded.",
        )
    return WeightsFolder(path, headers, metadata)


def _read_index(file: Path) -> tuple[dict[str, str], int | None]:
    try:
        index = json.loads(file.read_text())
        return dict(index["weight_map"].items()), index.get("metadata", {}).get("total_size")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"The weights in {file.parent} are not usable.",
            [f"{file.name} is not a safetensors index ({type(error).__name__}: {error})"],
            fix="copy the index again from its source. Nothing was loaded.",
        ) from error


def _read_headers(path: Path, file: str) -> tuple[dict[str, Header], dict[str, str]]:
    headers = {}
    with safe_open(path / file, framework="pt") as handle:
        for name in handle.keys():  # noqa: SIM118 - not a dict
            view = handle.get_slice(name)
            dtype = view.get_dtype()
            if dtype not in DTYPES:
                raise CheckpointError(f"{name} in {file} has dtype {dtype}.", fix=f"supported: {', '.join(DTYPES)}.")
            headers[name] = Header(file, DTYPES[dtype], tuple(view.get_shape()))
        return headers, handle.metadata() or {}


@contextmanager
def atomic_folder(path: str | Path, *, overwrite: bool) -> Iterator[Path]:
    """A temporary folder beside `path` that takes its name only if the block succeeds.

    With `overwrite`, an existing folder is replaced, provided that it is empty, or holds weights and nothing that a
    checkpoint does not.
    """
    path = Path(path)
    if path.exists():
        replaceable = path.is_dir() and _only_checkpoint_files(path)
        if not overwrite or not replaceable:
            raise CheckpointError(
                f"{path} exists already.",
                [] if replaceable else ["it is not a checkpoint folder, so it won't be replaced"],
                fix="choose another path" + (", or pass overwrite=True (--overwrite)." if replaceable else "."),
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{os.getpid()}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        old = path.parent / f".{path.name}.{os.getpid()}.old"
        if path.exists():
            path.rename(old)
        try:
            temporary.rename(path)
        except OSError:
            if old.exists():
                old.rename(path)
            raise
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _only_checkpoint_files(path: Path) -> bool:
    entries = list(path.iterdir())
    known = {".safetensors", ".distcp", ".json", ".txt", ".model", ".jinja"}
    weights = any(entry.suffix in (".safetensors", ".distcp") for entry in entries)
    familiar = all(e.is_file() and (e.suffix in known or e.name == DCP_METADATA) for e in entries)
    return not entries or (weights and familiar)


def write_weights(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], *, max_shard_bytes: int, metadata: dict[str, str]
) -> None:
    """Write tensors as they come, holding one shard at a time, then the index that names them all."""
    shards: list[dict[str, int]] = []
    pending: dict[str, Tensor] = {}

    def flush() -> None:
        save_file({n: _own_memory(t) for n, t in pending.items()}, folder / f"{len(shards)}.tmp", metadata=metadata)
        shards.append({n: t.nbytes for n, t in pending.items()})
        pending.clear()

    for name, tensor in tensors:
        if pending and sum(t.nbytes for t in pending.values()) + tensor.nbytes > max_shard_bytes:
            flush()
        pending[name] = tensor
    flush()
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for i, name in enumerate(names):
        (folder / f"{i}.tmp").rename(folder / name)
    weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    total = sum(size for shard in shards for size in shard.values())
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _own_memory(tensor: Tensor) -> Tensor:
    """On the CPU, contiguous, and not a view into a larger storage (which safetensors would refuse)."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; CheckpointError if it does not hold one."""
    try:
        data = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}.", fix="restore the file from its source.") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} does not hold a JSON object.", fix="restore the file from its source.")
    return data


def write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n")
