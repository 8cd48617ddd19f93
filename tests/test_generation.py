"""Requests, sampling and streaming of `GenerationSession`, over one small model."""

import dataclasses
import itertools
import math
import threading

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers")
if not hasattr(transformers, "DeepseekV3ForCausalLM"):
    pytest.skip("this transformers has no DeepSeek-V3", allow_module_level=True)

import mla_ops
from mla_ops.demo.model import TEXT, build_small_model, build_small_v4_model
from mla_ops.models import GenerationSession, decoder_for, teacher_forced_logits
from mla_ops.models.sampling import choose_tokens, gumbel_noise
from mla_ops.testing.checks import record_calls

BOOK = list(TEXT.read_bytes())
PROMPTS = [BOOK[:5], BOOK[40:61], BOOK[300:301]]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def decoder():
    model = build_small_model("DeepseekV3", num_layers=1, hidden_size=64, num_heads=2, initializer_range=0.1)
    return decoder_for(model, 64)


def make_session(decoder, **options):
    return GenerationSession(decoder, **{"max_num_requests": 2, "cache_format": "fp32", "block_size": 16, **options})


def test_streamed_tokens_are_the_generated_ones_and_come_one_by_one(decoder):
    expected = make_session(decoder).generate(PROMPTS, 9).tokens
    session = make_session(decoder)
    numbers = [session.submit(prompt, 9) for prompt in PROMPTS]
    found = {number: [] for number in numbers}
    for event in session.stream():
        assert 1 <= len(event.tokens) <= 2  # with the prefill's token, the first decode step's
        found[event.request] += event.tokens
        assert event.done == (len(found[event.request]) == 9)
    assert [found[number] for number in numbers] == expected


def test_requests_may_arrive_while_others_run(decoder):
    """They change nothing for those that run, and get what they get alone."""
    expected = make_session(decoder).generate(PROMPTS, 12).tokens
    session = make_session(decoder)
    found: dict[int, list[int]] = {}
    late = iter(PROMPTS[1:])
    numbers = [session.submit(PROMPTS[0], 12)]
    for event in session.stream():
        found.setdefault(event.request, []).extend(event.tokens)
        prompt = next(late, None) if len(found[numbers[0]]) >= 4 else None
        if prompt is not None:
            numbers.append(session.submit(prompt, 12))
    assert [found[number] for number in numbers] == expected


def test_tokens_that_a_broken_off_stream_did_not_give_come_later(decoder):
    """Requests end in one step; whoever iterates stops at each first event, as `next` does."""
    expected = make_session(decoder).generate(PROMPTS, 9).tokens
    session = make_session(decoder)
    found = {session.submit(prompt, 9): [] for prompt in PROMPTS}
    while (event := next(session.stream(), None)) is not None:
        found[event.request] += event.tokens
    assert list(found.values()) == expected


def run_and_cancel(session, prompts, when):
    """The tokens of each prompt; prompt i is cancelled once it has `when[i]` tokens, at 0 while it waits."""
    numbers = [session.submit(prompt, 12) for prompt in prompts]
    found = {number: [] for number in numbers}
    for place, count in when.items():
        if count == 0:
            session.cancel(numbers[place])
    for event in session.stream():
        found[event.request] += event.tokens
        if len(found[event.request]) >= when.get(numbers.index(event.request), 99):
            session.cancel(event.request)
    return [found[number] for number in numbers]


@pytest.mark.parametrize("when", [{0: 1}, {1: 3}, {2: 0}, {0: 1, 1: 1}, {0: 4, 2: 0, 3: 2}, {3: 12}], ids=str)
def test_a_cancelled_request_gives_no_more_and_the_others_do_not_notice(decoder, when):
    prompts = [*PROMPTS, BOOK[7:20]]
    expected = make_session(decoder).generate(prompts, 12).tokens
    session = make_session(decoder)
    for _ in range(3):  # rows and blocks of the first time are taken again
        found = run_and_cancel(session, prompts, when)
        for place, tokens in enumerate(found):
            least = when.get(place, 12)
            assert least <= len(tokens) <= max(least, 2)  # the first event has the prefill's token and a step's
            assert tokens == expected[place][: len(tokens)]
        assert sorted(session.free_blocks) == list(range(session.cache.num_blocks))
        assert not session.active.any()
    assert session.generate(prompts, 12).tokens == expected


