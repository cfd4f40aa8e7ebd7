from vllm import LLM

llm = LLM(model="meta-llama/Llama-3.1-8B-Instruct", data_parallel_size=2)
