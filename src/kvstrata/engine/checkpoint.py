"""A model directory: config.json and safetensors, read with every mistake named."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from kvstrata.engine.models.registry import architecture_of
from kvstrata.errors import KVStrataError, ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from torch import nn

    from kvstrata.engine.nn.parallel import Cut, TensorParallel

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_STORED_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""What weights may be kept as: plain numbers that are converted when they are read."""
_INDEX: Final = "model.safetensors.index.json"
_SINGLE: Final = "model.safetensors"


class _Index(msgspec.Struct):
    """What is read of an index of several safetensors."""

    weight_map: dict[str, str]


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json.

    Raises:
        ModelError: it is missing or is not a JSON object.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{folder} has no config.json; expected a model directory") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds {type(config).__name__}; expected a JSON object")
    return config


def positive_number(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """One number of a config.json, read as the models read theirs.

    Raises:
        ModelError: it is missing and has no default, or is no whole number above zero.
    """
    value = config.get(key, default)
    try:
        number = msgspec.convert(value, int, strict=False)
    except msgspec.ValidationError:
        number = 0
    if number < 1:
        raise ModelError(f"config.json: {key} is {value!r}; accepted: a whole number above zero")
    return number


def chosen_dtype(config: Mapping[str, Any], wanted: str) -> torch.dtype:
    """The dtype to use: the user's, or with "auto" the one that config.json names.

    Raises:
        ModelError: it is not one of those that models run in.
    """
    is_auto = wanted == "auto"
    named = config.get("dtype") or config.get("torch_dtype") or "float32"
    name = named if is_auto else wanted
    if isinstance(name, str) and name in DTYPES:
        return DTYPES[name]
    if is_auto:
        raise ModelError(
            f"config.json: dtype is {name!r}, which no model runs in; choose one of the dtypes "
            f"{', '.join(DTYPES)} to convert the weights to"
        )
    raise ModelError(f"dtype is {name!r}; accepted: auto, {', '.join(DTYPES)}")


def check_device(device: str) -> None:
    """Refuse a device that is not there.

    Raises:
        ModelError: it cannot be used; names those that can.
    """
    there = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    if device not in there and not (device == "cuda" and len(there) > 1):
        raise ModelError(f"device is {device!r}; there are here: {', '.join(there)}")


def build_model(config: Mapping[str, Any], ranks: TensorParallel) -> nn.Module:
    """Build this rank's part of a model, its weights not yet set.

    Raises:
        ModelError: the architecture is not known, or a key is missing or wrong.
    """
    _check_architectures(config)
    found = architecture_of(config)
    if config.get("quantization_config"):
        raise ModelError(
            "config.json: quantization_config is set, and quantised weights are not supported; "
            "accepted: float32 or bfloat16 weights"
        )
    try:
        settings = msgspec.convert(config, found.Config, strict=False)
    except msgspec.ValidationError as error:
        raise ModelError(f"config.json: {error}") from error
    try:
        return found.Model(settings, config, ranks)
    except KVStrataError:
        raise
    except Exception as error:  # sizes that torch refuses, keys of the wrong kind
        raise ModelError(f"config.json describes no model that can be built: {error!r}") from error


def _check_architectures(config: Mapping[str, Any]) -> None:
    named = config.get("architectures")
    if named is not None and not isinstance(named, list):
        raise ModelError(f"config.json: architectures is {named!r}; accepted: a list of names")


def load_model(
    folder: Path, ranks: TensorParallel, *, dtype: str = "auto", device: str = "cpu"
) -> nn.Module:
    """Build this rank's part of a model and fill it from the directory's safetensors.

    Args:
        folder: the model directory.
        ranks: who shares the weights.
        dtype: "float32", "bfloat16", or "auto" for the checkpoint's own.
        device: where the weights go.

    Raises:
        ModelError: names the file, key or tensor, and what was expected.
    """
    check_device(device)
    config = read_config(folder)
    with _default_dtype(chosen_dtype(config, dtype)):
        model = build_model(config, ranks)
    weights = Weights(folder)
    for name, wanted in wanted_weights(model):
        wanted.fill(weights.read(name, wanted.full_shape), ranks)
    return model.to(device).eval()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Build with this dtype: parameters get it, layers can ask for it, float32 buffers stay."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@dataclass(frozen=True, slots=True)
class WantedWeight:
    """One parameter of a rank's model."""

    parameter: nn.Parameter
    cut: Cut | None

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The shape in the checkpoint."""
        shape = tuple(self.parameter.shape)
        return shape if self.cut is None else self.cut.full_shape(shape)

    def fill(self, whole: torch.Tensor, ranks: TensorParallel) -> None:
        """Take this rank's part of the checkpoint's tensor."""
        part = whole if self.cut is None else self.cut.take(whole, ranks)
        with torch.no_grad():
            self.parameter.copy_(part)


def wanted_weights(model: nn.Module) -> Iterator[tuple[str, WantedWeight]]:
    """Every parameter by the name it has in a checkpoint."""
    for module_name, module in model.named_modules():
        cuts: Mapping[str, Cut] = getattr(module, "cuts", {})
        for name, parameter in module.named_parameters(recurse=False):
            full_name = f"{module_name}.{name}" if module_name else name
            yield full_name, WantedWeight(parameter, cuts.get(name))


class Weights:
    """The tensors of a model directory, read one at a time.

    Raises:
        ModelError: there are no safetensors, or their index cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}
        self._file_of = self._find()

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """One tensor, as a whole.

        Raises:
            ModelError: it is missing, has another shape or kind, or its file is damaged.
        """
        file_name = self._file_of.get(name)
        if file_name is None:
            raise ModelError(
                f"tensor {name!r} of shape {shape} is missing in the safetensors of {self._folder}"
            )
        try:
            tensor: torch.Tensor = self._open(file_name).get_tensor(name)
        except SafetensorError as error:
            raise ModelError(f"tensor {name!r} cannot be read from {file_name}: {error}") from error
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"tensor {name!r} in {file_name} has shape {tuple(tensor.shape)}; config.json "
                f"leads to {shape}"
            )
        if tensor.dtype not in _STORED_DTYPES:
            raise ModelError(
                f"tensor {name!r} in {file_name} has dtype {tensor.dtype}; accepted: "
                f"{', '.join(map(str, _STORED_DTYPES))}"
            )
        return tensor

    def _find(self) -> dict[str, str]:
        """Which file holds which tensor."""
        index = self._folder / _INDEX
        if index.exists():
            try:
                return msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
            except (OSError, ValueError, msgspec.DecodeError) as error:
                raise ModelError(f"{index} cannot be read: {error}") from error
        return dict.fromkeys(self._open(_SINGLE).keys(), _SINGLE)

    def _open(self, name: str) -> Any:  # noqa: ANN401 - safetensors has no types
        if name not in self._files:
            path = self._folder / name
            try:
                self._files[name] = safe_open(path, framework="pt")
            except FileNotFoundError as error:
                raise ModelError(f"{path} is missing; expected the model's weights") from error
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{path} cannot be read: {error}") from error
        return self._files[name]