def test_a_cancelled_request_makes_room_at_once(decoder):
    """The cache has blocks for one request; the one that waits starts when they are free."""
    expected = make_session(decoder).generate(PROMPTS[:1], 9).tokens
    session = make_session(decoder, num_blocks=2)
    first, second = session.submit(PROMPTS[1], 11), session.submit(PROMPTS[0], 9)
    stream = session.stream()
    assert next(stream).request == first
    session.cancel(first)
    assert len(session.free_blocks) == 2
    events = list(stream)
    assert {event.request for event in events} == {second}
    assert [token for event in events for token in event.tokens] == expected[0]


class Interrupt(TorchDispatchMode):
    """The user's, before the operator of this number."""

    def __init__(self, number):
        super().__init__()
        self.left = number

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))


def test_a_stream_goes_on_after_an_interrupted_step(decoder):
    """Wherever it was: what a step writes before its end is written again."""
    expected = make_session(decoder).generate(PROMPTS[:2], 4).tokens
    interrupted = 0
    for number in itertools.count(1):
        session = make_session(decoder)
        found = {session.submit(prompt, 4): [] for prompt in PROMPTS[:2]}
        event = next(session.stream())
        found[event.request] += event.tokens
        event = next(session.stream())
        found[event.request] += event.tokens
        try:
            with Interrupt(number):
                session.step()
            break
        except KeyboardInterrupt:
            interrupted += 1
        for event in session.stream():
            found[event.request] += event.tokens
        assert list(found.values()) == expected, f"before operator {number}"
    assert interrupted > 50


def test_a_broken_off_stream_and_its_requests_can_be_dropped(decoder):
    session = make_session(decoder)
    numbers = [session.submit(prompt, 9) for prompt in PROMPTS]
    next(session.stream()), next(session.stream())
    with pytest.raises(ValueError, match=r"needs an idle session: run stream\(\) to its end, cancel\(\) what runs"):
        session.generate(PROMPTS, 9)
    for number in numbers:
        session.cancel(number)
        session.cancel(number)  # what has ended stays so
    assert list(session.stream()) == []
    assert session.generate(PROMPTS, 9).tokens == make_session(decoder).generate(PROMPTS, 9).tokens


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        (1, ValueError, "cancel: no request has number 1, 1 were submitted"),
        (-1, ValueError, "cancel: request must be at least 0, got -1"),
        ("0", TypeError, "cancel: request must be an integer, got str '0'"),
    ],
)
def test_what_is_no_request_cannot_be_cancelled(decoder, request_, error, message):
    session = make_session(decoder)
    session.submit(PROMPTS[0], 3)
    with pytest.raises(error, match=f"^{message}$"):
        session.cancel(request_)
    assert len(session.waiting) == 1


def test_other_threads_submit_and_cancel(decoder):
    """One thread runs the stream; what another cancels ends within a round, and every request has its own number."""
    expected = dict(enumerate(make_session(decoder).generate(PROMPTS, 30).tokens))
    session = make_session(decoder, max_num_requests=3)
    prompt_of, cancelled, found = {}, set(), {}

    def ask(seed):
        for i in range(6):
            which = (seed + i) % len(PROMPTS)
            number = session.submit(PROMPTS[which], 30)
            prompt_of[number] = which
            if i % 2:
                cancelled.add(number)
                session.cancel(number)

    session.submit(PROMPTS[0], 30)
    prompt_of[0] = 0
    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or session.waiting:
        for event in session.stream():
            found.setdefault(event.request, []).extend(event.tokens)
    for thread in threads:
        thread.join()
    for event in session.stream():
        found.setdefault(event.request, []).extend(event.tokens)
    assert sorted(prompt_of) == list(range(19))
    for number, which in prompt_of.items():
        tokens = found.get(number, [])
        assert tokens == expected[which][: len(tokens)]
        assert number in cancelled or len(tokens) == 30
    assert sorted(session.free_blocks) == list(range(session.cache.num_blocks))


