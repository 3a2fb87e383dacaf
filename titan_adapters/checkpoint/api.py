"""Loading, saving and converting whole checkpoints."""

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from titan_adapters.checkpoint.folder import (
    CONFIG_DIGEST,
    Progress,
    WeightsFolder,
    atomic_folder,
    open_weights,
    write_json,
    write_weights,
)
from titan_adapters.checkpoint.identity import (
    Identity,
    check_digest,
    config_diff,
    copy_companions,
    read_identity,
    write_identity,
)
from titan_adapters.checkpoint.sharded import (
    is_sharded,
    materialised,
    own_class,
    save_dcp,
    whole_tensors,
    write_on_first_rank,
    write_part,
)
from titan_adapters.checkpoint.stock import stock_problems
from titan_adapters.config import TransformerConfig
from titan_adapters.contract import BaseTransformer, meta_model
from titan_adapters.errors import CheckpointError, StateDictError
from titan_adapters.hf_config import write_hf_config
from titan_adapters.state_dict import StateDictAdapter, native_adapter, native_tensors

Format = Literal["native", "hf"]
DEFAULT_SHARD_BYTES = 5 * 10**9


def load_checkpoint(
    model: BaseTransformer,
    path: str | Path,
    *,
    cast: bool = False,
    prefix: str | None = None,
    progress: Progress | None = None,
) -> None:
    """Write every weight of a native, published or DCP folder into `model`, exactly once.

    Everything is checked from headers before the first byte of a weight is used. A model on the meta device is
    materialised, on the CPU or its mesh's devices. At most one shard is held besides the model. Each rank of a parallel
    model reads every tensor, one at a time, and keeps its own part.

    Args:
        cast: Allow conversions to a narrower dtype, such as fp32 weights into a bf16 model.
        prefix: What precedes the model's names in a DCP folder, such as "model", if several models are in it.
        progress: Called as progress(bytes done, bytes in all, tensor name).

    Raises:
        CheckpointError: damaged folder, another model or config, or a narrowing dtype without `cast`.
        StateDictError: lists all missing, unexpected and misshapen tensors, or a tied head that differs.
    """
    identity = read_identity(path)
    _check_same_model(model, identity, path)
    weights, adapter, produced = checked_weights(identity, path, prefix, model)
    if not cast:
        _check_dtypes(produced, {name: tensor.dtype for name, tensor in native_tensors(model).items()})
    targets = materialised(model)
    for name, tensor in adapter.session("to_native").convert(weights.tensors(progress), partial=False):
        write_part(targets[name], tensor)


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    prefix: str | None = None,
    progress: Progress | None = None,
) -> BaseTransformer:
    """The model of a checkpoint folder with its weights, in `dtype` (default: what the config says).

    Other arguments as for `load_checkpoint`.
    """
    identity = read_identity(path)
    model = meta_model(identity.model, identity.config).to(dtype or getattr(torch, identity.config.dtype))
    load_checkpoint(model, path, cast=dtype is not None, prefix=prefix, progress=progress)
    return model.to(device)


