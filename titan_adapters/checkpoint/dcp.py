"""Reading torch.distributed.checkpoint folders without running code from them, whatever layout wrote them.

A trainer may have put more into the folder than a model: the model's tensors are known by their names there, which may
all have the same prefix. What else there is stays unread.

Such a folder is two kinds of pickle: `.metadata` describes tensors and where their chunks lie, `*.distcp` files hold
the chunks as torch.save wrote them. torch itself unpickles `.metadata` freely; here only the few types that it needs
are known, and chunks go through `torch.load(weights_only=True)`.
"""

import io
import logging
import math
import pickle
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from titan_adapters.checkpoint.folder import CONFIG_DIGEST, DCP_METADATA, DTYPES, Header, Progress, WeightsFolder
from titan_adapters.errors import CheckpointError

logger = logging.getLogger(__name__)

_METADATA_TYPES = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch": ("Size", *(str(dtype).removeprefix("torch.") for dtype in DTYPES.values())),
    "torch.serialization": ("_get_layout",),  # from a name to a torch.layout, by look-up
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),
}  # fmt: skip


@dataclass(frozen=True)
class Chunk:
    """A box of one tensor, and where its bytes are."""

    file: str
    start: int
    length: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class DcpFolder(WeightsFolder):
    """A DCP folder whose chunks have been checked against one another and against the files' sizes."""

    chunks: dict[str, list[Chunk]]

    def model_part(self, required: Collection[str], prefix: str | None = None) -> Self:
        """The model's tensors by the model's names.

        Without `prefix`, all `required` names must be there under exactly one prefix, possibly an empty one. With that,
        what is left out is what has another first component (up to the dot) than all of them.

        Raises:
            CheckpointError: several models are in the folder, or none is complete; says what is there.
        """
        found = Counter(name[: len(name) - len(end)] for name in self.headers for end in _ends(name) if end in required)
        if prefix is None:
            complete = [candidate for candidate, count in found.items() if count == len(required)]
            candidates = complete or list(found)
            if len(candidates) > 1:
                raise CheckpointError(
                    f"{self.path} does not show which of its tensors are the model.",
                    [f"under {p!r} are {found[p]} of the model's {len(required)} tensors" for p in candidates],
                    fix="pass prefix= to load_checkpoint, load_model or convert_checkpoint (`titan-adapters convert "
                    "--prefix`); an engine serves the converted folder.",
                )
            prefix = candidates[0] if candidates else ""
        elif prefix:
            prefix = prefix.removesuffix(".") + "."
        heads = {name.partition(".")[0] for name in required}
        kept = {
            name.removeprefix(prefix): name
            for name in self.headers
            if name.startswith(prefix) and (prefix or not found or name.partition(".")[0] in heads)
        }
        if len(kept) < len(self.headers):
            logger.info("Of %s, %d tensors are not the model's.", self.path, len(self.headers) - len(kept))
        headers = {name: self.headers[full] for name, full in kept.items()}
        return replace(self, headers=headers, chunks={name: self.chunks[full] for name, full in kept.items()})

    def tensor(self, name: str) -> Tensor:
        """One tensor, put together from its chunks."""
        header = self.headers[name]
        whole = torch.empty(header.shape, dtype=header.dtype)
        for chunk in self.chunks[name]:
            part = _load(self.path / chunk.file, chunk.start, chunk.length)
            if not isinstance(part, Tensor) or part.dtype != header.dtype or part.shape != chunk.sizes:
                raise _unusable(self.path, [f"{name} in {chunk.file} is not the tensor that {DCP_METADATA} describes"])
            whole[tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))] = part
        return whole

    def tensors(self, progress: Progress | None = None) -> Iterator[tuple[str, Tensor]]:
        """Every tensor; one is held at a time."""
        done, total = 0, self.nbytes
        for name, header in self.headers.items():
            yield name, self.tensor(name)
            done += header.nbytes
            if progress is not None:
                progress(done, total, name)


