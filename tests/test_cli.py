"""The command line, run in this process."""

import dataclasses
import functools
import re
import subprocess
import sys
import types

import pytest
import torch

from mla_ops import dispatch
from mla_ops.cli import main

transformers = pytest.importorskip("transformers")
if not hasattr(transformers, "DeepseekV32ForCausalLM") or not hasattr(transformers, "DeepseekV4ForCausalLM"):
    pytest.skip("this transformers has no DeepSeek-V3.2 or V4: needs 5.17 or later", allow_module_level=True)

import small_models

from mla_ops.demo.model import ARCHITECTURES, CHECKPOINTS, build_small_model, build_small_v4_model
from mla_ops.demo.run import DemoOptions, make_prompts
from mla_ops.models import SUPPORTED

SMALL = {
    "v3": functools.partial(build_small_model, "DeepseekV3", num_layers=2, hidden_size=128, num_heads=2),
    "v3.2": functools.partial(build_small_model, num_layers=2, hidden_size=128, num_heads=2),
    "glm5": functools.partial(build_small_model, "GlmMoeDsa", num_layers=2, hidden_size=128, num_heads=2),
    "v4": functools.partial(build_small_v4_model, hidden_size=128, num_heads=2, index_topk=16),
}


@pytest.fixture
def smaller_models(monkeypatch):
    for name, build in SMALL.items():
        monkeypatch.setitem(ARCHITECTURES, name, dataclasses.replace(ARCHITECTURES[name], build=build))


pytestmark = pytest.mark.usefixtures("one_thread")


def test_doctor_has_a_cell_for_every_op_and_notes_for_what_a_user_can_change(capsys):
    assert main(["doctor"]) == 0
    output = capsys.readouterr().out
    assert f"torch             {torch.__version__}" in output
    assert "pip install 'mla-ops[flash-mla]'" in output
    assert "pip install 'mla-ops[flashinfer]'" in output
    assert "triton" in output
    assert "transformers" in output
    assert "there is no flash_attn" not in output
    tables = re.findall(r"^Lowerings on (\S+?)(?:, \S+)*, by .*\n((?:  .*\n)+)", output, re.MULTILINE)
    assert tables[0][0] == "cpu"
    for device, table in tables:
        check_table(table, device)


def check_table(table: str, device: str) -> None:
    """The lines that doctor prints of a device's lowerings, against dispatch."""
    rows = {line.split()[0]: line.split(maxsplit=1)[1] for line in table.splitlines()}
    for entry in dispatch.report(device):
        found = re.findall(r"-|no \(\d+\)|no|runs|available(?: \(\d+\))?", rows[entry.op])
        cells = dict(zip(dispatch.BACKENDS, found, strict=True))
        if not entry.exists:
            assert cells[entry.backend] == "-"
        elif entry.reason is not None:
            assert cells[entry.backend].startswith("no")
            assert ("(" in cells[entry.backend]) == isinstance(entry.reason, dispatch.Missing)
            assert (entry.reason in table) == isinstance(entry.reason, dispatch.Missing)
        else:
            on_request = not entry.runs and (entry.backend, entry.op) in dispatch.ON_REQUEST
            assert re.sub(r" \(\d+\)", "", cells[entry.backend]) == ("runs" if entry.runs else "available")
            assert ("(" in cells[entry.backend]) == on_request
    assert rows["gather_cache"].split()[0] == "-"
    # every note is pointed to
    cells = {int(number) for number in re.findall(r"(?:no|available) \((\d+)\)", table)}
    assert cells == {int(number) for number in re.findall(r"^  \((\d+)\) \S", table, re.MULTILINE)}


@pytest.mark.parametrize(
    ("capability", "named", "not_named"),
    [
        ((8, 0), {"FlashInfer", "FlashAttention"}, {"FlashMLA"}),
        ((9, 0), {"FlashInfer", "FlashAttention", "FlashMLA"}, set()),
        ((10, 0), {"FlashInfer", "FlashAttention"}, {"FlashMLA"}),
        ((12, 1), {"FlashInfer", "FlashAttention"}, {"FlashMLA"}),
    ],
    ids=["SM80", "SM90", "SM100", "SM121"],
)
def test_doctor_names_the_packages_that_a_gpu_can_use(capability, named, not_named, monkeypatch):
    """And no others, on a machine that has none of them."""
    from mla_ops import cli
    from mla_ops.kernels import flash_attn, flash_mla
    from mla_ops.kernels.flashinfer import dense, installation

    for module in (flash_attn, flash_mla, dense, installation):
        monkeypatch.setattr(module, "is_installed", lambda name: False)
    monkeypatch.setattr(flash_mla, "find_provider", flash_mla.find_provider.__wrapped__)
    notes = [line for line in cli._lowerings(dispatch.stand_in(capability)) if line.startswith("  (")]
    text = "\n".join(notes)
    assert all(f"{package} " in text for package in named)
    assert not any(package in text for package in not_named)


