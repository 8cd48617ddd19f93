"""A pytest plugin: vLLM's own test of its sparse backends, on a CPU, with our class in the place of FlashMLA's.

`scripts.vllm_tests --own` loads it. The platform says that it is a Hopper GPU whose tensors are on the CPU. vLLM's ops
of its compiled part that the test itself calls are answered here: the write of a cache, and the conversion from e4m3.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

# vLLM's Triton kernels run in the interpreter; without the first it takes Triton for absent where there is no GPU
os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}

import pytest
import torch
import vllm.platforms
from vllm.utils import torch_utils

torch_utils.PIN_MEMORY = False  # read by other modules as they are imported

from vllm import _custom_ops as ops
from vllm.platforms.cuda import NonNvmlCudaPlatform
from vllm.platforms.interface import DeviceCapability

from mla_ops.integrations.vllm.shared import write_cache

CONFIG = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 1024,
    "max_position_embeddings": 163840,
    "torch_dtype": "bfloat16",
}


class Hopper(NonNvmlCudaPlatform):
    """vLLM's CUDA platform, without a GPU."""

    device_type = "cpu"

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
        return DeviceCapability(9, 0)

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        return 132


def concat_and_cache_mla(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    scale: torch.Tensor,
) -> None:
    write_cache(kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype)


def convert_fp8(out: torch.Tensor, values: torch.Tensor, scale: float = 1.0, kv_dtype: str = "fp8") -> None:
    out.copy_(values.view(torch.float8_e4m3fn).float() * scale)


# asked for as vLLM's layers are imported
for name in ("mm_supports_fp8", "mm_supports_block_fp8", "mm_supports_fp4"):
    setattr(ops, f"cutlass_scaled_{name}", lambda capability: False)
ops.cutlass_group_gemm_supported = lambda capability: False
ops.concat_and_cache_mla = concat_and_cache_mla
ops.convert_fp8 = convert_fp8
torch.cuda.get_device_capability = lambda *_: (9, 0)
vllm.platforms._current_platform = Hopper()
sys.modules["vllm.vllm_flash_attn._vllm_fa3_C"] = ModuleType("_vllm_fa3_C")  # vLLM imports it, and calls nothing

import tests.v1.attention.utils as utils  # vLLM's
import vllm.v1.attention.backends.mla.flashmla_sparse as theirs
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.v1.attention.ops import flashmla
from vllm.v1.worker.workspace import init_workspace_manager

from mla_ops.integrations.vllm import backends

theirs.FlashMLASparseBackend = backends.FlashMLASparseBackend
flashmla.is_flashmla_sparse_supported = lambda: (True, None)
_folder = tempfile.mkdtemp()
Path(_folder, "config.json").write_text(json.dumps(CONFIG))
_model_config = utils.ModelConfig


def local_model_config(model: str, tokenizer: str | None = None, **options: Any) -> Any:
    """The configuration that the test would fetch."""
    return _model_config(model=_folder, skip_tokenizer_init=True, **options)


utils.ModelConfig = local_model_config
utils.DeviceConfig = lambda *_, **__: DeviceConfig("cpu")


@pytest.fixture
def default_vllm_config() -> Iterator[None]:
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        yield


@pytest.fixture
def dist_init(tmp_path: Path) -> Iterator[None]:
    parallel_state.init_distributed_environment(1, 0, f"file://{tmp_path}/rendezvous", 0, "gloo")
    parallel_state.initialize_model_parallel(1, 1)
    yield
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


@pytest.fixture
def workspace_init() -> None:
    init_workspace_manager(torch.device("cpu"))
