"""For vLLM's API tests: tokenizers and files of a model on the Hub are the stand-in's, and nothing is downloaded."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import huggingface_hub  # noqa: E402
import transformers  # noqa: E402
import vllm.tokenizers  # noqa: E402
import vllm.transformers_utils.repo_utils as repo_utils  # noqa: E402

MODEL, ADAPTER = os.environ["VLLM_API_MODEL"], os.environ["VLLM_API_ADAPTER"]
_read = transformers.AutoTokenizer.from_pretrained


def _tokenizer(*_: object, **__: object) -> object:
    return _read(MODEL)


class _Api:
    def snapshot_download(self, repo_id: str = "", **_: object) -> str:
        return ADAPTER if "lora" in repo_id.lower() or "self_cognition" in repo_id else MODEL


transformers.AutoTokenizer.from_pretrained = _tokenizer
vllm.tokenizers.get_tokenizer = _tokenizer
huggingface_hub.snapshot_download = _Api().snapshot_download
repo_utils.hf_api = lambda *_, **__: _Api()
