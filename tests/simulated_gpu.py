"""A simulated CUDA device: find mistakes in the use of a GPU on a machine without one.

Inside `simulated_gpu` PyTorch reports one GPU. Its tensors say ``cuda:0`` and keep their values in
CPU tensors, on which every operator runs. What fails on a GPU fails here, with PyTorch's kind of
error: operands on different devices, a CPU generator for a tensor of the GPU, ``numpy()``. Reads
and writes for which the host waits for the device are counted, see `host_waits`.

Not simulated: streams (what is asynchronous is done at once), the types of mixed precision,
several GPUs, and forks of the operators themselves, such as fused optimizers.
"""

from __future__ import annotations

import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import lavis_mafa
from lavis_mafa.algorithm.grit.collector import _side_stream

aten = torch.ops.aten
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
# To PyTorch's C++ code simulated tensors are on this device: CUDA would ask for a driver.
INSIDE = torch.device("meta")
PRODUCT = Path(lavis_mafa.__file__).parent

INDEXING = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}
# The size of their result, or their result itself, depends on values that the host must read.
READING = {
    aten._local_scalar_dense.default: "item",
    aten.allclose.default: "allclose",
    aten.bincount.default: "bincount",
    aten.equal.default: "equal",
    aten.is_nonzero.default: "bool",
    aten.masked_select.default: "masked_select",
    aten.multinomial.default: "multinomial checks its weights",
    aten.nonzero.default: "nonzero",
    aten.unique_consecutive.default: "unique",
    aten.unique_dim.default: "unique",
    aten._unique2.default: "unique",
}


class GpuTensor(torch.Tensor):
    """A tensor on the simulated device; ``stored`` is a CPU tensor with its values."""

    stored: torch.Tensor

    @staticmethod
    def __new__(cls, stored: torch.Tensor) -> GpuTensor:
        layout = {"strides": stored.stride(), "storage_offset": stored.storage_offset()}
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, stored.size(), **layout, dtype=stored.dtype, device=INSIDE
        )
        tensor.stored = stored
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_meta = property(lambda self: False)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run_operator(func, args, kwargs or {}, lambda kind: None)

    def __repr__(self, *, tensor_contents=None) -> str:
        return f"GpuTensor({self.stored})"

    def data_ptr(self) -> int:
        return self.stored.data_ptr()

    def get_device(self) -> int:
        return CUDA.index

    def numpy(self, **kwargs: Any) -> Any:
        raise TypeError("can't convert a tensor of the simulated GPU to numpy; copy it to the CPU")

    __array__ = numpy

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def on_host(self) -> torch.Tensor:
        """Return a copy on the CPU, a parameter of a parameter, without counting a wait."""
        copy = self.stored.detach().clone()
        return nn.Parameter(copy, self.requires_grad) if isinstance(self, nn.Parameter) else copy

    def __reduce_ex__(self, protocol: int) -> Any:
        return self.on_host().__reduce_ex__(protocol)  # files hold CPU tensors

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copy = GpuTensor(self.stored.detach().clone()).requires_grad_(self.requires_grad)
        if isinstance(self, nn.Parameter):
            copy = nn.Parameter(copy, self.requires_grad)
        memo[id(self)] = copy
        return copy


def run_operator(func: Any, args: Any, kwargs: Any, wait: Callable[[str], None]) -> Any:
    """Run an operator on the stored values, after the checks of a GPU.

    Args:
        wait: called with a reason when the host would wait for the device.
    """
    tensors: list[torch.Tensor] = []

    def stored(given: torch.Tensor) -> torch.Tensor:
        tensors.append(given)
        return given.stored if isinstance(given, GpuTensor) else given

    values = [map_tensors(stored, one) for one in args]
    options = {name: map_tensors(stored, one) for name, one in kwargs.items()}
    target = kwargs.get("device")
    on_gpu = any(isinstance(one, GpuTensor) for one in tensors)
    to_gpu = on_gpu if target is None else target.type == INSIDE.type
    if not on_gpu and not to_gpu:
        return func(*args, **kwargs)
    _check_devices(func, args, tensors, kwargs.get("generator"))
    for kind in _waits(func, args, kwargs, to_gpu):
        wait(kind)
    if target is not None:
        options["device"] = CPU
    with torch._C.DisableTorchFunction():
        result = func(*values, **options)
    if func is aten.copy_.default:
        return args[0]
    # What an operator changes in place it also returns: return its tensor again.
    given = {id(stored(one)): one for one in tuple(tensors)}
    return map_tensors(
        lambda one: given[id(one)] if id(one) in given else GpuTensor(one) if to_gpu else one,
        result,
    )


