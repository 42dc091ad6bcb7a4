"""Adapters in PEFT's format: read, merged and written with NumPy alone, as an adapter or into their model's weights."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import sqrt
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from motley.training.errors import TrainingError
from motley.training.files import CURVE, Curve, written_whole
from motley.training.merging import (
    F32,
    AnyChanges,
    Change,
    Changes,
    Dense,
    dare,
    mean_of_changes,
    mean_of_tables,
    module_names,
    nearest_of_rank,
    normalised,
    ties,
    weighted_mean,
    weights_of_losses,
)
from motley.training.settings import How
from motley.training.tensors import tensors_of, write_tensors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_LENGTHS = "lengths"
_MATRIX = re.compile(
    re.escape(_PREFIX)
    + r"(?P<module>.+)\.lora_(?:(?P<side>[AB])\.weight|embedding_(?P<rows>[AB])|magnitude_vector(?:\.weight)?)"
)
_TABLE = re.compile(re.escape(_PREFIX) + r"(?P<module>(?!.*\.(?:lora_|base_layer)).+)\.weight")
HEAD, EMBEDDING = "lm_head", "embed_tokens"


class PeftAdapter(NamedTuple):
    """What a PEFT folder has.

    Attributes:
        changes: what it does to which module.
        tables: what it has in place of modules' matrices (``modules_to_save``), f32[N, K] each.
    """

    config: dict[str, Any]
    changes: dict[str, Change]
    tables: dict[str, F32]


def read_adapter(folder: Path) -> PeftAdapter:
    """Read a PEFT folder.

    Raises:
        TrainingError: it is none, is damaged, or is neither LoRA nor DoRA.
    """
    try:
        config = json.loads((folder / CONFIG).read_bytes())
    except (OSError, ValueError) as error:
        raise TrainingError(f"{folder / CONFIG}: no adapter in PEFT's format: {error}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise TrainingError(f"{folder}: not a LoRA adapter; others cannot be merged")
    sided = {"A", "B", _LENGTHS} if config.get("use_dora") else {"A", "B"}
    sides: dict[str, dict[str, F32]] = {}
    tables: dict[str, F32] = {}
    embeds = set()
    for name, values in tensors_of(folder / WEIGHTS).items():
        if (table := _TABLE.fullmatch(name)) and values.ndim == 2:
            tables[table["module"]] = values.astype(np.float32)
            continue
        match = _MATRIX.fullmatch(name)
        if match is None:
            hint = ": save it with save_embedding_layers=False" if ".base_layer." in name else ""
            raise TrainingError(f"{folder}: {name} is no matrix of LoRA nor a table, and cannot be merged{hint}")
        if match["rows"]:
            embeds.add(match["module"])
        sides.setdefault(match["module"], {})[match["side"] or match["rows"] or _LENGTHS] = values.astype(np.float32)
    changes = {}
    for module, pair in sides.items():
        lengths = pair.get(_LENGTHS)
        if set(pair) != sided or pair["A"].shape[0] != pair["B"].shape[1]:
            raise TrainingError(f"{folder}: {module}: LoRA's matrices do not fit each other")
        if lengths is not None and lengths.shape != pair["B"].shape[:1]:
            raise TrainingError(f"{folder}: {module}: DoRA's lengths do not fit LoRA's matrices")
        stacked = bool(config.get("target_parameters"))
        experts = (
            pair["A"].shape[0] // int(_of_module(config, "rank_pattern", module, config.get("r", 8))) if stacked else 1
        )
        if lengths is not None and experts > 1:
            raise TrainingError(f"{folder}: {module}: DoRA of experts in one tensor cannot be merged")
        if module in embeds:
            scaled = np.float32(_scale(config, module, pair["A"].shape[0])) * pair["A"]
            changes[module] = Change(pair["B"].T, scaled.T, embeds=True)
            continue
        for name, a, b in _of_experts(module, pair["A"], pair["B"], experts):
            changes[name] = Change(a, np.float32(_scale(config, module, a.shape[0])) * b, lengths)
    if twice := changes.keys() & tables.keys():
        raise TrainingError(f"{folder}: {min(twice)} has a table and LoRA's matrices besides")
    if not changes and not tables:
        raise TrainingError(f"{folder}: the adapter changes nothing")
    return PeftAdapter(config, changes, tables)


def _of_experts(module: str, a: F32, b: F32, count: int) -> Iterator[tuple[str, F32, F32]]:
    """The matrices of each of a module's experts, where it is a tensor that holds so many of them."""
    if count <= 1:
        yield module, a, b
        return
    each_a, each_b = a.reshape(count, -1, a.shape[1]), b.reshape(b.shape[0], -1, count)
    for expert in range(count):
        yield f"{module}[{expert}]", each_a[expert], np.ascontiguousarray(each_b[:, :, expert])