def test_a_request_submitted_while_generate_runs_is_refused(decoder):
    session = make_session(decoder)
    expected = make_session(decoder).generate(PROMPTS, 9).tokens
    refused = []

    def submit(done, most):
        with pytest.raises(ValueError, match=r"^submit: generate\(\) is running") as info:
            session.submit([1], 3)
        refused.append(info.value)

    assert session.generate(PROMPTS, 9, progress=submit).tokens == expected
    assert refused


def test_later_requests_do_not_count_in_the_result_of_a_generation(decoder):
    session = make_session(decoder)
    result = session.generate(PROMPTS, 9)
    before = dataclasses.astuple(result)
    session.submit(PROMPTS[0], 9)
    list(session.stream())
    assert dataclasses.astuple(result) == before


def test_a_generation_that_fails_leaves_an_idle_session(decoder):
    """As when a user interrupts it: what it began is dropped."""
    session = make_session(decoder)

    def interrupt(done, most):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.generate(PROMPTS, 9, progress=interrupt)
    assert sorted(session.free_blocks) == list(range(session.cache.num_blocks))
    assert session.generate(PROMPTS, 9).tokens == make_session(decoder).generate(PROMPTS, 9).tokens


def test_a_warm_up_beside_requests_is_refused(decoder):
    """It would write into the blocks of row 0."""
    expected = make_session(decoder).generate(PROMPTS, 9).tokens
    session = make_session(decoder)
    found = {session.submit(prompt, 9): [] for prompt in PROMPTS}
    for event in session.stream():
        found[event.request] += event.tokens
        if session.active.any():
            with pytest.raises(RuntimeError, match=r"^warm_up\(\) .* while no request is active$"):
                session.warm_up()
    assert list(found.values()) == expected


def test_samples_are_a_function_of_the_seed_whatever_runs_beside(decoder):
    options = {"temperature": 1.0, "top_p": 0.95}
    together = make_session(decoder, sampling=True).generate(PROMPTS, 12, seed=7, **options).tokens
    session = make_session(decoder, sampling=True, max_num_requests=1)
    alone = [session.generate([prompt], 12, seed=7 + i, **options).tokens[0] for i, prompt in enumerate(PROMPTS)]
    assert together == alone
    assert session.generate(PROMPTS[:1], 12, seed=8, **options).tokens[0] != together[0]
    greedy = make_session(decoder).generate(PROMPTS, 12).tokens
    assert greedy == make_session(decoder, sampling=True).generate(PROMPTS, 12).tokens
    assert greedy != together


def test_samples_have_the_softmax_probabilities_within_top_p():
    """20,000 seeds over 6 tokens: each share is within 5 standard deviations, and none is behind top_p."""
    count = 20_000
    logits = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0, -2.0]]).expand(count, -1)
    seeds, zeros = torch.arange(count), torch.zeros(count, dtype=torch.int64)
    full = torch.full((count,), 1.0)
    for top_p, kept in ((1.0, 6), (0.7, 2), (1e-9, 1)):
        tokens = choose_tokens(logits, 0.8 * full, top_p * full, seeds, zeros)
        shares = tokens.bincount(minlength=6) / count
        expected = (logits[0] / 0.8).softmax(0)
        assert (expected.cumsum(0) - expected < top_p).sum() == kept
        expected = torch.where(torch.arange(6) < kept, expected, 0)
        expected /= expected.sum()
        deviation = (expected * (1 - expected) / count).sqrt()
        assert ((shares - expected).abs() <= 5 * deviation).all()


