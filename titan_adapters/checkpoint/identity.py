"""Whose weights a folder holds: `titan.json` in our format, `config.json` in the published one."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from titan_adapters.checkpoint.folder import CONFIG_DIGEST, WeightsFolder, read_json, write_json
from titan_adapters.config import TransformerConfig
from titan_adapters.contract import BaseTransformer
from titan_adapters.differences import differences
from titan_adapters.errors import CheckpointError
from titan_adapters.hf_config import Names, read_hf_config
from titan_adapters.registry import find_model

TITAN_JSON = "titan.json"
FORMAT_VERSION = 1

# Copied along with the weights: what tokenizes, templates and stops, but no weights and no config.
COMPANIONS = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja", "generation_config.json",
)  # fmt: skip


@dataclass(frozen=True)
class Identity:
    """A model class, its config, and whether weights carry native or published names."""

    model: type[BaseTransformer]
    config: TransformerConfig
    names: Names


def read_identity(path: str | Path) -> Identity:
    """Resolve a checkpoint folder. It *names* a model; the class comes from the registry, never from the folder.

    Raises:
        CheckpointError: neither `titan.json` nor `config.json` is there, or `titan.json` is malformed.
        ConfigError, RegistryError: its content does not resolve.
    """
    path = Path(path)
    if (path / TITAN_JSON).is_file():
        data = read_json(path / TITAN_JSON)
        expected = {"titan_format", "model", "config", "names"}
        if set(data) != expected or data["titan_format"] != FORMAT_VERSION or data["names"] not in ("native", "hf"):
            raise CheckpointError(
                f"{path / TITAN_JSON} is not a version {FORMAT_VERSION} description.",
                [f"keys must be exactly {sorted(expected)}, are {sorted(data)}"],
                fix="write the folder again with save_checkpoint or `titan-adapters convert`.",
            )
        cls = find_model(data["model"])
        return Identity(cls, cls.Config.from_json(data["config"]), data["names"])
    if (path / "config.json").is_file():
        return Identity(*read_hf_config(read_json(path / "config.json")), "hf")
    raise CheckpointError(
        f"{path} is not a checkpoint folder.",
        [f"it has neither {TITAN_JSON} nor config.json" if path.is_dir() else "there is no such folder"],
        fix="give the folder that save_checkpoint, `titan-adapters convert` or transformers wrote.",
    )


def write_identity(folder: Path, identity: Identity) -> None:
    """Write `titan.json`."""
    write_json(
        folder / TITAN_JSON,
        {
            "titan_format": FORMAT_VERSION,
            "model": identity.model.model_type,
            "config": identity.config.to_json(),
            "names": identity.names,
        },
    )


def copy_companions(source: str | Path | None, folder: Path) -> None:
    """Copy tokenizer and generation files from folder `source`, if one is given."""
    if source is None:
        return
    source = Path(source)
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    generation, config = folder / "generation_config.json", source / "config.json"
    if not generation.exists() and config.is_file():
        # The end-of-sequence id really stops generation, so it must not get lost with config.json.
        data = json.loads(config.read_text())
        ids = {key: data[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if data.get(key) is not None}
        if ids:
            write_json(generation, ids)


def check_digest(weights: WeightsFolder, config: TransformerConfig) -> None:
    """Refuse weights that were written with another config than the one beside them."""
    for file, metadata in weights.metadata.items():
        written_with = metadata.get(CONFIG_DIGEST)
        if written_with is not None and written_with != config.digest():
            raise CheckpointError(
                f"{weights.path / file} was written with another config than {TITAN_JSON} now holds.",
                [f"digest in the file: {written_with}", f"digest of the config: {config.digest()}"],
                fix="restore the original titan.json, or load with that config and save again with the new one.",
            )


def config_diff(ours: TransformerConfig, theirs: TransformerConfig, *, ignore: tuple[str, ...] = ()) -> list[str]:
    """Fields in which two configs differ, one line each."""
    found = differences(ours.to_json(), theirs.to_json())
    return [f"{d.field}: {d.ours!r} here, {d.theirs!r} in the checkpoint" for d in found if d.field not in ignore]
