"""CPU_ATTN: the native CPU kernel, one call per layer for both prompts and decodes."""

from torch import Tensor

from quire.attention.backend import AttentionSpec, named
from quire.attention.batch import Batch
from quire.config.machine import Machine
from quire.kernels.cpu import attention, native


class CPUAttention:
    """Attention by native CPU kernels."""

    name = "CPU_ATTN"
    capturable = captures_prompts = False

    def fits(self, spec: AttentionSpec, machine: Machine) -> str | None:
        if machine.device != "cpu":
            return f"runs on a CPU, this is {machine.device}"
        if spec.dtype not in native.TYPES:
            return f"computes float32 and bfloat16, not {named(spec.dtype)}"
        if spec.head_dim % attention.HEAD_DIM_STEP:
            return f"needs a head size that is a multiple of {attention.HEAD_DIM_STEP}, not {spec.head_dim}"
        if spec.cache_dtype is not None and spec.cache_dtype not in attention.CACHE_DTYPES:
            return f"cannot read a KV cache of {named(spec.cache_dtype)}"
        return None if native.library() else "the native kernels are not available"

    def plan(self, batch: Batch) -> None:
        """Do nothing: the kernel reads the batch directly."""

    def forward(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: Batch,
        spec: AttentionSpec,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> Tensor:
        return attention.attend(
            q,
            k_cache,
            v_cache,
            rows=batch.rows,
            block_tables=batch.block_tables,
            query_starts=batch.query_starts,
            seq_lens=batch.seq_lens,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            scale=spec.score_scale,
            window=spec.window,
            chunked=spec.chunked,
            softcap=spec.softcap,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
            reach=batch.last_visible,
            scales=spec.scales,
        )
