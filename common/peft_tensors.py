"""What an adapter's tensors must be, by name, type and shape, whoever gives them.

`source` stands at the head of every message: a file's path, or the name of an argument.
"""

from __future__ import annotations

from collections.abc import Iterable

from common.adapter import Dtype, ExpertLayout, Layout, LoraConfig, TensorEntry
from common.errors import ConfigError
from common.peft_names import MAGNITUDE, TensorName, read_name

_RANK_DIMENSION = {
    Layout.LORA_A: 0,
    Layout.LORA_B: 1,
    Layout.PACKED_A: 1,
    Layout.PACKED_B: 2,
    Layout.FLAT_A: 0,
    Layout.FLAT_B: 1,
    Layout.SWAPPED_A: 0,
    Layout.SWAPPED_B: 1,
}
_SIZES = {1: "one size", 2: "two sizes", 3: "three sizes"}


def expert_layout(source: object, names: Iterable[str], *, tag: object = None) -> ExpertLayout:
    """How the experts' factors lie, by what the adapter says of itself (`tag`) or by its names.

    Raises:
        ConfigError: the tag is unknown or contradicts a name, or there is none where it is needed.
    """
    known = {layout.value: layout for layout in ExpertLayout}
    if tag is not None and tag not in known:
        raise ConfigError(f"{source}: expert_layout = {tag!r}; use one of {', '.join(known)}")
    possible = {known[str(tag)]} if tag is not None else set(ExpertLayout)
    for name in names:
        parts = read_name(name)
        if parts is None or possible & parts.layouts:
            possible &= parts.layouts if parts else possible
            continue
        raise ConfigError(
            f"{source}: tensor {name!r} is of expert layout "
            f"{_either(parts.layouts)}, others or its metadata say {_either(possible)}; "
            "make them agree"
        )
    if possible == {ExpertLayout.FLAT, ExpertLayout.SWAPPED}:
        raise ConfigError(
            f"{source}: its names do not tell whether the experts' factors lie flat or swapped; "
            "save it with 'expert_layout' as 'flat' or 'swapped' in the safetensors metadata"
        )
    return next(iter(possible)) if len(possible) == 1 else ExpertLayout.PER_EXPERT


def _either(layouts: Iterable[ExpertLayout]) -> str:
    return " or ".join(sorted(layout.value for layout in layouts))


def lora_factor(
    source: object,
    name: str,
    *,
    dtype: object,
    shape: object,
    lora: LoraConfig,
    experts: ExpertLayout = ExpertLayout.PER_EXPERT,
) -> TensorEntry:
    """One tensor by its PEFT name; `dtype` as in a safetensors header, `shape` a list of sizes.

    Raises:
        ConfigError: it is no A, B or magnitude of a module, or not of the module's rank.
    """
    parts = read_name(name)
    if parts is None:
        raise ConfigError(
            f"{source}: tensor {name!r} is no LoRA factor; only names that end in "
            ".lora_A.weight or .lora_B.weight, or .lora_magnitude_vector, can be served"
        )
    layout = parts.layout(experts)
    sizes = _sizes(source, name, shape, layout=layout)
    if layout is not Layout.MAGNITUDE:
        _check_rank(source, name, parts, sizes=sizes, layout=layout, lora=lora)
    return TensorEntry(name, _dtype(source, name, dtype), sizes, layout)


def _check_rank(
    source: object,
    name: str,
    parts: TensorName,
    *,
    sizes: tuple[int, ...],
    layout: Layout,
    lora: LoraConfig,
) -> None:
    rank = lora.rank_of(parts.parameter)
    own = sizes[_RANK_DIMENSION[layout]]
    of_all = layout in ExpertLayout.FLAT.factors + ExpertLayout.SWAPPED.factors
    if own % rank if of_all else own != rank:
        raise ConfigError(
            f"{source}: tensor {name!r} has shape {list(sizes)}, of rank {own}, but r = {rank} in "
            "its configuration; make them agree"
        )


def _dtype(source: object, name: str, found: object) -> Dtype:
    try:
        return Dtype(found)
    except ValueError as error:
        known = ", ".join(part.value for part in Dtype)
        raise ConfigError(f"{source}: tensor {name!r} has dtype {found!r}; use {known}") from error


def _sizes(source: object, name: str, found: object, *, layout: Layout) -> tuple[int, ...]:
    sizes, wanted = naturals(found), layout.dimensions
    if len(sizes) != wanted or 0 in sizes:
        what = "a LoRA factor" if wanted == 2 else f"a tensor of layout {layout.value}"
        raise ConfigError(
            f"{source}: tensor {name!r} has shape {found!r}; "
            f"{what} has {_SIZES[wanted or 2]} above 0"
        )
    return sizes


def naturals(found: object) -> tuple[int, ...]:
    """A list of whole numbers from 0 up; what is none is empty."""
    fits = isinstance(found, list) and all(type(n) is int and n >= 0 for n in found)
    return tuple(found) if fits and isinstance(found, list) else ()


def check_pairs(source: object, entries: Iterable[TensorEntry], *, use_dora: bool = False) -> None:
    """Every module has both factors, and with DoRA its magnitude.

    Raises:
        ConfigError: with the first module that has not.
    """
    modules: dict[str, set[str]] = {}
    for entry in entries:
        if parts := read_name(entry.name):
            modules.setdefault(entry.name.removesuffix(f".{parts.leaf}"), set()).add(parts.own_name)
    wanted = {"lora_A", "lora_B", MAGNITUDE} if use_dora else {"lora_A", "lora_B"}
    for module, found in modules.items():
        if found < wanted:
            whole = " and ".join(sorted(wanted))
            raise ConfigError(
                f"{source}: {module!r} has only {' and '.join(sorted(found))}; "
                f"save {'all of' if use_dora else 'both'} {whole} of it"
            )
        if found > wanted:
            raise ConfigError(
                f"{source}: {module!r} has a {MAGNITUDE}, but use_dora is not set; make them agree"
            )