def open_dcp(path: Path) -> DcpFolder:
    """Read and check the metadata of a DCP folder.

    Raises:
        CheckpointError: names a type that does not belong into `.metadata`, or every gap, overlap and short file.
    """
    metadata = _read_metadata(path)
    problems: list[str] = []
    headers: dict[str, Header] = {}
    chunks: dict[str, list[Chunk]] = {}
    digest = None
    try:
        places = {(index.fqn, index.offset): info for index, info in metadata.storage_data.items()}
        for name, described in metadata.state_dict_metadata.items():
            if name == CONFIG_DIGEST:
                digest = places[name, None]
                _plain_name(digest.relative_path)
            if isinstance(described, BytesStorageMetadata):
                continue  # pickled by the trainer, such as the step: never read
            shape, dtype = tuple(described.size), described.properties.dtype
            chunks[name] = [_chunk(places[name, box.offsets], box) for box in described.chunks]
            headers[name] = Header(chunks[name][0].file, dtype, shape)
            problems += _chunk_problems(path, name, shape, chunks[name])
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise _unusable(
            path, [f"{DCP_METADATA} does not describe tensors ({type(error).__name__}: {error})"]
        ) from error
    if list(path.glob("*.safetensors")):
        problems.append(f"it has both {DCP_METADATA} and safetensors files")
    if problems:
        raise _unusable(path, problems)
    written_with: dict[str, dict[str, str]] = {}
    if digest is not None:
        text = _load(path / digest.relative_path, digest.offset, digest.length)
        written_with[digest.relative_path] = {CONFIG_DIGEST: str(text)}
    return DcpFolder(path, headers, written_with, chunks)


def _ends(name: str) -> Iterator[str]:
    """`name`, and what is left of it after each of its dots."""
    while name:
        yield name
        name = name.partition(".")[2]


def _chunk(info: Any, box: Any) -> Chunk:
    if info.transform_descriptors is not None:
        raise ValueError(f"written through {info.transform_descriptors}")
    return Chunk(_plain_name(info.relative_path), info.offset, info.length, tuple(box.offsets), tuple(box.sizes))


def _plain_name(file: str) -> str:
    if file != Path(file).name:
        raise ValueError(f"{file!r} is not in the folder")
    return file


def _chunk_problems(path: Path, name: str, shape: tuple[int, ...], chunks: list[Chunk]) -> Iterator[str]:
    for chunk in chunks:
        file = path / chunk.file
        if not file.is_file():
            yield f"{chunk.file} is missing, which holds a part of {name}"
        elif file.stat().st_size < chunk.start + chunk.length:
            yield f"{chunk.file} is truncated within {name}"
        spans = zip(chunk.offsets, chunk.sizes, shape, strict=True)
        if any(offset < 0 or size < 0 or offset + size > whole for offset, size, whole in spans):
            yield f"a chunk of {name} lies outside of it"
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape) or _overlap(chunks):
        yield f"the chunks of {name} don't cover it exactly"


def _overlap(chunks: list[Chunk]) -> bool:
    """Whether two chunks share an element: they do so if their spans meet in every dim."""
    full = [chunk for chunk in chunks if math.prod(chunk.sizes)]
    return any(
        all(
            a_from < b_from + b_size and b_from < a_from + a_size
            for a_from, a_size, b_from, b_size in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
        )
        for i, a in enumerate(full)
        for b in full[:i]
    )


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _METADATA_TYPES.get(module, ()):
            raise CheckpointError(
                f"A checkpoint's {DCP_METADATA} asks for {module}.{name}.",
                ["only the types that torch.distributed.checkpoint describes tensors with are allowed there"],
                fix="don't use a folder of unknown origin; this one may be an attack. Nothing of it was run.",
            )
        return super().find_class(module, name)


def _read_metadata(path: Path) -> Any:
    try:
        with (path / DCP_METADATA).open("rb") as file:
            return _MetadataUnpickler(file).load()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle raises anything
        raise _unusable(path, [f"{DCP_METADATA} is damaged ({type(error).__name__}: {error})"]) from error


def _load(file: Path, start: int, length: int) -> Any:
    try:
        with file.open("rb") as handle:
            handle.seek(start)
            data = handle.read(length)
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError) as error:
        first = str(error).splitlines()[0]
        raise _unusable(file.parent, [f"{file.name} holds more than a tensor, or is damaged ({first})"]) from error


def _unusable(path: Path, problems: list[str]) -> CheckpointError:
    fix = "copy the folder again from its source, or write it again with save_checkpoint(..., format='dcp')."
    return CheckpointError(f"The DCP checkpoint in {path} is not usable.", problems, fix=fix)
