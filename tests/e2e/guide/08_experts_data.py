from vllm import LLM

llm = LLM(model="mistralai/Mixtral-8x7B-Instruct-v0.1", data_parallel_size=2, enable_expert_parallel=True)
