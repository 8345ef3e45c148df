"""vLLM's paths that load and unload adapters while the server runs."""

from __future__ import annotations

import asyncio
import time
from typing import Any, ClassVar

from starlette.responses import PlainTextResponse, Response

from capibara.core.types import UserError
from capibara.inference.engine.requests.adapters import SlotsBusy
from capibara.inference.server.service import bounds, threads
from capibara.inference.server.service.bodies import Parameters
from capibara.inference.server.service.bounds import brief
from capibara.inference.server.service.http_errors import SOON, Refusal
from capibara.inference.server.service.service import Served, ServerConfig

_LONGEST_NAME = 128


class LoadRequest(Parameters):
    """The body of POST /v1/load_lora_adapter."""

    of_reward_models = False
    unsupported: ClassVar[Any] = {"is_3d_lora_weight": (False,)}

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadRequest(Parameters):
    """The body of POST /v1/unload_lora_adapter."""

    of_reward_models = False
    ignored = ("lora_int_id",)

    lora_name: str


async def load(request: LoadRequest, served: Served, config: ServerConfig, began_s: float) -> Response:
    """Loads an adapter from a folder that the server's settings allow.

    Raises:
      Refusal: that is off, the name is taken or invalid, or the adapter is not there, is broken or of another model.
    """
    name = request.lora_name
    _check(name, served)
    if not name.isprintable() or len(name) > _LONGEST_NAME:
        message = f"lora_name is {brief(name)}, must have at most {_LONGEST_NAME} characters, all of them printable"
        raise Refusal(400, message, param="lora_name", code="invalid_value")
    if name == served.name:
        raise Refusal(
            400, f"lora_name is {brief(name)}, which is the model's: use another", param="lora_name", code="name_taken"
        )
    if name in served.adapters and not request.load_inplace:
        message = f"{brief(name)} has already been loaded: unload it first, or set load_inplace to true"
        raise Refusal(400, message, param="lora_name", code="name_taken")
    running = asyncio.get_running_loop().run_in_executor(threads.LOADING, _load, request, served)
    try:
        async with asyncio.timeout(began_s + config.timeout_s - time.monotonic()):
            await running
    except TimeoutError:
        raise Refusal(504, f"{brief(name)} took too long: see /v1/models, and try again", code="timeout") from None
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


async def unload(request: UnloadRequest, served: Served) -> Response:
    """Unloads an adapter; texts that use it go on.

    Raises:
      Refusal: that is off, or there is no adapter of this name.
    """
    _check(request.lora_name, served)
    try:
        served.engine.adapters.unload(request.lora_name)
    except UserError as error:
        raise Refusal(404, bounds.quoted(str(error)), param="lora_name", code="adapter_not_found") from None
    return PlainTextResponse(f"Success: LoRA adapter '{request.lora_name}' removed successfully.")


def _load(request: LoadRequest, served: Served) -> None:
    """Reads an adapter and loads it; errors as for `load`."""
    assert served.read_adapter is not None, "it is checked before"
    try:
        adapter = served.read_adapter(request.lora_name, request.lora_path)
        served.engine.adapters.load(adapter, replace=request.load_inplace)
    except PermissionError as error:
        raise Refusal(403, str(error), param="lora_path", code="folder_not_allowed") from None
    except FileNotFoundError as error:
        raise Refusal(404, str(error), param="lora_path", code="adapter_not_found") from None
    except SlotsBusy as error:
        raise Refusal(503, str(error), code="overloaded", headers=SOON) from None


def _check(name: str, served: Served) -> None:
    if served.read_adapter is None:
        message = "adapters are loaded while the server runs only if it is started with --adapter_folder=DIR"
        raise Refusal(404, message, code="no_such_url")
    if not name:
        raise Refusal(400, "lora_name is empty: name the adapter", param="lora_name", code="invalid_value")
