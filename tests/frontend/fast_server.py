"""An API process over a core of `fast_core.py`, in a file that imports nothing else."""

import asyncio
import socket
from pathlib import Path

from fast_core import engine_over

from quire.server.main import serve
from quire.server.settings import make_settings
from quire.text.tokenizer import load_tokenizer


def run_server(model: Path, address: str, listener: socket.socket, max_model_len: int) -> None:
    """Run an API process without a supervisor."""

    async def answer() -> None:
        tokenizer = load_tokenizer(model, "hf")
        engine = engine_over(address, vocab=340, max_model_len=max_model_len, tokenizer=tokenizer)
        engine.start()
        await engine.ready()
        await serve(make_settings({"disable_uvicorn_access_log": True}), engine, [listener], announce=False)

    asyncio.run(answer())
