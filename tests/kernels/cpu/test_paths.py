"""Tests of every path of QUIRE_CPU_KERNELS on this CPU: all C sources, and an engine against transformers.

The rest of the suite runs on one path, `native` unless the variable is set. Here a short part of it runs on
each of the others: in a separate process, since a process loads one library, or without any.
"""

import os
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import pytest
from oracle import make_tiny
from preloaded import Preloaded
from tiny import check_mixed_schedule

from quire.config.cpu_kernels import Cpu, paths_of
from quire.kernels import ops
from quire.kernels.cpu import gguf, native
from quire.kernels.cpu.native import NativeError, find_compiler
from quire.kernels.reference import ssm

ROOT = Path(__file__).parents[3]
KERNELS = [
    "tests/kernels/cpu/test_ops.py::test_norms",
    "tests/kernels/cpu/test_ops.py::test_activations",
    "tests/kernels/cpu/test_ops.py::test_activations_at_extreme_values",
    "tests/kernels/cpu/test_ops.py::test_rotate_and_write",
    "tests/kernels/cpu/test_ops.py::test_lora",
    "tests/kernels/cpu/test_linear.py::test_matches_torch_on_random_shapes",
    "tests/kernels/cpu/test_linear.py::test_bits_do_not_depend_on_batch_or_threads",
    "tests/kernels/reference/test_fp8.py::test_every_code_matches_torch",
    "tests/kernels/cpu/test_gguf.py::test_every_row_dequantizes_exactly",
    "tests/kernels/cpu/test_gguf.py::test_largest_codes_do_not_overflow",
    "tests/kernels/cpu/test_gguf.py::test_matches_float64_on_random_shapes",
    "tests/kernels/cpu/test_moe.py::test_expert_ids_and_weights_match",
    "tests/kernels/cpu/test_moe.py::test_plain_weights",
    "tests/kernels/cpu/test_masks.py",
    "tests/kernels/cpu/test_sampling.py::test_argmax_of_nonfinite_values",
    "tests/kernels/cpu/test_sampling.py::test_sampled_tokens_match_torch",
    "tests/kernels/reference/test_ssm.py::test_states_in_c",
    "tests/kernels/reference/test_ssm.py::test_conv_in_c",
    "tests/kernels/reference/test_ssm.py::test_gates_in_c",
    "tests/attention/test_cpu_attn.py::test_sinks",
    "tests/attention/test_cpu_attn.py::test_prompts_longer_than_a_block_of_rows",
    "tests/attention/test_cpu_attn.py::test_sequences_of_many_tiles_and_splits",
    "tests/attention/test_cpu_attn.py::test_bfloat16_is_summed_in_float32",
]
"""Tests that need the C library."""
MODELS = ("LlamaForCausalLM", "Qwen3NextForCausalLM", "DeepseekV3ForCausalLM")
"""Models that are computed without C kernels: a dense one, SSM states and experts, and MLA."""
RUN_TESTS = "import os, sys, pytest; os.chdir(sys.argv[1]); sys.exit(pytest.main(sys.argv[2:]))"
PATHS = [path for path in paths_of(Cpu.read()) if path not in ("native", "torch")]


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Turn the C kernels off: no choice that was made with them is kept, and a call of one fails."""
    choices = (native.library, ops.choose, ssm.choose, gguf.group_rows)
    monkeypatch.setenv("QUIRE_CPU_KERNELS", "torch")
    monkeypatch.setattr(native, "_runner", None)
    for choice in choices:
        choice.cache_clear()
    yield
    for choice in choices:
        choice.cache_clear()


@pytest.mark.usefixtures("no_library")
@pytest.mark.parametrize("architecture", MODELS)
def test_models_without_c_kernels_match_transformers(architecture: str, tmp_path: Path) -> None:
    check_mixed_schedule(*make_tiny(architecture, tmp_path))


def outcomes(report: Path) -> dict[str, str]:
    """Return the outcome of each test of a JUnit report by name: `passed`, or the reason for skipping."""
    by_name = {}
    for case in ET.parse(report).iter("testcase"):
        skipped = case.find("skipped")
        by_name[case.attrib["name"]] = "passed" if skipped is None else skipped.attrib["message"]
    return by_name


@pytest.mark.timeout(900)  # the first run on a machine compiles
@pytest.mark.parametrize("path", PATHS)
def test_each_path_gives_the_same_outputs(path: str, tmp_path: Path, preloaded: Preloaded) -> None:
    """Check that the branch of each instruction set compiles and computes the same."""
    try:
        find_compiler(os.environ.get("CC"))
    except NativeError as error:
        pytest.skip(str(error))
    report, log = tmp_path / "report.xml", tmp_path / "log"
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", f"--junitxml={report}"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environ |= {"QUIRE_CPU_KERNELS": path, "OMP_NUM_THREADS": "1"}
    words = ["-c", RUN_TESTS, str(ROOT), *options, *KERNELS]
    assert preloaded.run_code(words, environment=environ, log=log).wait(900) == 0, log.read_text()[-8000:]
    results = outcomes(report)
    skipped = {outcome for outcome in results.values() if outcome != "passed"}
    assert len(results) >= len(KERNELS) and not skipped