def map_tensors(change: Callable[[torch.Tensor], Any], given: Any) -> Any:
    """Apply a function to a tensor, or to every tensor in lists and tuples."""
    if isinstance(given, torch.Tensor):
        return change(given)
    if isinstance(given, (list, tuple)):
        return type(given)(map_tensors(change, one) for one in given)
    return given


def _check_devices(func: Any, args: Any, tensors: Any, generator: Any) -> None:
    """Raise where CUDA would: for a generator of the CPU, and operands on both devices."""
    if generator is not None:
        raise RuntimeError(f"{func}: expected a 'cuda' generator but found 'cpu'")
    if func is aten.copy_.default:
        return
    if func in INDEXING and isinstance(args[0], GpuTensor):  # indices may be on the CPU
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
    if func not in (aten.cat.default, aten.stack.default):
        # A CPU tensor without dimensions is passed to CUDA as a number.
        tensors = [x for x in tensors if isinstance(x, GpuTensor) or x.dim() > 0]
    kinds = {isinstance(x, GpuTensor) for x in tensors}
    if len(kinds) > 1:
        raise RuntimeError(f"{func}: expected all tensors on the same device, found cuda:0 and cpu")


def _waits(func: Any, args: Any, kwargs: Any, to_gpu: bool) -> Iterator[str]:
    """Yield why the host waits for the device during an operator."""
    if func in READING:
        yield READING[func]
    elif func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
        yield "repeat_interleave without output_size"
    elif func in INDEXING:
        indices = [index for index in args[1] if index is not None]
        masks = [index for index in indices if index.dtype in (torch.bool, torch.uint8)]
        number = func is not aten.index.Tensor and not isinstance(args[2], GpuTensor)
        if number and len(masks) == len(indices) == 1:
            return  # the same as masked_fill_
        yield from ["mask as index" for x in masks if isinstance(x, GpuTensor)]
        yield from ["index on the CPU" for x in indices if not isinstance(x, GpuTensor)]
        if number:
            yield "number assigned to indices"
    elif func in (aten.copy_.default, aten._to_copy.default):
        source = args[1] if func is aten.copy_.default else args[0]
        target = isinstance(args[0], GpuTensor) if func is aten.copy_.default else to_gpu
        blocks = not kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
        if isinstance(source, GpuTensor) != target and blocks:
            yield "copy to the GPU" if target else "copy to the CPU"


class Operators(TorchDispatchMode):
    """Run operators on the simulated device, and count waits of one thread by their place."""

    def __init__(self, waits: Counter[str]) -> None:
        super().__init__()
        self.waits, self.thread = waits, threading.get_ident()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return run_operator(func, args, kwargs or {}, self.wait)

    def wait(self, kind: str) -> None:
        if threading.get_ident() == self.thread:
            self.waits[f"{place_in_product()} ({kind})"] += 1


def place_in_product() -> str:
    """Return file, line and text of the innermost line of lavis_mafa that is running."""
    frames = traceback.extract_stack()
    inside = [one for one in frames if PRODUCT in Path(one.filename).parents] or frames
    return f"{inside[-1].filename}:{inside[-1].lineno} {inside[-1].line}"