def save_checkpoint(
    model: BaseTransformer,
    path: str | Path,
    format: Format | Literal["dcp"] = "native",
    *,
    companions: str | Path | None = None,
    cast: bool = False,
    overwrite: bool = False,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Write `model` as a new folder that appears complete or not at all.

    All ranks of a parallel model must call this. In a safetensors format rank 0 writes, and one whole tensor at a time
    is gathered; in "dcp", each rank writes its own part.

    Args:
        format: "native" (`titan.json`, native names), "hf" (`config.json` and names of the stock architecture), or
            "dcp" (`titan.json`, native names, torch.distributed.checkpoint's files, in the dtype that training holds).
        companions: Folder to take tokenizer and generation files from.
        cast: Convert weights that are not in `config.dtype`; otherwise they are refused, except in "dcp".
        overwrite: Replace an existing checkpoint folder.
    """
    config, cls = model.config, own_class(model)
    _check_tie(model)
    tensors = native_tensors(model)
    if format == "dcp":

        def describe(folder: Path) -> None:
            write_identity(folder, Identity(cls, config, "native"))
            copy_companions(companions, folder)

        save_dcp(Path(path), tensors, {CONFIG_DIGEST: config.digest()}, overwrite=overwrite, prepare=describe)
        return
    wanted = stored_dtypes(cls, config)
    wrong = [f"{name} is {t.dtype}" for name, t in tensors.items() if t.dtype != wanted[name]]
    if wrong and not cast:
        raise CheckpointError(
            f"The config says {config.dtype}, but the model holds other dtypes.",
            wrong,
            fix="pass cast=True to convert on the way, or change config.dtype.",
        )
    rows = ((name, tensor.to(wanted[name])) for name, tensor in whole_tensors(tensors))
    identity = Identity(cls, config, format)
    if is_sharded(tensors):
        write_on_first_rank(rows, lambda r: _write(path, identity, r, companions, overwrite, max_shard_bytes))
    else:
        _write(path, identity, rows, companions, overwrite, max_shard_bytes)


def convert_checkpoint(
    source: str | Path,
    target: str | Path,
    format: Format = "native",
    *,
    dtype: str | None = None,
    prefix: str | None = None,
    overwrite: bool = False,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Progress | None = None,
) -> Identity:
    """Stream a native, published or DCP folder into the other format; tokenizer files come along.

    Args:
        dtype: Store and serve in this dtype instead of the source's.
        prefix: As for `load_checkpoint`.
    """
    identity = read_identity(source)
    weights, adapter, produced = checked_weights(identity, source, prefix)
    config = identity.config
    if dtype is not None:
        config = type(config).from_json(config.to_json() | {"dtype": dtype})
    stored = stored_dtypes(identity.model, config)
    if dtype is None:
        _check_dtypes(produced, stored)
    native = adapter.session("to_native").convert(weights.tensors(progress), partial=False)
    rows = ((name, tensor.to(stored[name])) for name, tensor in native)
    result = Identity(identity.model, config, format)
    _write(target, result, rows, source, overwrite, max_shard_bytes)
    return result


def checked_weights(
    identity: Identity, path: str | Path, prefix: str | None = None, model: BaseTransformer | None = None
) -> tuple[WeightsFolder, StateDictAdapter, dict[str, Tensor]]:
    """A folder's weights, the table to native names, and the native tensors (meta) that they make; from headers alone.

    Args:
        model: That they are for. Default: what the identity says, on the meta device.

    Raises as `load_checkpoint` does.
    """
    if model is None:
        model = meta_model(identity.model, identity.config)
    adapter = adapter_for(model, identity.names)
    weights, produced = open_checked(path, identity.config, adapter, native_tensors(model), prefix)
    return weights, adapter, produced


def open_checked(
    path: str | Path,
    config: TransformerConfig,
    adapter: StateDictAdapter,
    expected: dict[str, Tensor],
    prefix: str | None = None,
) -> tuple[WeightsFolder, dict[str, Tensor]]:
    """The folder's weights that `adapter` takes, and the native tensors they make, if those are the `expected` ones."""
    weights = open_weights(path).model_part(adapter.required(), prefix)
    check_digest(weights, config)
    return weights, check_weights(weights, adapter, expected)


def stored_dtypes(model: type[BaseTransformer], config: TransformerConfig) -> dict[str, torch.dtype]:
    """What checkpoints hold each native tensor in: the config's dtype, but for what a module keeps in fp32."""
    native = native_tensors(meta_model(model, config).to(getattr(torch, config.dtype)))
    return {name: tensor.dtype for name, tensor in native.items()}


def check_weights(weights: WeightsFolder, adapter: StateDictAdapter, expected: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whether a load will succeed: names and shapes from headers, and whether tied tensors are equal.

    Returns what it will produce: native names and meta tensors.

    Raises:
        StateDictError: lists everything that does not fit. Nothing has been written then.
    """
    produced = adapter.check(weights.meta_tensors(), expected)
    both = [pair for pair in adapter.ties() if set(pair) <= set(weights.headers)]
    different = [
        f"{alias} differs from {of}, but the config says that they are tied"
        for alias, of in both
        if not torch.equal(weights.tensor(alias), weights.tensor(of))
    ]
    if different:
        raise StateDictError(
            "The checkpoint contradicts its config.",
            different,
            fix="set tied_embeddings=False to keep both, or remove the one that is not wanted.",
        )
    return produced


def adapter_for(model: BaseTransformer, names: Format) -> StateDictAdapter:
    """The table for weights that carry native or published names."""
    return native_adapter(model) if names == "native" else type(model).state_dict_adapter(model.config)


def _write(
    path: str | Path,
    identity: Identity,
    native: Iterable[tuple[str, Tensor]],
    companions: str | Path | None,
    overwrite: bool,
    max_shard_bytes: int,
) -> None:
    metadata = {"format": "pt"}
    if identity.names == "hf":
        hf_config = write_hf_config(identity.model, identity.config)
        _check_export(identity, hf_config)
    with atomic_folder(path, overwrite=overwrite) as folder:
        if identity.names == "native":
            write_identity(folder, identity)
            metadata[CONFIG_DIGEST] = identity.config.digest()
            tensors: Iterable[tuple[str, Tensor]] = native
        else:
            write_json(folder / "config.json", hf_config)
            session = identity.model.state_dict_adapter(identity.config).session("to_hf")
            tensors = session.convert(native, partial=False)
        write_weights(folder, tensors, max_shard_bytes=max_shard_bytes, metadata=metadata)
        copy_companions(companions, folder)


def _check_tie(model: BaseTransformer) -> None:
    """Whether head and embedding are one tensor is up to the config, and must not have been changed after the fact."""
    head, embedding, tied = model.lm_head.weight, model.tok_embeddings.weight, model.config.tied_embeddings
    problem = None
    if tied and head is not embedding and not torch.equal(head, embedding):
        problem = "lm_head.weight differs from tok_embeddings.weight, but the config says that they are tied"
    elif not tied and head is embedding:
        problem = "lm_head.weight is tok_embeddings.weight, but the config says that they are not tied"
    if problem:
        raise CheckpointError(
            "The model contradicts its config.", [problem], fix="call model.tie_weights(), or change tied_embeddings."
        )


def _check_export(identity: Identity, hf_config: dict) -> None:
    problems = stock_problems(identity.model, identity.config, hf_config)
    if problems:
        raise CheckpointError(
            f"The stock architecture's tensors are not those of this {identity.model.model_type}.",
            problems,
            fix="save it with format='native', or correct state_dict_adapter or to_hf_config.",
        )


def _check_same_model(model: BaseTransformer, identity: Identity, path: str | Path) -> None:
    if type(model).model_type != identity.model.model_type:
        raise CheckpointError(
            f"{path} holds a {identity.model.model_type}, the model is a {type(model).model_type}.",
            fix="build the model that the checkpoint names, for example with titan_adapters.load_model.",
        )
    different = config_diff(model.config, identity.config, ignore=("dtype",))
    if different:
        raise CheckpointError(
            f"The model's config is not the one in {path}.",
            different,
            fix="build the model from the checkpoint's config, or correct whichever is wrong.",
        )


def _check_dtypes(produced: dict[str, Tensor], wanted: dict[str, torch.dtype]) -> None:
    narrowed = [
        f"{name} is {tensor.dtype}, which {wanted[name]} would round"
        for name, tensor in produced.items()
        if torch.promote_types(tensor.dtype, wanted[name]) != wanted[name]
    ]
    if narrowed:
        raise CheckpointError(
            "Storing these weights would round them.",
            narrowed,
            fix="ask for it: cast=True when loading, dtype= (--dtype) when converting.",
        )
