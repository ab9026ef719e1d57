"""Taps show every attention call of a running model: query, key, value and the context that the heads produced.

Two routes. `InterfaceTap` wraps `AttentionInterface.get_interface`, which every modern architecture of transformers
calls whatever its backend. `FunctionTap` follows product -> softmax -> product, or a direct scaled-dot-product call,
through the modules that bypass the interface.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from transformers.modeling_utils import AttentionInterface

from headscope.left import HeadsLeft
from headscope.portable import cut

SOFTMAX = {torch.softmax, torch.Tensor.softmax, F.softmax}
_PRODUCT = {
    torch.matmul,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
    torch.bmm,
    torch.Tensor.bmm,
    torch.baddbmm,
    torch.Tensor.baddbmm,
    torch.einsum,
}


@dataclass
class AttentionCall:
    """One call of an attention function; `context` is what it returned, with heads still apart.

    Query, key and value are `[batch head position width]` on the interface route; on the function route they have the
    layout that the model chose, and are None where they could not be followed.
    """

    module: nn.Module
    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    context: Tensor
    probabilities: Tensor | None
    on_interface: bool
    mask: Any = None
    arguments: tuple[Any, ...] = ()
    """Positional arguments behind the mask."""
    keywords: dict[str, Any] = field(default_factory=dict)
    implementation: str = ""
    """The name of the attention function that runs."""
    eager: Callable[..., Any] | None = None
    """The model's own eager attention function, whatever runs in its place."""

    def told(self, on_call: OnCall) -> Tensor | None:
        """What `on_call` makes of this call, of which it sees the heads that are left."""
        left = HeadsLeft.of(self.module)
        if left is None:
            return on_call(self)
        query, key, value, rows = self.query, self.key, self.value, self.probabilities
        part = replace(
            self,
            query=None if query is None else left.query(query),
            key=None if key is None else left.key(key),
            value=None if value is None else left.key(value),
            context=left.context(self.context) if len(self.context) else self.context,
            probabilities=None if rows is None else left.query(rows),
        )
        changed = on_call(part)
        return None if changed is None else left.whole(changed)


OnProduct = Callable[[nn.Parameter, Tensor, Tensor], None]
"""Sees a parameter that a function multiplies with a tensor, that tensor, and the product."""

OnCall = Callable[[AttentionCall], Tensor | None]
"""Sees a call; may return a tensor that the model then uses in place of the context."""

Enter = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]


