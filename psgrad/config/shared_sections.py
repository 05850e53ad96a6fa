"""The sections that every command shares besides model and data: loss, engine, report."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, create_model, model_validator

from psgrad.config.plugin_options import installed_plugins, own_plugins, plugin_names, type_of
from psgrad.config.values import ConfigSection, FilePath, described, did_you_mean, is_callable_spec

LOSS_OPTIONS: Mapping[str, frozenset[str]] = {
    name: frozenset(each.options) for name, each in own_plugins("losses").items()
}
"""The losses of psgrad, and the options that each of them takes."""


def _chunk_size(value: object) -> object:
    if value == "auto" or (type(value) is int and value >= 1):
        return value
    raise ValueError(f"got {described(value)}, expected a whole number of at least 1, or auto")


_BYTES = {
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)},
}
_LEAST_MEMORY = 1 << 20  # less is a forgotten unit
_ELSEWHERE = ("offloaded", "sharded")  # where weights live that take a share of the memory for chunks


def _memory(value: object) -> object:
    """Bytes: a whole number of them, or a number with a unit."""
    if value == "auto":
        return value
    written = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)\s*([a-z]+)", str(value).strip().lower())
    size = value if type(value) is int else None
    if isinstance(value, str) and written and written[2] in _BYTES:
        size = int(float(written[1]) * _BYTES[written[2]])
    if size is None:
        raise ValueError(
            f"got {described(value)}, expected auto, or a size such as 2GiB or 500 MB (B, KB, MB, GB, TB;"
            " KiB, MiB, GiB, TiB)"
        )
    if size < _LEAST_MEMORY:
        raise ValueError(
            f"got {described(value)}, which is {size:,} bytes; expected at least 1MiB; is its unit right?"
        )
    return size


def _loss_name(value: str) -> str:
    if value in LOSS_OPTIONS or is_callable_spec(value) or value in installed_plugins("losses"):
        return value
    known = plugin_names("losses")
    meant = did_you_mean(value, known, before="", after=" ")
    raise ValueError(
        f"there is no loss {value!r}; {meant}known: {', '.join(known)}; or module:callable for one of"
        " your own"
    )


class _LossName(ConfigSection):
    name: Annotated[str, AfterValidator(_loss_name)]
    """A known loss, or module:callable(output, target) that returns one number for each sample."""


def _loss_options() -> dict[str, Any]:
    """The fields of all losses' options: name -> (type, FieldInfo)."""
    found: dict[str, Any] = {}
    for option in dict.fromkeys(option for each in own_plugins("losses").values() for option in each.options):
        takers = [name for name, each in own_plugins("losses").items() if option in each.options]
        schema = own_plugins("losses")[takers[0]].options[option]
        listed = " and ".join(filter(None, (", ".join(takers[:-1]), takers[-1])))
        described = Field(default=schema["default"], description=f"{schema['description']}; of {listed}")
        found[option] = (type_of(schema), described)
    return found


class LossConfig(create_model("_LossOptions", __base__=_LossName, **_loss_options())):  # type: ignore[misc]
    """The loss of one sample: a known name with options, or a callable. A bare string is the name alone."""

    bare: ClassVar[str] = "name"
    later: ClassVar[frozenset[str]] = frozenset({"columns", "reduction"})

    columns: list[str] = Field(default_factory=list)
    """Of a callable of your own: columns of the data whose values of a sample it gets after the target."""

    @model_validator(mode="after")
    def _options_of_this_loss(self) -> LossConfig:
        takes = LOSS_OPTIONS.get(self.name, frozenset())
        # A default says nothing: a resolved config, with all its defaults, must load again.
        refused = sorted(
            self.not_default() - {"name"} - takes - ({"columns"} if is_callable_spec(self.name) else set())
        )
        if refused:
            takes_text = f"it takes {', '.join(sorted(takes))}" if takes else "it takes no options"
            raise ValueError(f"the loss {self.name!r} does not take {', '.join(refused)}; {takes_text}")
        return self


class EngineConfig(ConfigSection):
    """How the gradients are computed."""

    device: str = "auto"
    """auto (a GPU if there is one), cpu, cuda or cuda:N."""
    chunk_size: Annotated[int | Literal["auto"], BeforeValidator(_chunk_size)] = "auto"
    """Rows computed together; auto fits them to the memory."""
    tokens_per_chunk: Annotated[int, Field(ge=1)] | None = None
    """Positions computed together at most, where rows differ in length; null for what fits the memory."""
    memory: Annotated[int | Literal["auto"], BeforeValidator(_memory)] = "auto"
    """The memory of a chunk, and of offloaded or sharded weights, up to half of it each: a size such as
    2GiB; auto is a share of the free memory.
    """
    parameters: Literal["auto", "resident", "offloaded", "sharded"] = "auto"
    """Where weights live: on the device (resident); or in the checkpoint's safetensors file or the host's
    memory, from where operators bring them in (offloaded); or in parts on the processes of a run, from where
    operators gather them (sharded); auto is resident if they take at most half of the free memory, else
    sharded if the processes have room for the parts.
    """
    shard_ranks: Annotated[int, Field(ge=2)] | Literal["auto"] = "auto"
    """Of how many processes each keeps a part of sharded weights; auto: those of one host, or all, the fewest
    that have room for the parts.
    """
    recompute: Literal["auto", "none", "blocks"] | Annotated[list[str], Field(min_length=1)] = "auto"
    """Whether the modules that repeat run again in the backward pass, so that the pass holds the values
    of one of them; auto for weights that are offloaded or sharded, and when a row does not fit into memory.
    Patterns such as `encoder.layer.*` name other modules to run again. A quarter of a chunk's memory holds
    matrix products and convolutions that are not computed again.
    """
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = "float32"
    """Precision; bfloat16 and float16 are mixed: products in them, parameters, sums and norms in float32.
    float16, for `analyze`, scales each sample's loss by a power of two.
    """
    verify: Annotated[int, Field(ge=0)] = 3
    """Rows whose gradient is checked against a plain one-sample gradient; 0 for none."""
    capture: Literal["auto", "off"] = "auto"
    """Whether a chunk's operators are captured once and replayed; off for models that change from row to row.
    """
    compile: Literal["none", "inductor"] = "none"
    """Whether the captured program is compiled."""
    machine: FilePath | None = None
    """A JSON file with this machine's speeds; by default those that `psgrad plan` measured."""

    @model_validator(mode="after")
    def _memory_sizes_automatic_chunks(self) -> EngineConfig:
        if self.memory != "auto" and self.chunk_size != "auto" and self.parameters not in _ELSEWHERE:
            raise ValueError(
                f"memory says how large an automatic chunk may get, and chunk_size is {self.chunk_size}; set"
                " one of the two"
            )
        return self

    @model_validator(mode="after")
    def _what_is_compiled_is_captured(self) -> EngineConfig:
        if self.compile != "none" and self.capture == "off":
            raise ValueError(f"compile: {self.compile} compiles what was captured, and capture is off")
        return self


class ReportConfig(ConfigSection):
    """The report."""

    include_inputs: bool = True
    """Whether the report shows the inputs of samples."""
    title: str | None = None
    """Heading of the report."""