def _joined(changes: Changes) -> dict[str, Change]:
    """The changes of modules, of those that `_of_experts` has taken apart."""
    experts: dict[str, list[Change]] = {}
    for name, change in sorted(changes.items(), key=lambda item: (item[0].partition("[")[0], len(item[0]), item[0])):
        experts.setdefault(name.partition("[")[0], []).append(change)
    return {
        module: some[0]
        if f"{module}[0]" not in changes
        else Change(
            np.concatenate([each.a for each in some]),
            np.stack([each.b for each in some], axis=-1).reshape(len(some[0].b), -1),
        )
        for module, some in experts.items()
    }


def _scale(config: dict[str, Any], module: str, rank: int) -> float:
    alpha = _of_module(config, "alpha_pattern", module, config.get("lora_alpha", 8))
    return float(alpha) / (sqrt(rank) if config.get("use_rslora") else rank)


def _of_module(config: dict[str, Any], patterns: str, module: str, usual: Any) -> Any:
    """What a config's patterns say of a module, by PEFT's rule that the first one counts."""
    own = (config.get(patterns) or {}).items()
    return next((value for pattern, value in own if re.match(rf"(.*\.)?({pattern})$", module)), usual)


def write_adapter(
    folder: Path, like: dict[str, Any], changes: Changes, tables: Mapping[str, F32] = MappingProxyType({})
) -> None:
    """Write a PEFT folder.

    Args:
        like: the config of an adapter of the same model.
        changes: all of one rank.
        tables: that are in place of the model's.

    Raises:
        TrainingError: the disk is full or cannot be written.
    """
    rank = next(iter(changes.values())).a.shape[0] if changes else int(like.get("r", 8))
    own: dict[str, Any] = {"r": rank, "lora_alpha": rank, "use_rslora": False, "rank_pattern": {}, "alpha_pattern": {}}
    own |= {"inference_mode": True}
    own["target_modules"] = [name for name in sorted(changes) if "[" not in name]
    own["modules_to_save"] = sorted(tables) or None
    matrices = {f"{_PREFIX}{module}.weight": table for module, table in sorted(tables.items())}
    for module, change in sorted(_joined(changes).items()):
        if change.embeds:
            matrices[f"{_PREFIX}{module}.lora_embedding_A"] = np.ascontiguousarray(change.b.T)
            matrices[f"{_PREFIX}{module}.lora_embedding_B"] = np.ascontiguousarray(change.a.T)
            continue
        matrices[f"{_PREFIX}{module}.lora_A.weight"] = change.a
        matrices[f"{_PREFIX}{module}.lora_B.weight"] = change.b
    with written_whole(folder) as partial:
        partial.mkdir()
        (partial / CONFIG).write_text(json.dumps(like | own, indent=2), encoding="utf-8")
        write_tensors(partial / WEIGHTS, matrices)


