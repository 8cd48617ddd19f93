"""What Gluon calls by other names in Triton 3.6, 3.7 and later: one name for each."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.ampere import async_copy

HAS_BARRIER = gl.constexpr(hasattr(gl, "barrier"))
HAS_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


# global to shared memory, 4 to 16 bytes a lane, without passing through registers
load_async = getattr(async_copy, "async_load", async_copy.async_copy_global_to_shared)


@gluon.jit
def thread_barrier():
    """All threads of the partition meet."""
    if HAS_BARRIER:
        gl.barrier()
    else:
        gl.thread_barrier()


@gluon.jit
def reinterpret(memory, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """The bytes of a shared-memory buffer under another dtype, shape and layout."""
    if HAS_REINTERPRET:
        return memory.reinterpret(dtype, shape, layout)
    else:  # noqa: RET505  (Triton's compiler wants both ends of the choice)
        return memory._reinterpret(dtype, shape, layout)
