"""vLLM's own tests of its HTTP API, against capibara's server.

    VLLM_TARGET_DEVICE=empty pip download --no-deps URL    (of vLLM's source distribution, unpacked: it has tests/entrypoints;
                                                            by its name pip refuses the version 0.33.0+empty)
    python benchmarks/vllm_api_tests.py --source=vllm-0.33.0 --python=VENV/bin/python --model=SmolLM2-135M-Instruct \\
        --adapter=peft/some [--json=OUT] [--only=completion]

VENV has vllm, pytest, pytest-asyncio and anthropic. The tests that start a server without a GPU's features run as they are,
with a server of ours and a small model that stands for the one that they name; those of its classes run there, too, and
say nothing of us. A failure is
    refused         our server said no, by the parameter's name: docs/unsupported.md, or the chat template has no such variable
    other           of an endpoint or flag of vLLM that we do not have, or of what the named model would say (listed below)
    FAILED          anything else: then the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree

HERE = pathlib.Path(__file__).resolve().parent
FILES = """
openai/models/test_models openai/completion/test_completion openai/completion/test_prompt_validation
openai/completion/test_token_in_token_out openai/chat_completion/test_chat openai/chat_completion/test_chat_completion
openai/chat_completion/test_chat_echo openai/chat_completion/test_chat_logit_bias_validation
openai/chat_completion/test_include_reasoning openai/chat_completion/test_logprob_token_ids
openai/chat_completion/test_completion_with_function_calling openai/chat_completion/test_root_path
openai/test_chunked_prompt openai/test_return_tokens_as_ids openai/test_return_token_ids openai/responses/test_simple
serve/tokenize/test_tokenization serve/instrumentator/test_basic serve/lora/test_lora_adapters anthropic/test_messages
""".split()
# What our server says where it refuses something by its name.
REFUSED = re.compile(
    r"is not supported|is not a parameter|is nothing that the chat template asks for|and the template asks for"
    r"|the model's chat template leaves out|greater than or equal to 0|\bmust be at most \d+ \(\d+ tokens of prompt"
)
_MODEL = "of what the named model says"
_TEMPLATE = "of the named model's chat template or tokens"
_CHUNK = "the finish reason has a chunk of its own, as OpenAI's"
_WORDS = "refused as it should be, in other words than vLLM's"
_FLAG = "of a flag of vLLM's server"
_PATH = "of an endpoint that only vLLM has"
_STATUS = "refused as it should be, with 400 where vLLM answers 500"
_ROOT = "adapters have no path of this machine as their root"
OTHER = {
    "test_models::test_check_models": _ROOT,
    "test_lora_adapters::test_static_lora_lineage": _ROOT,
    "test_lora_adapters::test_dynamic_lora_lineage": _ROOT,
    "test_lora_adapters::test_load_lora_adapter_with_same_name_replaces_inplace": _MODEL,
    "test_lora_adapters::test_dynamic_lora_invalid_files": _STATUS,
    "test_lora_adapters::test_dynamic_lora_badrequests": _STATUS,
    "test_lora_adapters::test_loading_invalid_adapters_does_not_break_others": _STATUS,
    # After the test's prompt the end is SmolLM2's likeliest token (0.39, by transformers, too).
    "test_completion::test_completion_streaming": _MODEL,
    "test_completion::test_parallel_no_streaming": _MODEL,
    "test_completion::test_completion_stream_options": "an end token is not counted, as by OpenAI, and the text has no other",
    "test_completion::test_parallel_streaming": _CHUNK,
    "test_completion::test_echo_logprob_completion": _TEMPLATE,
    "test_prompt_validation::test_empty_prompt": _WORDS,
    "test_prompt_validation::test_out_of_vocab_token_ids": _WORDS,
    "test_chat::test_more_than_one_prompt_logprobs_chat": _TEMPLATE,
    "test_chat::test_long_seed": _WORDS,
    "test_chat::test_single_chat_session": _TEMPLATE,
    "test_chat::test_chat_streaming": _CHUNK,
    "test_chat::test_chat_completion_stream_options": _CHUNK,
    "test_chat::test_structured_outputs_json_chat": _MODEL,  # a text that reaches its limit in a string
    "test_chat::test_structured_outputs_regex_chat": _MODEL,
    "test_chat::test_response_format_json_object": _MODEL,
    "test_chat::test_response_format_json_schema": _MODEL,
    "test_chat::test_complex_message_content": _MODEL,
    "test_chat::test_invocations": _PATH,
    "test_chat_completion::test_per_request_metrics_non_streaming": _FLAG,
    "test_chat_completion::test_per_request_metrics_on_final_usage_chunk": _FLAG,
    "test_chat_logit_bias_validation::test_chat_logit_bias_valid": "needs the named model's files",
    "test_chat_logit_bias_validation::test_chat_logit_bias_invalid": "needs the named model's files",
    "test_chat_echo::test_chat_session_with_echo_and_continue_final_message": _MODEL,
    "test_include_reasoning::test_include_reasoning_true_non_streaming": _MODEL,
    "test_include_reasoning::test_include_reasoning_true_streaming": _MODEL,
    "test_include_reasoning::test_default_includes_reasoning": _MODEL,
    "test_include_reasoning::test_reasoning_tokens_in_usage": _MODEL,
    "test_root_path::test_chat_session_root_path_with_api_key": _FLAG,
    "test_return_tokens_as_ids::test_completion_return_tokens_as_token_ids_completion": _FLAG,
    "test_return_tokens_as_ids::test_chat_return_tokens_as_token_ids_completion": _FLAG,
    "test_return_token_ids::test_chat_completion_with_tool_use": _MODEL,
    "test_return_token_ids::test_comparison_with_prompt_logprobs_and_logprobs": _MODEL,  # it ends with its end token
    "test_simple::test_reasoning_item": _MODEL,
    "test_simple::test_streaming_reasoning_tokens_e2e": _MODEL,
    "test_simple::test_non_streaming_reasoning_tokens_e2e": _MODEL,
    "test_simple::test_max_tokens": _MODEL,
    "test_basic::test_show_version": "the version is capibara's",
    "test_basic::test_request_cancellation": "of the named model's length",
    "test_basic::test_server_load": _PATH,
    "test_messages::test_anthropic_tool_call": _MODEL,
    "test_messages::test_anthropic_streaming_cache_usage": "tokens that a request adds to the prefix cache are not counted",
    "test_tokenization::test_tokenize_chat_with_tools": _TEMPLATE,
    "test_tokenization::test_tokenizer_info_basic": _PATH,
    "test_tokenization::test_tokenizer_info_schema": _PATH,
    "test_tokenization::test_tokenizer_info_consistency_with_tokenize": _PATH,
    "test_tokenization::test_tokenizer_info_chat_template": _PATH,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("source", "python", "model", "adapter"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--only", default="", help="files whose names have this")
    parser.add_argument("--json", help="write the results here")
    args = parser.parse_args()
    results: dict[str, tuple[str, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        root = _copied(pathlib.Path(args.source), pathlib.Path(folder))
        for name in FILES:
            if args.only in name:
                results |= _run(root, name, args)
                _show(name, results)
    counts = {
        kind: sum(of == kind for of, _ in results.values())
        for kind in ("passed", "skipped", "refused", "other", "FAILED")
    }
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(results, indent=1) + "\n")
    return int(counts["FAILED"] > 0)


def _copied(source: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """The tests, with our server in the place of theirs."""
    shutil.copytree(source / "tests" / "entrypoints", folder / "tests" / "entrypoints")
    for path in [folder / "tests", *(folder / "tests").rglob("*")]:
        if path.is_dir():
            (path / "__init__.py").touch()
    (folder / "tests" / "entrypoints" / "conftest.py").touch()
    shutil.copy(HERE / "peers" / "vllm_api" / "utils.py", folder / "tests" / "utils.py")
    shutil.copy(HERE / "peers" / "vllm_api" / "conftest.py", folder / "conftest.py")
    scope = "".join(f"asyncio_default_{kind}_loop_scope = module\n" for kind in ("fixture", "test"))
    (folder / "pytest.ini").write_text(f"[pytest]\nasyncio_mode = auto\n{scope}")
    return folder


def _run(root: pathlib.Path, name: str, args: argparse.Namespace) -> dict[str, tuple[str, str]]:
    """Test -> its kind and the reason."""
    server = [
        sys.executable,
        "-m",
        "capibara.serve",
        f"--model={os.path.abspath(args.model)}",
        "--gin.EngineConfig.slots=4",
        # The stand-in answers some prompts of test_chat to the end of its context, for minutes.
        "--gin.ServerConfig.max_tokens=1024",
    ]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"VLLM_API_SERVER": shlex.join(server), "VLLM_API_SOURCE": os.path.abspath(args.source)}
    environment |= {"VLLM_API_MODEL": os.path.abspath(args.model), "VLLM_API_ADAPTER": os.path.abspath(args.adapter)}
    report = root / "report.xml"
    report.unlink(missing_ok=True)
    command = [
        args.python,
        "-m",
        "pytest",
        "-q",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore",
        f"--junitxml={report}",
    ]
    subprocess.run(
        [*command, f"tests/entrypoints/{name}.py"], cwd=root, env=environment, stdout=subprocess.DEVNULL, check=False
    )
    if not report.exists():
        return {f"{name}::": ("FAILED", "pytest has ended early")}
    return {
        f"{name}::{case.get('name')}": _kind(name, case)
        for case in ElementTree.parse(report).getroot().iter("testcase")
    }


def _kind(name: str, case: ElementTree.Element) -> tuple[str, str]:
    """The kind of a test's result, and the reason."""
    if case.find("skipped") is not None:
        return "skipped", ""
    faults = [fault for fault in (case.find("failure"), case.find("error")) if fault is not None]
    if not faults:
        return "passed", ""
    text = " ".join(f"{fault.get('message')} {fault.text}" for fault in faults)
    if said := REFUSED.search(text):
        line = next((line for line in text.splitlines() if REFUSED.search(line)), said[0])
        return "refused", line.strip()[-200:]
    test = f"{name.rpartition('/')[2]}::{str(case.get('name')).partition('[')[0]}"
    if test in OTHER:
        return "other", OTHER[test]
    lines = [line for line in text.splitlines() if line.startswith("E ")] or [text[:200]]
    return "FAILED", " | ".join(line.strip() for line in lines[:3])[:400]


def _show(name: str, results: dict[str, tuple[str, str]]) -> None:
    of_file = {test: result for test, result in results.items() if test.startswith(f"{name}::")}
    passed = sum(kind == "passed" for kind, _ in of_file.values())
    print(f"{name}: {passed} of {len(of_file)} passed", flush=True)
    for test, (kind, reason) in of_file.items():
        if kind not in ("passed", "skipped"):
            print(f"    {kind:<8} {test.partition('::')[2]}: {reason}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
