"""The canonical form of modules and optimizers, for the identity of a run."""

from __future__ import annotations

import functools
import io
import pickletools
import re
import sys
import zipfile
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any

from sparkhvd._util.frameworks import framework_of
from sparkhvd.estimators.runs.canonical import (
    CanonicalForm,
    TensorContent,
    code_form,
    is_plain,
    is_tensor,
    names_of_installed_bases,
)
from sparkhvd.estimators.runs.function_globals import module_is_installed

if TYPE_CHECKING:
    import torch

# Attributes of every PyTorch optimizer. The groups, with the defaults, and the state are described separately, and a
# scheduler replaces ``step``.
_STANDARD_ATTRIBUTES = frozenset({"param_groups", "state", "step"})
# The names of attributes with PyTorch's options of hooks, which are keyed by numbers that differ in every process.
_HOOK_OPTIONS = {
    "_forward_hooks_with_kwargs": "_forward_hooks",
    "_forward_hooks_always_called": "_forward_hooks",
    "_forward_pre_hooks_with_kwargs": "_forward_pre_hooks",
}
# TorchScript appends the number of classes that the process has compiled to the name of a class.
_NUMBER_OF_CLASS = re.compile(r"___torch_mangle_\d+")


def describe(value: Any, form: CanonicalForm) -> list[object] | None:
    """Return the form of a module or an optimizer; None for any other object.

    Keras objects are modules, too, if PyTorch is the backend of Keras; they are not described here.
    """
    if callable(getattr(value, "named_parameters", None)) and framework_of(value) != "keras":
        return _module_form(form, value)
    if isinstance(groups := getattr(value, "param_groups", None), list):
        weights = [[form.reference(weight) or list(weight.shape) for weight in group["params"]] for group in groups]
        plain = [{name: item for name, item in group.items() if name != "params"} for group in groups]
        own = _optimizer_attribute_forms(form, value)
        return [form.of(type(value)), weights, form.of(plain), *_state_form(form, value, groups), *own]
    return None


def contents(value: object) -> TensorContent | None:
    """Return the content of a tensor of PyTorch; None for any other object."""
    torch = sys.modules.get("torch")  # a program that uses another framework need not import it
    if torch is None or not isinstance(value, torch.Tensor):
        return None
    dense = value.detach().to_dense().cpu().resolve_conj().resolve_neg().contiguous().flatten()
    plain = dense if dense.stride(0) == 1 else dense.clone(memory_format=torch.contiguous_format)
    elements = plain.view(torch.uint8).numpy().tobytes()  # NumPy lacks some types, such as bfloat16
    kind = "" if type(value) is torch.Tensor and not value.requires_grad else f"{type(value)} {value.requires_grad}"
    return TensorContent(str(value.dtype), tuple(value.shape), elements, kind)