def merge(
    folders: Sequence[Path],
    how: How,
    out: Path,
    *,
    weights: Sequence[float] = (),
    density: float = 0.2,
    seed: int = 0,
    rank: int = 0,
    into: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> float:
    """Merge adapters into one, or into a checkpoint's weights.

    Args:
        folders: PEFT folders of one model.
        weights: of the adapters; empty: equal ones, or by `How.LOSS` those of the held-out losses beside them.
        density: the share of values that TIES and DARE keep.
        rank: of the adapter that is made of TIES or DARE; 0: that of all adapters together.
        into: a model's folder; `out` becomes a copy of it with changed weights.
        progress: called with the modules that are done and all of them.

    Returns:
        The largest share of a module's change that the rank could not hold; 0 for means, and into weights.

    Raises:
        TrainingError: an adapter or the model cannot be read, they do not fit each other, or the disk is full.
    """
    if out.exists():
        raise TrainingError(f"{out} exists already: choose another folder")
    read = [read_adapter(folder) for folder in folders]
    config, adapters = read[0].config, [each.changes for each in read]
    names = list(dict.fromkeys([*module_names(adapters), *(name for each in read for name in each.tables)]))
    stacked = [folder for folder, each in zip(folders, read, strict=True) if each.config.get("target_parameters")]
    if into is not None and stacked:
        raise TrainingError(
            f"{stacked[0]}: changes experts of which checkpoints have other tensors: merge without --into"
        )
    if len({bool(each.config.get("ensure_weight_tying")) for each in read}) > 1:
        raise TrainingError(f"{folders[0]}: the adapters differ in ensure_weight_tying, so they change unlike tables")
    scaled = any(change.lengths is not None for changes in adapters for change in changes.values())
    if scaled and (into is None or len(folders) > 1 or how is not How.LINEAR):
        raise TrainingError(
            f"{folders[0]}: what DoRA makes of a matrix depends on that: merge it by itself, --into its model"
        )
    if how is How.LOSS and not weights:
        weights = weights_of_losses([_held_out_loss(folder) for folder in folders])
    shares = normalised(weights, len(folders))
    is_mean = how in (How.LINEAR, How.LOSS)

    def change(name: str, of: Sequence[AnyChanges]) -> F32:
        progress(names.index(name), len(names))
        if how is How.TIES:
            return ties(of, shares, density, name)
        return dare(of, shares, density, seed, name) if how is How.DARE else mean_of_changes(of, shares, name)

    if into is not None:

        def changed(name: str, whole: F32) -> F32:
            if scaled and name in adapters[0]:
                return adapters[0][name].applied(whole)
            return whole + change(name, [_change_of(each, name, whole) for each in read])

        _write_into(into, out, names, changed, config)
        return 0.0
    tables = _mean_tables(folders, read, shares, is_mean)
    if is_mean:
        write_adapter(out, config, weighted_mean(adapters, shares), tables)
        return 0.0
    together = sum(max((each.a.shape[0] for each in adapter.values()), default=0) for adapter in adapters)
    made = {name: nearest_of_rank(change(name, adapters), rank or together) for name in names}
    embeds = {name for adapter in adapters for name, each in adapter.items() if each.embeds}
    write_adapter(out, config, {name: replace(near, embeds=name in embeds) for name, (near, _) in made.items()})
    return max(missed for _, missed in made.values())


def _change_of(adapter: PeftAdapter, name: str, whole: F32) -> AnyChanges:
    """What an adapter does to the matrix of a module, that being known."""
    if name in adapter.tables:
        if adapter.tables[name].shape != whole.shape:
            raise TrainingError(f"{name}: the adapters are not of one model: their matrices differ in shape")
        return {name: Dense(adapter.tables[name] - whole)}
    return {name: adapter.changes[name]} if name in adapter.changes else {}


def _mean_tables(
    folders: Sequence[Path], read: Sequence[PeftAdapter], shares: Sequence[float], is_mean: bool
) -> dict[str, F32]:
    """The weighted means of the adapters' tables.

    Raises:
        TrainingError: they cannot be merged without the model's.
    """
    merged = {}
    for name in dict.fromkeys(name for each in read for name in each.tables):
        if not is_mean:
            raise TrainingError(
                f"{folders[0]}: TIES and DARE choose among the changes of {name}, of which the adapters have whole"
                " tables (modules_to_save): merge --into the model, or by linear"
            )
        without = [folder for folder, each in zip(folders, read, strict=True) if name not in each.tables]
        if without:
            raise TrainingError(
                f"{without[0]}: has no whole table of {name} (modules_to_save), and another adapter has: what it leaves"
                " of that is the model's, so merge --into the model"
            )
        own = [each.tables[name] for each in read]
        if len({table.shape for table in own}) > 1:
            raise TrainingError(f"{name}: the adapters are not of one model: their matrices differ in shape")
        merged[name] = mean_of_tables(own, shares)
    return merged


def _held_out_loss(folder: Path) -> float:
    """The loss that `motley train` measured last beside an adapter that it made."""
    losses = [point.held_out for point in Curve(folder.parent / CURVE).read() if point.held_out is not None]
    if not losses:
        raise TrainingError(f"{folder}: no held-out loss is known of this adapter: give --weights")
    return losses[-1]


def _write_into(
    model: Path, out: Path, names: Sequence[str], changed_of: Callable[[str, F32], F32], config: dict[str, Any]
) -> None:
    """Write a copy of a checkpoint in which the matrices of some modules are changed.

    Where its head is its table of embeddings, and one of them is changed, or each in its own way, both are written.

    Args:
        config: of the adapters.
    """
    transposed = bool(config.get("fan_in_fan_out"))
    files = sorted(model.glob("*.safetensors"))
    shards = {file: tensors_of(file) for file in files}
    known = [tensor for tensors in shards.values() for tensor in tensors]
    table = next((name for name in known if name.endswith(f"{EMBEDDING}.weight")), "")
    unties = table != "" and f"{HEAD}.weight" not in known and any(_is_table(name) for name in names)
    if unties and config.get("ensure_weight_tying"):  # what the adapters do to one is done to both
        embedding = [name for name in names if name.endswith(EMBEDDING)]
        names, unties = [name for name in names if name != HEAD or not embedding], False
        places = {table if _is_table(name) else _place(model, name, known): name for name in names}
    else:
        places = {_place(model, name, [*known, f"{HEAD}.weight"] if unties else known): name for name in names}
    with written_whole(out) as partial:
        partial.mkdir()
        for file in model.iterdir():
            if file.is_file() and file not in shards:
                shutil.copyfile(file, partial / file.name)
        for file, tensors in shards.items():
            changed: dict[str, Any] = dict(tensors)
            if unties and table in tensors:
                changed[f"{HEAD}.weight"] = tensors[table]
                _untie(partial, file.name)
            for tensor in changed.keys() & places.keys():
                whole = changed[tensor].astype(np.float32)
                dtype = changed[tensor].dtype
                flipped = transposed and not _is_table(places[tensor])
                try:
                    new = changed_of(places[tensor], whole.T if flipped else whole)
                except ValueError:
                    new = whole[:0]
                new = new.T if flipped else new
                if new.shape != whole.shape:
                    raise TrainingError(f"{model}: {tensor} is of another shape than the adapters' {places[tensor]}")
                changed[tensor] = new.astype(dtype)
            write_tensors(partial / file.name, changed)


def _is_table(module: str) -> bool:
    return module == HEAD or module.endswith(EMBEDDING)


def _untie(model: Path, shard: str) -> None:
    """Have a checkpoint say that its head is a tensor of its own, which is in a shard."""
    for file, own in ((model / "config.json", "tie_word_embeddings"), (model / "model.safetensors.index.json", "")):
        if file.is_file():
            told = json.loads(file.read_text(encoding="utf-8"))
            if own:
                for keys in (told, told.get("text_config") or {}):
                    if keys is told or own in keys:
                        keys[own] = False
            else:
                told["weight_map"][f"{HEAD}.weight"] = shard
            file.write_text(json.dumps(told, indent=2), encoding="utf-8")


def _place(model: Path, module: str, known: Sequence[str]) -> str:
    """The tensor of a checkpoint that is a module's matrix; some checkpoints lack the first part of its name."""
    wanted = f"{module}.weight"
    candidates = [wanted, wanted.partition(".")[2]]
    for candidate in candidates:
        if candidate in known:
            return candidate
    raise TrainingError(f"{model}: has no tensor {wanted}, which the adapters change: they are of another model")