def test_noise_is_standard_gumbel_and_uncorrelated_between_steps():
    """Mean and variance within 5 deviations of 100,000 values; so the correlation of two steps."""
    tokens = torch.arange(100_000).unsqueeze(0).expand(2, -1)
    noise = gumbel_noise(tokens, torch.tensor([3, 3]), torch.tensor([0, 1])).double()
    euler, variance = 0.5772156649, math.pi**2 / 6
    assert ((noise.mean(1) - euler).abs() < 5 * math.sqrt(variance / 100_000)).all()
    # the fourth central moment of Gumbel is 5.4 times the squared variance
    assert ((noise.var(1) - variance).abs() < 5 * variance * math.sqrt(4.4 / 100_000)).all()
    assert abs(torch.corrcoef(noise)[0, 1]) < 5 / math.sqrt(100_000)


def test_end_tokens_come_from_the_model_unless_given(decoder):
    free = make_session(decoder).generate(PROMPTS[:1], 10).tokens[0]
    end = free[4]
    cut = free[: free.index(end) + 1]
    decoder.model.generation_config.eos_token_id = [end, 255]
    try:
        assert make_session(decoder).generate(PROMPTS[:1], 10).tokens[0] == cut
        assert make_session(decoder, eos_token_ids=()).generate(PROMPTS[:1], 10).tokens[0] == free
    finally:
        decoder.model.generation_config.eos_token_id = None
    assert make_session(decoder, eos_token_ids=end).generate(PROMPTS[:1], 10).tokens[0] == cut


ENCODING = transformers.BatchEncoding({"input_ids": [[1, 2]]})
BAD = {
    "a text": ("Hello", {}, TypeError, "prompts must be a list of token-id lists, got str: encode it first"),
    "texts": (["Hello"], {}, TypeError, "prompt 0 must be a list of token ids, got str: encode it first"),
    "a tensor": (torch.ones(1, 2), {}, TypeError, "got Tensor: pass lists, tensor.tolist"),
    "a batch encoding": (ENCODING, {}, TypeError, "got BatchEncoding: pass its input_ids"),
    "one prompt": ([1, 2], {}, TypeError, r"got a list of ints: write \[prompt\]"),
    "floats": ([[1.0]], {}, TypeError, "prompt 0 must be a list of token ids, ints, got float in it"),
    "an id out of the vocabulary": ([[1], [256]], {}, ValueError, "prompt 1 has token id 256, the vocabulary has 256"),
    "a negative id": ([[-1]], {}, ValueError, "prompt 0 has token id -1"),
    "a temperature": ([[1]], {"temperature": 0.5}, ValueError, "temperature 0.5 needs .*sampling=True"),
    "a negative temperature": ([[1]], {"temperature": -1.0}, ValueError, "temperature must be at least 0"),
    "top_p of 0": ([[1]], {"top_p": 0.0}, ValueError, "top_p above 0 and at most 1, got 0.0 and 0.0"),
    "an array": ([np.array([1])], {}, TypeError, r"list of token ids, got ndarray: pass lists, array.tolist\(\)"),
    "bytes": ([b"a"], {}, TypeError, r"prompt 0 must be .* got bytes: write list\(...\)"),
    "a list of lists": ([[[1]]], {}, TypeError, "ints, got list in it"),
    "nothing": (None, {}, TypeError, "prompts must be a list of token-id lists, got NoneType"),
    "a temperature in words": ([[1]], {"temperature": "hot"}, TypeError, "temperature must be a number, got str"),
    "no top_p": ([[1]], {"top_p": None}, TypeError, "top_p must be a number, got NoneType"),
    "an infinite temperature": ([[1]], {"temperature": math.inf}, ValueError, "at least 0 and finite"),
    "a temperature of 1e300": ([[1]], {"temperature": 1e300}, ValueError, "finite in float32 .*, got 1e.300 and"),
    "an unsigned seed": ([[1]], {"seed": 2**63}, ValueError, "seed must be at most 9223372036854775807, got 9"),
    "a last seed": ([[1], [2]], {"seed": 2**63 - 1}, ValueError, "seed of prompt 1 must be a 64-bit integer with a"),
    "a broken seed": ([[1]], {"seed": 0.5}, TypeError, "seed must be an integer, got float"),
    "no new tokens": ([[1]], {"max_new_tokens": 0}, ValueError, "1 tokens and 0 new ones, both must be at least 1"),
    "limits in words": ([[1]], {"max_new_tokens": "3"}, TypeError, "max_new_tokens must be an int, or a list .* str"),
    "a broken limit": ([[1]], {"max_new_tokens": [1.5]}, TypeError, "max_new_tokens of prompt 0 .* got float"),
    "no steps": ([[1]], {"steps_per_check": 0}, ValueError, "steps_per_check must be at least 1, got 0"),
}


