# ruff: noqa
"""Prints the seconds since process start at each phase of a start, as one JSON line. Works with any tree."""
import time
T0 = time.time()
import functools, json, os, sys

began = float(os.environ["BEGAN"])
marks = [("python", T0 - began)]
spent: dict[str, float] = {}


def mark(name):
    marks.append((name, time.time() - began))


def timed(owner, name, label):
    real = getattr(owner, name)

    @functools.wraps(real)
    def wrapped(*args, **kwargs):
        start = time.time()
        try:
            return real(*args, **kwargs)
        finally:
            spent[label] = spent.get(label, 0.0) + time.time() - start

    setattr(owner, name, wrapped)


config = sys.argv[1]
from quire.data.params import SamplingParams
from quire.entrypoints.llm import LLM

mark("import quire")
import quire.core.build as build
import quire.entrypoints.llm as llm_module

real_configure = llm_module.configure


def configure(*args, **kwargs):
    result = real_configure(*args, **kwargs)
    mark("configure")
    return result


llm_module.configure = configure


class Table:
    def __init__(self, table):
        self.table = table

    def __getitem__(self, name):
        import torch

        mark("import torch")
        executor = self.table[name]
        mark("import executor, worker")
        import quire.worker.cuda.device as device
        import quire.worker.cuda.graphs as graphs
        import quire.worker.worker as worker
        from quire.kernels.triton import launch

        mark("import cuda device, triton")
        real_mode = launch.triton.AsyncCompileMode.submit
        count = spent

        def submit(self, *args):
            count["kernels"] = count.get("kernels", 0) + 1
            return real_mode(self, *args)

        launch.triton.AsyncCompileMode.submit = submit
        real_exit = launch.triton.AsyncCompileMode.__exit__

        def leave(self, *args):
            start = time.time()
            try:
                return real_exit(self, *args)
            finally:
                spent["compile: wait at end"] = time.time() - start

        launch.triton.AsyncCompileMode.__exit__ = leave
        timed(device.DummyBatches, "compile", "compile")
        timed(device.CudaDevice, "needs", "measure (with compile)")
        timed(device.CudaDevice, "_graph_bytes", "graph bytes")
        timed(graphs.Graphs, "capture", "capture")
        timed(graphs, "capture", "capture: graphs")
        for name in ("__init__", "load", "measure", "allocate", "warm_up"):
            timed(worker.Worker, name, f"worker.{name}")
        for kind in ("load_model",):
            timed(sys.modules["quire.worker.loaded_model"], kind, kind)
        return executor


build.EXECUTORS = Table(build.EXECUTORS)
llm = LLM(model=config, load_format="dummy", skip_tokenizer_init=True, enable_prefix_caching=False,
          max_model_len=4096, gpu_memory_utilization=0.9, disable_log_stats=True)
mark("ready")
llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False), use_tqdm=False)
mark("first token")
if os.environ.get("TOKENS"):
    out = llm.generate([[1, 2, 3], list(range(500))], SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False), use_tqdm=False)
    print("TOKENS", [o.outputs[0].token_ids for o in out])
print("PHASES " + json.dumps({name: round(at, 2) for name, at in marks}))
print("SPENT " + json.dumps({name: round(at, 2) for name, at in spent.items()}), flush=True)
try:
    import psutil
    print("LEFT", [p.cmdline()[:4] for p in psutil.Process().children(recursive=True)])
except ImportError:
    pass
