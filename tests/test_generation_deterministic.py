"""Sessions over a deterministic decoder: a request has the same bits whatever runs beside it."""

import pytest
import torch

transformers = pytest.importorskip("transformers")
if not hasattr(transformers, "DeepseekV3ForCausalLM"):
    pytest.skip("this transformers has no DeepSeek-V3", allow_module_level=True)

from test_generation import BOOK, build_for_hopper, build_v4, build_v32, make_session

from mla_ops.demo.model import build_small_model
from mla_ops.models import decoder_for
from mla_ops.testing.checks import record_calls

pytestmark = pytest.mark.usefixtures("one_thread")


def build_v3():
    return build_small_model("DeepseekV3", num_layers=1, hidden_size=64, num_heads=2)


def build_dense_for_hopper():
    return build_small_model("DeepseekV3", num_layers=1, hidden_size=128, num_heads=16)


@pytest.mark.parametrize("build", [build_v3, build_v32, build_v4])
def test_a_deterministic_decoder_asks_every_attention_for_it(build):
    """All but prefills over expanded keys, which run alone."""
    for wanted in (False, True):
        decoder = decoder_for(build(), 200, deterministic=wanted)
        session = make_session(decoder, block_size=128, prefill_tokens=32)
        with record_calls() as calls:
            session.generate([BOOK[:40], BOOK[:3]], 3)
        asked = {given.get("deterministic", False) for op, given in calls if op.startswith("paged_") and "q" in given}
        assert asked == {wanted}
        assert session.configuration()["deterministic"] == wanted
    with pytest.raises(TypeError, match="decoder_for: deterministic must be a bool, got int"):
        decoder_for(decoder.model, 200, deterministic=1)


def logits_of_the_first(session, prompts, new_tokens):
    """The logits behind each decode step of the first request; the others come when it has 3 tokens."""
    first, seen = session.submit(prompts[0], new_tokens), []
    others = iter(prompts[1:])
    for event in session.stream():
        if event.request != first:
            continue
        seen.append(session.logits[0].clone())  # it has the first row, so its tokens come first
        if len(seen) >= 3:
            for number, prompt in enumerate(others):
                session.submit(prompt, 2 + number % 5)
    return torch.stack(seen)


@pytest.mark.gpu
@pytest.mark.parametrize("build", [build_dense_for_hopper, build_for_hopper, build_v4])
def test_a_deterministic_request_has_the_same_bits_whatever_runs_beside_on_gpu(build):
    decoder = decoder_for(build().bfloat16().cuda(), 4096, deterministic=True)
    prompts = [BOOK[7 : 7 + length] for length in (1500, 1, 3000, 40, 700, 2, 129, 3900, 5, 64, 2100, 11, 350, 8, 999)]
    for cache_format in (decoder.attention.quantized_format, "bf16"):
        session = make_session(decoder, max_num_requests=16, cache_format=cache_format, block_size=128)
        alone = logits_of_the_first(session, prompts[:1], 24)
        assert torch.equal(alone, logits_of_the_first(session, prompts, 24))
        assert torch.equal(alone, logits_of_the_first(session, prompts[:1] + prompts[3:6], 24))