@pytest.mark.parametrize(("prompts", "options", "error", "message"), BAD.values(), ids=BAD)
def test_inputs_that_cannot_run_get_an_error_that_says_what_is_wanted(decoder, prompts, options, error, message):
    session = make_session(decoder)
    with pytest.raises(error, match=message):
        session.generate(prompts, **{"max_new_tokens": 3, **options})
    assert not session.waiting
    assert len(session.generate([[1]], 3).tokens[0]) == 3


def test_numbers_of_numpy_are_taken(decoder):
    expected = make_session(decoder, sampling=True).generate(PROMPTS[:1], 3, temperature=0.5, seed=7).tokens
    sizes = {
        "max_num_requests": np.int64(2),
        "block_size": np.int32(16),
        "eos_token_ids": np.array([255]),
        "seed": np.int64(0),
    }
    session = make_session(decoder_for(decoder.model, np.int64(decoder.max_model_len)), sampling=True, **sizes)
    how = {
        "temperature": np.float32(0.5),
        "top_p": np.float64(1.0),
        "seed": np.uint8(7),
        "steps_per_check": np.int64(2),
    }
    assert session.generate([list(np.array(PROMPTS[0]))], np.int64(3), **how).tokens == expected


def test_a_session_made_in_inference_mode_runs_outside_and_the_other_way_round(decoder):
    expected = make_session(decoder).generate(PROMPTS[:2], 5).tokens
    outside = make_session(decoder)
    with torch.inference_mode():
        inside = make_session(decoder)
        assert outside.generate(PROMPTS[:2], 5).tokens == expected
        assert inside.generate(PROMPTS[:2], 5).tokens == expected
    assert outside.generate(PROMPTS[:2], 5).tokens == expected
    assert inside.generate(PROMPTS[:2], 5).tokens == expected


@torch._dynamo.config.patch(recompile_limit=2)
def test_any_number_of_compiled_sessions_may_be_made(decoder):
    """Dynamo allows 8 graphs of a function by default, here 2: what one session of this model has."""
    torch._dynamo.reset()
    expected = make_session(decoder).generate(PROMPTS, 4).tokens
    for rows in (1, 2, 3):
        session = make_session(decoder, max_num_requests=rows, compiled=True, backend="eager")
        assert session.generate(PROMPTS, 4).tokens == expected
    assert torch._dynamo.config.recompile_limit == 2


