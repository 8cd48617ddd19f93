"""The command line, run in this process."""

import functools
import re

import pytest
import torch

from mla_ops import dispatch
from mla_ops.cli import main

transformers = pytest.importorskip("transformers")
if not hasattr(transformers, "DeepseekV32ForCausalLM"):
    pytest.skip("this transformers has no DeepSeek-V3.2: needs 5.17 or later", allow_module_level=True)

from mla_ops.demo.model import build_small_model
from mla_ops.demo.run import DemoOptions, make_prompts


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    # the matrices are tiny: a second thread costs more than it brings
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_doctor_names_every_op_and_gives_every_reason(capsys):
    assert main(["doctor"]) == 0
    output = capsys.readouterr().out
    assert f"torch         {torch.__version__}" in output
    assert "triton" in output
    assert "transformers" in output
    for op, _, reason in dispatch.report("cpu"):
        assert op in output
        assert reason is None or reason in output
    # every reason that a cell points to is spelled out
    cells = {int(number) for number in re.findall(r"no \((\d+)\)", output)}
    assert cells == {int(number) for number in re.findall(r"^  \((\d+)\) \S", output, re.MULTILINE)}


@pytest.mark.parametrize("cache", ["fp8_ds_mla", "fp32"])
def test_demo_ends_with_a_report(capsys, cache):
    command = ["demo", "--device", "cpu", "--no-compile", "--batch", "2", "--max-new-tokens", "3", "--cache", cache]
    assert main([*command, "--prompt", "Down, down, down."]) == 0
    output = capsys.readouterr().out
    assert "requests: 2, of 17, 17 tokens, 3 new tokens each" in output
    for heading in ("Text", "Agreement", "Lowerings", "Compilation"):
        assert f"\n{heading}\n" in output
    assert re.search(r"^decode, tokens a second +[\d,.]+ +[\d,.]+ +[\d.]+x$", output, re.MULTILINE)
    assert re.search(r"^  paged_sparse_attention +reference$", output, re.MULTILINE)
    latent = {"fp8_ds_mla": 3 * 656, "fp32": 3 * 576 * 4}[cache]
    assert f"ours: {latent:,} {cache} latent" in output
    if cache == "fp32":
        assert "before the first difference: 6 of 6" in output
        assert "top-1 100.0%" in output


@pytest.mark.slow
def test_demo_compiles_two_graphs_and_nothing_after_warm_up(capsys, monkeypatch):
    tiny = functools.partial(build_small_model, num_layers=2, hidden_size=128, num_heads=2)
    monkeypatch.setattr("mla_ops.demo.model.build_small_model", tiny)
    torch._dynamo.reset()
    assert main(["demo", "--device", "cpu", "--batch", "2", "--max-new-tokens", "3"]) == 0
    assert "graphs compiled 2, graph breaks 0, recompiles after warm-up 0" in capsys.readouterr().out


def test_demo_loads_a_local_checkpoint_with_its_tokenizer(tmp_path, capsys):
    tokenizers = pytest.importorskip("tokenizers")
    model = build_small_model(num_layers=1, hidden_size=128, num_heads=2)
    model.save_pretrained(tmp_path)
    vocabulary = {word: number for number, word in enumerate(["[UNK]", "down", "the", "rabbit", "hole"])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(tmp_path)

    prompt = tmp_path / "prompt.txt"
    prompt.write_text("down the rabbit hole")
    command = ["demo", "--model", str(tmp_path), "--prompt-file", str(prompt), "--batch", "1", "--max-new-tokens", "2"]
    assert main([*command, "--device", "cpu", "--no-compile", "--cache", "fp32"]) == 0
    output = capsys.readouterr().out
    assert str(tmp_path) in output
    assert "requests: 1, of 4 tokens" in output
    assert "before the first difference: 2 of 2" in output


def test_default_prompts_are_passages_of_unequal_length():
    class Bytes:
        def encode(self, text):
            return list(text.encode())

    prompts = make_prompts(DemoOptions(batch=4), Bytes())
    assert len({len(prompt) for prompt in prompts}) == 4
    assert bytes(prompts[0]).startswith(b"ALICE'S ADVENTURES IN WONDERLAND")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["demo", "--batch", "0"], "demo: --batch must be at least 1, got 0"),
        (["demo", "--device", "cpu", "--model", "/nowhere"], "--model must be a local checkpoint folder"),
        (["demo", "--device", "cpu", "--prompt", ""], "demo: the prompt is empty"),
        (["demo", "--device", "cpu", "--prompt", "a", "--prompt-file", "b"], "exclude each other"),
    ],
    ids=["batch 0", "no such checkpoint", "empty prompt", "two prompts"],
)
def test_demo_says_what_is_wrong(capsys, command, message):
    assert main(command) == 2
    assert message in capsys.readouterr().err


def test_bench_lists_what_it_can_run(capsys):
    assert main(["bench", "--help"]) == 0
    assert re.search(r"families: .*sparse_attention", capsys.readouterr().out)
    assert main(["bench", "merge", "nothing"]) == 2
    assert "no family nothing" in capsys.readouterr().err


@pytest.mark.gpu
def test_demo_replays_a_cuda_graph_on_gpu(capsys):
    assert main(["demo", "--batch", "2", "--max-new-tokens", "8"]) == 0
    output = capsys.readouterr().out
    assert "graphs compiled 2, graph breaks 0, recompiles after warm-up 0" in output
    assert re.search(r"decode replayed from one CUDA graph, \d+ replays", output)