class Functions(TorchFunctionMode):
    """Translate calls from Python that name a CUDA device: PyTorch would ask for its driver."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        if func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.record_stream:
            return None
        if func is torch.Tensor.cuda:
            func, args = torch.Tensor.to, (args[0], CUDA)
        if func is torch.Tensor.__setitem__ and isinstance(args[2], (bool, int, float)):
            if isinstance(args[0], GpuTensor):  # CUDA, too, makes it a CPU tensor first
                args = (*args[:2], torch.tensor(args[2], dtype=args[0].dtype))
        if func is torch.Tensor.new_tensor and isinstance(args[0], GpuTensor):
            func, args, kwargs = (
                torch.tensor,
                args[1:],
                {"dtype": args[0].dtype, **kwargs, "device": CUDA},
            )
        if func in (torch.tensor, torch.as_tensor):
            if not isinstance(args[0], torch.Tensor):
                args = map_tensors(lambda x: x.item() if isinstance(x, GpuTensor) else x, args)
            if _is_cuda(kwargs.get("device")):
                del kwargs["device"]
                return func(*args, **kwargs).to(INSIDE)
        if func is torch.Tensor.to:  # the only one that takes a device by its place
            args = tuple(INSIDE if _is_cuda(given) else given for given in args)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = INSIDE
        return func(*args, **kwargs)


def _is_cuda(given: Any) -> bool:
    return isinstance(given, (str, torch.device)) and str(given).split(":")[0] == CUDA.type


def _set_grad(self: Any) -> None:
    self.before = torch.is_grad_enabled()
    torch.set_grad_enabled(not self.mode)


def _restore_grad(self: Any, *error: Any) -> None:
    torch.set_grad_enabled(self.before)


@contextmanager
def simulated_gpu() -> Iterator[Counter[str]]:
    """Simulate a GPU; yield a counter of this thread's waits for it by place, which grows."""
    waits: Counter[str] = Counter()
    operators, functions = Operators(waits), Functions()

    def with_gpu(call: Callable[..., Any], *modes: Any) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            with ExitStack() as stack:
                for mode in modes:
                    stack.enter_context(mode)
                return call(*args, **kwargs)

        return called

    cuda = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "is_current_stream_capturing": lambda: False,
        "get_rng_state": lambda device=0: torch.get_rng_state(),
        **{
            name: MagicMock()
            for name in (
                "Event",
                "Stream",
                "current_stream",
                "stream",
                "device",
                "set_device",
                "set_rng_state",
                "empty_cache",
            )
        },
    }
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(patch.multiple(torch.cuda, **cuda))
        if hasattr(torch, "accelerator"):  # which PyTorch asks for graphs of CUDA in optimizers
            enter(patch.object(torch.accelerator, "current_accelerator", lambda *a, **k: None))
        # Modes belong to a thread. Those of functions are off in a function of PyTorch that is
        # written in Python, such as `backward`, which may run parts of the forward pass again.
        enter(
            patch.object(
                threading.Thread, "run", with_gpu(threading.Thread.run, functions, operators)
            )
        )
        engine = torch.autograd._engine_run_backward
        enter(patch.object(torch.autograd, "_engine_run_backward", with_gpu(engine, functions)))
        # Wrappers cannot be made in inference mode: only its effect on gradients is left.
        enter(patch.multiple(torch.inference_mode, __enter__=_set_grad, __exit__=_restore_grad))
        enter(functions)
        enter(operators)
        # A stream that is kept is a simulated one only meanwhile.
        _side_stream.cache_clear()
        stack.callback(_side_stream.cache_clear)
        yield waits


@contextmanager
def host_waits() -> Iterator[Counter[str]]:
    """Count this thread's waits for the GPU by place, on a real one if there is one."""
    if not torch.cuda.is_available():
        with simulated_gpu() as waits:
            yield waits
        return
    waits, thread, before = Counter(), threading.get_ident(), torch.cuda.get_sync_debug_mode()

    def count(message: Any, *rest: Any, **more: Any) -> None:
        if threading.get_ident() == thread and "synchronizing" in str(message):
            waits[place_in_product()] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = count
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode(before)