def _state_form(form: CanonicalForm, value: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> list[object]:
    """Return an optimizer's state for each parameter, and any other state; empty before the first step."""
    state = getattr(value, "state", None) or {}
    weights = [weight for group in groups for weight in group["params"]]
    ids = set(map(id, weights))
    other = {key: item for key, item in state.items() if id(key) not in ids}
    return [[form.of(state.get(weight)) for weight in weights], *([form.of(other)] if other else [])] if state else []


def _optimizer_attribute_forms(form: CanonicalForm, value: object) -> list[object]:
    """Return the attributes and hooks of an optimizer that PyTorch's class does not set, in a list."""
    installed = module_is_installed(type(value).__module__)
    attributes = {
        name: form.if_describable(item)
        for name, item in sorted(vars(value).items())
        if name not in _STANDARD_ATTRIBUTES
        and not name.startswith("_optimizer_")
        and not (installed and (name == "defaults" or name.startswith("_")))
    }
    hooks = _hook_forms(form, value, "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    return [sorted({**attributes, **hooks}.items())] if attributes or hooks else []


def _hook_forms(form: CanonicalForm, value: object, *names: str) -> dict[str, object]:
    """Return the forms of registered hooks, by the name of the attribute that contains them."""
    registered = {name: list((getattr(value, name, None) or {}).values()) for name in names}
    return {name: [form.if_describable(hook) for hook in hooks] for name, hooks in registered.items() if hooks}


def _module_form(form: CanonicalForm, value: torch.nn.Module) -> list[object]:
    form.add_parts(value.parameters())
    form.add_parts(module for module in value.modules() if module is not value)
    weights = [
        (
            name,
            form.of_tensor(weight, exact=form.weights),
            weight.requires_grad,
            *_hook_forms(form, weight, "_backward_hooks", "_post_accumulate_grad_hooks").items(),
            *form.tensor_attribute_forms(weight),
        )
        for name, weight in value.named_parameters()
    ]
    # A module without weights is a loss, which its buffers identify. A model's buffers may differ in every process.
    exact = form.weights or not weights
    buffers = [(name, form.of_tensor(buffer, exact=exact)) for name, buffer in value.named_buffers()]
    modules = [(name, _submodule_form(form, module, exact=exact)) for name, module in value.named_modules()]
    # A training sets the mode of the whole model, but Lightning keeps the modes of its parts. All modes of other
    # modules, such as a loss, are kept.
    keeps_modes = value.training or form.parameter != "model"
    fixed = [name for name, module in value.named_modules() if keeps_modes and not module.training]
    sharing = _tensors_sharing_memory(value)
    return [
        modules,
        weights,
        buffers,
        *([fixed] if fixed else []),
        *([sharing] if sharing else []),
        *_script_form(value),
    ]


def _tensors_sharing_memory(value: torch.nn.Module) -> list[object]:
    """Return the names and views of weights and buffers in the same memory: a change of one changes the others."""
    views_by_address: dict[int, list[object]] = {}
    lazy = sys.modules["torch"].nn.parameter.is_lazy
    for name, tensor in (*value.named_parameters(), *value.named_buffers()):
        if str(tensor.layout) == "torch.strided" and not lazy(tensor) and (address := _address(tensor)):
            view = [name, str(tensor.dtype), tensor.storage_offset(), list(tensor.shape), list(tensor.stride())]
            views_by_address.setdefault(address, []).append(view)
    return [{"memory": views} for views in views_by_address.values() if len(views) > 1]


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # a subclass without memory of its own
        return 0


def _script_form(value: torch.nn.Module) -> list[object]:
    """Return the code, the constants and the plain attributes of a module of TorchScript, without its weights."""
    save: Any = getattr(value, "save_to_buffer", None)
    if not callable(save):
        return []
    content = []
    with zipfile.ZipFile(io.BytesIO(save())) as archive:
        for path in archive.namelist():
            file = path.partition("/")[2]
            data = archive.read(path)
            if file.startswith("constants/"):
                content.append([file, data.hex()])
            elif file.endswith(".py"):
                content.append([_NUMBER_OF_CLASS.sub("", part) for part in (file, data.decode())])
            elif file in {"data.pkl", "constants.pkl"}:
                steps = [(step.name, str(argument)) for step, argument, _ in pickletools.genops(data)]
                content.append([file, *(_NUMBER_OF_CLASS.sub("", f"{name} {argument}") for name, argument in steps)])
    return [sorted(content)]


def _is_argument(value: object) -> bool:
    """Return whether a value may be an argument of an installed class: a number, an activation, a distance."""
    is_function = isinstance(value, FunctionType | BuiltinFunctionType | functools.partial)
    return is_plain(value) or is_function or not module_is_installed(type(value).__module__)


def _submodule_form(form: CanonicalForm, module: torch.nn.Module, *, exact: bool) -> list[object]:
    forms: dict[str, object] = {}
    installed_names = names_of_installed_bases(type(module))
    for name, item in sorted(vars(module).items()):
        if (
            name == "training"
            or type(item).__name__ == "ScriptMethod"
            or (name in installed_names and name != "_hparams" and not _is_argument(item))
        ):
            continue
        if name in _HOOK_OPTIONS:
            hooked = list(vars(module)[_HOOK_OPTIONS[name]])
            forms[name] = [hooked.index(number) for number in item]
        elif is_tensor(item):
            forms[name] = form.of_tensor(item, exact=exact)
        elif name.startswith("_"):
            forms[name] = form.if_describable(item)
        else:
            forms[name] = form.of(item)
    hooks = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    forms |= _hook_forms(form, module, *hooks)
    forward = getattr(type(module), "forward", None)
    code = code_form(forward.__code__) if isinstance(forward, FunctionType) else None
    return [form.of(type(module)), code, sorted(forms.items())]