def test_doctor_says_once_what_is_so_of_several_gpus(capsys, monkeypatch):
    lines = {"cpu": ["  reference"], "cuda:0": ["  hopper"], "cuda:1": ["  hopper"], "cuda:2": ["  triton"]}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    properties = types.SimpleNamespace(name="a GPU", major=9, minor=0, total_memory=2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr("mla_ops.cli._lowerings", lambda device: lines[str(device)])
    assert main(["doctor"]) == 0
    headings = re.findall(r"Lowerings on (.*), by", capsys.readouterr().out)
    assert headings == ["cpu", "cuda:0, cuda:1", "cuda:2"]


def test_doctor_ends_without_a_word_when_nobody_reads_on():
    """A reader that leaves, as in `doctor | head -1`."""
    command = [sys.executable, "-m", "mla_ops", "doctor"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=120) == 141


@pytest.mark.parametrize("cache", ["fp8_ds_mla", "fp32"])
def test_demo_ends_with_a_report(capsys, cache):
    command = ["demo", "--device", "cpu", "--no-compile", "--batch", "2", "--max-new-tokens", "3", "--cache", cache]
    assert main([*command, "--prompt", "Down, down, down."]) == 0
    output = capsys.readouterr().out
    assert "requests: 2, of 17, 17 tokens, 3 new tokens each" in output
    assert "1: Down, down, down. >>> " in output
    for heading in ("Text", "Agreement", "Lowerings", "Compilation"):
        assert f"\n{heading}\n" in output
    assert re.search(r"^decode, tokens a second +[\d,.]+ +[\d,.]+ +[\d.]+x$", output, re.MULTILINE)
    assert re.search(r"^  paged_sparse_attention +reference$", output, re.MULTILINE)
    latent = {"fp8_ds_mla": 2 * 656, "fp32": 2 * 576 * 4}[cache]
    assert f"ours: {latent:,} {cache} latent" in output
    if cache == "fp32":
        assert "before the first difference: 6 of 6" in output
        assert "top-1 100.0%" in output


# bytes a token in the sliding windows and the compressed caches: 584 of 512 dims, in blocks padded to 576
V4_KEYS = {
    "fp8_ds_mla_v4": (r"1,75\d fp8_ds_mla_v4 keys", "33 fp8_index index keys"),
    "bf16": (r"3,072 bf16 keys", "64 bf16 index keys"),
    "fp32": (r"6,144 fp32 keys", "128 fp32 index keys"),
}


@pytest.mark.parametrize("cache", V4_KEYS)
def test_demo_of_v4_ends_with_a_report(capsys, monkeypatch, smaller_models, cache):
    asked = set()
    select = dispatch.select

    def record(call):
        asked.add((call.op, call.cache_format, call.head_dim, call.extra_cache_format))
        return select(call)

    monkeypatch.setattr(dispatch, "select", record)
    command = ["demo", "--arch", "v4", "--device", "cpu", "--no-compile", "--batch", "2", "--max-new-tokens", "3"]
    chosen = [] if cache == "fp8_ds_mla_v4" else ["--cache", cache]
    # a window, more entries than the indexer chooses, and two of 128 tokens
    assert main([*command, *chosen, "--prompt", "Down, down, down. " * 15]) == 0
    output = capsys.readouterr().out
    assert "small DeepSeek-V4, fixed random weights" in output
    assert "requests: 2, of 270, 270 tokens, 3 new tokens each" in output
    assert "1: ..., down, down. Down, down, down. " in output
    keys, index_keys = V4_KEYS[cache]
    assert re.search(rf"ours: {keys} \+ \d+ {cache} compressed entries \+ {index_keys}", output)
    assert asked
    for op, *_ in asked:
        assert re.search(rf"^  {re.escape(op)} +reference$", output, re.MULTILINE), op
    if cache == "fp32":
        assert "before the first difference: 6 of 6" in output
        assert "top-1 100.0%" in output


@pytest.mark.parametrize("arch", ["v3", "glm5"])
def test_demo_names_the_lowering_of_every_op_that_ran(capsys, monkeypatch, smaller_models, arch):
    asked = set()
    select = dispatch.select

    def record(call):
        asked.add(call.op)
        return select(call)

    monkeypatch.setattr(dispatch, "select", record)
    command = ["demo", "--arch", arch, "--device", "cpu", "--no-compile", "--batch", "2", "--max-new-tokens", "3"]
    assert main([*command, "--cache", "fp32"]) == 0
    output = capsys.readouterr().out
    for op in asked:
        assert re.search(rf"^  {re.escape(op)} +reference$", output, re.MULTILINE), op
    assert "before the first difference: 6 of 6" in output


def test_demo_compiles_a_graph_for_each_kind_of_step_and_nothing_after_warm_up(capsys, monkeypatch):
    """Prefill, a short prefill, which runs dense, and decode. test_deepseek_v32.py compiles them by Inductor."""
    torch._dynamo.reset()
    small = dataclasses.replace(ARCHITECTURES["v3.2"], build=functools.partial(SMALL["v3.2"], num_layers=1))
    monkeypatch.setitem(ARCHITECTURES, "v3.2", small)
    command = ["demo", "--device", "cpu", "--batch", "1", "--max-new-tokens", "3"]
    assert main([*command, "--prompt", "Down, down, down. " * 15]) == 0
    output = capsys.readouterr().out
    assert "graphs compiled 3, graph breaks 0, recompiles after warm-up 0" in output
    assert "\n  by AOT eager" in output
    # progress while it compiles
    told = re.findall(r"^\[ *([\d.]+) s\] mla_ops: +(.*)$", output, re.MULTILINE)
    assert [what for _, what in told] == [
        "compiling prefill and decode (once)",
        "prefill of short sequences",
        "prefill of long sequences",
        "decode",
        "reading and continuing",
    ]
    assert float(told[0][0]) < float(told[-1][0])


# by model_type: with the checkpoint's class, since some are in newer versions of transformers only
CHECKPOINT_MODELS = {
    **{architecture.model_type: SMALL[name] for name, architecture in ARCHITECTURES.items()},
    "kimi_k2": SMALL["v3"],
    "kimi_k25": functools.partial(small_models.build_kimi_k25, num_layers=2),
    "hy_v4": functools.partial(small_models.build_hy_v4, num_layers=2, indexer_types=["full", "shared"]),
    "mistral_large4": small_models.build_mistral_large4,
}


def test_every_supported_model_has_a_checkpoint_here():
    assert sorted(CHECKPOINT_MODELS) == SUPPORTED


@pytest.mark.parametrize("model_type", CHECKPOINT_MODELS)
def test_demo_loads_a_local_checkpoint_with_its_tokenizer(tmp_path, capsys, model_type):
    tokenizers = pytest.importorskip("tokenizers")
    known = {one.model_type: one for one in (*ARCHITECTURES.values(), *CHECKPOINTS.values())}
    architecture = known[model_type]
    if not hasattr(transformers, architecture.model_class):
        pytest.skip(f"this transformers has no {architecture.model_class}")
    CHECKPOINT_MODELS[model_type]().save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    if model_type == "kimi_k2":  # a name that transformers does not know
        config.write_text(config.read_text().replace('"deepseek_v3"', '"kimi_k2"'))
    assert f'"model_type": "{model_type}"' in config.read_text()
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
    assert (architecture.selects or "all keys") + " a token" in output
    assert "requests: 1, of 4 tokens" in output
    assert "before the first difference: 2 of 2" in output


def test_default_prompts_are_passages_of_unequal_length():
    class Bytes:
        def encode(self, text):
            return list(text.encode())

    prompts = make_prompts(DemoOptions(batch=4), Bytes())
    assert len({len(prompt) for prompt in prompts}) == 4
    assert bytes(prompts[0]).startswith(b"ALICE'S ADVENTURES IN WONDERLAND")
    unpadded = make_prompts(DemoOptions(batch=4), Bytes(), ARCHITECTURES["v4"])
    assert len({len(prompt) for prompt in unpadded}) == 1
    assert len({bytes(prompt) for prompt in unpadded}) == 4


def make_checkpoint(folder, config, *files):
    """The files that the demo looks at before it loads anything; `files` beside the config, or all it needs."""
    for name in files or ("model.safetensors", "tokenizer.json"):
        (folder / name).touch()
    (folder / "config.json").write_text(config)


V3 = '{"model_type": "deepseek_v3"}'
BAD_CHECKPOINTS = {
    "no weights": ((V3, "tokenizer.json"), "has no weights: no *.safetensors or *.bin"),
    "no tokenizer": ((V3, "model.safetensors"), "has no tokenizer: no tokenizer*"),
    "a broken config": (("{",), "config.json at"),
    "quantized": (('{"model_type": "deepseek_v3", "quantization_config": {}}',), "is quantized: load it with"),
    "quantized text": (
        ('{"model_type": "kimi_k25", "text_config": {"quantization_config": {}}}',),
        "is quantized: load it with",
    ),
}


@pytest.mark.parametrize(("checkpoint", "message"), BAD_CHECKPOINTS.values(), ids=BAD_CHECKPOINTS)
def test_demo_says_what_a_checkpoint_lacks_before_it_loads_anything(tmp_path, capsys, monkeypatch, checkpoint, message):
    monkeypatch.setattr("mla_ops.demo.run.load_tokenizer", None)
    make_checkpoint(tmp_path, *checkpoint)
    assert main(["demo", "--model", str(tmp_path), "--device", "cpu"]) == 2
    assert message in capsys.readouterr().err


def test_demo_says_when_transformers_is_too_old_for_a_checkpoint(tmp_path, capsys, monkeypatch):
    older = dataclasses.replace(CHECKPOINTS["hy_v4"], model_class="HYV9ForCausalLM")
    monkeypatch.setitem(CHECKPOINTS, "hy_v4", older)
    make_checkpoint(tmp_path, '{"model_type": "hy_v4"}')
    assert main(["demo", "--model", str(tmp_path), "--device", "cpu"]) == 2
    assert "needs HYV9ForCausalLM, which transformers" in capsys.readouterr().err


def test_demo_names_the_architectures_that_a_checkpoint_may_have(tmp_path, capsys):
    make_checkpoint(tmp_path, '{"model_type": "llama"}')
    assert main(["demo", "--model", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert "'deepseek_v32', 'deepseek_v4'" in message
    assert "is of 'llama'" in message


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["demo", "--batch", "0"], "demo: --batch must be at least 1, got 0"),
        (["demo", "--device", "cpu", "--model", "/nowhere"], "--model must be a local checkpoint folder"),
        (["demo", "--device", "cpu", "--prompt", ""], "demo: the prompt is empty"),
        (["demo", "--device", "cpu", "--prompt", "a", "--prompt-file", "b"], "exclude each other"),
        (["demo", "--arch", "v4", "--cache", "fp8_ds_mla"], "'fp32'] for DeepSeek-V4, got 'fp8_ds_mla'"),
        (["demo", "--device", "cpu", "--prompt-file", "/nowhere"], "--prompt-file must be a text file, there is none"),
        (["demo", "--device", "cpu", "--prompt-file", sys.executable], "must be a text file in UTF-8"),
        (["demo", "--device", "cuda:99"], "--device cuda:99: torch"),
        (["demo", "--device", "gpu"], "--device must be cpu, cuda or cuda:N, got 'gpu'"),
        (["demo", "--device", "cpu", "--prompt", "a" * 16380], "make 16392 tokens, the model takes 16384"),
    ],
    ids=[
        "batch 0",
        "no such checkpoint",
        "empty prompt",
        "two prompts",
        "a format of the other architecture",
        "no such file",
        "a file that is no text",
        "a device that is not here",
        "no device",
        "a prompt past the model's length",
    ],
)
def test_demo_says_what_is_wrong_before_it_loads_anything(capsys, monkeypatch, command, message):
    monkeypatch.setattr("mla_ops.demo.run.load_model", None)
    assert main(command) == 2
    assert message in capsys.readouterr().err


def test_bench_lists_what_it_can_run(capsys):
    assert main(["bench", "--help"]) == 0
    assert re.search(r"families: .*sparse_attention", capsys.readouterr().out)
    assert main(["bench", "merge", "nothing"]) == 2
    assert "no family nothing" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_demo_replays_a_cuda_graph_on_gpu(capsys, arch):
    torch._dynamo.reset()  # its limit counts the graphs of all architectures in one process
    assert main(["demo", "--arch", arch, "--batch", "2", "--max-new-tokens", "8"]) == 0
    output = capsys.readouterr().out
    graphs = 3 if arch in ("v3.2", "glm5") else 2  # decode and prefill, which has two kinds beside an indexer
    assert f"graphs compiled {graphs}, graph breaks 0, recompiles after warm-up 0" in output
    assert re.search(r"decode replayed from one CUDA graph, \d+ replays", output)
