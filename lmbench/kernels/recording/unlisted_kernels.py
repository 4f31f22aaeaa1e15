"""Has Inductor note what it forgets: mixed-order reductions are in no list of kernels (torch 2.11 to 2.13)."""

from __future__ import annotations

from typing import Any


class UnlistedKernels:
    """From `listen` to `close`, notes each kernel whose call is commented without its name.

    A mixed-order reduction, such as a norm's backward pass for input and weight at once, is defined and called in one
    go; Inductor writes the call's comment, and with it the note, for no name. The kernel is the one just defined.
    """

    def __init__(self) -> None:
        self._before: tuple[Any, Any] | None = None

    def listen(self) -> None:
        from torch._inductor.codegen.triton import TritonScheduling
        from torch._inductor.debug import set_kernel_post_grad_provenance_tracing

        scheduling: Any = TritonScheduling
        self._before = define, comment = scheduling.define_kernel, scheduling.codegen_comment
        defined: list[str] = []

        def define_kernel(self: Any, *args: Any, **kwargs: Any) -> str:
            name: str = define(self, *args, **kwargs)
            defined[:] = [name]
            return name

        def codegen_comment(self: Any, node_schedule: Any, kernel_name: str | None = None) -> None:
            comment(self, node_schedule, kernel_name)
            if kernel_name is None and defined:
                set_kernel_post_grad_provenance_tracing(node_schedule, defined[0])

        scheduling.define_kernel, scheduling.codegen_comment = define_kernel, codegen_comment

    def close(self) -> None:
        if self._before is not None:
            from torch._inductor.codegen.triton import TritonScheduling

            scheduling: Any = TritonScheduling
            scheduling.define_kernel, scheduling.codegen_comment = self._before
            self._before = None