@pytest.mark.parametrize("default", ["cpu", "meta"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager ops", "compiled"])
def test_a_default_device_changes_nothing(decoder, compiled, default):
    """Many programs set "cuda"; Dynamo then traces methods of tensors through a mode, and not all of them."""
    torch._dynamo.reset()
    expected = make_session(decoder).generate(PROMPTS, 4).tokens
    torch.set_default_device(default)
    try:
        session = make_session(decoder, compiled=compiled, backend="eager")
        assert session.generate(PROMPTS, 4).tokens == expected
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager ops", "compiled"])
def test_autocast_changes_nothing(decoder, compiled):
    """The model runs in its own dtype, which its caches have."""
    expected = make_session(decoder).generate(PROMPTS[:2], 5).tokens
    session = make_session(decoder, compiled=compiled, backend="eager")
    logits = teacher_forced_logits(decoder, PROMPTS[1], "fp32")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert session.generate(PROMPTS[:2], 5).tokens == expected
        assert torch.equal(teacher_forced_logits(decoder, PROMPTS[1], "fp32"), logits)


BAD_SESSIONS = {
    "no requests": ({"max_num_requests": 0}, ValueError, "max_num_requests must be at least 1, got 0"),
    "empty blocks": ({"block_size": 0}, ValueError, "block_size must be at least 1, got 0"),
    "no blocks": ({"num_blocks": 0}, ValueError, "num_blocks must be at least 1, got 0"),
    "empty prefills": ({"prefill_tokens": 0}, ValueError, "prefill_tokens must be at least 1, got 0"),
    "half a request": ({"max_num_requests": 1.5}, TypeError, "max_num_requests must be an integer, got float"),
    "an end in words": ({"eos_token_ids": "</s>"}, TypeError, "eos_token_ids must be an int or a list .* got '</s>'"),
    "ends in words": ({"eos_token_ids": ["</s>"]}, TypeError, "eos_token_ids must be an int or a list of ints"),
    "a tensor of ends": ({"eos_token_ids": torch.ones(1)}, TypeError, "eos_token_ids must be an int or a list of ints"),
    "an end out of the vocabulary": ({"eos_token_ids": [1, 256]}, ValueError, "has 256, the vocabulary has 256"),
    "another cache": ({"cache_format": "fp8"}, ValueError, "reads cache_format 'fp32' or 'fp8_ds_mla', got 'fp8'"),
}


@pytest.mark.parametrize(("options", "error", "message"), BAD_SESSIONS.values(), ids=BAD_SESSIONS)
def test_a_session_that_cannot_run_is_refused_when_it_is_made(decoder, options, error, message):
    with pytest.raises(error, match=message):
        make_session(decoder, **options)


def test_a_session_without_room_for_a_new_token_is_refused(decoder):
    with pytest.raises(ValueError, match="max_model_len of the decoder must be at least 2"):
        make_session(decoder_for(decoder.model, 1))


def test_a_session_wants_a_decoder_not_a_model(decoder):
    with pytest.raises(TypeError, match=r"what decoder_for\(.*\) gives, got DeepseekV3ForCausalLM"):
        make_session(decoder.model)


def test_a_request_that_fails_leaves_its_row_and_its_blocks(decoder, monkeypatch):
    """A prefill fails, as when memory runs out; the others go on."""
    expected = make_session(decoder).generate(PROMPTS[1:], 9).tokens
    session = make_session(decoder)
    numbers = [session.submit(prompt, 9) for prompt in PROMPTS]

    def fail(*arguments):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(session, "prefill_chunk", fail)
        with pytest.raises(MemoryError):
            next(session.stream())
    found = {number: [] for number in numbers}
    for event in session.stream():
        found[event.request] += event.tokens
    assert list(found.values()) == [[], *expected]
    assert sorted(session.free_blocks) == list(range(session.cache.num_blocks))


def test_generate_refuses_to_mix_with_submitted_requests(decoder):
    session = make_session(decoder)
    session.submit([1], 3)
    with pytest.raises(ValueError, match="needs an idle session"):
        session.generate([[1]], 3)


@pytest.mark.gpu
def test_captured_samples_equal_eager_samples_on_gpu():
    model = build_small_model("DeepseekV3", num_layers=1, hidden_size=64, num_heads=2, initializer_range=0.1).cuda()
    found = []
    for cuda_graph in (False, True):
        session = make_session(decoder_for(model, 64), sampling=True, cuda_graph=cuda_graph)
        found.append(session.generate(PROMPTS, 12, temperature=1.0, top_p=0.9, seed=3).tokens)
    assert found[0] == found[1]


def build_v32():
    return build_small_model(num_layers=1, hidden_size=64, num_heads=2, index_heads=2, index_topk=16)


def build_v4():
    return build_small_v4_model(hidden_size=64, num_heads=2, index_topk=16)


def build_for_hopper():
    """As many heads as the Hopper kernels of the indexer and of attention take."""
    return build_small_model(num_layers=1, hidden_size=128, num_heads=16, index_heads=64, index_topk=256)


@pytest.mark.gpu
@pytest.mark.parametrize("build", [build_v32, build_v4])
def test_captured_requests_can_be_cancelled_on_gpu(build):
    """Beside one that goes on; its row and blocks serve the next request in the same graph."""
    prompts = [BOOK[:5], BOOK[40:61], BOOK[300:301], BOOK[7:20]]
    decoder = decoder_for(build().bfloat16().cuda(), 64)
    options = {"cache_format": decoder.attention.quantized_format, "block_size": 128}
    found = []
    for cuda_graph in (False, True):
        session = make_session(decoder, cuda_graph=cuda_graph, **options)
        whole = session.generate(prompts, 12).tokens
        found.append([run_and_cancel(session, prompts, {1: 3, 2: 0}), whole, session.generate(prompts, 12).tokens])
        assert sorted(session.free_blocks) == list(range(session.cache.num_blocks))
        cancelled, whole, again = found[-1]
        assert [len(tokens) for tokens in cancelled] == [12, 3, 0, 12]
        assert cancelled == [tokens[: len(c)] for tokens, c in zip(whole, cancelled, strict=True)]
        assert again == whole
    assert found[0] == found[1]


@pytest.mark.gpu
@pytest.mark.parametrize("build", [build_v32, build_for_hopper, build_v4])
def test_a_session_that_was_warmed_up_compiles_and_loads_nothing(build, kernels_made):
    """Captured, for prompts from one token to four chunks, of any number of requests."""
    decoder = decoder_for(build().bfloat16().cuda(), 2000)
    options = {"max_num_requests": 6, "cache_format": decoder.attention.quantized_format, "block_size": 128}
    session = GenerationSession(decoder, **options)
    session.warm_up()
    before = list(kernels_made)
    for number, length in enumerate((1, 2, 3, 7, 11, 30, 60, 129, 300, 511, 512, 513, 1100, 1900)):
        session.generate([BOOK[:length]] * (1 + number % 6), 3)
        assert kernels_made == before, f"a prompt of {length} tokens"


@pytest.mark.parametrize("cache_format", ["quantized", "plain"])
@pytest.mark.parametrize("build", [build_v32, build_v4])
def test_a_warm_up_makes_every_kind_of_call_that_the_model_makes(build, cache_format):
    """A kind: the op, the arguments that are given, their dtypes and formats."""
    decoder = decoder_for(build().bfloat16(), 300)
    named = decoder.attention.quantized_format if cache_format == "quantized" else "bf16"
    session = GenerationSession(decoder, max_num_requests=2, cache_format=named, block_size=128, prefill_tokens=24)

    def kinds(run):
        with record_calls() as calls:
            run()
        return {
            (op, *sorted((name, str(getattr(v, "dtype", v))) for name, v in given.items() if is_a_form(v)))
            for op, given in calls
        }

    def is_a_form(value):
        return isinstance(value, (torch.Tensor, str, bool))

    warmed = kinds(lambda: mla_ops.warmup(**session.configuration()))
    seen = kinds(lambda: session.generate([BOOK[:40], BOOK[:3]], 3))
    assert seen <= warmed, seen - warmed