class InterfaceTap(contextlib.AbstractContextManager["InterfaceTap"]):
    """Shows every call that goes through transformers' attention interface while the `with` block runs.

    The interface is one object for the whole process, so taps must not be open in two threads at once.
    """

    def __init__(self, on_call: OnCall, before: OnCall | None = None) -> None:
        """`before` sees a call whose context is still empty; what it returns saves the model from computing it."""
        self.on_call, self.before = on_call, before
        self.depth = 0

    def __enter__(self) -> InterfaceTap:
        self._original = AttentionInterface.get_interface
        tap = self

        def get_interface(registry: AttentionInterface, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
            function = tap._original(registry, name, default)

            def tapped(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
                kwargs = cut(module, "attention", kwargs)  # what a pruned module's heads get of a tensor for all
                call = AttentionCall(module, query, key, value, query[:0], None, True)
                call.mask = args[0] if args else kwargs.get("attention_mask")
                call.arguments, call.eager, call.implementation = args[1:], default, name
                call.keywords = {name: value for name, value in kwargs.items() if name != "attention_mask"}
                tap.depth += 1
                try:
                    ready = None if tap.before is None else call.told(tap.before)
                    output = (
                        (ready, None) if ready is not None else function(module, query, key, value, *args, **kwargs)
                    )
                finally:
                    tap.depth -= 1
                call.context = output[0]
                changed = call.told(tap.on_call)
                return output if changed is None else (changed, *output[1:])

            return tapped

        AttentionInterface.get_interface = get_interface  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        AttentionInterface.get_interface = self._original  # type: ignore[method-assign]


class ModuleStack(contextlib.AbstractContextManager["ModuleStack"]):
    """Knows which modules are running, innermost last, and shows each module's inputs as it starts."""

    def __init__(self, model: nn.Module, on_enter: Enter) -> None:
        self.model = model
        self.on_enter = on_enter
        self.running: list[nn.Module] = []
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> ModuleStack:
        for module in self.model.modules():
            self._handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.running.append(module)
        self.on_enter(module, args, kwargs)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        while self.running and self.running.pop() is not module:
            pass

    def innermost(self) -> nn.Module | None:
        """The innermost running module that computes something of its own."""
        return next((module for module in reversed(self.running) if not _is_passive(module)), None)


def _is_passive(module: nn.Module) -> bool:
    """Whether a module is an operation (softmax, dropout, a product) rather than an attention: it holds nothing."""
    return not module._modules and not module._parameters


class FunctionTap(TorchFunctionMode):
    """Finds attention in modules that bypass the interface, by following what happens to a softmax."""

    def __init__(
        self, stack: ModuleStack, interface: InterfaceTap, on_call: OnCall, on_product: OnProduct | None = None
    ) -> None:
        super().__init__()
        self.stack, self.interface, self.on_call, self.on_product = stack, interface, on_call, on_product
        # Tensors are kept alive with their marks: an id may be given again once its tensor is gone.
        self._scores: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._maps: dict[int, tuple[Tensor, nn.Module, tuple[Tensor, Tensor] | None]] = {}

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            return self._opened(args, kwargs)
        output = func(*args, **kwargs)
        if self.on_product is not None and (func in _PRODUCT or func is F.linear):
            self._show_product(output, [*args, *kwargs.values()])
        if self.interface.depth or not isinstance(output, Tensor) or output.dim() < 3:
            return output
        inputs = list(_tensors([*args, *kwargs.values()]))
        if func is F.scaled_dot_product_attention:
            return self._direct(args, kwargs, output)
        mapped = next((self._maps[id(tensor)] for tensor in inputs if id(tensor) in self._maps), None)
        if mapped is not None:
            return self._after_softmax(func, output, inputs, mapped)
        scored = next((self._scores[id(tensor)] for tensor in inputs if id(tensor) in self._scores), None)
        if func in SOFTMAX:
            module = self.stack.innermost()
            if module is not None:
                self._maps[id(output)] = (output, module, scored[1:] if scored else None)
        elif func in _PRODUCT and len(inputs) >= 2:
            self._scores[id(output)] = (output, inputs[-2], inputs[-1])
        elif scored is not None and output.is_floating_point():
            self._scores[id(output)] = (output, *scored[1:])
        return output

    def _opened(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run torch's own multi-head attention with its steps in sight: it asks this mode once, and then would not."""
        functional: Any = F
        asks = functional.has_torch_function

        def answer(tensors: Any) -> bool:
            functional.has_torch_function = asks
            return False

        functional.has_torch_function = answer
        try:
            with self:
                return F.multi_head_attention_forward(*args, **kwargs)
        finally:
            functional.has_torch_function = asks

    def _show_product(self, output: Any, values: list[Any]) -> None:
        tensors = list(_tensors(values))
        stored = [
            tensor if isinstance(tensor, nn.Parameter) else vars(tensor).get("headscope_of") for tensor in tensors
        ]
        parameter = next((one for one in stored if one is not None), None)
        other = next((tensor for tensor, one in zip(tensors, stored, strict=True) if one is None), None)
        if self.on_product is not None and parameter is not None and other is not None:
            self.on_product(parameter, other, output)

    def _after_softmax(self, func: Any, output: Tensor, inputs: list[Tensor], mapped: Any) -> Any:
        _, module, operands = mapped
        if func not in _PRODUCT:
            if output.is_floating_point():
                self._maps[id(output)] = (output, module, operands)
            return output
        probabilities = next(tensor for tensor in inputs if id(tensor) in self._maps)
        value = next((tensor for tensor in inputs if tensor is not probabilities), None)
        query, key = operands or (None, None)
        return self._emit(module, query, key, value, output, probabilities)

    def _direct(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        """A module calls scaled-dot-product attention itself: torch defines what its rows are."""
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
        given = dict(zip(names, args, strict=False)) | kwargs
        module = self.stack.innermost()
        if module is None:
            return output
        call = AttentionCall(module, given["query"], given["key"], given["value"], output, None, False)
        call.mask, call.eager, call.implementation = given.get("attn_mask"), plain_attention, "sdpa"
        call.keywords = {"is_causal": bool(given.get("is_causal", False)), "scale": given.get("scale")}
        changed = call.told(self.on_call)
        return output if changed is None else changed

    def _emit(
        self,
        module: nn.Module | None,
        query: Tensor | None,
        key: Tensor | None,
        value: Tensor | None,
        context: Tensor,
        probabilities: Tensor | None,
    ) -> Tensor:
        one_key = probabilities is not None and probabilities.shape[-1] < 2
        if module is None or (one_key and query is None):  # a softmax over something else
            return context
        changed = AttentionCall(module, query, key, value, context, probabilities, False).told(self.on_call)
        return context if changed is None else changed


def plain_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """Scaled-dot-product attention as torch defines it, with its rows `[batch head query key]`; `mask` is additive."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    rows = (scores if mask is None else scores + mask).softmax(dim=-1)
    return (rows @ value).transpose(1, 2), rows


def _tensors(values: list[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(list(value))
